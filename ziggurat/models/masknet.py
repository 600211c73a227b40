"""MaskNet: products by masks that depend on the sample (Wang et al., arXiv 2102.07619).

    block(x₀, h) = dropout(ReLU(LN(W (mask(x₀) ⊙ h)))),        mask(x₀) = W₂ ReLU(W₁ x₀ + b₁) + b₂

    serial      h₀ = LN_fields(x₀) ─► block 1 ─► block 2 ─► … ─► Linear ─► logits
    parallel    h₀ = LN_fields(x₀) ─► block 1 … block k, each on h₀ ─► side by side ─► MLP ─► logits

Every block looks at the raw embeddings x₀ again to decide which of its inputs matter: h ⊙ mask is a product of all
features with all others, chosen by an MLP. LN_fields normalises each field by itself, with weights of its own. As in
FuxiCTR: W without bias; the mask's hidden layer is `reduction_ratio` times as wide as h.

Cost of a block: 2·(|x₀|·r·|h| + r·|h|² + |h|·out) FLOPs a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Activation, Init, MLPConfig, Normalization, activate, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, checked


class MaskStructure(StrEnum):
    """Ways to combine the blocks."""

    SERIAL = "serial"
    PARALLEL = "parallel"


@dataclass(frozen=True, kw_only=True)
@checked
class MaskNetConfig:
    """Settings of the model `MaskNet`.

    Args:
        embedding_dim: d, width of every field.
        structure: serial or parallel.
        deep: serial: a block for each width, with this activation and dropout; parallel: the MLP above the blocks,
            whose activation and dropout the blocks share. `normalization` is that of the MLP alone.
        num_blocks: of the parallel structure.
        block_dim: width out of each parallel block.
        reduction_ratio: r, width of a mask's hidden layer over that of the mask.
        field_norm: each field normalised at the start (`layer`), or not (`none`).
        block_norm: a norm inside each block (`layer`), or not (`none`).
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        heads: parallel: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.MaskNetConfig(), small_inputs(), seed=0)).__name__
        'MaskNet'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("structure", ("parallel", "serial")),
        Integers("num_blocks", 1, 6, only=("structure", ("parallel",))),
        Integers("block_dim", 32, 256, log=True, only=("structure", ("parallel",))),
        Floats("reduction_ratio", 0.5, 3.0),
        Choices("field_norm", ("none", "layer")),
        *layers("deep", width=(64, 1024), depth=(1, 4)),
    )

    kind: Literal["masknet"] = "masknet"
    embedding_dim: Dim = 16
    structure: MaskStructure = MaskStructure.SERIAL
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 256)))
    num_blocks: int = 4
    block_dim: int = 64
    reduction_ratio: float = 1.0
    field_norm: Normalization = Normalization.LAYER
    block_norm: Normalization = Normalization.LAYER
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="MaskNet settings")
        needs_layers = self.structure is MaskStructure.SERIAL and not self.deep.hidden_dims
        if needs_layers or min(self.num_blocks, self.block_dim) < 1 or self.reduction_ratio <= 0:
            raise ConfigError(
                expected="num_blocks and block_dim of 1 or more, reduction_ratio above 0, a hidden layer if serial",
                found=f"{self.num_blocks}, {self.block_dim}, {self.reduction_ratio}, {self.deep.hidden_dims}",
                where="MaskNet settings",
                ways_out="correct the setting",
            )
        taken = (Normalization.LAYER, Normalization.NONE)
        if other := [norm for norm in (self.field_norm, self.block_norm) if norm not in taken]:
            raise ConfigError(
                expected="field_norm and block_norm: layer or none",
                found=", ".join(other),
                where="MaskNet settings",
                ways_out=f"set layer; deep.normalization = {other[0]} is for the MLP of the parallel structure",
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> MaskNet:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return MaskNet(self, inputs=inputs, embeddings=embeddings)


class FieldNorm(nn.Module):
    """Layer normalisation of every field by itself, with scale and shift for each field.

    Args:
        num_fields: n.
        dim: d.
    """

    def __init__(self, num_fields: int, *, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_fields, dim))
        self.shift = nn.Parameter(torch.zeros(num_fields, dim))

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F D"]:
        """LN over D, then scale and shift."""
        return F.layer_norm(fields_BFD, fields_BFD.shape[2:]) * self.scale + self.shift


class MaskBlock(nn.Module):
    """dropout(activation(LN(W (mask(x₀) ⊙ h)))).

    Args:
        input_dim: width of x₀.
        hidden_dim: width of h.
        output_dim: width of what comes out.
        config: ratio, norm, activation and dropout.
    """

    def __init__(self, input_dim: int, *, hidden_dim: int, output_dim: int, config: MaskNetConfig) -> None:
        super().__init__()
        self.mlp = config.deep
        wide = max(1, int(hidden_dim * config.reduction_ratio))
        self.mask_in = Linear(input_dim, wide, bias=self.mlp.bias)
        self.mask_out = Linear(wide, hidden_dim, bias=self.mlp.bias)
        self.linear = Linear(hidden_dim, output_dim, bias=False)
        self.norm = nn.LayerNorm(output_dim) if config.block_norm is Normalization.LAYER else None

    def forward(self, inputs_BI: Float[Tensor, "B I"], hidden_BH: Float[Tensor, "B H"]) -> Float[Tensor, "B O"]:
        """Mask h, map it on."""
        mask_BH = self.mask_out(activate(self.mask_in(inputs_BI), Activation.RELU))
        output_BO = self.linear(mask_BH * hidden_BH)
        if self.norm is not None:
            output_BO = self.norm(output_BO)
        return dropout(activate(output_BO, self.mlp.activation), p=self.mlp.dropout, training=self.training)


class MaskNet(RankingModel):
    """Blocks that multiply embeddings and hidden units by masks, which depend on the sample."""

    def __init__(self, config: MaskNetConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.stack = StackedInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        num_labels = len(inputs.labels)
        width = num_fields * dim
        self.field_norm = FieldNorm(num_fields, dim=dim) if config.field_norm is Normalization.LAYER else None
        self.output: nn.Module
        if config.structure is MaskStructure.SERIAL:
            # A block's output is the next one's h.
            pairs = itertools.pairwise((width, *config.deep.hidden_dims))
            self.output = Linear(config.deep.hidden_dims[-1], num_labels)
        else:
            pairs = [(width, config.block_dim)] * config.num_blocks
            blocks_width = config.num_blocks * config.block_dim
            self.output = Heads(blocks_width, config=config.deep, num_labels=num_labels, sharing=config.heads)
        self.blocks = nn.ModuleList(
            MaskBlock(width, hidden_dim=hidden, output_dim=output, config=config) for hidden, output in pairs
        )
        initialise([self.stack, self.blocks, self.output], config.init)

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of([self.output]) or super().output_biases()

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`."""
        return linear_maps([self.output]) or super().closing_maps()

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Blocks one after the other, or side by side below an MLP."""
        fields_BFD = self.stack(dense_BN, fields_BX, vectors)
        flat_BI = fields_BFD.flatten(1)
        hidden_BH = flat_BI if self.field_norm is None else self.field_norm(fields_BFD).flatten(1)
        if self.config.structure is MaskStructure.PARALLEL:
            return self.output(torch.cat([block(flat_BI, hidden_BH) for block in self.blocks], dim=1))
        for block in self.blocks:
            hidden_BH = block(flat_BI, hidden_BH)
        return self.output(hidden_BH)
