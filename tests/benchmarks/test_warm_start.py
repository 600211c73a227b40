"""The benchmark of warm starts: contestants carry the same rows over, and curves are read as they should be."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np
import pytest

from benchmarks import warm_start, warm_start_rows
from ziggurat.errors import ConfigError


def test_all_contestants_carry_the_rows_of_the_same_ids_over(tmp_path: Path) -> None:
    num_ids = 2_000
    warm_start_rows.make(tmp_path, num_ids=num_ids)
    theirs, mine = (warm_start_rows.ids_of(tmp_path, side).to_list() for side in ("theirs", "mine"))
    old = np.load(tmp_path / "weights.npy")[3:]
    row_of = {each: row for row, each in enumerate(theirs)}
    known = [row for row, each in enumerate(mine) if each in row_of]
    assert len(known) == 0.9 * num_ids
    of_vocabulary = {row: old[row_of[mine[row]]] for row in known}
    wanted = {
        "vocabulary": of_vocabulary,
        "growing": dict(enumerate(old)),
        "hashing": dict(enumerate(np.concatenate([old, old]))),
    }
    for case in warm_start_rows.CASES:
        results = [
            warm_start_rows.by_ziggurat(case, tmp_path, num_ids=num_ids),
            warm_start_rows.by_pandas(case, tmp_path),
            *([warm_start_rows.by_polars(tmp_path)] if case == "vocabulary" else []),
        ]
        assert len(results) == len(warm_start_rows.contestants_of(case))
        for measured, table in results:
            assert measured["cpu_s"] > 0
            rows = list(wanted[case])
            assert np.array_equal(table[3:][rows], np.stack([wanted[case][row] for row in rows]))
        new = sorted(set(range(len(results[0][1]) - 3)) - set(wanted[case]))
        assert not np.isin(results[0][1][3:][new, 0], old[:, 0]).any()  # as they were drawn


def test_memory_that_is_freed_again_counts() -> None:
    # Mapped by itself: malloc may give memory that an earlier test has freed and the process still has.
    with warm_start_rows.Measured() as measured, mmap.mmap(-1, 48_000_000) as many:
        for page in range(0, len(many), mmap.PAGESIZE):
            many[page] = 1
    assert 45_000_000 < measured.peak_bytes < 80_000_000


def test_steps_are_counted_to_the_first_that_is_as_low() -> None:
    curve = [(0, 0.7, 1.0), (10, 0.61, 0.9), (20, 0.58, 0.85), (30, 0.6, 0.88)]
    assert warm_start.steps_to(curve, 0.6) == 20
    assert warm_start.steps_to(curve, 0.7) == 0
    assert warm_start.steps_to(curve, 0.5) == math.inf


def test_a_finished_run_is_not_made_again(tmp_path: Path) -> None:
    made = list[int]()

    def make() -> dict[str, object]:
        made.append(1)
        return {"auc": 0.7}

    path = tmp_path / "cold.json"
    assert warm_start.kept(path, make) == warm_start.kept(path, make) == {"auc": 0.7}
    assert made == [1]


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="quality"):
        warm_start.run(options=warm_start.parse_options(["--parts", "gears"]))
