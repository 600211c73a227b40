"""DeepFM: a factorization machine beside an MLP, on the same embeddings (Guo et al., arXiv 1703.04247).

    table of f ──► [ e_f | w_f ]                      logit = Σ_f w_f + ⟨v, numbers⟩ + b        first order
                     │                                      + Σ_{i<j} ⟨x_i, x_j⟩                second order
                     └─► X (n, d)                           + MLP(flatten(X))                   the rest

The first-order weights are extra columns of the tables (`extra_columns.py`). With several labels each has first-order
weights and an output of the MLP of its own; the second-order term is the same for all. Without hidden layers
(`deep.hidden_dims = ()`) the MLP is left out: a plain factorization machine.

Cost: that of the MLP; the second-order term needs n·d operations (`blocks/interactions/second_order.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.heads import HeadSharing, heads_if_hidden
from ziggurat.models.blocks.interactions.second_order import largest_start, sum_of_pairs
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class DeepFMConfig:
    """Settings of the model `DeepFM`.

    Args:
        embedding_dim: d, width of every field; tables have one column a label more.
        deep: hidden layers; () for a plain factorization machine.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.DeepFMConfig(), small_inputs(), seed=0)).__name__
        'DeepFM'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["deepfm"] = "deepfm"
    embedding_dim: Dim = 16
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="DeepFM settings")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DeepFM:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return DeepFM(self, inputs=inputs, embeddings=embeddings)


class DeepFM(RankingModel):
    """A factorization machine beside an MLP, on the same embeddings."""

    def __init__(self, config: DeepFMConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        num_labels = len(inputs.labels)
        self.columns = ExtraColumns(self.field_dims, extra_dims=[num_labels] * len(self.field_dims))
        self.first_order = FirstOrder(inputs)
        self.stack = StackedInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        width = self.stack.num_fields * self.stack.dim
        self.deep = heads_if_hidden(width, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([self.first_order, self.stack, *([] if self.deep is None else [self.deep])], config.init)
        self.stack.dense.limit_start(largest_start(self.stack.num_fields, dim=self.stack.dim))

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The sum of the three terms."""
        main_BX, weights_BE = self.columns(fields_BX)
        fields_BFD = self.stack(dense_BN, main_BX, vectors)
        # The second-order term has one column: it is the same for all labels.
        logits_BL = self.first_order(dense_BN, weights_BE, vectors) + sum_of_pairs(fields_BFD)
        return logits_BL if self.deep is None else logits_BL + self.deep(fields_BFD.flatten(1))
