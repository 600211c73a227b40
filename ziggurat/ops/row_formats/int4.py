"""INT4: codes 0 … 15 between the two ends of a row, two a byte: ⌈D/2⌉ + 4 bytes."""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

from ziggurat.ops.row_formats.codes import END_BYTES, Codes


class Int4(Codes):
    """About an eighth of the bytes; updates are rounded at random."""

    name = "int4"
    most = 15
    cpp_code = 4
    triton_layout = "int4"
    time = 1.15
    worth = 1.25
    is_searched = True

    def width(self, dim: int) -> int:
        """Return the bytes of the ends and of the codes."""
        return END_BYTES + (dim + 1) // 2

    def packed(self, codes_ND: UInt8[Tensor, "N D"]) -> UInt8[Tensor, "N C"]:
        """Put every second code into the upper half of a byte."""
        codes = torch.nn.functional.pad(codes_ND, (0, codes_ND.shape[1] % 2))
        return codes[:, ::2] | (codes[:, 1::2] << 4)

    def unpacked(self, bytes_NC: UInt8[Tensor, "N C"], *, dim: int) -> UInt8[Tensor, "N D"]:
        """Return lower and upper halves in turns."""
        return torch.stack([bytes_NC & 15, bytes_NC >> 4], dim=2).flatten(1)[:, :dim]
