"""BF16: the upper 16 bits of FP32 numbers, 2·D bytes a row: 8 bits of precision, the range of FP32.

Stochastic rounding adds 16 random bits to the lower half and cuts it off: the number moves up with the probability of
what is cut, so on average it stays where it is.

Reference: stochastic rounding: Gupta et al., "Deep learning with limited numerical precision", ICML 2015.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor

from ziggurat.ops.row_formats.noise import noise
from ziggurat.ops.row_formats.row_format import NUMBERS, RowFormat


class Bf16(RowFormat):
    """Half the bytes; updates are rounded at random."""

    name = "bf16"
    dtype = torch.int16  # halves of numbers
    cpp_code = 1
    triton_layout = NUMBERS
    is_updated_by_triton = True
    time = 0.78
    worth = 0.4
    is_searched = True

    @property
    def file_dtype(self) -> torch.dtype:
        """The numbers themselves, so that others can read the file."""
        return torch.bfloat16

    def width(self, dim: int) -> int:
        """Return the columns."""
        return dim

    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> Int16[Tensor, "N D"]:
        """Return the upper halves, moved up by noise or to the nearest."""
        nearest = values_ND.to(torch.bfloat16).view(torch.int16)
        if words_N is None:
            return nearest
        bits = values_ND.contiguous().view(torch.int32).to(torch.int64)
        added = noise(words_N, torch.arange(values_ND.shape[1], device=words_N.device)) >> 16
        upper = (bits + added >> 16).to(torch.int16)
        return torch.where(values_ND.isfinite(), upper, nearest)

    def decode(self, rows_NW: Int16[Tensor, "N D"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return the numbers whose lower halves are zeros."""
        del dim
        return (rows_NW.to(torch.int32) << 16).view(torch.float32)
