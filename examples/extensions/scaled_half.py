"""Add a kernel that dispatch may choose for a product: FP16, with a power of two for each operand.

    A B  ≈  2^(a + b) · fp16(2^−a A) fp16(2^−b B)         2^a: the binade of the largest magnitude of A

FP16 keeps 11 bits of a number where BF16 keeps 8, at the same rate on GPUs, but ends at 65,504. Scaled operands are
below 2, so that a sum of 8,192 products stays below 32,768; longer sums are left to other kernels. Powers of two are
exact: what is lost is the rounding of operands and of the result, and numbers 2^−25 below the largest of their matrix.

    $ ziggurat --extension scaled_half numerics dispatch runs/first --out dispatch.json
    $ ziggurat --extension scaled_half train RECIPE --training.precision dispatch --training.dispatch dispatch.json

Dispatch measures its error and its time, conversions among them, beside those of all others, and chooses it where it is
the fastest that is safe. A CPU without FP16 instructions is slow at it, and dispatch then leaves it alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.precision.kernels import ProductKernel

_LONGEST_SUM = 8192


class ScaledHalf(ProductKernel):
    """Multiplies in FP16, operands scaled by powers of two."""

    name = "scaled_half"
    holds = "the format holds 65,504 times a power of two for each operand"

    def refuses(self, left: tuple[int, ...], right: tuple[int, ...]) -> str:
        """Return why it cannot multiply matrices of these shapes; "" if it can."""
        return f"a sum of {left[-1]:,} products may pass 65,504" if left[-1] > _LONGEST_SUM else ""

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply; leading dims are broadcast."""
        left_binade = _binade(left)
        right_binade = _binade(right)
        product = torch.matmul(torch.ldexp(left, -left_binade).half(), torch.ldexp(right, -right_binade).half())
        # One after the other: the sum of both exponents may be beyond the range of a single power.
        return torch.ldexp(torch.ldexp(product.float(), left_binade), right_binade)


def _binade(operand: Tensor) -> Tensor:
    """Return the exponent of the power of two at or below the largest magnitude; infinities stay what they are."""
    # Powers of two from 2^127 on would not be FP32 numbers: subnormal operands are scaled by 2^126.
    return (torch.frexp(operand.abs().amax()).exponent - 1).clamp(min=-126)


SCALED_HALF = ProductKernel.add(ScaledHalf())
