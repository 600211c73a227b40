"""FinalNet: layers whose output contains products of their own units, in two blocks that teach each other (SIGIR 2023).

    layer     (h₂, h₁) = halves of W x + b         out = [ h₂ | h₁ ⊙ h₂ ]  (concat)   or   h₂ + h₁ ⊙ h₂  (sum)
              then norm, activation, dropout

    block 1   [X | X ⊙ gates] or X ─► layers ─► y₁ ─┐
    block 2   X               ─────► layers ─► y₂ ─┴─► y = (y₁ + y₂) / 2

Each layer doubles the order of the products, where a cross layer raises it by one, at the cost of a linear map. Zhu et
al., "FINAL: Factorized Interaction Layer for CTR Prediction".

*Self-distillation.* With two blocks and binary labels the paper trains

    loss = BCE(σ(y), label) + BCE(σ(y₁), σ(y)*) + BCE(σ(y₂), σ(y)*)            * as a constant

How it enters the loss stands in `contract/self_distillation.py`.

Cost: 2·in·out FLOPs a layer and sample (`sum`: twice that).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.interactions.field_gate import FieldGate
from ziggurat.models.blocks.mlp import (
    Activation,
    Init,
    MLPConfig,
    Normalization,
    activate,
    initialise,
    norm_of_width,
)
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.losses import LossSums
from ziggurat.models.contract.model import Embedded, Outputs
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers
from ziggurat.models.contract.self_distillation import add_self_distillation
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, checked


class Residual(StrEnum):
    """Ways in which a layer joins its linear half and the products."""

    CONCAT = "concat"
    SUM = "sum"


class Blocks(StrEnum):
    """The number of blocks of a FinalNet."""

    ONE = "one"
    TWO = "two"


class Gating(StrEnum):
    """Choices of what block 1 reads."""

    NONE = "none"  # the fields
    FIELDS = "fields"  # the fields, and the fields times gates


_LINEAR = MLPConfig(hidden_dims=(256, 256), activation=Activation.IDENTITY, normalization=Normalization.BATCH)


@dataclass(frozen=True, kw_only=True)
@checked
class FinalNetConfig:
    """Settings of the model `FinalNet`.

    Args:
        embedding_dim: d, width of every field.
        blocks: one or two.
        first: layers of block 1; widths must be even with `concat`. No activation by default.
        second: layers of block 2; unused with one block.
        residual: concat or sum.
        gating: of block 1.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.FinalNetConfig(), small_inputs(), seed=0)).__name__
        'FinalNet'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("blocks", ("two", "one")),
        Choices("gating", ("none", "fields")),
        Integers("first.width", 64, 800, step=16),  # even, as `concat` wants
        Integers("first.depth", 1, 3),
        Integers("second.width", 64, 800, step=16, only=("blocks", ("two",))),
        Integers("second.depth", 1, 3, only=("blocks", ("two",))),
    )

    kind: Literal["finalnet"] = "finalnet"
    embedding_dim: Dim = 16
    blocks: Blocks = Blocks.TWO
    first: MLPConfig = _LINEAR
    second: MLPConfig = _LINEAR
    residual: Residual = Residual.CONCAT
    gating: Gating = Gating.NONE
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="FinalNet settings")
        for name, block in (("first", self.first), ("second", self.second)):
            odd = self.residual is Residual.CONCAT and any(width % 2 for width in block.hidden_dims)
            if odd or not block.hidden_dims:
                raise ConfigError(
                    expected="a layer or more in each block, of even widths with residual = concat",
                    found=f"{name}.hidden_dims = {block.hidden_dims}",
                    where="FinalNet settings",
                    ways_out=("correct the widths", "set residual = sum"),
                )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> FinalNet:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return FinalNet(self, inputs=inputs, embeddings=embeddings)


class FactorizedBlock(nn.Module):
    """Factorized interaction layers and a linear output.

    Args:
        input_dim: width of the input.
        config: widths, norm, activation, dropout of the layers.
        residual: concat or sum.
        num_labels: outputs.
    """

    def __init__(self, input_dim: int, *, config: MLPConfig, residual: Residual, num_labels: int) -> None:
        super().__init__()
        self.config = config
        self.residual = residual
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        wide = input_dim
        for width in config.hidden_dims:
            # A sum needs two halves that are as wide as its result.
            self.layers.append(Linear(wide, 2 * width if residual is Residual.SUM else width, bias=config.bias))
            if config.normalization is not Normalization.NONE:
                self.norms.append(norm_of_width(config.normalization, width))
            wide = width
        self.output = Linear(wide, num_labels)

    def forward(self, inputs_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B L"]:
        """Logits of this block."""
        hidden_BH = inputs_BI
        for index, layer in enumerate(self.layers):
            kept_BH, factor_BH = layer(hidden_BH).chunk(2, dim=1)
            products_BH = kept_BH * factor_BH
            if self.residual is Residual.SUM:
                hidden_BH = kept_BH + products_BH
            else:
                hidden_BH = torch.cat([kept_BH, products_BH], dim=1)
            if len(self.norms):
                hidden_BH = self.norms[index](hidden_BH)
            hidden_BH = activate(hidden_BH, self.config.activation)
            hidden_BH = dropout(hidden_BH, p=self.config.dropout, training=self.training)
        return self.output(hidden_BH)


class FinalNet(RankingModel):
    """Layers whose output contains products of their own units, in one block, or two that teach each other."""

    def __init__(self, config: FinalNetConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
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
        self.gate = FieldGate(num_fields, dim=dim) if config.gating is Gating.FIELDS else None
        self.first = FactorizedBlock(
            width if self.gate is None else 2 * width,
            config=config.first,
            residual=config.residual,
            num_labels=num_labels,
        )
        self.second = (
            FactorizedBlock(width, config=config.second, residual=config.residual, num_labels=num_labels)
            if config.blocks is Blocks.TWO
            else None
        )
        initialise([child for child in self.children() if child is not embeddings], config.init)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """One block's logits, or the mean of two, which are then named as well."""
        blocks = self.blocks(embedded.dense, embedded.fields, self.vectors_of(embedded))
        if len(blocks) == 1:
            return self.as_outputs(blocks[0])
        # FP32 at least: blocks are compared with their mean in the loss.
        first_BL, second_BL = (block_BL.to(torch.promote_types(block_BL.dtype, torch.float32)) for block_BL in blocks)
        return self.as_outputs((first_BL + second_BL) / 2, {"first": first_BL, "second": second_BL})

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """One block's logits, or the mean of two."""
        return self.forward_dense(Embedded(dense=dense_BN, fields=fields_BX, vectors=vectors)).logits

    def blocks(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> list[Tensor]:
        """The logits of each block."""
        fields_BFD = self.stack(dense_BN, fields_BX, vectors)
        gated_BFD = fields_BFD if self.gate is None else self.gate(fields_BFD)
        first_BL = self.first(gated_BFD.flatten(1))
        if self.second is None:
            return [first_BL]
        return [first_BL, self.second(fields_BFD.flatten(1))]

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Cross-entropy of the mean, with the gradients of the terms by which the blocks teach each other."""
        sums = super().loss(outputs, batch)
        if not outputs.named:
            return sums
        return add_self_distillation(sums, outputs, batch, inputs=self.inputs)
