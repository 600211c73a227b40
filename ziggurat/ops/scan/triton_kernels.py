"""The Triton kernels of `triton.py`. Importing this needs the package triton; only `triton.py` does, when asked to."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def _places(number, ends, chosen, steps: tl.constexpr):
    """Find the chosen cluster that holds each number, counted through all of them; `ends` are ascending."""
    # The number of clusters that end at or before the number; built from its highest bit down.
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
        # Each byte has two numbers of 4 bits: column c in the low half, column c + plane_bytes in the high one.
        both = tl.load(plane + at, mask=inside[:, None] & is_there[None, :], other=0).to(tl.int32)
        low = tl.load(codes + column, mask=is_there, other=0)
        high = tl.load(codes + plane_bytes + column, mask=is_there, other=0)
        dots += tl.sum((both & 15) * low[None, :] + (both >> 4) * high[None, :], axis=1)
    return dots


@triton.jit
def _keys(score, positions, inside):
    """Numbers that are larger for a higher score, and of equal scores for the smaller position."""
    bits = score.to(tl.int32, bitcast=True)
    # The bits of a negative float fall as it rises: all but the sign are turned round.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    # The complement puts the smaller position first among equal scores; the lowest int64 stands for no row.
    return tl.where(inside, (ordered << 32) | (0xFFFFFFFF - positions), -0x7FFFFFFFFFFFFFFF - 1)


@triton.jit
def _keys_of_block(
    upper, lower, scales, codes, code_sums, reach, lengths, rows, row_starts, total,
    order, ends, chosen, offsets, masks, mask_rows, words, num_clusters, query, number,
    plane_bytes: tl.constexpr, columns: tl.constexpr, by_upper: tl.constexpr, has_reach: tl.constexpr,
    has_rows: tl.constexpr, has_clusters: tl.constexpr, has_masks: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """Score the rows of these numbers, counted through all rows of a query."""
    inside = number < total
    positions = number
    if has_clusters:
        of_query = query * num_clusters
        place = _places(number, ends + of_query, tl.load(chosen + query), steps)
        before = tl.load(ends + of_query + place - 1, mask=inside & (place > 0), other=0)
        cluster = tl.load(order + of_query + place, mask=inside, other=0)
        # `before` rows of the query lie in the clusters in front of this one.
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
        # Twice (16 · upper + 15/2 − 128), as `upper_scores` has it: 15 − 256 = −241.
        exact = 32 * dots - 241 * code_sum
    else:
        # Codes are stored with 128 added, so that halves have no sign; the query's sum takes it off again.
        exact = 16 * dots + _dots(lower, positions, inside, own, plane_bytes, columns) - 128 * code_sum
    score = exact.to(tl.float32) * tl.load(scales + positions, mask=inside, other=0.0) + 0.0  # −0 is 0
    # Of centroids: what the best row of a cluster is expected to score above it, by the query's length.
    if has_reach:
        length = tl.load(lengths + query)
        if by_upper:
            length = 2 * length
        score += length * tl.load(reach + positions, mask=inside, other=0.0)
    return _keys(score, positions, inside)


@triton.jit
def best_kernel(
    upper, lower, scales, codes, code_sums, reach, lengths, rows, row_starts, totals,
    order, ends, chosen, offsets, masks, mask_rows, words, num_clusters, found,
    plane_bytes: tl.constexpr, columns: tl.constexpr, by_upper: tl.constexpr, has_reach: tl.constexpr,
    has_rows: tl.constexpr, has_clusters: tl.constexpr, has_masks: tl.constexpr, steps: tl.constexpr,
    block: tl.constexpr, keep: tl.constexpr, has_more: tl.constexpr, is_sorted: tl.constexpr,
):  # fmt: skip
    """Find the best `keep` of the rows that a program looks at, as keys.

    With `is_sorted` each program writes a list, largest first, and none where it has no rows. Otherwise the keys of a
    whole block may stand in any order, and a program without rows says so.

    Rows are numbered through the clusters that were chosen for the query, through a list of its own, or through the
    table. A block is full wherever clusters begin and end. A program looks at one block, or with `has_more` at each
    block whose turn is its own: of a descending and an ascending list the larger ones, place by place, are the best.
    """
    # In 64 bits: queries times rows of a table may pass 2³¹.
    query = tl.program_id(1).to(tl.int64)
    total = tl.load(totals + query)
    first = tl.program_id(0).to(tl.int64) * block
    out = found + (query * tl.num_programs(0) + tl.program_id(0)) * keep
    if has_more:
        keys = tl.full([block], -0x7FFFFFFFFFFFFFFF - 1, tl.int64)
        for begin in range(first, total, tl.num_programs(0) * block):
            number = begin + tl.arange(0, block).to(tl.int64)
            some = _keys_of_block(
                upper, lower, scales, codes, code_sums, reach, lengths, rows, row_starts, total,
                order, ends, chosen, offsets, masks, mask_rows, words, num_clusters, query, number,
                plane_bytes, columns, by_upper, has_reach, has_rows, has_clusters, has_masks, steps,
            )  # fmt: skip
            # The larger of a falling and a rising list, place by place, are the best of both, in no order.
            keys = tl.sort(tl.maximum(keys, tl.sort(some)), descending=True)
        tl.store(out + tl.arange(0, block), keys, mask=tl.arange(0, block) < keep)
    elif first < total:
        number = first + tl.arange(0, block)
        keys = _keys_of_block(
            upper, lower, scales, codes, code_sums, reach, lengths, rows, row_starts, total,
            order, ends, chosen, offsets, masks, mask_rows, words, num_clusters, query, number,
            plane_bytes, columns, by_upper, has_reach, has_rows, has_clusters, has_masks, steps,
        )  # fmt: skip
        if keep < block:
            tl.store(out + tl.arange(0, keep), tl.topk(keys, keep))
        elif is_sorted:
            tl.store(out + tl.arange(0, block), tl.sort(keys, descending=True))
        else:
            tl.store(out + tl.arange(0, block), keys)
    # A sorted list without rows need not be written: `merge_kernel` counts the lists that are used.
    elif not is_sorted:
        tl.store(out + tl.arange(0, keep), tl.full([keep], -0x7FFFFFFFFFFFFFFF - 1, tl.int64))


@triton.jit
def merge_kernel(
    lists, totals, merged, most,
    keep: tl.constexpr, block: tl.constexpr, steps: tl.constexpr, members: tl.constexpr, others: tl.constexpr,
):  # fmt: skip
    """Write the largest `most` keys of a query's sorted lists, largest first: a program a list, and no sort.

    The place of a key is the number of keys before it: in its own list those in front of it, in each other list what a
    binary search finds. A list is left at the first key whose place is behind the last one wanted. Equal keys are those
    of no row alone, and the list decides between them. Only lists of programs that had rows are read.
    """
    own = tl.program_id(0)
    query = tl.program_id(1).to(tl.int64)
    total = tl.load(totals + query)
    used = tl.minimum((total + block - 1) // block, tl.num_programs(0)).to(tl.int32)
    none = -0x7FFFFFFFFFFFFFFF - 1
    first_list = lists + query * tl.num_programs(0) * keep
    out = merged + query * most
    # One program fills what is behind all keys, which no key's place covers.
    if own == 0:
        for begin in range(used * keep, most, block):
            at = begin + tl.arange(0, block)
            tl.store(out + at, tl.full([block], none, tl.int64), mask=at < most)
    first = 0
    if own >= used:
        first = keep
    while first < keep:
        at = first + tl.arange(0, members)
        key = tl.load(first_list + own * keep + at)
        place = at
        for begin in range(0, used, others):
            other = begin + tl.arange(0, others)
            is_other = (other < used) & (other != own)
            # One before the list, since `further` counts from 1.
            ends = first_list + other * keep - 1
            before = tl.zeros([members, others], dtype=tl.int32)
            for step in tl.static_range(steps):
                further = before + (1 << (steps - 1 - step))
                is_there = (further <= keep) & is_other[None, :]
                theirs = tl.load(ends[None, :] + further, mask=is_there, other=none)
                # Equal keys are those of no row; any fixed order of lists gives each a place of its own.
                is_before = (theirs > key[:, None]) | ((theirs == key[:, None]) & (other < own)[None, :])
                before = tl.where(is_there & is_before, further, before)
            place += tl.sum(before, axis=1)
        tl.store(out + place, key, mask=place < most)
        first += members
        # The list falls: its later keys are further behind still.
        if tl.max(place, axis=0) >= most - 1:
            first = keep


@triton.jit
def round_kernel(
    queries, codes, sums, scales, lengths, are_finite, pitch,
    dim: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Round a query to INT8, as `reference.round_query` does, and fill it up with zeros to the width of rows."""
    query = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, padded)
    x = tl.load(queries + query * pitch + d, mask=d < dim, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30)
    # `div_rn` rounds as IEEE does, Triton's own division need not; it takes tensors, not numbers.
    # One division, as the reference has: 1 / largest · 127 would round twice, and give other codes once in a while.
    step = tl.div_rn(tl.full([1], 127.0, tl.float32), largest + tl.zeros([1], tl.float32))
    code = ((x * step + 12582912.0) - 12582912.0).to(tl.int32)  # to the nearest, ties to even: 1.5 · 2²³
    tl.store(codes + query * width + d, code, mask=d < width)
    tl.store(sums + query, tl.sum(code, axis=0))
    one = tl.arange(0, 1)
    scale = tl.div_rn(largest + tl.zeros([1], tl.float32), tl.full([1], 127.0, tl.float32))
    tl.store(scales + query + one, scale)
    # Exact in 32 bits: at most 127² a column.
    square = (tl.sum(code * code, axis=0) + tl.zeros([1], tl.int32)).to(tl.float32)
    tl.store(lengths + query + one, tl.sqrt_rn(square))
    is_finite = (x == x) & (tl.abs(x) < float("inf"))
    tl.store(are_finite + query, tl.min(is_finite.to(tl.int32), axis=0) == 1)


@triton.jit
def choose_kernel(
    keys, offsets, passing, mask_rows, probes, least, order, ends, chosen, totals, num_clusters,
    each_probes: tl.constexpr, each_least: tl.constexpr, has_passing: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Choose clusters from the sorted keys of all: the best `probes`, and more while fewer than `least` rows pass."""
    query = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, padded)
    there = rank < num_clusters
    at = query * num_clusters + rank
    # The inverse of `_keys`: the lower half is the complement of the position.
    cluster = 0xFFFFFFFF - (tl.load(keys + at, mask=there, other=0xFFFFFFFF) & 0xFFFFFFFF)
    begin = tl.load(offsets + cluster, mask=there, other=0)
    size = tl.load(offsets + cluster + 1, mask=there, other=0) - begin
    passed = size
    if has_passing:
        mask_row = tl.load(mask_rows + query)
        counted = there & (mask_row >= 0)
        passed = tl.load(passing + tl.maximum(mask_row, 0) * num_clusters + cluster, mask=counted, other=0)
        passed = tl.where(mask_row >= 0, passed, size)
    before = tl.cumsum(passed, axis=0) - passed  # rows that passed when a cluster's turn comes
    # At least one cluster, even where none was asked for.
    fewest = tl.maximum(tl.load(probes + query) if each_probes else probes, 1)
    wanted = tl.load(least + query) if each_least else least
    count = tl.sum((there & ((rank < fewest) | (before < wanted))).to(tl.int64), axis=0)
    end = tl.cumsum(size, axis=0)
    tl.store(order + at, cluster, mask=there)
    tl.store(ends + at, end, mask=there)
    tl.store(chosen + query, count)
    # Ends rise, so the largest of the chosen ones is the sum of their sizes.
    tl.store(totals + query, tl.max(tl.where(rank < count, end, 0), axis=0))


@triton.jit
def list_kernel(keys, positions, counts, starts, width, padded: tl.constexpr):
    """Write the positions of sorted keys, how many there are, and where the list of a query begins."""
    query = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, padded)
    key = tl.load(keys + query * width + m, mask=m < width, other=-0x7FFFFFFFFFFFFFFF - 1)
    is_there = key != -0x7FFFFFFFFFFFFFFF - 1
    tl.store(positions + query * width + m, tl.where(is_there, 0xFFFFFFFF - (key & 0xFFFFFFFF), -1), mask=m < width)
    tl.store(counts + query, tl.sum(is_there.to(tl.int64), axis=0))
    tl.store(starts + query, query * width)


@triton.jit
def _write_found(key, m, scale, scores, positions, k):
    """Write scores and positions of sorted keys of a query; −∞ and −1 where there is none."""
    none = -0x7FFFFFFFFFFFFFFF - 1
    ordered = key >> 32
    # The same exchange turns the order back into bits: it is its own inverse.
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.int32)
    score = bits.to(tl.float32, bitcast=True) * scale
    tl.store(scores + m, tl.where(key == none, float("-inf"), score), mask=m < k)
    tl.store(positions + m, tl.where(key == none, -1, 0xFFFFFFFF - (key & 0xFFFFFFFF)), mask=m < k)


@triton.jit
def found_kernel(keys, scales, scores, positions, width, k, padded: tl.constexpr):
    """Write scores and positions of sorted keys; −∞ and −1 where fewer than k were found."""
    query = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, padded)
    key = tl.load(keys + query * width + m, mask=m < width, other=-0x7FFFFFFFFFFFFFFF - 1)
    _write_found(key, m, tl.load(scales + query), scores + query * k, positions + query * k, k)


@triton.jit
def exact_kernel(
    upper, lower, row_scales, codes, code_sums, scales, keys, scores, positions, width, k,
    plane_bytes: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Score the candidates of a query by all bits, sort them, and write the best k: all of it in one program."""
    query = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, block)
    none = -0x7FFFFFFFFFFFFFFF - 1
    candidate = tl.load(keys + query * width + m, mask=m < width, other=none)
    inside = candidate != none
    place = tl.where(inside, 0xFFFFFFFF - (candidate & 0xFFFFFFFF), 0)
    own = codes + query * (2 * plane_bytes)
    dots = 16 * _dots(upper, place, inside, own, plane_bytes, columns)
    dots += _dots(lower, place, inside, own, plane_bytes, columns)
    exact = dots - 128 * tl.load(code_sums + query)
    score = exact.to(tl.float32) * tl.load(row_scales + place, mask=inside, other=0.0) + 0.0  # −0 is 0
    best = tl.sort(_keys(score, place, inside), descending=True)
    _write_found(best, m, tl.load(scales + query), scores + query * k, positions + query * k, k)


@triton.jit
def passing_kernel(offsets, masks, words, passing, num_clusters, members: tl.constexpr, block: tl.constexpr):
    """Count the rows of `members` clusters that pass a mask."""
    cluster = tl.program_id(0) * members + tl.arange(0, members)
    mask = tl.program_id(1).to(tl.int64)
    there = cluster < num_clusters
    begin = tl.load(offsets + cluster, mask=there, other=0)[:, None]
    end = tl.load(offsets + cluster + 1, mask=there, other=0)[:, None]
    # A 1 of 64 bits: a plain one would be shifted in 32.
    one = begin * 0 + 1
    count = tl.zeros([members], dtype=tl.int64)
    # As many words as the widest of these clusters covers, the words that it shares with neighbours included.
    for first in range(0, tl.max((end + 63) // 64 - begin // 64), block):
        word = begin // 64 + first + tl.arange(0, block)[None, :]
        bits = tl.load(masks + mask * words + word, mask=word * 64 < end, other=0)
        before = begin - word * 64  # bits of the clusters in front
        within = end - word * 64  # bits up to the end of this one
        bits = tl.where(before > 0, bits & ~((one << tl.minimum(tl.maximum(before, 0), 63)) - 1), bits)
        bits = tl.where(within < 64, bits & ((one << tl.minimum(tl.maximum(within, 0), 63)) - 1), bits)
        # Bits of a word are counted in pairs, fours and bytes; the product adds up the bytes at the top.
        bits = bits - ((bits >> 1) & 0x5555555555555555)
        bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
        count += tl.sum((bits * 0x0101010101010101) >> 56, axis=1)
    tl.store(passing + mask * num_clusters + cluster, count, mask=there)
