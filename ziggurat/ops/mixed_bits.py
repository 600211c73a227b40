"""Random bits as a function of numbers, in torch on any device: what `ziggurat/features/hashing.py` computes in numpy.

torch has whole numbers of 64 bits with a sign alone. Sums and products have the same bits with a sign as without;
shifts to the right and numbers that are written down need a word each.
"""

from __future__ import annotations

from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.hashing import GOLDEN, MULTIPLIERS


def signed(number: int) -> int:
    """The signed number of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


GOLDEN_SIGNED = signed(int(GOLDEN))


def shifted(bits: Int64[Tensor, "*N"], count: int) -> Int64[Tensor, "*N"]:
    """A logical shift to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def mix(bits: Int64[Tensor, "*N"]) -> Int64[Tensor, "*N"]:
    """The finaliser of splitmix64, with the bits of `ziggurat.features.hashing.mix`."""
    first, second = (signed(int(each)) for each in MULTIPLIERS)
    bits = (bits ^ shifted(bits, 30)) * first
    bits = (bits ^ shifted(bits, 27)) * second
    return bits ^ shifted(bits, 31)
