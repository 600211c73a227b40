"""Tensors that a block format must get right: ordinary, of all magnitudes, and the edges."""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.numerics import BlockFormat


def bits(x: Tensor) -> Tensor:
    """The bits of FP32 numbers: -0 is not 0, NaN is NaN."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same FP32 numbers, to the sign of a zero."""
    return left.shape == right.shape and torch.equal(bits(left), bits(right))


def hard_numbers(format: BlockFormat, *shape: int, seed: int = 0) -> Tensor:
    """Return numbers of all binades that the format holds, zeros, ties between codes and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    element = format.element
    low, high = (-149, 127) if format.has_scale else (element.min_exponent - 12, element.max_exponent - 1)
    exponents = torch.randint(low, high, (len(rows), 1), generator=generator)
    rows.copy_(torch.ldexp(rows.clamp(-1.99, 1.99).double(), exponents).float())
    ordinary = torch.randn(rows.shape, generator=generator)
    rows[::2] = ordinary[::2]
    rows[::4] = (rows[::4] * 64).round() / 64  # ties
    rows[torch.rand(rows.shape, generator=generator) < 0.1] = 0.0
    rows[torch.rand(rows.shape, generator=generator) < 0.02] = -0.0
    rows[1::8, : rows.shape[1] // 2] = 0.0
    rows[3::16] = 0.0
    return rows.view(shape)
