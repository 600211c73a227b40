"""FiBiNET: bilinear products of all pairs of fields, of the fields and of the fields scaled by how much each matters.

    X (n, d) ─┬─► pairs: (W v_i) ⊙ v_j ──────────────► p (P, d) ─┐
              └─► SENET: A_f · x_f ─► pairs with other W ─► q (P, d) ┴─► MLP ─► + ─► logits
    rows ──────► first order ─────────────────────────────────────────────────────┘

Huang, Zhang and Zhang, "FiBiNET: Combining Feature Importance and Bilinear feature Interaction for Click-Through Rate
Prediction", RecSys 2019, arXiv 1905.09433. SENET stands in `blocks/interactions/squeeze_excitation.py`, the pairs, of
which there are P = n(n−1)/2, in `blocks/interactions/bilinear_pairs.py`. As FuxiCTR and BARS compute it: p and q have
matrices of their own, and the linear term is a first-order weight for each row, an extra column of its table
(`extra_columns.py`).

Cost: the first layer of the MLP reads n(n−1)·d numbers, 2·n(n−1)·d·h FLOPs a sample, mostly far more than all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.interactions.bilinear_pairs import BilinearKind, BilinearPairs
from ziggurat.models.blocks.interactions.squeeze_excitation import SqueezeExcitation
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Count, Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class FiBiNETConfig:
    """Settings of the model `FiBiNET`.

    Args:
        embedding_dim: d, width of every field; tables have one column a label more.
        bilinear: one matrix for all pairs, one for each left field, or one for each pair.
        reduction: fields a unit of SENET's hidden layer; the paper's is 3.
        deep: hidden layers of the MLP above the pairs.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.FiBiNETConfig(), small_inputs(), seed=0)).__name__
        'FiBiNET'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("bilinear", ("all", "each", "pair")),
        Integers("reduction", 1, 4),
        *layers("deep", width=(64, 1024), depth=(1, 4)),
    )

    kind: Literal["fibinet"] = "fibinet"
    embedding_dim: Dim = 16
    bilinear: BilinearKind = BilinearKind.PAIR
    reduction: Count = 3
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(400, 400, 400)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="FiBiNET settings")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> FiBiNET:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return FiBiNET(self, inputs=inputs, embeddings=embeddings)


class FiBiNET(RankingModel):
    """Bilinear products of all pairs of fields, as they are and as SENET scales them."""

    def __init__(self, config: FiBiNETConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
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
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        if num_fields < 2:
            raise ConfigError(
                expected="two fields or more, because a bilinear product takes two",
                found=f"{num_fields} field{'' if num_fields == 1 else 's'}",
                where="FiBiNET",
                ways_out=("take wide_deep or dnn", "add features to the schema"),
            )
        self.importance = SqueezeExcitation(num_fields, reduction=config.reduction)
        self.pairs = BilinearPairs(num_fields, dim=dim, kind=config.bilinear)
        self.scaled_pairs = BilinearPairs(num_fields, dim=dim, kind=config.bilinear)
        width = 2 * self.pairs.num_pairs * dim
        self.deep = Heads(width, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([child for child in self.children() if child is not embeddings], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The MLP on both sets of pairs, and the first order."""
        main_BX, weights_BE = self.columns(fields_BX)
        fields_BFD = self.stack(dense_BN, main_BX, vectors)
        pairs_BPD = self.pairs(fields_BFD)
        scaled_BPD = self.scaled_pairs(self.importance(fields_BFD))
        both_BX = torch.cat([pairs_BPD, scaled_BPD], dim=1).flatten(1)
        return self.first_order(dense_BN, weights_BE, vectors) + self.deep(both_BX)
