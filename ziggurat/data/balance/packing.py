"""Packing: a step takes samples in the order of the stream until a budget of tokens is full.

    lengths     900  50  700 | 1500 | 2600 | 30  10 …       budget 1,700
    batches     [    3     ]   [1]    [1]    [  …

Where the lengths of lists differ a hundredfold, a fixed number of samples makes steps of tenfold different work, and
memory must fit the worst. A budget makes the work of steps alike and leaves the order alone: no bucket waits for
samples of its length, so time is not reordered. A sample above the budget is a step by itself; nothing is cut or left
out.

Where a batch ends follows from the samples after the last end alone, so a stream that goes on at any batch is cut as
it would have been: resuming needs only the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ziggurat.features.batch import Batch
from ziggurat.features.batches.samples import concatenate_batches


def packed(
    batches: Iterator[Batch], *, budget: float, most: int, cost_of: Callable[[Batch], np.ndarray]
) -> Iterator[Batch]:
    """The same samples in the same order, in batches of at most `budget` cost.

    Args:
        batches: in the order of the stream.
        budget: the cost that no batch exceeds, unless one sample does.
        most: samples of a batch, at most.
        cost_of: (B,) of the samples of a batch, not negative: their tokens.
    """
    waiting: list[Batch] = []
    for batch in batches:
        if not batch.batch_size:
            continue
        rest = concatenate_batches([*waiting, batch])
        ends = np.cumsum(cost_of(rest))
        begin = 0
        # What reaches the last sample waits, since samples to come may still fit, unless it has as many as may be.
        while (end := _end(ends, begin, budget=budget, most=most)) < rest.batch_size or end - begin == most:
            yield rest.rows(begin, end)
            begin = end
        waiting = [rest.rows(begin, rest.batch_size)] if begin < rest.batch_size else []
    yield from waiting


def _end(ends: np.ndarray, begin: int, *, budget: float, most: int) -> int:
    """Return where the batch that begins with sample `begin` ends; at the number of samples where more would fit."""
    if begin == len(ends):
        return begin
    done = float(ends[begin - 1]) if begin else 0.0
    fitting = int(np.searchsorted(ends, done + budget, side="right"))
    # One sample at least, even if it exceeds the budget alone.
    return min(max(fitting, begin + 1), begin + most, len(ends))
