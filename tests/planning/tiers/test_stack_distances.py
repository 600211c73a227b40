"""Stack distances against a list that is searched, a touch at a time, and curves against caches that are simulated."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest

from ziggurat.planning.tiers.miss_ratio import RowTrace, miss_ratio_curve
from ziggurat.planning.tiers.stack_distances import FIRST_TOUCH, smaller_before, stack_distances


def searched_distances(rows: list[int]) -> list[int]:
    stack: list[int] = []
    found = []
    for row in rows:
        found.append(stack.index(row) if row in stack else FIRST_TOUCH)
        stack = [row, *(other for other in stack if other != row)]
    return found


def walked_misses(trace: RowTrace, cache_rows: int) -> tuple[int, int]:
    """Touches and lookups that a cache of rows misses which never evicts a row of the batch that it serves."""
    stamps: dict[int, tuple[int, int]] = {}  # cached row: its last batch, and the order in which rows came
    touches = lookups = came = 0
    for number, (begin, end) in enumerate(itertools.pairwise(trace.bounds.tolist())):
        rows = trace.rows[begin:end].tolist()
        missed = [(row, count) for row, count in zip(rows, trace.lookups[begin:end].tolist(), strict=True)
                  if row not in stamps]  # fmt: skip
        if number >= trace.counted_from:
            touches, lookups = touches + len(missed), lookups + sum(count for _, count in missed)
        for row in rows:
            if row in stamps:
                stamps[row] = number, stamps[row][1]
        for row, _ in missed:
            old = min((row for row in stamps if stamps[row][0] < number), key=lambda row: stamps[row], default=None)
            if len(stamps) >= cache_rows and old is not None:
                del stamps[old]
            if len(stamps) < cache_rows:
                stamps[row] = number, came
                came += 1
    return touches, lookups


def least_recent_misses(trace: RowTrace, cache_rows: int) -> tuple[int, int]:
    """The same of a cache that serves one touch after the other."""
    cache: OrderedDict[int, None] = OrderedDict()
    touches = lookups = 0
    for place, (row, count) in enumerate(zip(trace.rows.tolist(), trace.lookups.tolist(), strict=True)):
        if row in cache:
            cache.move_to_end(row)
            continue
        touches, lookups = (touches + 1, lookups + count) if place >= trace.first_counted else (touches, lookups)
        cache[row] = None
        if len(cache) > cache_rows:
            cache.popitem(last=False)
    return touches, lookups


@pytest.mark.parametrize("seed", range(20))
def test_distances_are_those_of_a_searched_list(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, generator.integers(1, 40), generator.integers(0, 80))
    assert stack_distances(rows).tolist() == searched_distances(rows.tolist())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 64, 65])
def test_smaller_numbers_to_the_left(count: int) -> None:
    numbers = np.random.default_rng(count).permutation(count)
    expected = [int((numbers[:place] < number).sum()) for place, number in enumerate(numbers)]
    assert smaller_before(numbers).tolist() == expected


def zipf_trace(*, seed: int, num_rows: int, batches: int, size: int, share: float = 1.0) -> RowTrace:
    generator = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, num_rows + 1) ** 0.9
    drawn = generator.permutation(num_rows)[generator.choice(num_rows, (batches, size), p=weights / weights.sum())]
    touched = [np.unique(rows, return_counts=True) for rows in drawn]
    return RowTrace.of_batches(touched, num_rows=num_rows, counted_from=batches // 2, share=share)


@pytest.mark.parametrize("seed", range(4))
def test_curves_are_those_of_simulated_caches(seed: int) -> None:
    trace = zipf_trace(seed=seed, num_rows=200, batches=20, size=40)
    curve = miss_ratio_curve(trace)
    for cache_rows in (0, 1, 5, 20, 37, 60, 100, 199, 200):
        served = walked_misses if cache_rows < 2 * trace.most_touches else least_recent_misses
        touches, lookups = served(trace, cache_rows)
        found = curve.at(cache_rows)
        assert found.touches == pytest.approx(touches / trace.all_touches, abs=1e-12)
        assert found.lookups == pytest.approx(lookups / trace.all_lookups, abs=1e-12)
        near, _ = walked_misses(trace, cache_rows)
        assert found.touches == pytest.approx(near / trace.all_touches, abs=0.05)  # rows of a batch are equally old
    assert curve.first_touches == curve.misses(200)
    assert curve.error(20) == 0.0


def test_a_sample_of_rows_is_near_the_curve_and_says_how_near() -> None:
    exact = miss_ratio_curve(zipf_trace(seed=3, num_rows=20_000, batches=40, size=1_000))
    sampled = miss_ratio_curve(zipf_trace(seed=3, num_rows=20_000, batches=40, size=1_000, share=0.2))
    sizes = (500, 1_000, 2_000, 4_000, 10_000)
    off = [abs(sampled.misses(size) - exact.misses(size)) for size in sizes]
    claimed = [sampled.error(size) for size in sizes]
    assert max(off) < 0.05
    assert all(error > 0 for error in claimed)
    assert np.mean(off) < 3 * np.mean(claimed) < 0.15


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_cache_of_one_place_a_row_misses_what_a_simulated_one_does(share: float) -> None:
    trace = zipf_trace(seed=1, num_rows=2_000, batches=60, size=200)
    curve = miss_ratio_curve(zipf_trace(seed=1, num_rows=2_000, batches=60, size=200, share=share))
    for cache_rows in (50, 300, 1_500):
        missed, generator = 0, np.random.default_rng(0)
        for _ in range(4):
            place, held = generator.integers(0, cache_rows, 2_000), np.full(cache_rows, -1)
            for index, row in enumerate(trace.rows.tolist()):
                missed += index >= trace.first_counted and held[place[row]] != row
                held[place[row]] = row
        found = curve.one_place(cache_rows).touches
        assert found == pytest.approx(missed / 4 / trace.all_touches, abs=0.02 if share == 1.0 else 0.06)
        assert found > curve.misses(cache_rows) - 0.02
    assert curve.one_place(2_000).touches == curve.first_touches


def test_nothing_touched_misses_nothing() -> None:
    curve = miss_ratio_curve(RowTrace.of_batches([], num_rows=10))
    assert curve.misses(3) == curve.one_place(3).touches == curve.first_touches == 0.0
