"""Rows of codes between two ends: what INT8 and INT4 share.

A row lies between its ends, low and high, which are FP16 (4 bytes in front of the codes):

    step = (high − low) / most                      most: 255 or 15
    code = ⌊(x − low) · most / (high − low) + u⌋    u uniform in [0, 1) for stochastic rounding, 1/2 for the nearest
    x    ≈ low + step · code, and high itself for the largest code

The ends are the smallest and the largest number of the row, rounded to FP16 with one random number for both, so that
low ≤ high; the numbers that they come from always get the first and the last code. Three things follow:

    - the ends of a row are unbiased like everything between them. (A number that lies within one FP16 step of an end
      without being it is cut off at the end: 2^-11 of the end at most.)
    - rows can be read as FP32, stored, and written again to the same numbers.
    - a row with a number that is not finite reads as NaN in all its columns; ends beyond ±65,504 are kept as that.

References: row-wise INT8 and INT4 with stochastic rounding: Yang et al., "Mixed-precision embedding using a cache",
arXiv 2010.11305, section 4. Stochastic rounding: Gupta et al., ICML 2015.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ziggurat.ops.row_formats.noise import noise
from ziggurat.ops.row_formats.row_format import RowFormat

END_BYTES = 4  # the two ends of a row, FP16 each
_LARGEST = 65504.0  # of FP16


class Codes(RowFormat):
    """Codes between the ends of a row. See the module's docstring.

    Attributes:
        most: the largest code.
    """

    most: ClassVar[int]
    dtype = torch.uint8
    keeps_rows_whole = True

    @abstractmethod
    def packed(self, codes_ND: UInt8[Tensor, "N D"]) -> UInt8[Tensor, "N C"]:
        """Return the bytes of codes, one a column."""

    @abstractmethod
    def unpacked(self, bytes_NC: UInt8[Tensor, "N C"], *, dim: int) -> UInt8[Tensor, "N D"]:
        """Return the codes of bytes, one a column."""

    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> UInt8[Tensor, "N W"]:
        """Return the ends of each row and its codes."""
        dim = values_ND.shape[1]
        low_N = values_ND.amin(dim=1)
        high_N = values_ND.amax(dim=1)
        # 13 of 32 bits: FP16 has so many fewer of a number than FP32.
        own = None if words_N is None else noise(words_N, torch.full((1,), -1, device=words_N.device))[:, 0] >> 19
        ends_N2 = torch.stack([round_fp16(low_N, own), round_fp16(high_N, own)], dim=1)
        first_N1, last_N1 = ends_N2.float().split(1, dim=1)
        per_N1 = torch.full_like(first_N1, self.most).div(last_N1 - first_N1)  # not most / x, which is most · (1 / x)
        if words_N is None:
            u: float | Tensor = 0.5
        else:
            # 24 bits are exact in FP32, so that u never rounds up to 1.
            u = (noise(words_N, torch.arange(dim, device=words_N.device)) >> 8).float() * 2.0**-24
        codes = ((values_ND - first_N1) * per_N1 + u).floor().clamp_(0, self.most)
        # The ends themselves, whatever the division rounds them to: rows come back as they were read.
        codes = torch.where(values_ND == high_N.unsqueeze(1), float(self.most), codes)
        codes = torch.where(values_ND == low_N.unsqueeze(1), 0.0, codes)
        # Between equal ends there is nothing to divide by, and every number is code 0.
        codes_ND = torch.where(last_N1 > first_N1, codes, 0.0).to(torch.uint8)
        return torch.cat([ends_N2.view(torch.uint8), self.packed(codes_ND)], dim=1)

    def decode(self, rows_NW: UInt8[Tensor, "N W"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return the numbers that codes stand for."""
        ends = rows_NW[:, :END_BYTES].clone(memory_format=torch.contiguous_format)  # aligned, also where it is one row
        low_N1, high_N1 = ends.view(torch.float16).float().split(1, dim=1)
        codes = self.unpacked(rows_NW[:, END_BYTES:], dim=dim)
        step_N1 = (high_N1 - low_N1) / torch.full_like(low_N1, self.most)  # a GPU multiplies by 1 / a number
        return torch.where(codes == self.most, high_N1, low_N1 + step_N1 * codes)


def round_fp16(values_N: Float[Tensor, "N"], own_N: Int64[Tensor, "N"] | None) -> Float[Tensor, "N"]:
    """Round numbers to FP16 by 13 random bits each, or to the nearest; NaN where one is not finite."""
    finite = torch.where(values_N.isfinite(), values_N, torch.nan).clamp(-_LARGEST, _LARGEST)
    if own_N is not None:
        # Of normal FP16 numbers at least: below them steps are of one size.
        exponent = ((finite.view(torch.int32) >> 23) & 0xFF).clamp(min=127 - 14, max=127 + 15)
        quantum = ((exponent - 10) << 23).view(torch.float32)  # distance of FP16 numbers there
        per_quantum = ((2 * 127 + 10 - exponent) << 23).view(torch.float32)
        finite = ((finite * per_quantum + own_N.float() * 2.0**-13).floor() * quantum).clamp(-_LARGEST, _LARGEST)
    # −0 is 0: rows of equal numbers then have equal bytes.
    return (finite + 0.0).to(torch.float16)
