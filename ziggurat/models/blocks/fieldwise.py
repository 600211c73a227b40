"""Maps that act on the fields of a sample one by one, or on the axis of fields.

    FieldwiseLinear    o_f = W_f e_f                 a matrix for each field: every table has a space of its own
    FieldMix           o_i = Σ_f L_if x_f            fields combined with learned numbers, each column alike

`FieldwiseLinear` is F small products; fields of the same size share one weight and one call
(`ops/interactions/fieldwise.py`), fields of other sizes form groups.

Cost a sample: 2·Σ_f d_f·o and 2·F·M·D FLOPs forward, twice that backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.mlp import Init
from ziggurat.ops.interactions.fields import field_mix
from ziggurat.ops.interactions.fieldwise import fieldwise_products
from ziggurat.precision import Arithmetic, DenseProducts


class BatchedLinear(DenseProducts):
    """F linear maps of one size: o_f = W_f x_f, without bias.

    Args:
        num_fields: F.
        input_dim: d, numbers of each x_f.
        output_dim: o, numbers of each o_f.
    """

    def __init__(self, num_fields: int, *, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_fields, input_dim, output_dim))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start each W_f as an `nn.Linear(d, o)` would."""
        _, wide, narrow = self.weight.shape
        start_like_linear(self.weight, init, fan_in=wide, fan_out=narrow)

    def forward(self, flat_BT: Float[Tensor, "B Fd"]) -> Float[Tensor, "B F o"]:
        """Every field, side by side, through its own map."""
        if not self.arithmetic.is_native:
            fields_FBd = flat_BT.unflatten(1, self.weight.shape[:2]).transpose(0, 1)
            return self.arithmetic.matmul(fields_FBd, self.weight).transpose(0, 1)
        return fieldwise_products(flat_BT, self.weight).unflatten(1, (self.weight.shape[0], -1))


class FieldwiseLinear(nn.Module):
    """A linear map without bias for each field of a sample; fields may differ in size.

    Args:
        field_dims: d_f, numbers of each field, in order.
        output_dim: o, numbers that each field becomes.
    """

    def __init__(self, field_dims: Sequence[int], *, output_dim: int) -> None:
        super().__init__()
        self.field_dims = tuple(field_dims)
        self.output_dim = output_dim
        # In a fixed order: the groups' numbers are names of weights in checkpoints.
        sizes = sorted(set(field_dims), reverse=True)
        self.members = [[i for i, columns in enumerate(field_dims) if columns == size] for size in sizes]
        self.groups = nn.ModuleList(
            BatchedLinear(len(members), input_dim=size, output_dim=output_dim)
            for size, members in zip(sizes, self.members, strict=True)
        )

    def forward(self, flat_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B F o"]:
        """Project the fields, which lie side by side, T = Σ d_f."""
        if len(self.groups) == 1:
            return self.groups[0](flat_BT)
        fields = flat_BT.split(self.field_dims, dim=1)
        # Places to be filled, in the order of the fields.
        projected: list[Tensor] = [flat_BT] * len(fields)
        for members, group in zip(self.members, self.groups, strict=True):
            outputs_BGo = group(torch.cat([fields[index] for index in members], dim=1))
            for place, index in enumerate(members):
                projected[index] = outputs_BGo[:, place]
        return torch.stack(projected, dim=1)


class FieldMix(DenseProducts):
    """Linear combinations of fields: o_i = Σ_f L_if x_f, the linear compression of Wukong (arXiv 2403.02545).

    Args:
        num_fields: F.
        num_outputs: M.
        dim: D of a field; only used to count FLOPs.
    """

    def __init__(self, num_fields: int, *, num_outputs: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(num_outputs, num_fields))
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start L as an `nn.Linear(F, M)` would."""
        outputs, inputs = self.weight.shape
        start_like_linear(self.weight, init, fan_in=inputs, fan_out=outputs)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """Mix the fields."""
        return mix_by(self.arithmetic, fields_BFD, self.weight)


def mix_by(
    arithmetic: Arithmetic, fields_BFD: Float[Tensor, "B F D"], weight_MF: Float[Tensor, "M F"]
) -> Float[Tensor, "B M D"]:
    """Compute o_i = Σ_f L_if x_f in an arithmetic."""
    return field_mix(fields_BFD, weight_MF) if arithmetic.is_native else arithmetic.matmul(weight_MF, fields_BFD)


def start_like_linear(weight: Tensor, init: Init, *, fan_in: int, fan_out: int) -> None:
    """Fill a weight as `initialise` fills that of an `nn.Linear(fan_in, fan_out)`."""
    with torch.no_grad():
        if init is Init.XAVIER_NORMAL:
            weight.normal_(0.0, (2.0 / (fan_in + fan_out)) ** 0.5)
        else:
            weight.uniform_(-(fan_in**-0.5), fan_in**-0.5)
