"""Number formats of dense products: how matrices are multiplied, and which modules multiply them."""

from __future__ import annotations

from ziggurat.precision.arithmetic import NATIVE, Arithmetic, NativeArithmetic, RoundedArithmetic
from ziggurat.precision.in_blocks import BlockArithmetic, InBlocks
from ziggurat.precision.precision import PLAIN, USUAL, Precision
from ziggurat.precision.products import DenseProducts, Linear, its_arithmetic

__all__ = [
    "NATIVE",
    "PLAIN",
    "USUAL",
    "Arithmetic",
    "BlockArithmetic",
    "DenseProducts",
    "InBlocks",
    "Linear",
    "NativeArithmetic",
    "Precision",
    "RoundedArithmetic",
    "its_arithmetic",
]
