"""The Triton kernels of `cross_triton.py`. Importing this needs the package triton."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import rounded_to


@triton.jit
def add_crossed_kernel(
    crossed, inputs, factor, out, cast, count,
    has_cast: tl.constexpr, interpreted: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute x + x₀ ⊙ f, number by number."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = at < count
    x = tl.load(crossed + at, mask=mask, other=0.0)
    x0 = tl.load(inputs + at, mask=mask, other=0.0)
    x += x0 * tl.load(factor + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, x, mask=mask)
    if has_cast:
        tl.store(cast + at, rounded_to(x, cast.dtype.element_ty, interpreted), mask=mask)


@triton.jit
def add_crossed_backward_kernel(
    gradient, inputs, factor, of_factor, first, partials, size, dim,
    is_first: tl.constexpr, interpreted: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    tiles: tl.constexpr,
):  # fmt: skip
    """Compute g ⊙ x₀, ∂x₀ += g ⊙ f, and the sum of the first over `rows · tiles` rows."""
    c = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for number in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + number) * rows + tl.arange(0, rows)[:, None]
        mask = (row < size) & (c < dim)
        at = row * dim + c
        g = tl.load(gradient + at, mask=mask, other=0.0)
        product = g * tl.load(inputs + at, mask=mask, other=0.0)
        # The bias's gradient is the sum of what is stored, rounded as torch rounds it before its own sum.
        product = rounded_to(product, of_factor.dtype.element_ty, interpreted)
        tl.store(of_factor + at, product, mask=mask)
        total += product.to(tl.float32)
        g *= tl.load(factor + at, mask=mask, other=0.0).to(tl.float32)
        if not is_first:
            g += tl.load(first + at, mask=mask, other=0.0)
        tl.store(first + at, g, mask=mask)
    whole = tl.sum(total, axis=0)[None, :]
    tl.store(partials + tl.program_id(0).to(tl.int64) * dim + c, whole, mask=c < dim)
