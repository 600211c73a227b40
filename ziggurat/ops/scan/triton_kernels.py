"""The Triton kernels of `triton.py`. Importing this needs the package triton; only `triton.py` does, when asked to."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def _places(number, ends, chosen, steps: tl.constexpr):
    """Which of the chosen clusters holds each number, counted through all of them; `ends` are ascending."""
    place = tl.zeros(number.shape, dtype=tl.int32)
    for step in tl.static_range(steps):
        further = place + (1 << (steps - 1 - step))
        is_there = further <= chosen
        end = tl.load(ends + further - 1, mask=is_there, other=0)
        place = tl.where(is_there & (end <= number), further, place)
    return place


@triton.jit
def _dots(plane, positions, inside, codes, plane_bytes: tl.constexpr, columns: tl.constexpr):
    """Products of a query with the four bits of rows in one plane; exact in 32 bits."""
    dots = tl.zeros(positions.shape, dtype=tl.int32)
    for first in tl.static_range(0, plane_bytes, columns):
        column = first + tl.arange(0, columns)
        is_there = column < plane_bytes
        at = positions[:, None] * plane_bytes + column[None, :]
        both = tl.load(plane + at, mask=inside[:, None] & is_there[None, :], other=0).to(tl.int32)
        low = tl.load(codes + column, mask=is_there, other=0)
        high = tl.load(codes + plane_bytes + column, mask=is_there, other=0)
        dots += tl.sum((both & 15) * low[None, :] + (both >> 4) * high[None, :], axis=1)
    return dots


@triton.jit
def _keys(score, positions, inside):
    """Numbers that are larger for a higher score, and of equal scores for the smaller position."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(inside, (ordered << 32) | (0xFFFFFFFF - positions), -0x7FFFFFFFFFFFFFFF - 1)


@triton.jit
def best_kernel(
    upper, lower, scales, codes, code_sums, reach, lengths, rows, row_starts, totals,
    order, ends, chosen, offsets, masks, mask_rows, words, num_clusters, found,
    plane_bytes: tl.constexpr, columns: tl.constexpr, by_upper: tl.constexpr, has_reach: tl.constexpr,
    has_rows: tl.constexpr, has_clusters: tl.constexpr, has_masks: tl.constexpr, steps: tl.constexpr,
    block: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """The best `keep` of `block` rows of a query, as keys.

    Rows are numbered through the clusters that were chosen for the query, through a list of its own, or through the
    table. A block is full wherever clusters begin and end.
    """
    query = tl.program_id(1).to(tl.int64)
    total = tl.load(totals + query)
    number = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if tl.program_id(0).to(tl.int64) * block < total:
        inside = number < total
        positions = number
        if has_clusters:
            of_query = query * num_clusters
            place = _places(number, ends + of_query, tl.load(chosen + query), steps)
            before = tl.load(ends + of_query + place - 1, mask=inside & (place > 0), other=0)
            cluster = tl.load(order + of_query + place, mask=inside, other=0)
            positions = tl.load(offsets + cluster, mask=inside, other=0) + number - before
        if has_rows:
            start = tl.load(row_starts + query)
            if start >= 0:
                positions = tl.load(rows + start + number, mask=inside, other=0)
        if has_masks:
            mask_row = tl.load(mask_rows + query)
            if mask_row >= 0:
                word = tl.load(masks + mask_row * words + positions // 64, mask=inside, other=0)
                inside = inside & (((word >> (positions % 64)) & 1) == 1)
        own = codes + query * (2 * plane_bytes)
        dots = _dots(upper, positions, inside, own, plane_bytes, columns)
        code_sum = tl.load(code_sums + query)
        if by_upper:
            exact = 32 * dots - 241 * code_sum
        else:
            exact = 16 * dots + _dots(lower, positions, inside, own, plane_bytes, columns) - 128 * code_sum
        score = exact.to(tl.float32) * tl.load(scales + positions, mask=inside, other=0.0) + 0.0  # −0 is 0
        if has_reach:
            score += tl.load(lengths + query) * tl.load(reach + positions, mask=inside, other=0.0)
        keys = _keys(score, positions, inside)
        out = found + (query * tl.num_programs(0) + tl.program_id(0)) * keep
        if keep < block:
            keys = tl.sort(keys, descending=True)
        tl.store(out + tl.arange(0, block), keys, mask=tl.arange(0, block) < keep)


@triton.jit
def passing_kernel(offsets, masks, mask_rows, words, passing, block: tl.constexpr):
    """How many rows of a cluster pass the mask of a query."""
    cluster, query = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(offsets + cluster), tl.load(offsets + cluster + 1)
    mask_row = tl.load(mask_rows + query)
    count = end - begin
    if mask_row >= 0:
        count = count * 0
        for first in range(begin // 64, (end + 63) // 64, block):
            word = first + tl.arange(0, block)
            bits = tl.load(masks + mask_row * words + word, mask=word * 64 < end, other=0)
            before, within = (
                begin - word * 64,
                end - word * 64,
            )  # the bits between are the cluster's
            one = word * 0 + 1
            bits = tl.where(before > 0, bits & ~((one << tl.minimum(tl.maximum(before, 0), 63)) - 1), bits)
            bits = tl.where(within < 64, bits & ((one << tl.minimum(tl.maximum(within, 0), 63)) - 1), bits)
            bits = bits - ((bits >> 1) & 0x5555555555555555)
            bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
            bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
            count += tl.sum((bits * 0x0101010101010101) >> 56, axis=0)
    tl.store(passing + query * tl.num_programs(0) + cluster, count)
