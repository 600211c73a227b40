"""Rows from numbers and numbers from rows, in torch: the definition that compiled code is held to, bit for bit.

BF16. The upper 16 bits of an FP32 number. Stochastic rounding adds 16 random bits to the lower half and cuts it off:
the number moves up with the probability of what is cut, so on average it stays where it is.

Split BF16. The upper half rounded to the nearest, and a lower half with a sign: upper · 2^16 + lower are the bits of
the FP32 number, always. Lookups read the upper half; updates put both together, and nothing is ever lost.

INT8, INT4. A row lies between its ends, low and high, which are FP16:

    step = (high − low) / most                      most: 255 or 15
    code = ⌊(x − low) · most / (high − low) + u⌋    u uniform in [0, 1) for stochastic rounding, 1/2 for the nearest
    x    ≈ low + step · code, and high itself for the largest code

The ends are the smallest and the largest number of the row, rounded to FP16 with one random number for both, so that
low ≤ high; the numbers that they come from always get the first and the last code. Three things follow:

    - the ends of a row are unbiased like everything between them. (A number that lies within one FP16 step of an end
      without being it is cut off at the end: 2^-11 of the end at most.)
    - rows can be read as FP32, stored, and written again to the same numbers: `encode(decode(row))` without noise
      decodes to the same bits. Checkpoints are FP32 and need to know nothing of formats.
    - a row with a number that is not finite reads as NaN in all its columns; ends beyond ±65,504 are kept as that.

References: split BF16: Kalamkar et al., "Optimizing deep learning recommender systems' training on CPU cluster
architectures", SC 2020 (arXiv 2005.04680), section VII. Row-wise INT8 and INT4 with stochastic rounding: Yang et al.,
"Mixed-precision embedding using a cache", arXiv 2010.11305, section 4. Stochastic rounding: Gupta et al., ICML 2015.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int16, Int64, Shaped
from torch import Tensor

from ziggurat.ops.row_formats.formats import RowFormat
from ziggurat.ops.row_formats.noise import noise

_LARGEST = 65504.0  # of FP16
_NAN_BF16 = 0x7FC0


def row_dtype(row_format: RowFormat) -> torch.dtype:
    """Of the tensor that holds rows: int16 for halves of numbers, uint8 for ends and codes."""
    return torch.uint8 if row_format.has_codes else torch.int16


def row_width(row_format: RowFormat, dim: int) -> int:
    """Elements of `row_dtype` in a row."""
    return row_format.row_bytes(dim) // row_dtype(row_format).itemsize


def decode(rows_NW: Shaped[Tensor, "N W"], row_format: RowFormat, *, dim: int) -> Float[Tensor, "N D"]:
    """The numbers of rows, as lookups read them."""
    if not row_format.has_codes:
        return (rows_NW.to(torch.int32) << 16).view(torch.float32)
    ends = rows_NW[:, :4].clone(memory_format=torch.contiguous_format)  # aligned, also where it is one odd row
    low_N1, high_N1 = ends.view(torch.float16).float().split(1, dim=1)
    codes = rows_NW[:, 4:]
    if row_format is RowFormat.INT4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :dim]
    step_N1 = (high_N1 - low_N1) / torch.full_like(low_N1, row_format.most)  # a GPU multiplies by 1 / a number
    return torch.where(codes == row_format.most, high_N1, low_N1 + step_N1 * codes)


def encode(
    values_ND: Float[Tensor, "N D"], row_format: RowFormat, *, words_N: Int64[Tensor, "N"] | None = None
) -> Shaped[Tensor, "N W"]:
    """Round numbers to rows of a format.

    Args:
        values_ND: the numbers.
        row_format: BF16, INT8 or INT4; `split` is for split BF16.
        words_N: noise of each row (`RowNoise.words`); None rounds to the nearest.
    """
    if row_format is RowFormat.BF16:
        return _encode_bf16(values_ND, words_N)
    assert row_format.has_codes, row_format
    dim, most = values_ND.shape[1], row_format.most
    low_N, high_N = values_ND.amin(dim=1), values_ND.amax(dim=1)
    own = None if words_N is None else noise(words_N, torch.full((1,), -1, device=words_N.device))[:, 0] >> 19
    ends_N2 = torch.stack([round_fp16(low_N, own), round_fp16(high_N, own)], dim=1)
    first_N1, last_N1 = ends_N2.float().split(1, dim=1)
    per_N1 = torch.full_like(first_N1, most).div(last_N1 - first_N1)  # not most / x, which multiplies by 1 / x
    if words_N is None:
        u: float | Tensor = 0.5
    else:
        u = (noise(words_N, torch.arange(dim, device=words_N.device)) >> 8).float() * 2.0**-24
    codes = ((values_ND - first_N1) * per_N1 + u).floor().clamp_(0, most)
    codes = torch.where(values_ND == high_N.unsqueeze(1), float(most), codes)
    codes = torch.where(values_ND == low_N.unsqueeze(1), 0.0, codes)
    codes_ND = torch.where(last_N1 > first_N1, codes, 0.0).to(torch.uint8)
    if row_format is RowFormat.INT4:
        codes_ND = torch.nn.functional.pad(codes_ND, (0, dim % 2))
        codes_ND = codes_ND[:, ::2] | (codes_ND[:, 1::2] << 4)
    return torch.cat([ends_N2.view(torch.uint8), codes_ND], dim=1)


def split(values_ND: Float[Tensor, "N D"]) -> tuple[Int16[Tensor, "N D"], Int16[Tensor, "N D"]]:
    """The upper halves, to the nearest, and the lower halves of FP32 numbers."""
    bits = torch.where(values_ND.isnan(), torch.nan, values_ND).view(torch.int32)
    lower = bits.to(torch.int16)  # the lower 16 bits, with a sign
    return (bits - lower >> 16).to(torch.int16), lower


def join(upper_ND: Int16[Tensor, "N D"], lower_ND: Int16[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """FP32 numbers from their halves; the bits that `split` was given."""
    return ((upper_ND.to(torch.int32) << 16) + lower_ND).view(torch.float32)


def round_fp16(values_N: Float[Tensor, "N"], own_N: Int64[Tensor, "N"] | None) -> Float[Tensor, "N"]:
    """Numbers in FP16, rounded by 13 random bits each, or to the nearest; NaN where one is not finite."""
    finite = torch.where(values_N.isfinite(), values_N, torch.nan).clamp(-_LARGEST, _LARGEST)
    if own_N is not None:
        exponent = ((finite.view(torch.int32) >> 23) & 0xFF).clamp(min=127 - 14, max=127 + 15)
        quantum = ((exponent - 10) << 23).view(torch.float32)  # distance of FP16 numbers there
        per_quantum = ((2 * 127 + 10 - exponent) << 23).view(torch.float32)
        finite = ((finite * per_quantum + own_N.float() * 2.0**-13).floor() * quantum).clamp(-_LARGEST, _LARGEST)
    return (finite + 0.0).to(torch.float16)


def _encode_bf16(values_ND: Float[Tensor, "N D"], words_N: Int64[Tensor, "N"] | None) -> Int16[Tensor, "N D"]:
    if words_N is None:
        return values_ND.to(torch.bfloat16).view(torch.int16)
    bits = values_ND.contiguous().view(torch.int32).to(torch.int64)
    added = noise(words_N, torch.arange(values_ND.shape[1], device=words_N.device)) >> 16
    upper = (bits + added >> 16).to(torch.int16)
    return torch.where(values_ND.isfinite(), upper, values_ND.to(torch.bfloat16).view(torch.int16))
