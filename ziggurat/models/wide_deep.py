"""Wide & Deep: a logistic regression beside an MLP, learned together (Cheng et al., arXiv 1606.07792).

    table of f ──► [ e_f | w_f ]          logit = Σ_f w_f + ⟨v, numbers⟩ + b          wide: remembers
                     │                          + MLP(x₀)                             deep: generalises
                     └─► x₀ = [numbers | e_1 | … | e_F | projected vectors]

The wide part reads rows by themselves. The paper adds hand-made crosses of features to it, which are features of the
schema here: a column of both values, say `app × installed`. The first-order weights are extra columns of the tables
(`extra_columns.py`), so one lookup serves both parts. The paper trains the wide part by FTRL with L1 and the deep part
by AdaGrad; here, as in BARS, the rows of both learn by the optimizer of the tables.

Cost: that of the MLP, and a sum of F numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class WideDeepConfig:
    """Settings of the model `WideDeep`.

    Args:
        embedding_dim: D, columns of each table's vector; tables have one column a label more.
        deep: hidden layers; the paper's are 1024-512-256.
        numeric: how numbers enter the MLP; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.WideDeepConfig(), small_inputs(), seed=0)).__name__
        'WideDeep'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["wide_deep"] = "wide_deep"
    embedding_dim: Dim = 16
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(1024, 512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        if not self.deep.hidden_dims:
            raise ConfigError(
                expected="one hidden layer or more in the deep part",
                found="deep.hidden_dims = ()",
                where="Wide & Deep settings",
                ways_out=("set deep.hidden_dims", "take logistic_regression for the wide part alone"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> WideDeep:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return WideDeep(self, inputs=inputs, embeddings=embeddings)


class WideDeep(RankingModel):
    """A logistic regression beside an MLP on the same rows."""

    def __init__(self, config: WideDeepConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        num_labels = len(inputs.labels)
        self.columns = ExtraColumns(self.field_dims, extra_dims=[num_labels] * len(self.field_dims))
        self.first_order = FirstOrder(inputs)
        self.flat = FlatInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.deep = Heads(self.flat.output_dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([self.first_order, self.flat, self.deep], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The sum of the two parts."""
        main_BX, weights_BE = self.columns(fields_BX)
        flat_Bd = self.flat(dense_BN, main_BX, vectors)
        return self.first_order(dense_BN, weights_BE, vectors) + self.deep(flat_Bd)
