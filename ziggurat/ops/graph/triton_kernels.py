"""The Triton kernel of `triton.py`: a program for one row of the graph. Importing this needs the package triton."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import mixed, rounded_to


@triton.jit
def propagate_kernel(
    offsets,
    columns,
    weights,
    x,
    rows,
    base,
    out,
    dim,
    width,
    key,
    prime,
    scale,
    has_rows: tl.constexpr,
    has_base: tl.constexpr,
    is_sampled: tl.constexpr,
    is_random: tl.constexpr,
    rescales: tl.constexpr,
    block_edges: tl.constexpr,
    block_dim: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Add up the neighbours of a row for some of the columns, `block_edges` of them at a time."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place) if has_rows else place
    begin = tl.load(offsets + row)
    size = tl.load(offsets + row + 1) - begin
    d = tl.program_id(1) * block_dim + tl.arange(0, block_dim)
    inside = d < dim
    sums = tl.zeros([block_dim], dtype=tl.float32)
    if has_base:
        sums += tl.load(base + place * dim + d, mask=inside, other=0.0)
    taken = size
    factor = 1.0
    if is_sampled:
        taken = tl.minimum(size, width)
        if rescales:
            factor = tl.maximum(size.to(tl.float32) / width, 1.0)
    # As in edge_sampling.py. A small key comes in 32 bits: the sum with a row has 64.
    wide_key = row * 0 + key
    bits = mixed(wide_key.to(tl.uint64, bitcast=True) + row.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)
    first = tl.where(wide_key != 0, (bits >> 33).to(tl.int64), 0)
    for start in range(0, taken, block_edges):
        k = start + tl.arange(0, block_edges).to(tl.int64)
        is_edge = k < taken
        chosen = k
        if is_sampled:
            # Of a row that is not cut the number is thrown away, and must be no division by 0.
            n = tl.maximum(size, 1)
            steps = k * (prime % n) if is_random else k * n // width
            chosen = tl.where(size > width, (first % n + steps) % n, k)
        at = begin + tl.where(is_edge, chosen, 0)
        column = tl.load(columns + at, mask=is_edge, other=0).to(tl.int64)
        weight = tl.load(weights + at, mask=is_edge, other=0.0) * factor
        features = tl.load(x + column[:, None] * dim + d[None, :], mask=is_edge[:, None] & inside[None, :], other=0.0)
        sums += tl.sum(weight[:, None] * features.to(tl.float32), axis=0)
    tl.store(out + place * dim + d, rounded_to(scale * sums, out.dtype.element_ty, interpreted), mask=inside)
