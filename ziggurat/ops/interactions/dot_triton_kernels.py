"""The Triton kernels of `dot_triton.py`: fields go by in chunks of columns, as wide as registers allow.

Importing this needs the package triton.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import rounded_to


@triton.jit
def _fields(
    first, second, f, d, num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr,
    in_bf16: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    """The fields of a sample, in the type in which they are multiplied."""
    at, inside = f * dim + d, d < dim
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
    """Where the pair (i, j) stands among those above the diagonal, and whether it does."""
    j = tl.arange(0, padded_fields)[None, :]
    return f * num_fields - f * (f + 1) // 2 + j - f - 1, (f < j) & (j < num_fields)


@triton.jit
def interaction_kernel(
    first, second, row, first_pitch, second_pitch,
    num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr, passed: tl.constexpr,
    padding: tl.constexpr, in_bf16: tl.constexpr, interpreted: tl.constexpr, padded_fields: tl.constexpr,
    chunk: tl.constexpr, padded_passed: tl.constexpr, padded_padding: tl.constexpr,
):  # fmt: skip
    """`[passed | pairs | zeros]` of one sample."""
    sample = tl.program_id(0).to(tl.int64)
    first, second = first + sample * first_pitch, second + sample * second_pitch
    num_pairs: tl.constexpr = num_fields * (num_fields - 1) // 2
    row += sample * (passed + num_pairs + padding)
    f = tl.arange(0, padded_fields)[:, None]
    products = tl.zeros([padded_fields, padded_fields], dtype=tl.float32)
    for begin in range(0, dim, chunk):
        d = begin + tl.arange(0, chunk)[None, :]
        x = _fields(first, second, f, d, num_first, num_fields, dim, in_bf16, interpreted)
        products += tl.dot(x, tl.trans(x), input_precision="ieee")
    place, above = _pairs(f, num_fields, padded_fields)
    tl.store(row + passed + place, rounded_to(products, row.dtype.element_ty, interpreted), mask=above)
    if passed > 0:
        c = tl.arange(0, padded_passed)
        kept = tl.load(first + c, mask=c < passed, other=0.0).to(tl.float32)
        tl.store(row + c, rounded_to(kept, row.dtype.element_ty, interpreted), mask=c < passed)
    if padding > 0:
        c = tl.arange(0, padded_padding)
        zeros = tl.zeros([padded_padding], dtype=tl.float32).to(row.dtype.element_ty)
        tl.store(row + passed + num_pairs + c, zeros, mask=c < padding)


@triton.jit
def interaction_backward_kernel(
    first, second, gradient, first_gradient, second_gradient, first_pitch, second_pitch,
    num_first: tl.constexpr, num_fields: tl.constexpr, dim: tl.constexpr, passed: tl.constexpr,
    padding: tl.constexpr, in_bf16: tl.constexpr, interpreted: tl.constexpr, padded_fields: tl.constexpr,
    chunk: tl.constexpr, padded_passed: tl.constexpr, padded_padding: tl.constexpr,
):  # fmt: skip
    """The gradients of the fields of one sample: (G + Gᵀ) X, and what was passed on."""
    sample = tl.program_id(0).to(tl.int64)
    first, second = first + sample * first_pitch, second + sample * second_pitch
    gradient += sample * (passed + num_fields * (num_fields - 1) // 2 + padding)
    f = tl.arange(0, padded_fields)[:, None]
    place, above = _pairs(f, num_fields, padded_fields)
    g = tl.load(gradient + passed + place, mask=above, other=0.0).to(tl.float32)
    g = _factor(g + tl.trans(g), in_bf16, interpreted)
    for begin in range(0, dim, chunk):
        d = begin + tl.arange(0, chunk)[None, :]
        x = _fields(first, second, f, d, num_first, num_fields, dim, in_bf16, interpreted)
        total = tl.dot(g, x, input_precision="ieee")
        at, inside = f * dim + d, d < dim
        if passed > 0:
            total += tl.load(gradient + at, mask=inside & (at < passed), other=0.0).to(tl.float32)
        own = first_gradient + sample * num_first * dim + at
        stored = rounded_to(total, first_gradient.dtype.element_ty, interpreted)
        tl.store(own, stored, mask=inside & (f < num_first))
        if num_first < num_fields:
            rest = inside & (f >= num_first) & (f < num_fields)
            own = second_gradient + sample * (num_fields - num_first) * dim + at - num_first * dim
            tl.store(own, rounded_to(total, second_gradient.dtype.element_ty, interpreted), mask=rest)
