"""INT8: codes 0 … 255 between the two ends of a row, D + 4 bytes."""

from __future__ import annotations

from jaxtyping import UInt8
from torch import Tensor

from ziggurat.ops.row_formats.codes import END_BYTES, Codes


class Int8(Codes):
    """About a quarter of the bytes; updates are rounded at random."""

    name = "int8"
    most = 255
    cpp_code = 3
    triton_layout = "int8"
    time = 1.08
    worth = 0.5
    is_searched = True

    def width(self, dim: int) -> int:
        """Return the bytes of the ends and of the codes."""
        return END_BYTES + dim

    def packed(self, codes_ND: UInt8[Tensor, "N D"]) -> UInt8[Tensor, "N D"]:
        """Return the codes."""
        return codes_ND

    def unpacked(self, bytes_NC: UInt8[Tensor, "N D"], *, dim: int) -> UInt8[Tensor, "N D"]:
        """Return the codes."""
        del dim
        return bytes_NC
