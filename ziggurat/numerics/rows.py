"""Rows of tables in block formats, packed to their exact bits: MX9, MX6 and others as row formats.

    row of 40 numbers in MX9    block of 16, 18 bytes │ block of 16, 18 bytes │ block of 8, 9½ bytes, filled up to 10

A row of D columns takes 9/8·D bytes in MX9 and 6/8·D in MX6 where D is a multiple of 16. A number between two that the
format holds becomes the upper one with the probability of the remainder, where updates are rounded at random; scales of
its block are those of the numbers before, so only what lies above the largest code of its block is cut off.

None is listed by the package, because torch rounds and reads their rows at many times the cost of INT8. Whoever wants
one lists it:

    RowFormat.add(RowsInBlocks(catalogue.MX9))      settings may then say --tables.weights mx9

It lies here and not beside the other row formats, because `ops` knows nothing of `numerics`.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics import blocks
from ziggurat.numerics.block_format import BlockFormat, Rounding
from ziggurat.numerics.packing import Packed, pack_rows, row_bits, unpack
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.row_formats.noise import noise


class RowsInBlocks(RowFormat):
    """Rows packed to the bits of a block format.

    Args:
        format: whose blocks lie along the columns of a row.
        name: of the row format; that of the block format unless given.

    Raises:
        ConfigError: scales of the format are no powers of two, so that rows that were read would not be written back to
            the same numbers.
    """

    dtype = torch.uint8
    keeps_rows_whole = True
    time = 16.0  # of MX9 with the kernel in torch: most of it rounds at random (INT8 there: 5)
    worth = 0.6

    def __init__(self, format: BlockFormat, *, name: str = "") -> None:
        if not format.has_scale or not format.has_power_of_two_scales:
            raise ConfigError(
                expected="a block format whose scales are powers of two",
                found=f"{format.name}, whose scales are {'FP32 numbers' if format.has_scale else 'absent'}",
                where="RowsInBlocks, a row format",
                ways_out=("RowsInBlocks(BlockFormat.named('msfp16'))", "see the formats: ziggurat numerics formats"),
            )
        self.format = format
        self.name = name or format.name
        # A number is cut off to the code below it; the code above it is the next one.
        self._lower_codes = dataclasses.replace(format, name=f"{format.name}_cut", rounding=Rounding.TRUNCATE)

    def width(self, dim: int) -> int:
        """Return the bytes of all blocks, filled up to whole bytes."""
        return -(-row_bits(self.format, dim) // 8)

    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> UInt8[Tensor, "N W"]:
        """Return the packed blocks of each row; a block with a number that is not finite is NaN."""
        if not len(values_ND):
            return values_ND.new_empty(0, self.width(values_ND.shape[1]), dtype=torch.uint8)
        if words_N is not None:
            values_ND = self._rounded_at_random(values_ND, words_N)
        return pack_rows(values_ND, self.format)

    def decode(self, rows_NW: UInt8[Tensor, "N W"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return the numbers of packed blocks."""
        if not len(rows_NW):
            return rows_NW.new_empty(0, dim, dtype=torch.float32)
        return unpack(Packed(rows=rows_NW, format=self.format, shape=torch.Size((len(rows_NW), dim)), axis=1))

    def _rounded_at_random(self, values_ND: Float[Tensor, "N D"], words_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Return numbers that the format holds."""
        dim = values_ND.shape[1]
        finite_or_nan = values_ND.masked_fill(values_ND.isinf(), torch.nan)
        below = blocks.encode(finite_or_nan, self._lower_codes)
        element = self.format.element
        next_codes = (below.elements + 1).clamp(max=element.code(element.largest))
        above = dataclasses.replace(below, elements=next_codes)
        lower_ND = blocks.decode(below, self.format, n=dim)
        upper_ND = blocks.decode(above, self.format, n=dim)
        share_ND = (values_ND - lower_ND) / (upper_ND - lower_ND)  # NaN or infinite where both are the largest
        uniform_ND = (noise(words_N, torch.arange(dim, device=words_N.device)) >> 8) * 2.0**-24
        rises_ND = (uniform_ND < share_ND) & (upper_ND != lower_ND)
        return torch.where(rises_ND, upper_ND, lower_ND)
