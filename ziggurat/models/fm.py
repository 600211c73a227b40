"""FM: a factorization machine, every pair of fields weighed by the dot product of their vectors (Rendle, ICDM 2010).

    table of f ──► [ e_f | w_f ]          logit = Σ_f w_f + ⟨v, numbers⟩ + b          first order
                     │                          + Σ_{i<j} ⟨x_i, x_j⟩                  second order
                     └─► X (n, d)

A pair of rows that was never seen together still has a weight, since each row has learned its vector from other pairs.
Numbers and pretrained vectors are fields as well. The first-order weights are extra columns of the tables
(`extra_columns.py`); with several labels each has weights of its own, and the second-order term is the same for all.
DeepFM without hidden layers is the same model.

Cost: n·d additions and products (`blocks/interactions/second_order.py`), no matrix product but that of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.interactions.second_order import largest_start, sum_of_pairs
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class FMConfig:
    """Settings of the model `FM`.

    Args:
        embedding_dim: d, width of every field; tables have one column a label more.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the linear maps on numbers and vectors.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.FMConfig(), small_inputs(), seed=0)).__name__
        'FM'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (Integers("embedding_dim", 4, 64, step=2),)

    kind: Literal["fm"] = "fm"
    embedding_dim: Dim = 16
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="FM settings")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> FM:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return FM(self, inputs=inputs, embeddings=embeddings)


class FM(RankingModel):
    """A factorization machine: first order, and the dot products of all pairs of fields."""

    def __init__(self, config: FMConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.columns = ExtraColumns(self.field_dims, extra_dims=[len(inputs.labels)] * len(self.field_dims))
        self.first_order = FirstOrder(inputs)
        self.stack = StackedInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        initialise([self.first_order, self.stack], config.init)
        self.stack.dense.limit_start(largest_start(self.stack.num_fields, dim=self.stack.dim))

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The sum of the two terms."""
        main_BX, weights_BE = self.columns(fields_BX)
        fields_BFD = self.stack(dense_BN, main_BX, vectors)
        # The second-order term has one column: it is the same for all labels.
        return self.first_order(dense_BN, weights_BE, vectors) + sum_of_pairs(fields_BFD)
