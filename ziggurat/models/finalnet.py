"""FinalNet: layers whose output contains products of their own units, in two blocks that teach each other (SIGIR 2023).

    layer     (h₂, h₁) = halves of W x + b         out = [ h₂ | h₁ ⊙ h₂ ]  (concat)   or   h₂ + h₁ ⊙ h₂  (sum)
              then norm, activation, dropout

    block 1   [X | X ⊙ gates] or X ─► layers ─► y₁ ─┐
    block 2   X               ─────► layers ─► y₂ ─┴─► y = (y₁ + y₂) / 2

Each layer doubles the order of the products, where a cross layer raises it by one, at the cost of a linear map. Zhu et
al., "FINAL: Factorized Interaction Layer for CTR Prediction".

*Self-distillation.* With two blocks and binary labels the paper trains

    loss = BCE(σ(y), label) + BCE(σ(y₁), σ(y)*) + BCE(σ(y₂), σ(y)*)            * as a constant

The two further terms have the gradients c·(σ(y_i) − σ(y)), where c is the sample's weight in the loss. c need not be
known: the first term sends back g = c·(σ(y) − label), whose sign tells a label of 0 from 1 and whose size gives c. So
`_SelfDistillation` adds the terms on the way back: the training step is exactly the paper's for labels of 0 and 1, and
the loss that is reported stays plain cross-entropy, comparable with other models'.

Cost: 2·in·out FLOPs a layer and sample (`sum`: twice that).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import Task
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
    normalise,
)
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.ranking_model import RankingModel
from ziggurat.ops.dropout import dropout


class Residual(StrEnum):
    """How a layer joins its linear half and the products."""

    CONCAT = "concat"
    SUM = "sum"


class Blocks(StrEnum):
    """How many blocks."""

    ONE = "one"
    TWO = "two"


class Gating(StrEnum):
    """What block 1 reads."""

    NONE = "none"  # the fields
    FIELDS = "fields"  # the fields, and the fields times gates


_LINEAR = MLPConfig(hidden_dims=(256, 256), activation=Activation.IDENTITY, normalization=Normalization.BATCH)


@dataclass(frozen=True, kw_only=True)
class FinalNetConfig:
    """Settings of `FinalNet`.

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
    """

    kind: Literal["finalnet"] = "finalnet"
    embedding_dim: int = 16
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
        self.config, self.residual = config, residual
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        wide = input_dim
        for width in config.hidden_dims:
            self.layers.append(nn.Linear(wide, 2 * width if residual is Residual.SUM else width))
            if config.normalization is not Normalization.NONE:
                self.norms.append(norm_of_width(config.normalization, width))
            wide = width
        self.output = nn.Linear(wide, num_labels)

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
                hidden_BH = normalise(self.norms[index], hidden_BH)
            hidden_BH = activate(hidden_BH, self.config.activation)
            hidden_BH = dropout(hidden_BH, p=self.config.dropout, training=self.training)
        return self.output(hidden_BH)


class FinalNet(RankingModel):
    """See the module docstring."""

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
        num_fields, dim, num_labels = self.stack.num_fields, self.stack.dim, len(inputs.labels)
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
        self.is_binary = [label.task is Task.BINARY for label in inputs.labels]
        initialise([child for child in self.children() if child is not embeddings], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """One block's logits, or the mean of two."""
        fields_BFD = self.stack(dense_BN, fields_BX, vectors)
        gated_BFD = fields_BFD if self.gate is None else self.gate(fields_BFD)
        first_BL = self.first(gated_BFD.flatten(1))
        if self.second is None:
            return first_BL
        second_BL = self.second(fields_BFD.flatten(1))
        if not self.training:
            return (first_BL + second_BL) / 2
        columns = [
            _SelfDistillation.apply(first_BL[:, label].float(), second_BL[:, label].float())
            if is_binary
            else (first_BL[:, label] + second_BL[:, label]).float() / 2
            for label, is_binary in enumerate(self.is_binary)
        ]
        return torch.stack(columns, dim=1)  # pyright: ignore[reportArgumentType]

    def linears_on_raw_inputs(self) -> list[nn.Module]:
        """Those that make fields of raw inputs."""
        return self.stack.first_linears


class _SelfDistillation(torch.autograd.Function):
    """(y₁ + y₂) / 2, whose backward pass adds the gradients of both blocks' cross-entropy against their mean."""

    @staticmethod
    def forward(ctx: Any, first_B: Tensor, second_B: Tensor) -> Tensor:
        ctx.save_for_backward(first_B, second_B)
        return (first_B + second_B) / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        [gradient_B] = gradients
        first_B, second_B = (saved.sigmoid() for saved in ctx.saved_tensors)
        mean_B = ((ctx.saved_tensors[0] + ctx.saved_tensors[1]) / 2).sigmoid()
        error_B = torch.where(gradient_B < 0, mean_B - 1, mean_B)  # σ(y) − label
        weight_B = torch.where(error_B == 0, 0.0, gradient_B / error_B)
        half_B = gradient_B / 2
        return half_B + weight_B * (first_B - mean_B), half_B + weight_B * (second_B - mean_B)
