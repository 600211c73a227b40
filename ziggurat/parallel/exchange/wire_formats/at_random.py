"""Stochastic rounding: up with the probability of the remainder.

Rounding to nearest is biased for gradients that are smaller than half a step: they vanish every time. Stochastic
rounding is right on average. Reference for its effect: Gupta et al., "Deep Learning with Limited Numerical Precision",
arXiv 1502.02551.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Significant bits, and the exponent of the smallest normal number: below it steps are of one size.
_GRIDS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.float8_e4m3fn: (4, -6)}


def round_to_bf16_at_random(numbers: Tensor) -> Tensor:
    """Return BF16 of FP32 numbers: noise below the last bit, then truncation."""
    noise = torch.randint(0, 1 << 16, numbers.shape, dtype=torch.int32, device=numbers.device)
    bits = torch.where(numbers.isfinite(), numbers.view(torch.int32) + noise, numbers.view(torch.int32))
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


def round_at_random(numbers: Tensor, *, grid: torch.dtype) -> Tensor:
    """Round to the grid of a type, in the type of the numbers."""
    significant, smallest = _GRIDS[grid]
    exponent = torch.frexp(numbers.abs().clamp(min=2.0**smallest)).exponent - significant
    step = torch.ldexp(torch.ones_like(numbers), exponent)
    return (numbers / step).add_(torch.rand_like(numbers)).floor_().mul_(step)
