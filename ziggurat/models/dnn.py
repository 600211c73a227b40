"""DNN: all embeddings side by side into one MLP (the ranking half of Covington et al., RecSys 2016).

    x₀ = [numbers | e_1 | … | e_F | projected vectors] ──► MLP ──► logit

Interactions are left to the hidden layers. It is the baseline to beat: in BARS's five-seed runs on Criteo it is within
0.0003 AUC of DCNv2. Numbers enter as fields (x_n · w_n) by default, as BARS does; see `NumericInput`.

Cost: 2·d·h FLOPs a sample for the first layer (d = F·D), then those of the rest of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.growth import widened
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class DNNConfig:
    """Settings of the model `DNN`.

    Args:
        embedding_dim: D, columns of each table.
        deep: hidden layers.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one network for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.DNNConfig(), small_inputs(), seed=0)).__name__
        'DNN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["dnn"] = "dnn"
    embedding_dim: Dim = 16
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`."""
        return cls(embedding_dim=8, deep=MLPConfig(hidden_dims=(48, 48)))

    def deeper(self) -> Self | None:
        """Return None: the MLP grows by its width."""
        return None

    def wider(self, factor: float) -> Self:
        """Widen the MLP."""
        return replace(self, deep=widened(self.deep, factor))

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DNN:
        """The model on tables of these columns."""
        return DNN(self, inputs=inputs, embeddings=embeddings, towers=towers)


class DNN(RankingModel):
    """One MLP over numbers and all embeddings side by side."""

    def __init__(
        self,
        config: DNNConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.config = config
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.heads = Heads(
            self.flat.output_dim, config=config.deep, num_labels=len(inputs.labels), sharing=config.heads
        )
        initialise([self.flat, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The MLP on x₀."""
        return self.heads(self.flat(dense_BN, fields_BX, vectors))
