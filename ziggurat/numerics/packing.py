"""Pack tensors to the bits of a block format, and back.

    row      block 0 │ block 1 │ … │ last block, shorter │ zeros up to a whole byte
    block    scale, d1 bits │ second level, d2 bits for each k2 numbers │ codes of the numbers

Bits count from the lowest of a byte upwards, and so do the bits of each field. Exponents of scales are stored with a
bias of 2^(d1-1) - 1, and all ones mean NaN, as E8M0 does; an FP32 scale is stored as it is. A code is sign and
magnitude, or two's complement, as the element says. A block of MX9 takes 18 bytes, of MX6 12, of MX4 8, of MXFP8 33.

`unpack(pack(x))` equals `quantise(x)` to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ziggurat.errors import NumericsError
from ziggurat.numerics import blocks
from ziggurat.numerics.block_format import BlockFormat
from ziggurat.numerics.blocks import Blocks
from ziggurat.numerics.kernel import pack_fast, unpack_fast
from ziggurat.numerics.quantise import checked, from_rows, refuse_what_does_not_fit, rows_along

_NAN_BITS = 0x7FC00000


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tensor in the bits of a block format.

    Args:
        rows: (R, W) bytes of the rows along the axis.
        format: of the numbers.
        shape: of the tensor.
        axis: that blocks lie along.
    """

    rows: UInt8[Tensor, "R W"]
    format: BlockFormat
    shape: torch.Size
    axis: int


def pack(x: Float[Tensor, "*B"], format: BlockFormat, axis: int, *, name: str = "the tensor") -> Packed:
    """Round a tensor to a format, and return its bits; see `quantise` for arguments and errors."""
    values = checked(x, axis, name=name)
    if values.numel():
        rows = rows_along(values, format, axis)
        row_bytes = -(-row_bits(format, rows.shape[1]) // 8)
        found = pack_fast(rows, format, row_bytes=row_bytes)
        if found is not None:
            return Packed(rows=found, format=format, shape=values.shape, axis=axis)
    return pack_reference(values, format, axis, name=name)


def pack_rows(rows: Float[Tensor, "R n"], format: BlockFormat) -> UInt8[Tensor, "R W"]:
    """Return the bits of rows, as `pack` does along their last axis; an infinity is packed as NaN.

    For rows that travel or are stored, whose reader looks for what is not finite. The format has scales, one a row at
    least.
    """
    try:
        return pack(rows, format, axis=1).rows
    except NumericsError:  # infinities, which are too rare to look for them in front of every call
        return pack(rows.masked_fill(rows.isinf(), torch.nan), format, axis=1).rows


def unpack(packed: Packed) -> Float[Tensor, "*B"]:
    """Return the FP32 numbers of packed bits."""
    if packed.shape.numel():
        found = unpack_fast(packed.rows, packed.format, n=_row_length(packed))
        if found is not None:
            return from_rows(found, packed.shape, packed.format, packed.axis)
    return unpack_reference(packed)


def row_bits(format: BlockFormat, n: int) -> int:
    """Return the bits of a row of n numbers."""
    length = blocks.block_length(format, n)
    num_blocks = -(-n // length)
    whole = n // length
    rest = n - whole * length
    seconds = whole * -(-length // format.k2) + -(-rest // format.k2) if format.d2 else 0
    return num_blocks * format.d1 + seconds * format.d2 + n * format.element.bits


def pack_reference(x: Float[Tensor, "*B"], format: BlockFormat, axis: int, *, name: str = "the tensor") -> Packed:
    """Compute the result that `pack` must equal."""
    x = checked(x, axis, name=name)
    refuse_what_does_not_fit(x, format, name=name)
    rows = rows_along(x, format, axis) if x.numel() else x.reshape(0, 0)
    bits = _bits_of_blocks(blocks.encode(rows, format), format, n=rows.shape[1]) if x.numel() else rows
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    # Eight bits a byte, the lowest first.
    packed = (padded << torch.arange(8, device=x.device)).sum(dim=-1).to(torch.uint8)
    return Packed(rows=packed, format=format, shape=x.shape, axis=axis)


def unpack_reference(packed: Packed) -> Float[Tensor, "*B"]:
    """Compute the result that `unpack` must equal."""
    n = packed.shape.numel() if packed.rows.shape[0] == 0 else _row_length(packed)
    if n == 0:
        return torch.zeros(packed.shape)
    return from_rows(
        blocks.decode(blocks_of_bits(packed), packed.format, n=n), packed.shape, packed.format, packed.axis
    )


def blocks_of_bits(packed: Packed) -> Blocks:
    """Return the coded blocks of packed rows, of which there is one at least."""
    bits = (packed.rows.unsqueeze(-1) >> torch.arange(8, device=packed.rows.device)) & 1
    return _blocks_of_bits(bits.flatten(1), packed.format, n=_row_length(packed))


def _row_length(packed: Packed) -> int:
    """Return the numbers of a packed row."""
    return packed.shape.numel() // packed.rows.shape[0]


def _bits_of_blocks(coded: Blocks, format: BlockFormat, *, n: int) -> Tensor:
    """Return the bits of rows, one a byte."""
    parts = []
    for index, count in enumerate(_counts(format, n)):
        is_nan = coded.is_nan[:, index]
        if coded.scales is not None:
            codes = coded.scales[:, index]
            if format.has_power_of_two_scales:
                codes = codes + format.max_scale_exponent
            # All ones, as E8M0 has it; FP32 scales have a NaN of their own.
            nan_code = 2**format.d1 - 1 if format.has_power_of_two_scales else _NAN_BITS
            parts.append(_bits_of(torch.where(is_nan[:, :1], nan_code, codes.unsqueeze(-1)), format.d1))
        if coded.seconds is not None:
            parts.append(_bits_of(coded.seconds[:, index, : -(-count // format.k2)], format.d2))
        codes = _signed(coded.elements[:, index], coded.signs[:, index], format)
        if not format.has_scale:
            # Without a scale the last code says NaN; formats are refused that use it for a number.
            codes = torch.where(is_nan, 2 ** (format.element.bits - 1) - 1, codes)
        parts.append(_bits_of(codes[:, :count], format.element.bits))
    return torch.cat(parts, dim=1)


def _blocks_of_bits(bits: Tensor, format: BlockFormat, *, n: int) -> Blocks:
    """Return the coded blocks of rows of bits, one a byte."""
    counts = _counts(format, n)
    length = -(-counts[0] // format.k2) * format.k2
    scales: list[Tensor] = []
    seconds: list[Tensor] = []
    elements: list[Tensor] = []
    at = 0

    def taken(count: int, width: int, *, full: int) -> Tensor:
        nonlocal at
        fields = bits[:, at : at + count * width].unflatten(1, (count, width)).long()
        at += count * width
        codes = (fields << torch.arange(width, device=bits.device)).sum(dim=-1)
        # The last block may be shorter; all are filled up to one length.
        return torch.nn.functional.pad(codes, (0, full - count))

    for count in counts:
        if format.has_scale:
            scales.append(taken(1, format.d1, full=1))
        if format.d2:
            seconds.append(taken(-(-count // format.k2), format.d2, full=length // format.k2))
        elements.append(taken(count, format.element.bits, full=length))
    codes = torch.stack(elements, dim=1)
    negative_bit = 2 ** (format.element.bits - 1)
    signs = codes >= negative_bit
    magnitudes = codes - negative_bit * signs
    if format.element.is_twos_complement:
        # The rest of a negative code counts up from −2^(b−1): this is its distance from zero.
        magnitudes = torch.where(signs, negative_bit - magnitudes, magnitudes)
    found = torch.cat(scales, dim=1) if scales else None
    if found is None:
        is_nan = magnitudes == negative_bit - 1
    else:
        nan_code = 2**format.d1 - 1 if format.has_power_of_two_scales else _NAN_BITS
        is_nan = (found == nan_code).unsqueeze(-1).expand_as(codes)
        found = torch.where(found == nan_code, 0, found)
        found = found - format.max_scale_exponent if format.has_power_of_two_scales else found
    second = torch.stack(seconds, dim=1) if seconds else None
    return Blocks(elements=magnitudes, signs=signs, scales=found, seconds=second, is_nan=is_nan)


def _counts(format: BlockFormat, n: int) -> list[int]:
    """Return the numbers of each block of a row."""
    length = blocks.block_length(format, n)
    return [min(length, n - start) for start in range(0, n, length)]


def _signed(magnitudes: Int64[Tensor, "R k"], signs: Tensor, format: BlockFormat) -> Int64[Tensor, "R k"]:
    bits = format.element.bits
    if format.element.is_twos_complement:
        # `%` gives the two's complement: −1 becomes all ones.
        return torch.where(signs, -magnitudes, magnitudes) % 2**bits
    return magnitudes + 2 ** (bits - 1) * signs


def _bits_of(codes: Int64[Tensor, "R c"], width: int) -> Tensor:
    """Return the bits of codes, the lowest first, one a byte."""
    bits = (codes.unsqueeze(-1) >> torch.arange(width, device=codes.device)) & 1
    return bits.flatten(1).to(torch.uint8)
