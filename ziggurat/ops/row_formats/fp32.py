"""FP32: the numbers themselves, 4·D bytes a row."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.row_formats.row_format import NUMBERS, RowFormat


class Fp32(RowFormat):
    """FP32 numbers as they are, which lookups and updates read and write in place."""

    name = "fp32"
    dtype = torch.float32
    is_plain = True
    rounds = False
    triton_layout = NUMBERS
    is_updated_by_triton = True
    is_searched = True

    def width(self, dim: int) -> int:
        """Return the columns."""
        return dim

    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> Float[Tensor, "N D"]:
        """Return the numbers."""
        del words_N
        return values_ND

    def decode(self, rows_NW: Float[Tensor, "N D"], *, dim: int) -> Float[Tensor, "N D"]:
        """Return the numbers."""
        del dim
        return rows_NW
