"""The Triton kernels of the forward pass, and of what it needs of offsets. Importing this needs the package triton.

A program serves a block of samples of one field: all fields of a storage are one launch. Numbers are read 16 bytes at a
time where D and the columns allow it, so the caller says by how much all columns can be divided (`align`).
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import numbers_of


@triton.jit
def _end_of(weight, at, there):
    """The FP16 number at a byte that may be odd."""
    lower = tl.load(weight + at, mask=there, other=0).to(tl.uint16)
    upper = tl.load(weight + at + 1, mask=there, other=0).to(tl.uint16)
    return (lower | (upper << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _ends_of(weight, begin, there, row_bytes: tl.constexpr):
    """The two FP16 numbers with which a row of codes begins: one read where rows begin at multiples of 4 bytes."""
    if row_bytes % 4 == 0:
        both = tl.load((weight + begin).to(tl.pointer_type(tl.uint32), bitcast=True), mask=there, other=0)
        low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = _end_of(weight, begin, there)
        high = _end_of(weight, begin + 2, there)
    return low, high


@triton.jit
def _numbers_of_rows(
    weight,
    row,
    there,
    d,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    row_format: tl.constexpr,
    row_bytes: tl.constexpr,
):
    """Rows in FP32; `ops/row_formats/codes.py` defines codes. Zeros where a row is not there."""
    if row_format == "numbers":
        mask = there[:, None] & (d < dim)
        return numbers_of(tl.load(weight + row[:, None] * dim + d, mask=mask, other=0))
    else:
        begin = (row * row_bytes)[:, None]
        low, high = _ends_of(weight, begin, there[:, None], row_bytes)
        if row_format == "int8":
            code = tl.load(weight + begin + 4 + d, mask=there[:, None] & (d < dim), other=0)
            most: tl.constexpr = 255
        else:
            h = tl.arange(0, padded_dim // 2)[None, :]
            pair = tl.load(weight + begin + 4 + h, mask=there[:, None] & (h < (dim + 1) // 2), other=0)
            code = tl.interleave(pair & 15, pair >> 4)
            most: tl.constexpr = 15
        # Correctly rounded, as on a CPU; a GPU's `/` need not be.
        step = tl.div_rn(high - low, tl.full(low.shape, most, tl.float32))
        number = low + step * code.to(tl.float32)
        # The last code is the end itself, which low + step · most may miss by a rounding.
        return tl.where(code == most, high, number)


@triton.jit(do_not_specialize=["batch_size", "num_offsets", "num_values", "least_values"])
def lookup_kernel(
    weight, slots, single, values, offsets, out, flag, batch_size, num_offsets, num_values, least_values, width,
    dim: tl.constexpr, padded_dim: tl.constexpr, align: tl.constexpr, samples: tl.constexpr,
    has_lists: tl.constexpr, unroll: tl.constexpr, row_format: tl.constexpr, row_bytes: tl.constexpr,
):  # fmt: skip
    """Pool the rows of `samples` samples of one field; a row that is not in its table counts as none and is reported.

    Each list is summed in its own order, one row after the other, `unroll` reads at a time: the bits of a sum depend
    on the list alone. Lists end at `num_values`, or, where there is room behind them, before it; with fewer than
    `least_values` rows in all they count as wrong.
    """
    sample = tl.program_id(0).to(tl.int64) * samples + tl.arange(0, samples)
    slot = slots + tl.program_id(1) * 5
    kind = tl.load(slot)
    index = tl.load(slot + 1)
    first_row = tl.load(slot + 2)
    num_rows = tl.load(slot + 3)
    column = tl.multiple_of(tl.load(slot + 4), align)
    inside = sample < batch_size
    d = tl.arange(0, padded_dim)[None, :]
    own = d < dim
    if has_lists:
        # A single field reads as lists of one row, so that one loop serves all fields of the launch.
        begin = sample
        end = sample + 1
        ids = single + index * batch_size
        wrong = sample < 0
        if kind != 0:
            ids = values
            at = index * batch_size + sample
            begin = tl.load(offsets + at, mask=inside, other=0).to(tl.int64)
            end = tl.load(offsets + at + 1, mask=inside, other=0).to(tl.int64)
            # No address is computed from offsets that are wrong: the list counts as empty, and is reported.
            last = tl.load(offsets + num_offsets - 1)
            whole = (tl.load(offsets) == 0) & (last <= num_values) & (last >= least_values)
            wrong = (begin < 0) | (begin > end) | (end > num_values) | (whole == 0)
            begin = tl.where(wrong, 0, begin)
            end = tl.where(wrong, 0, end)
        # Nothing for samples behind the last.
        end = tl.where(inside, end, begin)
        total = tl.zeros([samples, padded_dim], dtype=tl.float32)
        for first in range(0, tl.max(end - begin, axis=0), unroll):
            # Unrolled, so that several rows are on their way; they are added one by one, in order.
            for number in tl.static_range(unroll):
                at = begin + first + number
                there = at < end
                row = tl.load(ids + at, mask=there, other=0).to(tl.int64)
                good = there & (row >= 0) & (row < num_rows)
                wrong = wrong | (there & (good == 0))
                total += _numbers_of_rows(
                    weight, first_row + row, good, d, dim, padded_dim, row_format, row_bytes
                )  # fmt: skip
        if kind == 2:
            length = tl.maximum(end - begin, 1).to(tl.float32)
            total = total * tl.div_rn(length * 0.0 + 1.0, length)[:, None]
    else:
        row = tl.load(single + index * batch_size + sample, mask=inside, other=0).to(tl.int64)
        good = inside & (row >= 0) & (row < num_rows)
        wrong = inside & (good == 0)
        total = _numbers_of_rows(weight, first_row + row, good, d, dim, padded_dim, row_format, row_bytes)
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.store(flag, 1)
    place = sample[:, None] * width + column + d
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside[:, None] & own)


@triton.jit(do_not_specialize=["batch_size"])
def divide_means_kernel(
    slots, offsets, grad, batch_size, width,
    dim: tl.constexpr, padded_dim: tl.constexpr, align: tl.constexpr, samples: tl.constexpr,
):  # fmt: skip
    """Divide the gradient of mean-pooled fields by the lengths of the lists, in place."""
    slot = slots + tl.program_id(1) * 5
    if tl.load(slot) == 2:
        sample = tl.program_id(0).to(tl.int64) * samples + tl.arange(0, samples)
        inside = sample < batch_size
        d = tl.arange(0, padded_dim)[None, :]
        at = tl.load(slot + 1) * batch_size + sample
        begin = tl.load(offsets + at, mask=inside, other=0)
        length = tl.maximum(tl.load(offsets + at + 1, mask=inside, other=0) - begin, 1).to(tl.float32)
        column = tl.multiple_of(tl.load(slot + 4), align)
        place = grad + sample[:, None] * width + column + d
        mask = inside[:, None] & (d < dim)
        scale = tl.div_rn(1.0 + 0.0 * length, length)[:, None]
        tl.store(place, tl.load(place, mask=mask, other=0.0) * scale, mask=mask)
