"""Counts of a window where it is encoded: against a count of all rows by hand, late and bad ones among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import LateRows, StreamConfig
from ziggurat.runs.stream.window_encoder import WindowEncoder
from ziggurat.training.records.run_folder import RunFolder

DAY = 86_400
START = 957_139_200  # 2000-05-01
SCHEMA = zg.Schema(features=(zg.Dense(name="x"),), labels=(zg.Label(name="y"),), time="at")


@dataclass
class Counted:
    """Counts of a window, by hand."""

    day: int
    days_known: list[int] = field(default_factory=list)
    bad: int = 0
    dropped: int = 0

    @property
    def labelled(self) -> int:
        return sum(each <= self.day for each in self.days_known)


def by_hand(frames: list[pl.DataFrame], *, drop: bool) -> list[Counted]:
    """Cut files that come one after the other, row by row."""
    still_open: dict[int, Counted] = {}
    done: list[Counted] = []
    late = Counted(day=0)

    def finish() -> None:
        nonlocal late
        window = still_open.pop(min(still_open))
        window.days_known += late.days_known
        window.bad += late.bad
        window.dropped += late.dropped
        late = Counted(day=0)
        done.append(window)

    for frame in frames:
        for at, known, label in frame.select("at", "known", "y").iter_rows():
            day = (at - START) // DAY
            is_late = bool(done) and day <= done[-1].day
            if is_late and drop:
                late.dropped += 1
                continue
            window = late if is_late else still_open.setdefault(day, Counted(day=day))
            if label == "x":
                window.bad += 1
            else:
                window.days_known.append((known - START) // DAY)
        while len(still_open) > 1:
            finish()
    while still_open:
        finish()
    if late.days_known or late.bad:
        late.day = done[-1].day
        done.append(late)
    return done


def random_files(seed: int) -> list[pl.DataFrame]:
    """Return three files, each of later days than the one before, with some rows of any day."""
    rng = np.random.default_rng(seed)
    frames = []
    for number in range(3):
        size = int(rng.integers(30, 90))
        day = np.where(rng.random(size) < 0.3, rng.integers(0, 6, size), 2 * number + rng.integers(0, 2, size))
        at = START + day * DAY + rng.integers(0, DAY, size)
        known = at + (rng.exponential(1.2 * DAY, size) * rng.integers(0, 2, size)).astype(np.int64)
        y = np.where(rng.random(size) < 0.2, "x", rng.integers(0, 2, size).astype(str))
        frames.append(pl.DataFrame({"x": rng.normal(size=size), "y": y, "at": at, "known": known}))
    return frames


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", list(LateRows))
def test_counts_are_those_of_rows_one_by_one(tmp_path: Path, seed: int, late: LateRows) -> None:
    policy = [LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT][seed % 3]
    delay = DelayConfig(policy=policy, column="known", label="y")
    run = RunFolder(tmp_path / "run")
    data = DataConfig(bad_rows=BadRowPolicy.QUARANTINE)
    arrivals = Arrivals(run.stream, config=StreamConfig(by="day", delay=delay, late=late), data=data, schema=SCHEMA)
    frames = random_files(seed)
    paths: list[Path] = []
    for number, frame in enumerate(frames):
        paths.append(tmp_path / f"{number}.csv")
        frame.write_csv(paths[-1])
        arrivals.take(paths)
        while arrivals.finish_next(is_over=False):
            pass
    while arrivals.finish_next(is_over=True):
        pass
    done = arrivals.journal.done
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path / "fit") as bad_rows:
        fitted = Preprocessing.fit(SCHEMA, arrivals.chunks(done[0]), bad_rows=bad_rows)
    encoder = WindowEncoder(
        run, arrivals=arrivals, data=data, schema=SCHEMA, delay=delay, preprocessing=fitted, teachers=None
    )
    expected = by_hand(frames, drop=late is LateRows.DROP)
    found = []
    for number, window in enumerate(done, start=1):
        encoded = encoder.encode(number, window, shown=lambda rows: None)
        found.append((window.rows - encoded.bad, encoded.bad, encoded.labelled, window.dropped))
    assert found == [(len(each.days_known), each.bad, each.labelled, each.dropped) for each in expected]
    assert sum(bad for _, bad, _, _ in found) > 0
    num_dropped = sum(dropped for _, _, _, dropped in found)
    assert (num_dropped > 0) == (late is LateRows.DROP)
    assert num_dropped == arrivals.journal.dropped
