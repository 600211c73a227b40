"""Add a precision: TF32 on any device, as the tensor cores of a GPU read it.

    FP32    1 sign   8 exponent   23 mantissa
    TF32    1 sign   8 exponent   10 mantissa        operands of products only; sums, weights and the rest stay FP32

An operand is rounded to the nearest number with 10 bits of mantissa, ties to even. The range stays that of FP32, so
nothing overflows that did not before, but for the last half step below the largest number, which becomes infinite.
A GPU gives the same numbers up to the order of its sums; here a laptop tells whether a model bears TF32, before
anybody pays for one.

    import tf32_anywhere                        # lists it; --training.precision tf32_anywhere then takes it

Cost: three passes over each operand and product, several times slower than FP32. For studies, not for speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.precision import Precision, RoundedArithmetic

_DROPPED_BITS = 13


class TF32Arithmetic(RoundedArithmetic):
    """Rounds operands to 10 bits of mantissa; every number by itself, so the dim of the sum does not matter."""

    name = "tf32_anywhere"

    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        """Return the nearest numbers with 10 bits of mantissa, ties to even; infinities and NaN stay."""
        bits = operand.float().view(torch.int32)
        last_kept = (bits >> _DROPPED_BITS) & 1
        half = (1 << (_DROPPED_BITS - 1)) - 1
        rounded = ((bits + half + last_kept) >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)
        return torch.where(operand.isfinite(), rounded, operand).to(operand.dtype)


class TF32Anywhere(Precision):
    """FP32 whose dense products read 10 bits of the mantissa, on any device."""

    name = "tf32_anywhere"
    arithmetic = TF32Arithmetic()


TF32_ANYWHERE = Precision.add(TF32Anywhere())
