"""The Triton kernels of `triton.py`. Importing this needs the package triton; only `triton.py` does, when asked to.

    forward_kernel    a program for a tile of queries of one head: goes through the keys that they see
    queries_kernel    the same tiles, backward: dQ, and for softmax δ_i = ⟨dO_i, O_i⟩
    keys_kernel       a program for a tile of keys: goes through the queries that see them; dK and dV
    biases_kernel     a program for a block diagonal of a sequence, all heads: sums of dS by place and by bucket
    places_kernel     adds up what block diagonals hold for each place of w_pos

Rows (queries) and columns (keys) are counted from the beginning of their sequence where masks are concerned, and from
the first that is there where memory is. Tiles that all rows see whole come first and need no mask; those at the edges
of what is seen follow, in one loop: left of the whole ones, right of them, and the rows' own columns where targets
stand behind all that they see.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import math

import torch
import triton
import triton.language as tl

from ziggurat.ops.attention.time_buckets import BASE
from ziggurat.ops.kernel_choice import is_interpreted

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MOST = tl.constexpr(2**30)  # duration in a tile, for 32 bits
FEW = tl.constexpr(3)  # buckets of a tile besides the lowest, which are found by comparing
SOME = tl.constexpr(10)
# Arguments that say how many: a kernel is not compiled again when a batch has other ones.
SIZES = ("time_tiles", "sequences", "tiles", "lead", "pieces", "context", "reach", "half", "positions")
HAS_PTX = tl.constexpr(not is_interpreted() and torch.version.hip is None)
BUCKETS_AN_OCTAVE = tl.constexpr(math.log(2.0) / BASE)


@triton.jit
def _clip(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def _sequence(
    offsets, query_offsets, targets, spans, b, sequences, has_targets: tl.constexpr, has_spans: tl.constexpr
):  # fmt: skip
    """First key and query in memory, how many there are, where they stand in their sequence, its length and history."""
    # Offsets stay in 64 bits, since they are multiplied by strides; within one sequence 32 bits are enough.
    first_key = tl.load(offsets + b)
    first_query = tl.load(query_offsets + b)
    num_keys = (tl.load(offsets + b + 1) - first_key).to(tl.int32)
    num_queries = (tl.load(query_offsets + b + 1) - first_query).to(tl.int32)
    # Without spans the queries are the last events of their sequence.
    query_start = num_keys - num_queries
    # A zero of the dtype of the branch below: Triton wants the same type on both sides of an `if`.
    key_start = num_keys * 0
    length = num_keys
    if has_spans:
        query_start = tl.load(spans + b).to(tl.int32)
        key_start = tl.load(spans + sequences + b).to(tl.int32)
        length = tl.load(spans + 2 * sequences + b).to(tl.int32)
    history = length
    if has_targets:
        history = length - tl.load(targets + b).to(tl.int32)
    return first_key, num_keys, first_query, num_queries, query_start, key_start, length, history


@triton.jit
def _rows_seen(rows, history, context, reach):
    """The interval of columns that each row sees besides itself."""
    shift = tl.maximum(context - 1, 0)
    first = tl.minimum(rows, history) - reach
    # Rows of the context see the whole history; a target's own column is no part of the interval.
    high = tl.where(rows < context, history, tl.minimum(rows + 1, history))
    low = tl.where((reach > 0) & (rows >= context) & (first > shift), first, 0)
    return low, high


@triton.jit
def _columns_of_rows(first_row, last_row, history, context, reach, key_start, num_keys, tile: tl.constexpr):
    """Find the tiles of columns that rows see: left, whole, right and own ones, in the order of memory.

    Returns:
        begin of the left tiles and how many, begin of whole ones and how many, right, own.
    """
    first_low, _first_high = _rows_seen(first_row, history, context, reach)
    last_low, last_high = _rows_seen(last_row, history, context, reach)
    # A tile may begin in the context and end behind it: the furthest end is then that of its first rows.
    most = tl.where(first_row < context, history, last_high)
    # Of the rows behind the context, the first sees least.
    least = tl.where(last_row < context, history, tl.minimum(tl.maximum(first_row, context) + 1, history))
    left = _clip(first_low - key_start, 0, num_keys)
    whole = _clip(last_low - key_start, 0, num_keys)
    whole_end = _clip(least - key_start, 0, num_keys)
    end = _clip(most - key_start, 0, num_keys)
    num_left = tl.cdiv(whole - left, tile)
    # Rounded up to tiles, so that whole ones begin where the left ones end and no column is read twice.
    whole = left + num_left * tile
    num_whole = tl.maximum(whole_end - whole, 0) // tile
    right = whole + num_whole * tile
    num_right = tl.cdiv(tl.maximum(end - right, 0), tile)
    # Own columns that tiles to the right have already are not read twice.
    own = tl.maximum(tl.maximum(first_row, history) - key_start, right + num_right * tile)
    own_end = tl.where(last_row >= history, _clip(last_row + 1 - key_start, 0, num_keys), 0)
    num_own = tl.cdiv(tl.maximum(own_end - own, 0), tile)
    return left, num_left, whole, num_whole, right, num_right, own, num_own


@triton.jit
def _rows_of_columns(
    first, last, history, length, context, reach, query_start, num_queries, tile: tl.constexpr
):  # fmt: skip
    """Find the tiles of rows that see columns `first` to `last`: those of the context, left, whole and right ones.

    Returns:
        rows of the context that are asked and how many tiles of them, begin of left tiles and how many, whole, right.
    """
    shift = tl.maximum(context - 1, 0)
    of_targets, _all_of_history = _rows_seen(history, history, context, reach)  # all targets stand at one position
    is_history = first < history
    # A target's column is seen by that target alone, so its rows begin and end at itself.
    begin = tl.where(is_history, tl.where(first < context, 0, tl.maximum(first, context)), first)
    end = tl.minimum(history, reach + tl.maximum(shift, last) + 1)
    # Without a reach, or where targets still reach these columns, the rows that see some of them go on to the end.
    end = tl.where((reach == 0) | (of_targets <= last), length, end)
    end = tl.where(is_history, end, last + 1)
    whole_end = tl.minimum(history, reach + tl.maximum(shift, first) + 1)
    whole_end = tl.where((reach == 0) | (of_targets <= first), length, whole_end)
    whole_end = tl.where(last < history, whole_end, 0)
    # Columns in the context are seen from row 0 on, so the tiles below have its rows already.
    of_context = tl.where(is_history & (first >= context), _clip(context - query_start, 0, num_queries), 0)
    num_context = tl.cdiv(of_context, tile)
    left = _clip(begin - query_start, 0, num_queries)
    whole = _clip(last - query_start, left, num_queries)
    end = _clip(end - query_start, 0, num_queries)
    whole_end = _clip(whole_end - query_start, 0, num_queries)
    # No row sees all of these columns where they are more than `reach` and one: every tile is then at an edge.
    whole_end = tl.where(whole < whole_end, whole_end, left)
    whole = tl.where(whole < whole_end, whole, left)
    num_left = tl.cdiv(whole - left, tile)
    whole = left + num_left * tile
    num_whole = tl.maximum(whole_end - whole, 0) // tile
    right = whole + num_whole * tile
    num_right = tl.cdiv(tl.maximum(end - right, 0), tile)
    return of_context, num_context, left, num_left, whole, num_whole, right, num_right


@triton.jit
def _load_tile(
    of, begin, index, limit, row_stride, dim: tl.constexpr, padded: tl.constexpr, masked: tl.constexpr
):  # fmt: skip
    """Rows `begin + index` of a matrix whose rows are `row_stride` apart, (len(index), padded); zeros outside."""
    c = tl.arange(0, padded)
    at = (begin + index)[:, None] * row_stride + c[None, :]
    if masked:
        return tl.load(of + at, mask=((begin + index) < limit)[:, None] & (c < dim)[None, :], other=0.0)
    if dim < padded:
        return tl.load(of + at, mask=(c < dim)[None, :], other=0.0)
    return tl.load(of + at)


@triton.jit
def _store_tile(to, values, begin, index, limit, row_stride, dim: tl.constexpr, padded: tl.constexpr):
    c = tl.arange(0, padded)
    at = (begin + index)[:, None] * row_stride + c[None, :]
    mask = ((begin + index) < limit)[:, None] & (c < dim)[None, :]
    tl.store(to + at, values.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _exp2(x):
    """2ˣ by the unit for special functions: two units of the last place, numbers below the normal ones are 0."""
    if HAS_PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.exp2(x)


@triton.jit
def _inverse(x):
    """1/x by the unit for special functions, to one unit of the last place."""
    if HAS_PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return 1.0 / x


@triton.jit
def _log2(x):
    """The logarithm by the unit for special functions, of a number of at least 1."""
    if HAS_PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _read(pointers):
    """Load numbers that nobody writes, in the layout of whoever uses them.

    The compiler takes `tl.load` for a load of operands: it copies them to shared memory ahead of their use, or loads
    them in an order that is good for whole rows and exchanges them between threads, with barriers. Biases lie in the
    first-level cache.
    """
    if not HAS_PTX:
        found = tl.load(pointers)
    elif pointers.dtype.element_ty == tl.int64:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.s64 $0, [$1];", "=l,l", [pointers.to(tl.int64)], tl.int64, is_pure=True, pack=1
        )
    else:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def _zeros_like(numbers):
    """Zeros that lie among threads as other numbers do, which the compiler cannot see to be constant."""
    if HAS_PTX:
        return tl.inline_asm_elementwise("mov.f32 $0, 0f00000000;", "=f,f", [numbers], tl.float32, is_pure=True, pack=1)
    return tl.zeros_like(numbers)


@triton.jit(do_not_specialize=SIZES)
def bounds_kernel(query_times, key_times, bounds, offsets, query_offsets, sequences, tiles, tile: tl.constexpr):
    """Store the earliest and the latest time of one tile of a sequence: of its queries, then of its keys."""
    # Tiles of one sequence lie side by side, which `_bounds_of` counts on.
    pid = tl.program_id(0)
    at = pid % tiles * tile
    b = pid // tiles
    first_key = tl.load(offsets + b)
    first_query = tl.load(query_offsets + b)
    num_keys = (tl.load(offsets + b + 1) - first_key).to(tl.int32)
    num_queries = (tl.load(query_offsets + b + 1) - first_query).to(tl.int32)
    index = at + tl.arange(0, tile)
    if at < num_queries:
        # Behind the end the last one is read again, which moves no bound.
        times = tl.load(query_times + first_query + tl.minimum(index, num_queries - 1))
        tl.store(bounds + pid * 2, tl.min(times, axis=0))
        tl.store(bounds + pid * 2 + 1, tl.max(times, axis=0))
    if at < num_keys:
        times = tl.load(key_times + first_key + tl.minimum(index, num_keys - 1))
        # Bounds of all tiles of keys lie behind those of all tiles of queries.
        bounds += sequences * tiles * 2
        tl.store(bounds + pid * 2, tl.min(times, axis=0))
        tl.store(bounds + pid * 2 + 1, tl.max(times, axis=0))


@triton.jit
def _bounds_of(bounds, at, num, tile: tl.constexpr, size: tl.constexpr):
    """The earliest and the latest of the times `at` to `at + size - 1`, by those of the tiles that they lie in."""
    last = (tl.minimum(at + size, num) - 1) // tile
    earliest = _read(bounds + at // tile * 2)
    latest = _read(bounds + at // tile * 2 + 1)
    for further in tl.static_range(1, size // tile + 1):
        of_tile = bounds + tl.minimum(at // tile + further, last) * 2
        earliest = tl.minimum(earliest, _read(of_tile))
        latest = tl.maximum(latest, _read(of_tile + 1))
    return earliest, latest


@triton.jit
def _bucket_of(duration, limits, buckets: tl.constexpr):
    """The bucket of one duration, by the shortest duration of each."""
    # 0 has no logarithm; 0 and 1 are told apart by the border below.
    size = tl.maximum(duration.to(tl.float32), 1.0)
    nearest = tl.minimum((_log2(size) * BUCKETS_AN_OCTAVE + 0.5).to(tl.int32), buckets - 1)
    # The logarithm is approximate: the border itself decides, in whole numbers.
    return nearest - (duration < _read(limits + nearest)).to(tl.int32)


@triton.jit
def _durations(first_asked, last_asked, first_time, last_time, limits, buckets: tl.constexpr):
    """Find what the bounds of a tile's times say of its durations.

    Returns:
        what is taken from keys' times, and from all durations by that; the lowest and the highest bucket; whether
        durations less that fit in 32 bits; whether durations do.
    """
    # Where all keys are earlier than all queries, even the shortest duration is at least this long.
    shift = tl.maximum(first_asked - last_time, 0)
    shortest = tl.maximum(shift, first_time - last_asked)
    longest = tl.maximum(last_asked - first_time, last_time - first_asked)
    lowest = _bucket_of(shortest, limits, buckets)
    highest = _bucket_of(longest, limits, buckets)
    base = first_asked - shift
    # Both summands bound a difference that kernels form in 32 bits (`_apart`).
    far = tl.maximum(tl.abs(first_time - base), tl.abs(last_time - base))
    fits = (last_asked - first_asked) + far < MOST
    return base, shift, lowest, highest, fits, longest < 2 * MOST


@triton.jit
def _apart(asked_at, times_at, first_asked, base):
    """Durations of a tile in 32 bits, less what `_durations` takes from them."""
    asked = (_read(asked_at) - first_asked).to(tl.int32)
    return tl.abs(asked - (_read(times_at) - base).to(tl.int32))


@triton.jit
def _limit(bucket, shift, limits):
    """The shortest duration of a bucket, less what was taken from all durations."""
    return _clip(_read(limits + bucket) - shift, 0, MOST).to(tl.int32)


@triton.jit
def _buckets(durations, borders, buckets: tl.constexpr):
    """The bucket of every duration: the border that its logarithm is nearest to, or the bucket below that border.

    Borders are 0 and the numbers of `time_buckets.py`; that the logarithm is not exact changes nothing.
    """
    size = tl.maximum(durations.to(tl.float32), 1.0)
    nearest = tl.minimum((_log2(size) * BUCKETS_AN_OCTAVE + 0.5).to(tl.int32), buckets - 1)
    return nearest - (size < _read(borders + nearest)).to(tl.int32)


@triton.jit
def _are_apart(asked, times, limit):
    """Say which times are `limit` or more before which queries.

    The limit is taken from the side of which a thread has two numbers: differences of all pairs would cost more.
    """
    return times + limit <= asked if asked.shape[0] == 1 else times <= asked - limit


@triton.jit
def _ladder(
    asked_at, times_at, first_asked, base, shift, lowest, w_time, limits, buckets: tl.constexpr, steps: tl.constexpr
):  # fmt: skip
    """Biases of durations in the bucket `lowest` or in one of the next `steps`; no key is later than a query."""
    asked = (_read(asked_at) - first_asked).to(tl.int32)
    times = (_read(times_at) - base).to(tl.int32)
    # One of the two is a column and one a row: only their sum has the shape of the tile.
    added = tl.zeros((asked + times).shape, dtype=tl.float32) + _read(w_time + lowest)
    for step in tl.static_range(1, steps + 1):
        # Steps behind the last bucket read its weight again, and no duration reaches their limit.
        weight = _read(w_time + tl.minimum(lowest + step, buckets - 1))
        added = tl.where(_are_apart(asked, times, _limit(lowest + step, shift, limits)), weight, added)
    return added


@triton.jit
def _plus_times(
    s, asked_at, times_at, first_asked, last_asked, first_time, last_time, w_time, borders, limits,
    buckets: tl.constexpr,
):  # fmt: skip
    """Scores of a tile and their biases by time; the times are at two pointers, one of them a column and one a row.

    Where a tile has few buckets, as it has far from the diagonal, its durations are compared with where each of them
    begins; else their logarithms say which.
    """
    base, shift, lowest, highest, fits, are_short = _durations(
        first_asked, last_asked, first_time, last_time, limits, buckets
    )
    # With no key later than a query, durations fall from left to right and a comparison finds a bucket.
    are_ordered = fits & (first_asked >= last_time)
    if are_ordered & (highest - lowest <= FEW):
        s += _ladder(asked_at, times_at, first_asked, base, shift, lowest, w_time, limits, buckets, FEW)
    elif are_ordered & (highest - lowest <= SOME):
        s += _ladder(asked_at, times_at, first_asked, base, shift, lowest, w_time, limits, buckets, SOME)
    elif fits & are_short:
        found = _buckets(_apart(asked_at, times_at, first_asked, base) + shift.to(tl.int32), borders, buckets)
        s += _read(w_time + found)
    else:
        found = _buckets(tl.abs(_read(asked_at) - _read(times_at)), borders, buckets)
        s += _read(w_time + found)
    return s


@triton.jit
def _plus_places(
    s, w_pos, first_row, first_column, last_row, last_column, row_index, column_index, history, half,
    rows_tile: tl.constexpr, columns_tile: tl.constexpr,
):  # fmt: skip
    """Scores of a tile and their biases by place; `last_row` and `last_column` are those that are there.

    Where no place is clipped, each element lies a constant number of places behind one pointer, so that addresses cost
    nothing.
    """
    ahead = first_column - first_row
    # No clip needed: every place of the tile lies in w_pos, and no row stands behind the history.
    is_inside = (ahead + columns_tile - 1 <= half) & (rows_tile - 1 - ahead <= half)
    if is_inside & (tl.maximum(last_row, last_column) <= tl.minimum(history, half)):
        s += _read((w_pos + half + ahead - row_index) + column_index)
    else:
        row_places = _clip(tl.minimum(first_row + row_index, history), 0, half)
        column_places = _clip(tl.minimum(first_column + column_index, history), 0, half)
        s += _read(w_pos + (half + column_places - row_places))
    return s


@triton.jit
def _biased(
    s, row_at, column_at, row_index, column_index, b, sequences,
    first_query, num_queries, query_start, first_key, num_keys, key_start, history, half,
    w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles,
    has_pos: tl.constexpr, has_time: tl.constexpr, buckets: tl.constexpr,
    rows_tile: tl.constexpr, columns_tile: tl.constexpr, times_tile: tl.constexpr,
):  # fmt: skip
    """Scores of the tile at `row_at` and `column_at` in memory, with their biases by place and time."""
    if has_pos:
        s = _plus_places(
            s, w_pos, query_start + row_at, key_start + column_at,
            query_start + tl.minimum(row_at + rows_tile, num_queries) - 1,
            key_start + tl.minimum(column_at + columns_tile, num_keys) - 1,
            row_index, column_index, history, half, rows_tile, columns_tile,
        )  # fmt: skip
    if has_time:
        first_asked, last_asked = _bounds_of(bounds + b * time_tiles * 2, row_at, num_queries, times_tile, rows_tile)
        first_time, last_time = _bounds_of(
            bounds + (sequences + b) * time_tiles * 2, column_at, num_keys, times_tile, columns_tile
        )
        s = _plus_times(
            s, query_times + first_query + tl.minimum(row_at + row_index, num_queries - 1),
            key_times + first_key + tl.minimum(column_at + column_index, num_keys - 1),
            first_asked, last_asked, first_time, last_time, w_time, borders, limits, buckets,
        )  # fmt: skip
    return s


@triton.jit
def _is_seen(rows, columns, history, context, reach):
    low, high = _rows_seen(rows, history, context, reach)
    return ((columns >= low) & (columns < high)) | (columns == rows)


@triton.jit
def _gate(s):
    """The logistic function."""
    return _inverse(1.0 + _exp2(s * -LOG2_E))


@triton.jit
def _weights_and_slopes(s, g, lse, delta, form: tl.constexpr):
    """Weights, and gradients of scores from gradients `g` of weights; both times n for pointwise forms."""
    if form == "silu":
        gate = _gate(s)
        weights = s * gate
        # d silu = σ + s·σ·(1 − σ), with s·σ at hand as the weight.
        slopes = g * (gate + weights * (1.0 - gate))
    elif form == "relu":
        weights = tl.maximum(s, 0.0)
        slopes = tl.where(s > 0.0, g, 0.0)
    else:
        # The sum of the row is in `lse`: one exponential gives the normalised weight, without a maximum.
        weights = _exp2((s - lse) * LOG2_E)
        slopes = weights * (g - delta)
    return weights, slopes


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, lse, offsets, query_offsets, targets, spans, w_pos, w_time, query_times, key_times, borders, limits,
    bounds, time_tiles, sequences, tiles, context, reach, half, scale, inverse,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    heads: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_spans: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr,
    buckets: tl.constexpr,
    form: tl.constexpr, precision: tl.constexpr, rows_tile: tl.constexpr, columns_tile: tl.constexpr,
    times_tile: tl.constexpr,
):  # fmt: skip
    """Results of `rows_tile` queries of one head of one sequence; late queries, which see most, are taken first."""
    pid = tl.program_id(0)
    # Programs start about in the order of their numbers: with the long ones first there is less of a tail.
    tile = tiles - 1 - pid // (sequences * heads)
    b = (pid // heads) % sequences
    head = pid % heads
    first_key, num_keys, first_query, num_queries, query_start, key_start, _length, history = _sequence(
        offsets, query_offsets, targets, spans, b, sequences, has_targets, has_spans
    )
    begin = tile * rows_tile
    if begin >= num_queries:
        return
    # A sequence may be shorter than its context.
    context = tl.minimum(context, history)
    q += first_query * q_row + head * q_head
    k += first_key * k_row + head * k_head
    v += first_key * v_row + head * v_head
    index = tl.arange(0, rows_tile)
    across = tl.arange(0, columns_tile)
    rows = (query_start + begin + index)[:, None]
    queries = _load_tile(q, begin, index, num_queries, q_row, dim, padded, True)
    last_row = query_start + tl.minimum(begin + rows_tile, num_queries) - 1
    left, num_left, whole, num_whole, right, num_right, own, num_own = _columns_of_rows(
        query_start + begin, last_row, history, context, reach, key_start, num_keys, columns_tile
    )
    # With biases all tiles are in one loop: those from here to `num_left` are whole, and go without a mask.
    first_whole = num_left
    if has_pos or has_time:
        num_left += num_whole
    sums = tl.zeros((rows_tile, padded_value), dtype=tl.float32)
    most = tl.full((rows_tile,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((rows_tile,), dtype=tl.float32)
    # With biases one loop has all tiles: the code is twice as long, and the mask is little beside them.
    for masked in tl.static_range(1 if has_pos or has_time else 0, 2):
        for i in range(num_whole if masked == 0 else num_left + num_right + num_own):
            is_edge = masked
            if has_pos or has_time:
                is_edge = (i < first_whole) | (i >= num_left)
            if masked == 0:
                at = whole + i * columns_tile
            else:
                # Left tiles, right ones and own columns have numbers one after the other, and gaps between them in
                # memory.
                at = tl.where(i < num_left, left, right - num_left * columns_tile) + i * columns_tile
                at = tl.where(i < num_left + num_right, at, own + (i - num_left - num_right) * columns_tile)
            keys = _load_tile(k, at, across, num_keys, k_row, dim, padded, masked)
            values = _load_tile(v, at, across, num_keys, v_row, value_dim, padded_value, masked)
            columns = (key_start + at + across)[None, :]
            products = tl.dot(queries, tl.trans(keys), input_precision=precision)
            s = products * scale
            if has_pos or has_time:
                s = _biased(
                    s, begin, at, index[:, None], across[None, :], b, sequences,
                    first_query, num_queries, query_start, first_key, num_keys, key_start, history, half,
                    w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles,
                    has_pos, has_time, buckets, rows_tile, columns_tile, times_tile,
                )  # fmt: skip
            if form == "softmax":
                if is_edge:
                    seen = _is_seen(rows, columns, history, context, reach) & (at + across < num_keys)[None, :]
                    s = tl.where(seen, s, float("-inf"))
                # From here on in powers of 2, the unit's own; `logarithms` below goes back to e.
                s *= LOG2_E
                higher = tl.maximum(most, tl.max(s, axis=1))
                base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that saw nothing yet
                weights = _exp2(s - base[:, None])
                # The maximum may have grown: what was summed so far is brought to the new one.
                shrink = _exp2(most - base)
                total = total * shrink + tl.sum(weights, axis=1)
                sums *= shrink[:, None]
                most = higher
            else:
                weights = s * _gate(s) if form == "silu" else tl.maximum(s, 0.0)
                if is_edge:
                    # Columns behind the last key need no mask: their values were loaded as zeros.
                    weights = tl.where(_is_seen(rows, columns, history, context, reach), weights, 0.0)
            # Rounded to the dtype of the values, which tensor cores ask for; the sum stays FP32.
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=precision)
    if form == "softmax":
        # A row that sees nothing has a total of 0: zeros, not NaN.
        sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        logarithms = tl.where(total > 0.0, most * LN_2 + tl.log(total), float("-inf"))
        tl.store(lse + (first_query + begin + index) * heads + head, logarithms, mask=begin + index < num_queries)
    else:
        sums *= inverse
    out += first_query * out_row + head * out_head
    _store_tile(out, sums, begin, index, num_queries, out_row, value_dim, padded_value)


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    q, k, v, grad, out, lse, delta, dq, offsets, query_offsets, targets, spans, w_pos, w_time, query_times, key_times,
    borders, limits, bounds, time_tiles, sequences, tiles, context, reach, half, scale, inverse,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, out_row, out_head,
    heads: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_spans: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr,
    buckets: tl.constexpr,
    form: tl.constexpr, precision: tl.constexpr, rows_tile: tl.constexpr, columns_tile: tl.constexpr,
    times_tile: tl.constexpr,
):  # fmt: skip
    """Gradients of `rows_tile` queries of one head of one sequence."""
    pid = tl.program_id(0)
    tile = tiles - 1 - pid // (sequences * heads)
    b = (pid // heads) % sequences
    head = pid % heads
    first_key, num_keys, first_query, num_queries, query_start, key_start, _length, history = _sequence(
        offsets, query_offsets, targets, spans, b, sequences, has_targets, has_spans
    )
    begin = tile * rows_tile
    if begin >= num_queries:
        return
    context = tl.minimum(context, history)
    q += first_query * q_row + head * q_head
    k += first_key * k_row + head * k_head
    v += first_key * v_row + head * v_head
    grad += first_query * grad_row + head * grad_head
    index = tl.arange(0, rows_tile)
    across = tl.arange(0, columns_tile)
    rows = (query_start + begin + index)[:, None]
    is_there = begin + index < num_queries
    queries = _load_tile(q, begin, index, num_queries, q_row, dim, padded, True)
    grads = _load_tile(grad, begin, index, num_queries, grad_row, value_dim, padded_value, True)
    sums_of_row = 0.0
    mean = 0.0
    if form == "softmax":
        out += first_query * out_row + head * out_head
        results = _load_tile(out, begin, index, num_queries, out_row, value_dim, padded_value, True)
        # δ = Σ dO·O equals Σ P·dP, so no second pass over the keys is needed (FlashAttention-2, algorithm 2).
        means = tl.sum(grads.to(tl.float32) * results.to(tl.float32), axis=1)
        of_rows = (first_query + begin + index) * heads + head
        tl.store(delta + of_rows, means, mask=is_there)
        # e^(s − ∞) is 0: rows behind the last one weigh nothing.
        logarithms = tl.load(lse + of_rows, mask=is_there, other=float("inf"))
        logarithms = tl.where(logarithms == float("-inf"), float("inf"), logarithms)  # a row that sees nothing
        sums_of_row = logarithms[:, None]
        mean = means[:, None]
    last_row = query_start + tl.minimum(begin + rows_tile, num_queries) - 1
    left, num_left, whole, num_whole, right, num_right, own, num_own = _columns_of_rows(
        query_start + begin, last_row, history, context, reach, key_start, num_keys, columns_tile
    )
    first_whole = num_left
    if has_pos or has_time:
        num_left += num_whole
    sums = tl.zeros((rows_tile, padded), dtype=tl.float32)
    # With biases one loop has all tiles: the code is twice as long, and the mask is little beside them.
    for masked in tl.static_range(1 if has_pos or has_time else 0, 2):
        for i in range(num_whole if masked == 0 else num_left + num_right + num_own):
            is_edge = masked
            if has_pos or has_time:
                is_edge = (i < first_whole) | (i >= num_left)
            if masked == 0:
                at = whole + i * columns_tile
            else:
                at = tl.where(i < num_left, left, right - num_left * columns_tile) + i * columns_tile
                at = tl.where(i < num_left + num_right, at, own + (i - num_left - num_right) * columns_tile)
            keys = _load_tile(k, at, across, num_keys, k_row, dim, padded, masked)
            values = _load_tile(v, at, across, num_keys, v_row, value_dim, padded_value, masked)
            columns = (key_start + at + across)[None, :]
            products = tl.dot(queries, tl.trans(keys), input_precision=precision)
            s = products * scale
            if not (has_pos or has_time):
                g = tl.dot(grads, tl.trans(values), input_precision=precision)
            else:
                s = _biased(
                    s, begin, at, index[:, None], across[None, :], b, sequences,
                    first_query, num_queries, query_start, first_key, num_keys, key_start, history, half,
                    w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles,
                    has_pos, has_time, buckets, rows_tile, columns_tile, times_tile,
                )  # fmt: skip
                # After the biases: before them it would hold registers that they need.
                g = tl.dot(grads, tl.trans(values), input_precision=precision)
            _weights, slopes = _weights_and_slopes(s, g, sums_of_row, mean, form)
            if is_edge:
                seen = _is_seen(rows, columns, history, context, reach)
                # Pointwise forms need no such mask: keys behind the last were loaded as zeros, and add nothing to dQ.
                if form == "softmax":
                    seen = seen & (at + across < num_keys)[None, :]
                slopes = tl.where(seen, slopes, 0.0)
            if keys.dtype == tl.float16:
                slopes *= inverse  # before it is rounded: n times the gradient may be more than FP16 has
            sums = tl.dot(slopes.to(keys.dtype), keys, sums, input_precision=precision)
    # Once a row, where rounding does not force it into the loop.
    if k.dtype.element_ty != tl.float16:
        sums *= inverse
    dq += (first_query * heads + head) * dim
    _store_tile(dq, sums * scale, begin, index, num_queries, heads * dim, dim, padded)


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    q, k, v, grad, lse, delta, dk, dv, offsets, query_offsets, targets, spans, w_pos, w_time, query_times, key_times,
    borders, limits, bounds, time_tiles, sequences, tiles, context, reach, half, scale, inverse,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    heads: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_spans: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr,
    buckets: tl.constexpr,
    form: tl.constexpr, precision: tl.constexpr, rows_tile: tl.constexpr, columns_tile: tl.constexpr,
    times_tile: tl.constexpr,
):  # fmt: skip
    """Gradients of `columns_tile` keys and values of one head of one sequence.

    Early keys, which most rows see, are taken first: tiles are counted from the end of each sequence.
    """
    pid = tl.program_id(0)
    b = (pid // heads) % sequences
    head = pid % heads
    first_key, num_keys, first_query, num_queries, query_start, key_start, length, history = _sequence(
        offsets, query_offsets, targets, spans, b, sequences, has_targets, has_spans
    )
    # Counted from the end of each sequence, tiles may be negative: those sequences are shorter.
    tile = tl.cdiv(num_keys, columns_tile) - tiles + pid // (sequences * heads)
    if tile < 0:
        return
    begin = tile * columns_tile
    context = tl.minimum(context, history)
    q += first_query * q_row + head * q_head
    k += first_key * k_row + head * k_head
    v += first_key * v_row + head * v_head
    grad += first_query * grad_row + head * grad_head
    lse += first_query * heads + head
    delta += first_query * heads + head
    index = tl.arange(0, columns_tile)
    across = tl.arange(0, rows_tile)
    columns = (key_start + begin + index)[:, None]
    keys = _load_tile(k, begin, index, num_keys, k_row, dim, padded, True)
    values = _load_tile(v, begin, index, num_keys, v_row, value_dim, padded_value, True)
    last = key_start + tl.minimum(begin + columns_tile, num_keys) - 1
    of_context, num_context, left, num_left, whole, num_whole, right, num_right = _rows_of_columns(
        key_start + begin, last, history, length, context, reach, query_start, num_queries, rows_tile
    )
    first_whole = num_left
    if has_pos or has_time:
        num_left += num_whole
    of_keys = tl.zeros((columns_tile, padded), dtype=tl.float32)
    of_values = tl.zeros((columns_tile, padded_value), dtype=tl.float32)
    # With biases one loop has all tiles: the code is twice as long, and the mask is little beside them.
    for masked in tl.static_range(1 if has_pos or has_time else 0, 2):
        for i in range(num_whole if masked == 0 else num_left + num_right + num_context):
            is_edge = masked
            if has_pos or has_time:
                is_edge = (i < first_whole) | (i >= num_left)
            limit = num_queries
            if masked == 0:
                at = whole + i * rows_tile
            else:
                at = tl.where(i < num_left, left, right - num_left * rows_tile) + i * rows_tile
                is_context = i >= num_left + num_right
                at = tl.where(is_context, (i - num_left - num_right) * rows_tile, at)
                limit = tl.where(is_context, of_context, num_queries)
            queries = _load_tile(q, at, across, limit, q_row, dim, padded, masked)
            grads = _load_tile(grad, at, across, limit, grad_row, value_dim, padded_value, masked)
            rows = (query_start + at + across)[None, :]
            is_there = at + across < limit
            sums_of_row = 0.0
            mean = 0.0
            if form == "softmax":
                logarithms = tl.load(lse + (at + across) * heads, mask=is_there, other=float("inf"))
                # A row that sees nothing: e^(s − ∞) is 0.
                logarithms = tl.where(logarithms == float("-inf"), float("inf"), logarithms)
                sums_of_row = logarithms[None, :]
                mean = tl.load(delta + (at + across) * heads, mask=is_there, other=0.0)[None, :]
            products = tl.dot(keys, tl.trans(queries), input_precision=precision)
            s = products * scale
            if not (has_pos or has_time):
                g = tl.dot(values, tl.trans(grads), input_precision=precision)
            else:
                s = _biased(
                    # Rows and columns have changed places: here a column of the tile is a query.
                    s, at, begin, across[None, :], index[:, None], b, sequences,
                    first_query, num_queries, query_start, first_key, num_keys, key_start, history, half,
                    w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles,
                    has_pos, has_time, buckets, rows_tile, columns_tile, times_tile,
                )  # fmt: skip
                # After the biases: before them it would hold registers that they need.
                g = tl.dot(values, tl.trans(grads), input_precision=precision)
            weights, slopes = _weights_and_slopes(s, g, sums_of_row, mean, form)
            if is_edge:
                seen = _is_seen(rows, columns, history, context, reach) & is_there[None, :]
                weights = tl.where(seen, weights, 0.0)
                slopes = tl.where(seen, slopes, 0.0)
            if keys.dtype == tl.float16:
                # Before slopes are rounded: n times the gradient may be more than FP16 has.
                slopes *= inverse
            of_values = tl.dot(weights.to(grads.dtype), grads, of_values, input_precision=precision)
            of_keys = tl.dot(slopes.to(queries.dtype), queries, of_keys, input_precision=precision)
    if k.dtype.element_ty != tl.float16:
        of_keys *= inverse
    dk += (first_key * heads + head) * dim
    dv += (first_key * heads + head) * value_dim
    _store_tile(dk, of_keys * scale, begin, index, num_keys, heads * dim, dim, padded)
    _store_tile(dv, of_values * inverse, begin, index, num_keys, heads * value_dim, value_dim, padded_value)


@triton.jit
def _add_four(a, b, c, d, more_a, more_b, more_c, more_d):
    return a + more_a, b + more_b, c + more_c, d + more_d


@triton.jit
def _four_sums(a, b, c, d):
    """Sums of all numbers of four tiles, exchanged between warps at once."""
    if HAS_PTX:
        size: tl.constexpr = a.shape[0] * a.shape[1]
        tiles = (
            # A sum of all has no order to keep, so no number has to move to another thread.
            tl.reshape(a, [size], can_reorder=True),
            tl.reshape(b, [size], can_reorder=True),
            tl.reshape(c, [size], can_reorder=True),
            tl.reshape(d, [size], can_reorder=True),
        )
        sums = tl.reduce(tiles, 0, _add_four)
    else:
        sums = (tl.sum(a), tl.sum(b), tl.sum(c), tl.sum(d))
    return sums


@triton.jit
def _of_four(place, at_least, first, second, third, fourth):
    """Differences of sums that are one inside of the other, at places 0 to 3.

    What lies in a bucket is the sum from it on less the sum from the next one on: one comparison a number. A bucket
    without a number has a difference of equal sums: exactly 0.
    """
    of_pair = tl.where(place == 0, at_least - first, tl.where(place == 1, first - second, 0.0))
    return of_pair + tl.where(place == 2, second - third, tl.where(place == 3, third - fourth, 0.0))


@triton.jit(do_not_specialize=SIZES)
def biases_kernel(
    q, k, v, grad, lse, delta, d_places, d_columns, d_own, d_time, offsets, query_offsets, targets, spans,
    w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles, sequences, tiles, lead, pieces,
    context, reach, half, scale, inverse,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
    heads: tl.constexpr, dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_spans: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr,
    form: tl.constexpr, precision: tl.constexpr, tile: tl.constexpr, buckets: tl.constexpr,
    padded_buckets: tl.constexpr, of_targets: tl.constexpr,
):  # fmt: skip
    """Sums of dS over all heads: of a piece of a block diagonal by place, and by bucket.

    All tiles of a block diagonal hold the same places at the same elements, so they are added up as tiles, and the
    diagonals of the sum are added up once, at the end. Targets stand at one position, so theirs are sums of columns:
    `of_targets` asks for these, a block of columns a program; else rows behind the first target are left out.
    """
    pid = tl.program_id(0)
    b = pid % sequences
    piece = (pid // sequences) % pieces
    band = pid // (sequences * pieces)
    first_key, num_keys, first_query, num_queries, query_start, key_start, _length, history = _sequence(
        offsets, query_offsets, targets, spans, b, sequences, has_targets, has_spans
    )
    context = tl.minimum(context, history)
    if of_targets:
        behind = 0
        first_tile = _clip(history + 1 - query_start, 0, num_queries) // tile
        last_tile = tl.cdiv(num_queries, tile)
        if band * tile >= num_keys:
            return
    else:
        behind = band - lead  # of tiles of rows and tiles of columns
        first_tile = tl.maximum(behind, 0)
        last_tile = tl.minimum(tl.cdiv(num_queries, tile), tl.cdiv(num_keys, tile) + behind)
        if has_pos and has_targets:
            last_tile = tl.minimum(last_tile, tl.cdiv(_clip(history + 1 - query_start, 0, num_queries), tile))
    # Pieces divide the tiles of a diagonal; the last ones may get none, and their slots stay zeros.
    share = tl.cdiv(tl.maximum(last_tile - first_tile, 0), pieces)
    first_tile += piece * share
    last_tile = tl.minimum(last_tile, first_tile + share)
    if first_tile >= last_tile:
        return
    index = tl.arange(0, tile)
    of_buckets = tl.arange(0, padded_buckets)
    sums = tl.zeros((tile, tile), dtype=tl.float32)
    histogram = tl.zeros((padded_buckets,), dtype=tl.float32)
    for row_tile in range(first_tile, last_tile):
        row_at = row_tile * tile
        at = (row_tile - behind) * tile
        if of_targets:
            at = band * tile
        first_row = query_start + row_at
        last_row = query_start + tl.minimum(row_at + tile, num_queries) - 1
        first_column = key_start + at
        last_column = key_start + tl.minimum(at + tile, num_keys) - 1
        low, first_high = _rows_seen(first_row, history, context, reach)
        last_low, high = _rows_seen(last_row, history, context, reach)
        high = tl.maximum(high, first_high)
        is_any = (low <= last_column) & (high > first_column)
        is_any = is_any | ((first_row <= last_column) & (first_column <= last_row))
        if is_any:
            # The same for all heads, so it is computed once and added to each head's products.
            added = _biased(
                # Plain zeros would be folded away, and with them the layout in which biases are to be read.
                _zeros_like(sums), row_at, at, index[:, None], index[None, :], b, sequences,
                first_query, num_queries, query_start, first_key, num_keys, key_start, history, half,
                w_pos, w_time, query_times, key_times, borders, limits, bounds, time_tiles,
                has_pos, has_time, buckets, tile, tile, tile,
            )  # fmt: skip
            slopes_of_heads = tl.zeros((tile, tile), dtype=tl.float32)
            for head in range(heads):
                queries = _load_tile(
                    q + first_query * q_row + head * q_head, row_at, index, num_queries, q_row, dim, padded, True
                )
                keys = _load_tile(k + first_key * k_row + head * k_head, at, index, num_keys, k_row, dim, padded, True)
                grads = _load_tile(
                    grad + first_query * grad_row + head * grad_head,
                    row_at, index, num_queries, grad_row, value_dim, padded_value, True,
                )  # fmt: skip
                values = _load_tile(
                    v + first_key * v_row + head * v_head, at, index, num_keys, v_row, value_dim, padded_value, True
                )
                sums_of_row = 0.0
                mean = 0.0
                if form == "softmax":
                    to = (first_query + row_at + index) * heads + head
                    is_row = row_at + index < num_queries
                    logarithms = tl.load(lse + to, mask=is_row, other=float("inf"))
                    logarithms = tl.where(logarithms == float("-inf"), float("inf"), logarithms)
                    sums_of_row = logarithms[:, None]
                    mean = tl.load(delta + to, mask=is_row, other=0.0)[:, None]
                s = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale + added
                g = tl.dot(grads, tl.trans(values), input_precision=precision)
                _weights, slopes = _weights_and_slopes(s, g, sums_of_row, mean, form)
                # Added before the mask: all heads have the same one, so it is applied to their sum.
                slopes_of_heads += slopes
            least_high = tl.where(last_row < context, history, tl.minimum(tl.maximum(first_row, context) + 1, history))
            is_whole = (last_low <= first_column) & (first_column + tile <= least_high)
            is_whole = is_whole & (row_at + tile <= num_queries) & (at + tile <= num_keys)
            if has_pos and has_targets:
                is_whole = is_whole & ((first_row > history) if of_targets else (last_row <= history))
            if not is_whole:
                rows = (query_start + row_at + index)[:, None]
                columns = (key_start + at + index)[None, :]
                seen = _is_seen(rows, columns, history, context, reach)
                seen = seen & (row_at + index < num_queries)[:, None] & (at + index < num_keys)[None, :]
                if has_pos and has_targets:
                    seen = seen & ((rows > history) if of_targets else (rows <= history))
                slopes_of_heads = tl.where(seen, slopes_of_heads, 0.0)
            sums += slopes_of_heads
            if has_time:
                first_asked, last_asked = _bounds_of(bounds + b * time_tiles * 2, row_at, num_queries, tile, tile)
                first_time, last_time = _bounds_of(bounds + (sequences + b) * time_tiles * 2, at, num_keys, tile, tile)
                base, shift, lowest, highest, fits, _are_short = _durations(
                    first_asked, last_asked, first_time, last_time, limits, buckets
                )
                asked_at = query_times + first_query + tl.minimum(row_at + index, num_queries - 1)[:, None]
                times_at = key_times + first_key + tl.minimum(at + index, num_keys - 1)[None, :]
                # The sum of all numbers of the tile is that of the lowest bucket or a later one.
                at_least = tl.sum(slopes_of_heads)  # in the bucket `bucket` or a later one
                # The condition of the ladder in `_plus_times`: only then durations are comparable without their
                # absolute value.
                if fits & (first_asked >= last_time):
                    asked = (_read(asked_at) - first_asked).to(tl.int32)
                    times = (_read(times_at) - base).to(tl.int32)
                    for bucket in range(lowest, highest + 1, 4):
                        first, second, third, fourth = _four_sums(
                            tl.where(_are_apart(asked, times, _limit(bucket + 1, shift, limits)), slopes_of_heads, 0.0),
                            tl.where(_are_apart(asked, times, _limit(bucket + 2, shift, limits)), slopes_of_heads, 0.0),
                            tl.where(_are_apart(asked, times, _limit(bucket + 3, shift, limits)), slopes_of_heads, 0.0),
                            tl.where(_are_apart(asked, times, _limit(bucket + 4, shift, limits)), slopes_of_heads, 0.0),
                        )
                        histogram += _of_four(of_buckets - bucket, at_least, first, second, third, fourth)
                        at_least = fourth
                else:
                    found = _buckets(tl.abs(_read(asked_at) - _read(times_at)), borders, buckets)
                    for bucket in range(lowest, highest + 1, 4):
                        first, second, third, fourth = _four_sums(
                            tl.where(found > bucket, slopes_of_heads, 0.0),
                            tl.where(found > bucket + 1, slopes_of_heads, 0.0),
                            tl.where(found > bucket + 2, slopes_of_heads, 0.0),
                            tl.where(found > bucket + 3, slopes_of_heads, 0.0),
                        )
                        histogram += _of_four(of_buckets - bucket, at_least, first, second, third, fourth)
                        at_least = fourth
    if has_time:
        slot = (band * pieces + piece) * sequences + b
        tl.store(d_time + slot.to(tl.int64) * buckets + of_buckets, histogram * inverse, mask=of_buckets < buckets)
    if has_pos:
        if of_targets:
            slot = (b * pieces + piece) * tiles + band
            of_columns = tl.sum(sums, axis=0) * inverse
            tl.store(d_columns + slot.to(tl.int64) * tile + index, of_columns)
            is_target = key_start + band * tile + index >= history
            tl.store(d_own + slot, tl.sum(tl.where(is_target, of_columns, 0.0), axis=0))
        else:
            # Element (i, c) becomes (i, (i + c) mod tile): what lies on one diagonal lies in one column then.
            shifted = (index[:, None] + index[None, :]) % tile
            # `tl.sum` cannot add along diagonals, so rows are turned until these are columns.
            turned = tl.gather(sums, shifted, axis=1)
            is_above = index[:, None] + index[None, :] < tile
            # A band has 2 · tile numbers: one for each diagonal that its tiles have.
            to = d_places + ((b * pieces + piece).to(tl.int64) * (tiles + lead) + band) * (2 * tile)
            tl.store(to + tile + index, tl.sum(tl.where(is_above, turned, 0.0), axis=0) * inverse)
            tl.store(to + index, tl.sum(tl.where(is_above, 0.0, turned), axis=0) * inverse)


@triton.jit(do_not_specialize=[size for size in SIZES if size != "pieces"])
def places_kernel(
    d_places, d_columns, d_pos, offsets, query_offsets, targets, spans, sequences, tiles, lead, half, positions,
    has_targets: tl.constexpr, has_spans: tl.constexpr, pieces: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Sums over sequences of what block diagonals, and columns that targets see, hold for `block` places of w_pos."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    distance = places - half
    sums = tl.zeros((block,), dtype=tl.float32)
    for b in range(sequences):
        _first_key, num_keys, _first_query, _num_queries, query_start, key_start, _length, history = _sequence(
            offsets, query_offsets, targets, spans, b, sequences, has_targets, has_spans
        )
        # Rows less columns, counted in memory, are i − j = apart: on diagonals of two bands of tiles.
        apart = key_start - query_start - distance + tile * (lead + 1)
        band = apart // tile - 1
        for piece in tl.static_range(pieces):
            # In 64 bits: sequences × tiles may pass 2³¹.
            of_piece = d_places + tl.cast(b * pieces + piece, tl.int64) * (tiles + lead) * (2 * tile)
            for further in tl.static_range(2):
                place = tile * (1 + further) - apart % tile
                is_there = (apart >= 0) & (band + further >= 0) & (band + further < tiles + lead) & (place < 2 * tile)
                at = (band + further) * (2 * tile) + place
                sums += tl.load(of_piece + at, mask=is_there & (places < positions), other=0.0)
            if has_targets:
                column = distance + history - key_start
                is_seen = (distance < 0) & (column >= 0) & (column < num_keys)
                of_piece = d_columns + tl.cast(b * pieces + piece, tl.int64) * tiles * tile
                sums += tl.load(of_piece + column, mask=is_seen & (places < positions), other=0.0)
    tl.store(d_pos + places, sums, mask=places < positions)
