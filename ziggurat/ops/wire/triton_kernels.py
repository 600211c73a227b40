"""The Triton kernels of `triton.py`: a program for some rows of one field. Importing this needs the package triton.

BF16 is read and written as int16, FP8 as uint8: conversions are those of the reference, on bits.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import bf16_of, numbers_of


@triton.jit
def _place(fields, align: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr):
    """Locate one tile: rows of the field, whether they are there, those of the matrix, columns, and what is inside."""
    field = fields + tl.program_id(1).to(tl.int64) * 8
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < tl.load(field + 1)
    c = tl.arange(0, padded)[None, :]
    mask = there[:, None] & (c < tl.multiple_of(tl.load(field + 3), align))
    column = tl.multiple_of(tl.load(field + 2), align) + c
    start = tl.multiple_of(tl.load(field + 4), align) + row[:, None] * tl.multiple_of(tl.load(field + 5), align) + c
    scale = (tl.load(field + 6) + row * tl.load(field + 7)) // 2
    return tl.load(field) + row, there, mask, column, start, scale


@triton.jit
def _fp8_of(number):
    """e4m3 of numbers of at most 448, to the nearest, ties to even; NaN stays."""
    bits = number.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # 120: the bias of FP32's exponent less that of e4m3, 127 − 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0  # whose last bit is e4m3's smallest step, 2^-9
    # Adding has rounded to that step; what is left are the bits above those of 16,384.
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)  # 2^-6: below it steps are of one size
    return (tl.where(bits > 0x7F800000, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _of_fp8(stored):
    """FP32 of e4m3."""
    code = stored.to(tl.uint32)
    rest = code & 0x7F
    small = (code & 7).to(tl.float32) * 0.001953125
    number = tl.where(rest < 8, small, ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    bits = number.to(tl.uint32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where(rest == 0x7F, bits | 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _scales(x, largest: tl.constexpr):
    """The scale of each row, in FP32 and as BF16: no number of it leaves the format's range."""
    most = tl.max(tl.abs(x), axis=1)
    is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    # At least the smallest normal number: rows of zeros are divided by it, too.
    scale = tl.maximum(tl.div_rn(most, tl.full(most.shape, largest, tl.float32)), 1.1754943508222875e-38)
    bits = scale.to(tl.uint32, bitcast=True)
    # Rounded up to BF16: rounded down, the largest number would leave the range.
    bits = tl.where(bits >= 0x7F800000, bits, bits + 0xFFFF) & 0xFFFF0000
    bits = tl.where(is_nan, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True), (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def pack_kernel(
    matrix, fields, numbers, scales, matrix_pitch,
    code: tl.constexpr, align: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Read a tile of a field, convert it, and write it into a message."""
    row, there, mask, column, start, scale_at = _place(fields, align, rows, padded)
    x = numbers_of(tl.load(matrix + row[:, None] * matrix_pitch + column, mask=mask, other=0))
    if code == "int8":
        scale, kept = _scales(x, 127.0)
        tl.store(scales + scale_at, kept, mask=there)
        whole = (
            tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) + 12582912.0
        ) - 12582912.0  # 1.5 · 2^23: to the nearest
        whole = tl.where(whole == whole, tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0)
        tl.store(numbers + start, whole.to(tl.int8), mask=mask)
    elif code == "fp8":
        scale, kept = _scales(x, 448.0)
        tl.store(scales + scale_at, kept, mask=there)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        limited = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        tl.store(numbers + start, _fp8_of(tl.where(scaled == scaled, limited, scaled)), mask=mask)
    elif code == "bf16":
        tl.store(numbers + start, bf16_of(x), mask=mask)
    else:
        tl.store(numbers + start, x.to(numbers.dtype.element_ty), mask=mask)


@triton.jit
def unpack_kernel(
    numbers, scales, fields, matrix, matrix_pitch,
    code: tl.constexpr, align: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Read a tile of a field from a message, convert it, and write it into its columns."""
    row, there, mask, column, start, scale_at = _place(fields, align, rows, padded)
    stored = tl.load(numbers + start, mask=mask, other=0)
    if code == "int8" or code == "fp8":
        scale = numbers_of(tl.load(scales + scale_at, mask=there, other=0))[:, None]
        x = (_of_fp8(stored) if code == "fp8" else stored.to(tl.float32)) * scale
    else:
        x = numbers_of(stored)
    at = matrix + row[:, None] * matrix_pitch + column
    if matrix.dtype.element_ty == tl.int16:
        tl.store(at, bf16_of(x), mask=mask)
    else:
        tl.store(at, x.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def pads_kernel(message, pads):
    """Fill what lies between two parts of a message with zeros."""
    pad = pads + tl.program_id(0) * 2
    i = tl.arange(0, 16)
    tl.store(message + tl.load(pad) + i, (i * 0).to(tl.uint8), mask=i < tl.load(pad + 1))
