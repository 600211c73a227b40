"""The Triton kernels of `dot_triton.py`: fields go by in chunks of columns, as wide as registers allow.

Importing this needs the package triton.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import rounded_to


@triton.jit
def _fields(
    first, second, f, d, there, num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr,
    in_bf16: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """Load the fields of a sample, in the type in which they are multiplied."""
    at = f * dim + d
    inside = (d < dim) & there
    if num_first == 1 and num_fields > 1:  # one row for all: a masked read of the whole tile costs as much as the rest
        own = tl.load(first + d, mask=inside, other=0.0).to(tl.float32)
        rest = inside & (f >= 1) & (f < num_fields)
        x = tl.load(second + at - dim, mask=rest, other=0.0).to(tl.float32)
        x = tl.where(f == 0, own, x)
    else:
        x = tl.load(first + at, mask=inside & (f < num_first), other=0.0).to(tl.float32)
        if num_first < num_fields:
            rest = inside & (f >= num_first) & (f < num_fields)
            x += tl.load(second + at - num_first * dim, mask=rest, other=0.0).to(tl.float32)
    return _factor(x, in_bf16, interpreted)


@triton.jit
def _factor(x, in_bf16: tl.constexpr, interpreted: tl.constexpr):
    """BF16 where products are; the interpreter multiplies FP32 numbers, rounded alike."""
    if in_bf16:
        x = rounded_to(x, tl.bfloat16, interpreted)
        if interpreted:
            x = x.to(tl.float32)
    return x


@triton.jit
def _pairs(f, num_fields: tl.constexpr, padded_fields: tl.constexpr):
    """Return the index of the pair (i, j) among those above the diagonal, and whether it is one of them."""
    j = tl.arange(0, padded_fields)[None, :]
    return f * num_fields - f * (f + 1) // 2 + j - f - 1, (f < j) & (j < num_fields)


@triton.jit
def interaction_kernel(
    first, second, row, first_pitch, second_pitch, batch_size,
    num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr, passed: tl.constexpr,
    padding: tl.constexpr, in_bf16: tl.constexpr, interpreted: tl.constexpr, padded_fields: tl.constexpr,
    chunk: tl.constexpr, padded_passed: tl.constexpr, padded_padding: tl.constexpr, samples: tl.constexpr,
    stages: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """`[passed | pairs | zeros]` of `samples` samples, one after the other: the next is read ahead."""
    num_pairs: tl.constexpr = num_fields * (num_fields - 1) // 2
    width: tl.constexpr = passed + num_pairs + padding
    f = tl.arange(0, padded_fields)[:, None]
    place, above = _pairs(f, num_fields, padded_fields)
    for number in tl.range(0, samples, num_stages=stages):
        sample = tl.program_id(0).to(tl.int64) * samples + number
        there = sample < batch_size
        own = first + sample * first_pitch
        rest = second + sample * second_pitch
        out = row + sample * width
        products = tl.zeros([padded_fields, padded_fields], dtype=tl.float32)
        for begin in tl.static_range(0, dim, chunk):
            d = begin + tl.arange(0, chunk)[None, :]
            x = _fields(own, rest, f, d, there, num_first, num_fields, dim, in_bf16, interpreted)
            products += tl.dot(x, tl.trans(x), input_precision=precision)
        tl.store(out + passed + place, rounded_to(products, row.dtype.element_ty, interpreted), mask=above & there)
        if passed > 0:
            c = tl.arange(0, padded_passed)
            kept = tl.load(own + c, mask=(c < passed) & there, other=0.0).to(tl.float32)
            tl.store(out + c, rounded_to(kept, row.dtype.element_ty, interpreted), mask=(c < passed) & there)
        if padding > 0:
            c = tl.arange(0, padded_padding)
            zeros = tl.zeros([padded_padding], dtype=tl.float32).to(row.dtype.element_ty)
            tl.store(out + passed + num_pairs + c, zeros, mask=(c < padding) & there)


@triton.jit
def interaction_backward_kernel(
    first, second, gradient, first_gradient, second_gradient, first_pitch, second_pitch, batch_size,
    num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr, passed: tl.constexpr,
    padding: tl.constexpr, in_bf16: tl.constexpr, interpreted: tl.constexpr, padded_fields: tl.constexpr,
    chunk: tl.constexpr, padded_passed: tl.constexpr, padded_padding: tl.constexpr, samples: tl.constexpr,
    stages: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """The gradients of the fields of `samples` samples: (G + Gᵀ) X, and what was passed on."""
    width: tl.constexpr = passed + num_fields * (num_fields - 1) // 2 + padding
    f = tl.arange(0, padded_fields)[:, None]
    place, above = _pairs(f, num_fields, padded_fields)
    for number in tl.range(0, samples, num_stages=stages):
        sample = tl.program_id(0).to(tl.int64) * samples + number
        there = sample < batch_size
        own = first + sample * first_pitch
        rest = second + sample * second_pitch
        upstream = gradient + sample * width
        g = tl.load(upstream + passed + place, mask=above & there, other=0.0).to(tl.float32)
        # G has numbers above the diagonal alone, so no addition rounds and the sum is exact.
        g = _factor(g + tl.trans(g), in_bf16, interpreted)
        for begin in tl.static_range(0, dim, chunk):
            d = begin + tl.arange(0, chunk)[None, :]
            x = _fields(own, rest, f, d, there, num_first, num_fields, dim, in_bf16, interpreted)
            total = tl.dot(g, x, input_precision=precision)
            at = f * dim + d
            inside = (d < dim) & there
            # What was passed on lies in the first field: one row is read for the whole tile.
            if passed > 0 and passed <= dim:
                gone_on = tl.load(upstream + d, mask=inside & (d < passed), other=0.0).to(tl.float32)
                total += tl.where(f == 0, gone_on, 0.0)
            elif passed > 0:
                total += tl.load(upstream + at, mask=inside & (at < passed), other=0.0).to(tl.float32)
            stored = rounded_to(total, first_gradient.dtype.element_ty, interpreted)
            tl.store(first_gradient + sample * num_first * dim + at, stored, mask=inside & (f < num_first))
            if num_first < num_fields:
                others = second_gradient + sample * (num_fields - num_first) * dim + at - num_first * dim
                stored = rounded_to(total, second_gradient.dtype.element_ty, interpreted)
                tl.store(others, stored, mask=inside & (f >= num_first) & (f < num_fields))
