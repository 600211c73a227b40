"""The Triton kernels of `triton.py`. Importing this needs the package triton; only `triton.py` does, when asked to."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def _rows_seen(rows, length, history, context, reach):
    """The interval of columns that each row sees besides itself, and its position for the bias."""
    context = tl.minimum(context, history)
    shift = tl.maximum(context - 1, 0)
    position = tl.minimum(rows, history)
    high = tl.where(rows < context, history, tl.minimum(rows + 1, history))
    first = position - reach
    low = tl.where((reach > 0) & (rows >= context) & (first > shift), first, 0)
    return low, high, position


@triton.jit
def _buckets(asked, times, cell_bucket, cell_next):
    """The bucket of every duration, found from its cell (`time_buckets.py`)."""
    apart = asked[:, None] - times[None, :]
    size = tl.maximum(tl.where(apart < 0, -apart, apart).to(tl.float32), 1.0)
    cell = (size.to(tl.int32, bitcast=True) >> 20) - 1016
    return tl.load(cell_bucket + cell) + (size >= tl.load(cell_next + cell)).to(tl.int32)


@triton.jit
def _scores(
    q, k, rows, columns, seen, history, asked, times, w_pos, w_time, cell_bucket, cell_next, scale, half,
    has_pos: tl.constexpr, has_time: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, and which pairs see each other."""
    low, high, position = seen
    inside = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
    inside = inside | (columns[None, :] == rows[:, None])
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if has_pos:
        at = half + tl.minimum(columns, history)[None, :] - position[:, None]
        s += tl.load(w_pos + at, mask=inside, other=0.0)
    if has_time:
        s += tl.load(w_time + _buckets(asked, times, cell_bucket, cell_next))
    return s, inside


@triton.jit
def _load(of, first, index, count, head, heads, width: tl.constexpr, padded: tl.constexpr):
    """Rows `first + index` of one head, (len(index), padded); zeros outside."""
    c = tl.arange(0, padded)
    at = ((first + index)[:, None] * heads + head) * width + c[None, :]
    mask = ((index >= 0) & (index < count))[:, None] & (c < width)[None, :]
    return tl.load(of + at, mask=mask, other=0.0)


@triton.jit
def _store(to, values, first, index, count, head, heads, width: tl.constexpr, padded: tl.constexpr):
    c = tl.arange(0, padded)
    at = ((first + index)[:, None] * heads + head) * width + c[None, :]
    mask = ((index >= 0) & (index < count))[:, None] & (c < width)[None, :]
    tl.store(to + at, values.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _sequence(offsets, query_offsets, targets, b, has_targets: tl.constexpr):
    """First key, length, first query, queries, and length of the history of a sequence."""
    first_key, first_query = tl.load(offsets + b), tl.load(query_offsets + b)
    length, asked = tl.load(offsets + b + 1) - first_key, tl.load(query_offsets + b + 1) - first_query
    history = length
    if has_targets:
        history = length - tl.load(targets + b)
    return first_key, length, first_query, asked, history


@triton.jit
def forward_kernel(
    q, k, v, out, offsets, query_offsets, targets, w_pos, w_time, query_times, key_times, cell_bucket, cell_next,
    heads, context, reach, half, scale, inverse,
    dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Results of `block` queries of one head of one sequence."""
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first_key, length, first_query, asked, history = _sequence(offsets, query_offsets, targets, b, has_targets)
    index = tl.program_id(0) * block + tl.arange(0, block)
    rows = length - asked + index
    seen = _rows_seen(rows, length, history, context, reach)
    queries = _load(q, first_query, index, asked, head, heads, dim, padded)
    asked_at = rows
    if has_time:
        asked_at = tl.load(query_times + first_query + index, mask=index < asked, other=0)
    sums = tl.zeros((block, padded_value), dtype=tl.float32)
    if tl.program_id(0) * block < asked:
        for begin in range(0, length, block):
            columns = begin + tl.arange(0, block)
            keys = _load(k, first_key, columns, length, head, heads, dim, padded)
            values = _load(v, first_key, columns, length, head, heads, value_dim, padded_value)
            times = columns
            if has_time:
                times = tl.load(key_times + first_key + columns, mask=columns < length, other=0)
            s, inside = _scores(
                queries, keys, rows, columns, seen, history, asked_at, times, w_pos, w_time, cell_bucket, cell_next,
                scale, half, has_pos, has_time,
            )  # fmt: skip
            weights = tl.where(inside, s / (1.0 + tl.exp(-s)) * inverse, 0.0)
            sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    _store(out, sums, first_query, index, asked, head, heads, value_dim, padded_value)


@triton.jit
def _slopes(s, inside, g, inverse):
    """Weights and gradients of scores, from scores and gradients of weights."""
    gate = 1.0 / (1.0 + tl.exp(-s))
    weights = tl.where(inside, s * gate * inverse, 0.0)
    return weights, tl.where(inside, g * gate * (1.0 + s * (1.0 - gate)) * inverse, 0.0)


@triton.jit
def queries_kernel(
    q, k, v, grad, dq, d_pos, d_time, offsets, query_offsets, targets, w_pos, w_time, query_times, key_times,
    cell_bucket, cell_next, heads, context, reach, half, scale, inverse,
    dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr, block: tl.constexpr,
    positions: tl.constexpr, buckets: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one head of one sequence, and its share of the biases' gradients.

    One program goes through all bands, and adds to its own share alone: no atomics, so the same bits on repeat.
    """
    pid = tl.program_id(0)
    b, head = pid // heads, pid % heads
    first_key, length, first_query, asked, history = _sequence(offsets, query_offsets, targets, b, has_targets)
    for band in range(0, asked, block):
        index = band + tl.arange(0, block)
        rows = length - asked + index
        seen = _rows_seen(rows, length, history, context, reach)
        queries = _load(q, first_query, index, asked, head, heads, dim, padded)
        grads = _load(grad, first_query, index, asked, head, heads, value_dim, padded_value)
        asked_at = rows
        if has_time:
            asked_at = tl.load(query_times + first_query + index, mask=index < asked, other=0)
        sums = tl.zeros((block, padded), dtype=tl.float32)
        for begin in range(0, length, block):
            columns = begin + tl.arange(0, block)
            keys = _load(k, first_key, columns, length, head, heads, dim, padded)
            values = _load(v, first_key, columns, length, head, heads, value_dim, padded_value)
            times = columns
            if has_time:
                times = tl.load(key_times + first_key + columns, mask=columns < length, other=0)
            s, inside = _scores(
                queries, keys, rows, columns, seen, history, asked_at, times, w_pos, w_time, cell_bucket, cell_next,
                scale, half, has_pos, has_time,
            )  # fmt: skip
            inside = inside & (index < asked)[:, None] & (columns < length)[None, :]
            _, slopes = _slopes(s, inside, tl.dot(grads, tl.trans(values), input_precision="ieee"), inverse)
            sums += tl.dot(slopes.to(keys.dtype), keys, input_precision="ieee")
            if has_pos:
                places = half + tl.minimum(columns, history)[None, :] - tl.minimum(rows, history)[:, None]
                lowest = tl.min(tl.min(tl.where(inside, places, positions), axis=1), axis=0)
                highest = tl.max(tl.max(tl.where(inside, places, -1), axis=1), axis=0)
                for place in range(lowest, highest + 1):
                    of_place = tl.sum(tl.sum(tl.where(places == place, slopes, 0.0), axis=1), axis=0)
                    to = d_pos + pid * positions + place
                    tl.store(to, tl.load(to) + of_place)
            if has_time:
                found = _buckets(asked_at, times, cell_bucket, cell_next)
                lowest = tl.min(tl.min(tl.where(inside, found, buckets), axis=1), axis=0)
                highest = tl.max(tl.max(tl.where(inside, found, -1), axis=1), axis=0)
                for bucket in range(lowest, highest + 1):
                    of_bucket = tl.sum(tl.sum(tl.where(found == bucket, slopes, 0.0), axis=1), axis=0)
                    to = d_time + pid * buckets + bucket
                    tl.store(to, tl.load(to) + of_bucket)
        _store(dq, sums * scale, first_query, index, asked, head, heads, dim, padded)


@triton.jit
def keys_kernel(
    q, k, v, grad, dk, dv, offsets, query_offsets, targets, w_pos, w_time, query_times, key_times, cell_bucket,
    cell_next, heads, context, reach, half, scale, inverse,
    dim: tl.constexpr, value_dim: tl.constexpr, padded: tl.constexpr, padded_value: tl.constexpr,
    has_targets: tl.constexpr, has_pos: tl.constexpr, has_time: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Gradients of `block` keys and values of one head of one sequence."""
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first_key, length, first_query, asked, history = _sequence(offsets, query_offsets, targets, b, has_targets)
    columns = tl.program_id(0) * block + tl.arange(0, block)
    keys = _load(k, first_key, columns, length, head, heads, dim, padded)
    values = _load(v, first_key, columns, length, head, heads, value_dim, padded_value)
    times = columns
    if has_time:
        times = tl.load(key_times + first_key + columns, mask=columns < length, other=0)
    of_keys = tl.zeros((block, padded), dtype=tl.float32)
    of_values = tl.zeros((block, padded_value), dtype=tl.float32)
    if tl.program_id(0) * block < length:
        for band in range(0, asked, block):
            index = band + tl.arange(0, block)
            rows = length - asked + index
            seen = _rows_seen(rows, length, history, context, reach)
            queries = _load(q, first_query, index, asked, head, heads, dim, padded)
            grads = _load(grad, first_query, index, asked, head, heads, value_dim, padded_value)
            asked_at = rows
            if has_time:
                asked_at = tl.load(query_times + first_query + index, mask=index < asked, other=0)
            s, inside = _scores(
                queries, keys, rows, columns, seen, history, asked_at, times, w_pos, w_time, cell_bucket, cell_next,
                scale, half, has_pos, has_time,
            )  # fmt: skip
            inside = inside & (index < asked)[:, None]
            weights, slopes = _slopes(s, inside, tl.dot(grads, tl.trans(values), input_precision="ieee"), inverse)
            of_values += tl.dot(tl.trans(weights.to(grads.dtype)), grads, input_precision="ieee")
            of_keys += tl.dot(tl.trans(slopes.to(queries.dtype)), queries, input_precision="ieee")
    _store(dk, of_keys * scale, first_key, columns, length, head, heads, dim, padded)
    _store(dv, of_values, first_key, columns, length, head, heads, value_dim, padded_value)
