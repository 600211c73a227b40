"""ESMM: entire space multi-task model (Ma et al., SIGIR 2018, arXiv 1804.07931).

    x ──┬─► MLP ─► chance of a click, of those who were shown it              ─────────────────► label 1
        └─► MLP ─► chance of a purchase, of those who clicked it  ── times ──► among all shown ─► label 2

Both networks share the embeddings. The purchase is learned from all rows that were shown (`blocks/funnel.py`): the
second network has no label of its own, it is what makes the product right. Longer funnels have a network a label.

A label of a later step is 0, and not missing, where the step before did not happen. What the second network says is
the score of label 2 over that of label 1.

Cost: L networks, 2·d·h FLOPs a sample for each first layer (d = width of x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Label
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.funnel import check_funnel, refuse_unknown_steps
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class ESMMConfig:
    """Settings of the model `ESMM`.

    Args:
        embedding_dim: D, columns of each table.
        deep: hidden layers of each label's network; the paper has 360, 200, 80.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.ESMMConfig(), small_inputs(num_labels=2), seed=0)).__name__
        'ESMM'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        *layers("deep", width=(64, 1024), depth=(1, 4)),
    )

    funnel: ClassVar[bool] = True

    kind: Literal["esmm"] = "esmm"
    embedding_dim: Dim = 16
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(360, 200, 80)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def check_labels(self, labels: Sequence[Label]) -> None:
        """Refuse labels of a schema that are no funnel."""
        refuse_unknown_steps(labels, where="labels of the schema, model esmm")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> ESMM:
        """The model on tables of these columns."""
        return ESMM(self, inputs=inputs, embeddings=embeddings, towers=towers)


class ESMM(RankingModel):
    """A network for each step of a funnel, over shared embeddings.

    Raises:
        ConfigError: a label is not binary.
    """

    def __init__(
        self,
        config: ESMMConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        check_funnel(inputs, where="labels of the schema, model esmm")
        self.config = config
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.heads = Heads(
            self.flat.output_dim,
            config=config.deep,
            num_labels=len(inputs.labels),
            sharing=HeadSharing.SEPARATE,
            is_funnel=True,
        )
        initialise([self.flat, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Compute each step given the one before, then among all."""
        return self.heads(self.flat(dense_BN, fields_BX, vectors))
