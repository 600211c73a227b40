"""AutoInt: self-attention between fields; with an MLP beside it AutoInt+ (Song et al., arXiv 1810.11921).

    X (n, d) ─┬─► layer 1 ─► … ─► layer l ─► flatten ─► Linear ─┐
              └─► flatten ─► MLP ───────────────────────────────┴─► + ─► logits (+ first order, if wide = linear)

    layer(X) = ReLU(LN?([softmax(Q_h K_hᵀ / s) V_h]_h + X W_res))              `blocks/interactions/self_attention.py`

Each layer lets a field take up what it attends to, so l layers reach products of l + 1 fields, weighted by similarity.
As in FuxiCTR: no bias in the maps, W_res only where widths differ, dropout on the attention weights.

Cost of a layer: 8·n·d·A + 4·n²·A FLOPs a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.heads import HeadSharing, heads_if_hidden
from ziggurat.models.blocks.interactions.self_attention import AttentionConfig, AutoIntLayer
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, checked


class Wide(StrEnum):
    """Choices of whether there is a first-order term."""

    NONE = "none"
    LINEAR = "linear"


@dataclass(frozen=True, kw_only=True)
@checked
class AutoIntConfig:
    """Settings of the model `AutoInt`.

    Args:
        embedding_dim: d, width of every field.
        num_layers: attention layers.
        attention: of each layer.
        deep: hidden layers of the MLP beside attention; () for AutoInt without "+".
        wide: a first-order term, or none.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.AutoIntConfig(), small_inputs(), seed=0)).__name__
        'AutoInt'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_layers", 1, 6),
        Choices("attention.dim", ("16", "32", "64", "128", "256")),
        Choices("attention.num_heads", ("1", "2", "4")),
        Floats("attention.dropout", 0.0, 0.4),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["autoint"] = "autoint"
    embedding_dim: Dim = 16
    num_layers: int = 2
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    wide: Wide = Wide.NONE
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="AutoInt settings")
        if self.num_layers < 1:
            raise ConfigError(
                expected="one attention layer or more",
                found=f"num_layers = {self.num_layers}",
                where="AutoInt settings",
                ways_out=("set num_layers", "take dnn for none"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label if the model is wide."""
        extra = len(inputs.labels) if self.wide is Wide.LINEAR else 0
        return inputs.table_columns(self.embedding_dim, extra=extra)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> AutoInt:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return AutoInt(self, inputs=inputs, embeddings=embeddings)


class AutoInt(RankingModel):
    """Self-attention between fields; with an MLP beside it AutoInt+."""

    def __init__(self, config: AutoIntConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        num_labels = len(inputs.labels)
        is_wide = config.wide is Wide.LINEAR
        extra = num_labels if is_wide else 0
        self.columns = ExtraColumns(self.field_dims, extra_dims=[extra] * len(self.field_dims))
        self.first_order = FirstOrder(inputs) if is_wide else None
        self.stack = StackedInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        attention = config.attention
        widths = (dim, *[attention.dim] * config.num_layers)
        self.layers = nn.ModuleList(
            AutoIntLayer(num_fields, input_dim=width, config=attention) for width, _ in itertools.pairwise(widths)
        )
        self.output = Linear(num_fields * attention.dim, num_labels)
        self.deep = heads_if_hidden(num_fields * dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        # Tables have starting weights of their own, drawn from another stream of the seed.
        initialise([child for child in self.children() if child is not embeddings], config.init)

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of([self.output]) or super().output_biases()

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`."""
        return linear_maps([self.output])

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Attention, MLP, first order."""
        main_BX, weights_BE = (fields_BX, fields_BX) if self.first_order is None else self.columns(fields_BX)
        fields_BFD = self.stack(dense_BN, main_BX, vectors)
        attended_BFA = fields_BFD
        for layer in self.layers:
            attended_BFA = layer(attended_BFA)
        logits_BL = self.output(attended_BFA.flatten(1))
        if self.deep is not None:
            logits_BL = logits_BL + self.deep(fields_BFD.flatten(1))
        if self.first_order is not None:
            logits_BL = logits_BL + self.first_order(dense_BN, weights_BE, vectors)
        return logits_BL
