"""The Triton kernels of the update. Importing this needs the package triton; `update.py` says what runs when.

    flatten_…        every lookup as (row of the storage, where its gradient is); `none` for padding and no row
    count_kernel     after the sort: how many runs of equal rows, and chunks of long ones, begin in each block
    cut_kernel       where they begin, and which row each run is of
    partials_kernel  the sum of each chunk of a long run
    combine_kernel   the sum of a long run, from its chunks in order
    apply_kernel     sums of short runs, then the rule: a tile of runs a program, each row read and written once
    bounded_kernel   before any of these: whether no sum of gradients can overflow, or be NaN

How many runs and chunks there are is known to the device alone: launches are as large as they could be, and programs
that have nothing to do end at once.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from ziggurat.ops.bits_triton import bf16_of, mixed, numbers_of, upper_halves


@triton.jit(do_not_specialize=["batch_size", "first_source"])
def flatten_single_kernel(
    slots, single, rows, sources, flag, batch_size, width, first_source, none,
    align: tl.constexpr, samples: tl.constexpr, has_sources: tl.constexpr,
):  # fmt: skip
    """Lookups of one field with one row a sample; sources, if wanted, are counted in units of `align` numbers."""
    sample = tl.program_id(0).to(tl.int64) * samples + tl.arange(0, samples)
    field = tl.program_id(1)
    # Five numbers a slot: kind, index, first row, rows, column (`LookupLayout.packed`).
    slot = slots + field * 5
    inside = sample < batch_size
    row = tl.load(single + tl.load(slot + 1) * batch_size + sample, mask=inside, other=0).to(tl.int64)
    good = (row >= 0) & (row < tl.load(slot + 3))
    # A kernel cannot raise; who launched it asks the flag.
    if tl.max((good == 0).to(tl.int32), axis=0) > 0:
        tl.store(flag, 1)
    # Padding and rows of no table go behind all others, where the sort leaves them out of every run.
    found = tl.where(good & (row > 0), tl.load(slot + 2) + row, none)
    at = field.to(tl.int64) * batch_size + sample
    tl.store(rows + at, found.to(rows.dtype.element_ty), mask=inside)
    if has_sources:
        source = (first_source + sample * width + tl.load(slot + 4)) // align
        tl.store(sources + at, source.to(sources.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch_size", "num_offsets", "num_values", "first_source", "num_features"])
def flatten_lists_kernel(
    slots, slot_of_list, values, offsets, rows, sources, flag, batch_size, num_offsets, num_values, width,
    first_source, none, num_features, steps: tl.constexpr, align: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Lookups of all lists: which list a value is in is found by binary search, so long lists cost no more."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_values
    # A zero of 64 bits.
    place = at * 0
    for step in tl.static_range(steps):  # the last list that begins at or before it
        further = place + (1 << (steps - 1 - step))
        there = further < num_offsets
        begin = tl.load(offsets + further, mask=there, other=0)
        place = tl.where(there & (begin <= at), further, place)
    # Values behind the last list's end are of no list (`Lookups.filled`).
    listed = inside & (place < num_offsets - 1)
    # Lists are feature after feature.
    feature = place // batch_size
    sample = place % batch_size
    position = tl.load(slot_of_list + feature, mask=listed & (feature < num_features), other=-1)
    mine = position >= 0
    slot = slots + position * 5
    row = tl.load(values + at, mask=mine, other=0).to(tl.int64)
    good = (row >= 0) & (row < tl.load(slot + 3, mask=mine, other=1))
    if tl.max((good == 0).to(tl.int32), axis=0) > 0:
        tl.store(flag, 1)
    first_row = tl.load(slot + 2, mask=mine, other=0)
    found = tl.where(mine & good & (row > 0), first_row + row, none)
    source = (first_source + sample * width + tl.load(slot + 4, mask=mine, other=0)) // align
    tl.store(rows + at, found.to(rows.dtype.element_ty), mask=inside)
    tl.store(sources + at, source.to(sources.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch_size", "bound"])
def bounded_kernel(
    slots, single, offsets, grad, verdict, batch_size, width, bound,
    dim: tl.constexpr, padded_dim: tl.constexpr, align: tl.constexpr, samples: tl.constexpr, has_lists: tl.constexpr,
):  # fmt: skip
    """Make the verdict false if a gradient that reaches a row is NaN, or not below the bound.

    A field whose row is padding, or whose list is empty, reads nothing, and its gradient does not count.
    """
    sample = tl.program_id(0).to(tl.int64) * samples + tl.arange(0, samples)
    slot = slots + tl.program_id(1) * 5
    kind = tl.load(slot)
    index = tl.load(slot + 1)
    # A promise to the compiler, which then reads several numbers at once.
    column = tl.multiple_of(tl.load(slot + 4), align)
    inside = sample < batch_size
    at = index * batch_size + sample
    d = tl.arange(0, padded_dim)[None, :]
    mask = inside[:, None] & (d < dim)
    g = tl.load(grad + sample[:, None] * width + column + d, mask=mask, other=0.0).to(tl.float32)
    reads = inside
    if has_lists:
        if kind == 0:
            reads = inside & (tl.load(single + at, mask=inside, other=0) != 0)
        else:
            begin = tl.load(offsets + at, mask=inside, other=0)
            reads = inside & (tl.load(offsets + at + 1, mask=inside, other=0) > begin)
    else:
        reads = inside & (tl.load(single + at, mask=inside, other=0) != 0)
    is_wrong = ((tl.abs(g) < bound) == 0) & reads[:, None]  # a comparison with NaN is false
    if tl.max(tl.max(is_wrong.to(tl.int32), axis=1), axis=0) > 0:
        tl.store(verdict, 0)


@triton.jit
def _begins_of_block(rows, num_lookups, none, block: tl.constexpr):
    """Find which sorted lookups of a block are of a row, and which of them begin a run."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_lookups
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    # The lookup at 0 has nothing before it: −1 is no row, so it begins a run.
    before = tl.load(rows + at - 1, mask=inside & (at > 0), other=-1).to(tl.int64)
    is_run = inside & (row != none)
    return at, inside, row, is_run, is_run & (row != before)


@triton.jit
def _is_long(rows, at, row, begins, num_lookups, long_run: tl.constexpr):
    """Find which runs are long: those whose row is still there `long_run` lookups further."""
    # Sorted: with the row there, all lookups in between have it, too.
    there = begins & (at + long_run < num_lookups)
    return there & (tl.load(rows + at + long_run, mask=there, other=-1).to(tl.int64) == row)


@triton.jit(do_not_specialize=["num_lookups"])
def count_kernel(
    rows, counts, lasts, num_lookups, none,
    has_long: tl.constexpr, long_run: tl.constexpr, chunk: tl.constexpr, steps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Count the runs that begin in each block, and behind all of these counts the chunks of its long runs.

    `lasts` is written where a long run begins: its last lookup, which is found by a search that reads seven places at
    a time, since each read waits for the one before.
    """
    at, _, row, _, begins = _begins_of_block(rows, num_lookups, none, block)
    tl.store(counts + tl.program_id(0), tl.sum(begins.to(tl.int32), axis=0))
    if has_long:
        chunks = tl.zeros([block], dtype=tl.int32)
        is_long = _is_long(rows, at, row, begins, num_lookups, long_run)
        if tl.max(is_long.to(tl.int32), axis=0) > 0:
            # `_is_long` has looked here already.
            last = at + long_run
            for step in tl.static_range(steps):
                # Seven places a step tell 8 parts apart: 3 bits of the answer.
                stride = 1 << (3 * (steps - 1 - step))
                passed = tl.zeros([block], dtype=tl.int64)
                for number in tl.static_range(1, 8):
                    further = last + number * stride
                    there = is_long & (further < num_lookups)
                    same = tl.load(rows + further, mask=there, other=-1).to(tl.int64) == row
                    passed += (there & same).to(tl.int64)
                last += passed * stride
            tl.store(lasts + at, last.to(tl.int32), mask=is_long)
            chunks = tl.where(is_long, (last - at) // chunk + 1, 0).to(tl.int32)
        tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum(chunks, axis=0))


@triton.jit(do_not_specialize=["num_lookups", "batch_size", "first_source"])
def cut_kernel(
    rows, order, sources, slots, ends, lasts, starts, rows_of_runs, sorted_sources, first_chunks, pieces,
    num_lookups, none, batch_size, width, first_source,
    has_sources: tl.constexpr, align: tl.constexpr, has_long: tl.constexpr, long_run: tl.constexpr,
    chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write where each run begins, one more entry for where the last one ends, its row, and the sources in this order.

    Without `sources` lookup n is of field n / batch_size. `ends` are the counts of `count_kernel`, summed up to each
    block. A chunk is written as three numbers: its first lookup, where it ends, and in the first of a run how many the
    run has. `first_chunks` is written for long runs.
    """
    at, inside, row, is_run, begins = _begins_of_block(rows, num_lookups, none, block)
    number = tl.program_id(0)
    run = tl.load(ends + number - 1, mask=number > 0, other=0) + tl.cumsum(begins.to(tl.int32), axis=0) - 1
    tl.store(starts + run, at.to(starts.dtype.element_ty), mask=begins)
    tl.store(rows_of_runs + run, row.to(rows_of_runs.dtype.element_ty), mask=begins)
    # The end of the last run is written by whoever sees that nothing with a row follows.
    following = tl.load(rows + at + 1, mask=is_run & (at + 1 < num_lookups), other=none).to(tl.int64)
    tl.store(starts + run + 1, (at + 1).to(starts.dtype.element_ty), mask=is_run & (following == none))
    # Where the lookup was before the sort.
    place = tl.load(order + at, mask=inside, other=0)
    if has_sources:
        source = tl.load(sources + place, mask=inside, other=0)
    else:
        # Of single fields there are fewer than 2³¹ lookups here (`alone` in runs.py), and 32 bits divide faster.
        lookup = place.to(tl.int32)
        field = lookup // batch_size
        sample = (lookup - field * batch_size).to(tl.int64)
        source = (first_source + sample * width + tl.load(slots + field * 5 + 4, mask=inside, other=0)) // align
    tl.store(sorted_sources + at, source.to(sorted_sources.dtype.element_ty), mask=inside)
    if has_long:
        is_long = _is_long(rows, at, row, begins, num_lookups, long_run)
        if tl.max(is_long.to(tl.int32), axis=0) > 0:
            last = tl.load(lasts + at, mask=is_long, other=0).to(tl.int64)
            chunks = tl.where(is_long, (last - at) // chunk + 1, 0).to(tl.int32)
            most = tl.max(chunks, axis=0)
            # Counts of chunks lie behind those of runs.
            blocks = tl.num_programs(0)
            first = tl.load(ends + blocks + number - 1, mask=number > 0, other=0)
            first += tl.cumsum(chunks, axis=0) - chunks
            tl.store(first_chunks + run, first, mask=is_long)
            tl.store(pieces + 3 * first.to(tl.int64) + 2, chunks, mask=is_long)
            for further in range(0, most):
                piece = pieces + 3 * (first + further).to(tl.int64)
                begin = at + further * chunk
                is_piece = further < chunks
                tl.store(piece, begin.to(tl.int32), mask=is_piece)
                tl.store(piece + 1, tl.minimum(begin + chunk, last + 1).to(tl.int32), mask=is_piece)
                tl.store(piece + 2, tl.zeros([block], tl.int32), mask=is_piece & (further > 0))


@triton.jit
def _sum_of_columns(x):
    """The sum of each row of (rows, columns), (rows,): neighbours are added until one column is left.

    `tl.sum` would add in an order that depends on the threads which hold a row, and so on warps, on the tile and on
    how wide gradients are read; this tree is the same for all.
    """
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
            x = left + right
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _sum_of_lanes(x):
    """The sum of the rows of (lanes, columns), (1, columns): halves are added, in a tree that is written down, too."""
    # Six halvings are enough for 64 lanes; `if` ends it at one.
    for _ in tl.static_range(6):
        if x.shape[0] > 1:
            halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]])
            first, second = tl.split(tl.permute(halves, (1, 2, 0)))
            x = first + second
    return x


@triton.jit
def partials_kernel(
    vectors, sources, pieces, num_chunks, partials,
    dim: tl.constexpr, padded_dim: tl.constexpr, align: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of long runs: lane t of a tile sums members t, t + tile, …; then the lanes."""
    # The host does not know how many chunks there are: a fixed number of programs goes through them in turns.
    for number in range(tl.program_id(0), tl.load(num_chunks), tl.num_programs(0)):
        begin = tl.load(pieces + 3 * number)
        end = tl.load(pieces + 3 * number + 1)
        lane = tl.arange(0, tile)
        d = tl.arange(0, padded_dim)[None, :]
        total = tl.zeros([tile, padded_dim], dtype=tl.float32)
        for first in range(begin, end, tile):
            there = first + lane < end
            source = tl.load(sources + first + lane, mask=there, other=0).to(tl.int64) * align
            mask = there[:, None] & (d < dim)
            total += tl.load(vectors + source[:, None] + d, mask=mask, other=0.0).to(tl.float32)
        whole = _sum_of_lanes(total)
        # In 64 bits: chunks times columns may pass 2³¹.
        tl.store(partials + (number + tl.zeros([1, 1], tl.int64)) * dim + d, whole, mask=d < dim)


@triton.jit
def combine_kernel(pieces, num_chunks, partials, dim: tl.constexpr, padded_dim: tl.constexpr, tile: tl.constexpr):
    """Sum long runs of several chunks, in the place of their first chunk."""
    for number in range(tl.program_id(0), tl.load(num_chunks), tl.num_programs(0)):
        # 0 in chunks that are not the first of their run.
        count = tl.load(pieces + 3 * number + 2)
        if count > 1:
            lane = tl.arange(0, tile)
            d = tl.arange(0, padded_dim)[None, :]
            total = tl.zeros([tile, padded_dim], dtype=tl.float32)
            for first in range(0, count, tile):
                there = first + lane < count
                at = (number + first + lane).to(tl.int64)[:, None] * dim + d
                total += tl.load(partials + at, mask=there[:, None] & (d < dim), other=0.0)
            whole = _sum_of_lanes(total)
            tl.store(partials + (number + tl.zeros([1, 1], tl.int64)) * dim + d, whole, mask=d < dim)


@triton.jit
def _rounding_bits(origins, num_origins, row, there, step_number, d):
    """16 random bits for each row and column; `ops/row_formats/noise.py` defines them."""
    # Tables are few and begin in rising order: the last that begins at or before a row is its own.
    origin = row * 0
    for number in range(1, num_origins):
        origin = tl.where(tl.load(origins + number * 4) <= row, number, origin)
    own = origins + origin * 4
    shift = tl.load(own + 1, mask=there, other=0)
    key = tl.load(own + 2, mask=there, other=0)
    column = tl.load(own + 3, mask=there, other=0)
    golden = 0x9E3779B97F4A7C15
    key = mixed(key.to(tl.uint64, bitcast=True) + step_number.to(tl.uint64, bitcast=True) * golden)
    word = mixed(key + (row + shift).to(tl.uint64, bitcast=True) * golden).to(tl.uint32) + column.to(tl.uint32)
    # From here on in 32 bits, which is what GPUs multiply fast.
    z = word[:, None] + (d + 1).to(tl.uint32) * 0x9E3779B9
    z = z ^ (z >> 16)
    z = z * 0x7FEB352D
    z = z ^ (z >> 15)
    z = z * 0x846CA68B
    return (z ^ (z >> 16)) >> 16


@triton.jit
def _sums_of_runs(
    vectors, sources, first_chunks, partials, run, begin, end, there, mask, d,
    has_long: tl.constexpr, long_run: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    align: tl.constexpr, tile: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Sums of `tile` runs, each summed in the order of the batch; sums of long runs are there already."""
    g = tl.zeros([tile, padded_dim], dtype=tl.float32)
    stop = end
    if has_long:
        # `combine_kernel` has summed long runs: their sum is where theirs begins, and the loop adds nothing to it. Read
        # before the loop, which then needs fewer registers than if it kept what says where that sum is.
        is_long = there & (end - begin > long_run)
        part = tl.load(first_chunks + run, mask=is_long, other=0).to(tl.int64)
        g = tl.load(partials + part[:, None] * dim + d, mask=is_long[:, None] & mask, other=0.0)
        stop = tl.where(is_long, begin, end)
    # As long as the longest run of the tile; the others are masked.
    for first in range(0, tl.max(stop - begin, axis=0), unroll):
        for number in tl.static_range(unroll):
            at = begin + first + number
            source = tl.load(sources + at, mask=at < stop, other=0).to(tl.int64) * align
            use = (at < stop)[:, None] & mask
            g += tl.load(vectors + source[:, None] + d, mask=use, other=0.0).to(tl.float32)
    return g


@triton.jit
def _updated(
    w, g, squares, first_state, second_state, row, there, place, mask, size, eps, rest1, rest2,
    rule: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """The weights after the rule; its state is written. The formulas are in `ops/table_optimizers/`.

    `squares` is the sum that Adagrad has kept so far.
    """
    if rule == "adagrad":
        # Row-wise Adagrad: one sum a row, of the mean of squared gradients.
        square = _sum_of_columns(tl.where(mask, g * g, 0.0)) / dim
        total = squares + square
        tl.store(first_state + row, total, mask=there)
        # −size as a tensor, for `div_rn`, which rounds as the reference's division does.
        factor = tl.div_rn(0.0 * total - size, tl.sqrt_rn(total) + eps)
        w = w + g * factor[:, None]
    elif rule == "adam":
        a = tl.load(first_state + place, mask=mask, other=0.0)
        v = tl.load(second_state + place, mask=mask, other=0.0)
        # As `lerp` computes it: rest is 1 − β.
        a = a + rest1 * (g - a)
        v = v + rest2 * (g * g - v)
        tl.store(first_state + place, a, mask=mask)
        tl.store(second_state + place, v, mask=mask)
        w = w - size * tl.div_rn(a, tl.sqrt_rn(v) + eps)
    else:
        w = w - size * g
    return w


@triton.jit(do_not_specialize=["num_runs", "most_runs", "num_origins", "step_number"])
def apply_kernel(
    weight, first_state, second_state, vectors, rows, sources, starts, num_runs, first_chunks, partials,
    sums, summed_rows, learning_rate, scale, applies, eps, weight_decay, rest1, rest2,
    origins, num_origins, step_number, most_runs,
    size_there: tl.constexpr, scale_there: tl.constexpr, applies_there: tl.constexpr, number_there: tl.constexpr,
    rule: tl.constexpr, is_summed: tl.constexpr, has_decay: tl.constexpr, has_long: tl.constexpr,
    long_run: tl.constexpr, rounding: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    align: tl.constexpr, tile: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of `tile` runs, and apply the rule to their rows.

    `rule` is "sum" (write the sums, and behind them zeros of row 0, `most_runs` in all), "sgd", "adagrad" or "adam".
    With `is_summed` a run is one vector at its own place.
    Numbers of which `…_there` is true are on the device. `rounding` is "none" (FP32), or how a row in BF16 is rounded:
    "nearest", "stochastic".
    """
    run = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    count = num_runs if is_summed else tl.load(num_runs)
    goes = tl.program_id(0).to(tl.int64) * tile < count
    if rule == "sum":
        # Sums have a fixed number of rows: also programs without a run write theirs, as zeros.
        goes = tl.program_id(0) >= 0
    if applies_there:
        goes = goes & (tl.load(applies) != 0)
    if goes:
        there = run < count
        d = tl.arange(0, padded_dim)[None, :]
        mask = there[:, None] & (d < dim)
        row = tl.load(rows + run, mask=there, other=0).to(tl.int64)
        if is_summed:
            there = there & ((row != 0) | (run == 0))  # behind the distinct rows padding fills up
            mask = there[:, None] & (d < dim)
        else:
            begin = tl.load(starts + run, mask=there, other=0)
            end = tl.load(starts + run + 1, mask=there, other=0)
        if rule != "sum":  # on their way while gradients are summed
            place = row[:, None] * dim + d
            stored = tl.load(weight + place, mask=mask, other=0)
        squares = 0.0
        if rule == "adagrad":
            squares = tl.load(first_state + row, mask=there, other=0.0)
        if is_summed:
            g = tl.load(vectors + run[:, None] * dim + d, mask=mask, other=0.0).to(tl.float32)
        else:
            g = _sums_of_runs(
                vectors, sources, first_chunks, partials, run, begin, end, there, mask, d,
                has_long, long_run, dim, padded_dim, align, tile, unroll,
            )  # fmt: skip
        if rule == "sum":
            fits = run < most_runs
            tl.store(sums + run[:, None] * dim + d, g, mask=fits[:, None] & (d < dim))
            tl.store(summed_rows + run, row, mask=fits)
        else:
            w = numbers_of(stored)
            size = tl.load(learning_rate).to(tl.float32) if size_there else learning_rate
            g = g * (tl.load(scale).to(tl.float32) if scale_there else scale)
            if has_decay:
                g = g + w * weight_decay
            w = _updated(
                w, g, squares, first_state, second_state, row, there, place, mask, size, eps, rest1, rest2, rule, dim
            )  # fmt: skip
            if rounding == "none":
                tl.store(weight + place, w, mask=mask)
            elif rounding == "stochastic":
                number = row * 0 + (tl.load(step_number) if number_there else step_number)
                added = _rounding_bits(origins, num_origins, row, there, number, d)
                tl.store(weight + place, upper_halves(w, added), mask=mask)
            else:
                tl.store(weight + place, bf16_of(w), mask=mask)
