"""Split BF16: 2·D bytes that lookups read, and 2·D beside the optimizer's state: together the bits of FP32.

The upper half of a number is rounded to the nearest, and the lower half has a sign: upper · 2^16 + lower are the bits
of the FP32 number, always. Lookups read the upper half; updates put both together, and nothing is ever lost.

Reference: Kalamkar et al., "Optimizing deep learning recommender systems' training on CPU cluster architectures",
SC 2020 (arXiv 2005.04680), section VII.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor

from ziggurat.ops.row_formats.bf16 import Bf16
from ziggurat.ops.row_formats.row_format import RowFormat


class SplitBf16(Bf16):
    """Lookups read half the bytes; updates are those of FP32, bit for bit."""

    name = "split_bf16"
    rounds = False
    has_beside = True
    cpp_code = 2
    is_updated_by_triton = False
    time = 1.0
    worth = 0.0
    is_searched = False

    def encode(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None = None
    ) -> Int16[Tensor, "N D"]:
        """Return the upper halves, to the nearest."""
        return self.encode_trained(values_ND, words_N=words_N)[0]

    def encode_trained(
        self, values_ND: Float[Tensor, "N D"], *, words_N: Int64[Tensor, "N"] | None
    ) -> tuple[Int16[Tensor, "N D"], Int16[Tensor, "N D"]]:
        """Return the upper halves, to the nearest, and the lower halves of FP32 numbers; noise has no say."""
        del words_N
        # One NaN for all: a payload in the lower half alone would leave an upper half that reads as infinity.
        bits = torch.where(values_ND.isnan(), torch.nan, values_ND).view(torch.int32)
        lower = bits.to(torch.int16)  # the lower 16 bits, with a sign
        return (bits - lower >> 16).to(torch.int16), lower

    def decode_trained(
        self, rows_NW: Int16[Tensor, "N D"], beside_ND: Int16[Tensor, "N D"] | None, *, dim: int
    ) -> Float[Tensor, "N D"]:
        """Return FP32 numbers from their halves; the bits that `encode_trained` was given."""
        if beside_ND is None:
            return self.decode(rows_NW, dim=dim)
        return ((rows_NW.to(torch.int32) << 16) + beside_ND).view(torch.float32)

    @property
    def without_beside(self) -> RowFormat:
        """BF16, of which the same numbers are read."""
        return RowFormat.named("bf16")
