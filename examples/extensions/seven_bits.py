"""Add a block format: seven bits a number, between MX6 and MX9, and a precision whose products round to it.

    block      16 numbers   a power of two of 8 bits: the binade of the largest
    pair        2 numbers   one bit: both lie a binade lower, and are kept twice as finely
    number                  a sign and an integer of 5 bits

    1 + 5 + 8/16 + 1/2  =  7 bits a number

A format is data, so rounding, packing, their kernels, the report of formats and scoring in integers take it as it is;
nothing else has to be written. Each bit is worth 6 dB: what MX6 loses and MX9 need not spend lies here.

    import seven_bits                           # lists both; --training.precision seven_bits then takes it
    ziggurat --extension seven_bits numerics formats seven_bits mx6 mx9

Reference: the family is that of MX9 and MX6, "With Shared Microexponents, A Little Shifting Goes a Long Way" (arXiv
2302.08007), whose names belong to its own three members.
"""

from __future__ import annotations

from ziggurat.numerics import BlockFormat, Element
from ziggurat.precision import Precision
from ziggurat.precision.in_blocks import InBlocks

SEVEN_BITS = BlockFormat.add(
    BlockFormat(name="seven_bits", element=Element.integer(5), k1=16, k2=2, d1=8, d2=1, family="an example")
)
SEVEN_BIT_PRODUCTS = Precision.add(InBlocks(SEVEN_BITS))
