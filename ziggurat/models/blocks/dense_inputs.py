"""Inputs without an embedding table: numbers and pretrained vectors, brought to the fields' size.

    numbers (N)      BOTTOM_MLP   ──► MLP ──► 1 field of D          DLRM: arXiv 1906.00091 (Wukong: one or more)
                     FIELDS       ──► x_n · w_n: N fields of D      each number scales a learned vector; BARS, AutoInt
                     CONCAT       ──► as they are, beside the fields    DCNv2: arXiv 2008.13535, section 3.1

    vector v (dim)   ──► Linear(dim, D), no bias ──► 1 field of D

A batch without numbers has N = 0 columns, and then there is no numeric part, whatever the setting.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig
from ziggurat.precision.products import Linear


class NumericInput(StrEnum):
    """Ways in which numbers reach the interaction."""

    BOTTOM_MLP = "bottom_mlp"  # all numbers through one MLP, whose output is one field
    FIELDS = "fields"  # each number times a learned vector is a field of its own
    CONCAT = "concat"  # the numbers themselves, beside the fields


class DenseInputs(nn.Module):
    """Turns numbers and pretrained vectors into fields of `dim` numbers.

    Args:
        inputs: names and sizes of the features.
        dim: D of a field.
        numeric: what to do with numbers.
        bottom: hidden layers of the bottom MLP; its closing linear map to D is activated too (as in the paper's code).
        num_bottom_fields: m, fields that the bottom MLP gives.

    Attributes:
        num_numeric_fields: fields that the numbers become (0, m or N).
        num_vector_fields: one for each pretrained vector.
        num_beside: numbers that go beside the fields (N for CONCAT, else 0).
    """

    def __init__(
        self, inputs: InputSpec, *, dim: int, numeric: NumericInput, bottom: MLPConfig, num_bottom_fields: int = 1
    ) -> None:
        super().__init__()
        num_dense = len(inputs.dense)
        self.dim = dim
        self.vector_names = tuple(spec.name for spec in inputs.vectors)
        self.bottom: MLP | None = None
        self.numeric_fields: NumericFields | None = None
        if num_dense and numeric is NumericInput.BOTTOM_MLP:
            width = num_bottom_fields * dim
            self.bottom = MLP(
                num_dense,
                config=bottom,
                output_dim=width,
                output_activation=bottom.activation,
                output_bias=bottom.bias,
            )
        elif num_dense and numeric is NumericInput.FIELDS:
            self.numeric_fields = NumericFields(num_dense, dim=dim)
        self.vector_fields = nn.ModuleList(Linear(spec.dim, dim, bias=False) for spec in inputs.vectors)
        self.num_numeric_fields = {
            NumericInput.BOTTOM_MLP: num_bottom_fields if num_dense else 0,
            NumericInput.FIELDS: num_dense,
            # Numbers that go beside the fields are none themselves.
        }.get(numeric, 0)
        self.num_vector_fields = len(inputs.vectors)
        self.num_beside = num_dense if numeric is NumericInput.CONCAT else 0

    def limit_start(self, std: float) -> None:
        """Scale the starting weights of fields down, so that their numbers have at most this standard deviation.

        A bottom MLP stays as it is: it gives one field or a few, however many numbers there are.

        Args:
            std: for inputs whose own is 1.
        """
        # Tensors and no Python numbers: a model that is built to be looked at lies on the meta device.
        with torch.no_grad():
            if self.numeric_fields is not None:
                weight = self.numeric_fields.weight
                weight.mul_((std / _size(weight)).clamp(max=1.0))
            for field in self.vector_fields:
                if isinstance(field, nn.Linear):
                    # Each number of the field is a sum over all numbers of the vector.
                    sum_size = math.sqrt(field.in_features) * _size(field.weight)
                    field.weight.mul_((std / sum_size).clamp(max=1.0))

    def numbers(self, dense_BN: Float[Tensor, "B N"]) -> Float[Tensor, "B X"]:
        """The numeric part, flat: X = num_numeric_fields·D + num_beside columns."""
        if self.bottom is not None:
            return self.bottom(dense_BN)
        if self.numeric_fields is not None:
            return self.numeric_fields(dense_BN).flatten(1)
        return dense_BN

    def vectors(self, vectors: dict[str, Tensor]) -> list[Float[Tensor, "B D"]]:
        """One field for each pretrained vector, in the order of the inputs."""
        return [field(vectors[name]) for name, field in zip(self.vector_names, self.vector_fields, strict=True)]


def _size(weight: Tensor) -> Tensor:
    """Return the root mean square of the numbers of a weight."""
    return weight.square().mean().sqrt()


class NumericFields(nn.Module):
    """Each number times a learned vector: field n is x_n · w_n (a linear map from 1 to D without bias).

    Args:
        num_dense: N.
        dim: D.
    """

    def __init__(self, num_dense: int, *, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_dense, dim))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start each w_n as an `nn.Linear(1, D)` would."""
        with torch.no_grad():
            if init is Init.XAVIER_NORMAL:
                self.weight.normal_(0.0, (2.0 / (1 + self.weight.shape[1])) ** 0.5)
            else:
                # ± 1/sqrt(in), with one input.
                self.weight.uniform_(-1.0, 1.0)

    def forward(self, dense_BN: Float[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        """N fields of D numbers."""
        return dense_BN.unsqueeze(2) * self.weight
