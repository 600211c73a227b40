"""The population stability index: by its formula, near 0 without a shift, and above the alarm with one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.data.streams.stability import (
    ALARM,
    EDGES,
    BucketCounts,
    WindowCounts,
    stability_index,
    stability_indices,
)

COUNTS = st.lists(st.integers(0, 50), min_size=5, max_size=5)


def rows_of(num_rows: int, *, seed: int = 0) -> pa.Table:
    dataset = tiny_dataset(num_rows, seed=seed)
    return pa.concat_tables(dataset.read_group(index) for index in range(len(dataset.group_sizes)))


def counts_of(table: pa.Table) -> dict[str, list[int]]:
    counts = BucketCounts(tiny_inputs())
    for start in range(0, table.num_rows, 100):
        counts.add(table.slice(start, 100))
    return counts.plain()


@given(COUNTS, COUNTS)
def test_the_index_is_its_formula(ours: list[int], theirs: list[int]) -> None:
    if not sum(ours) or not sum(theirs):
        assert math.isnan(stability_index(ours, theirs))
        return
    total = 0.0
    used = sum(one + other > 0 for one, other in zip(ours, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        if one + other:
            p = (one + 0.5) / (sum(ours) + used / 2)
            q = (other + 0.5) / (sum(theirs) + used / 2)
            total += (p - q) * math.log(p / q)
    expected = max(0.0, total - (used - 1) * (1 / sum(ours) + 1 / sum(theirs)))
    assert stability_index(ours, theirs) == pytest.approx(expected, abs=1e-12)
    assert stability_index(ours, theirs) == pytest.approx(stability_index(theirs, ours))


def test_values_are_counted_once_in_the_buckets_that_are_theirs() -> None:
    table = rows_of(730)
    counts = counts_of(table)
    assert counts.keys() == {"price", "age", "user", "item", "tags"}
    for name in ("price", "age", "user", "item"):
        assert sum(counts[name]) == 730
    tags = table.column("tags").combine_chunks().flatten().to_pylist()
    assert sum(counts["tags"]) == len(tags) > 730
    price = table.column("price").to_pylist()
    for bucket, (low, high) in enumerate(zip([-math.inf, *EDGES], [*EDGES, math.inf], strict=True)):
        assert counts["price"][bucket] == sum(low <= value < high for value in price)
    # Equal ids share a bucket.
    assert sum(map(bool, counts["user"])) <= 40


def test_reserved_rows_and_missing_numbers_have_buckets_of_their_own() -> None:
    columns = {"price": [0.5, math.nan], "age": [1.0, 2.0], "user": [1, 2], "item": [7, -9]}
    table = pa.table({**columns, "tags": pa.array([[], [0, 5]], type=pa.list_(pa.int32()))})
    counts = BucketCounts(tiny_inputs())
    counts.add(table)
    assert counts.plain()["user"][:3] == [0, 1, 1]
    assert counts.plain()["price"][-1] == 1
    assert counts.plain()["tags"][0] == 1
    assert sum(counts.plain()["item"][3:]) == 2


def test_windows_of_one_distribution_are_stable_and_a_shift_of_it_is_not() -> None:
    for num_rows in (150, 2000):
        first, second = (counts_of(rows_of(num_rows, seed=seed)) for seed in (0, 1))
        assert max(stability_indices(first, second).values()) < (ALARM if num_rows < 1000 else ALARM / 4)
    table = rows_of(2000, seed=2)
    index = table.column_names.index("user")
    other = table.set_column(index, "user", pa.array(np.full(2000, 9, dtype=np.int32)))
    moved = stability_indices(counts_of(other), first)
    assert moved["user"] > 1
    assert max(moved[name] for name in ("price", "age", "item", "tags")) < ALARM / 2


def test_a_window_that_is_opened_again_compares_as_it_did(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    windows = {number: counts_of(rows_of(300, seed=number)) for number in range(1, 7)}
    kept = WindowCounts()
    found = {number: kept.add(number, counts, path=path, forgotten=0) for number, counts in windows.items()}
    assert found[1].history == {} == found[1].before
    assert found[6].history == stability_indices(windows[6], windows[1])
    assert found[6].before == stability_indices(windows[6], windows[5])
    for number in (4, 5, 6):
        assert WindowCounts.read(path).add(number, windows[number], path=path, forgotten=3) == found[number]
    assert WindowCounts.read(path).windows.keys() == {"1", "3", "4", "5", "6"}
