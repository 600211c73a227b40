"""When rows are trained, and as what, if their labels are known later: against a loop, and over windows of a stream."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings

import ziggurat as zg
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.journal import Window
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay, lessons
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.label_state import LabelState
from ziggurat.features.schema import Task

DAY = 86_400
SCHEMA = zg.Schema(features=(zg.Dense(name="x"),), labels=(zg.Label(name="y"),), time="at")
START = 957_139_200  # 2000-05-01
KNOWN, ASSUMED, CORRECTED, CONFIRMED = LabelState


def correct(**settings_: object) -> DelayConfig:
    return DelayConfig(policy=LabelDelay.CORRECT, column="known", **settings_)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 60), st.booleans(), st.booleans()), min_size=0, max_size=20
    ),
    policy=st.sampled_from([LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT]),
    observe=st.sampled_from([0, 7, 30]),
    confirms=st.booleans(),
    negatives_first=st.booleans(),
)
def test_lessons_are_those_of_a_loop(
    rows: list[tuple[int, int, bool, bool]], policy: LabelDelay, observe: int, confirms: bool, negatives_first: bool
) -> None:
    config = DelayConfig(
        policy=policy,
        column="known",
        observe_s=float(observe),
        confirms=confirms,
        negatives_first=negatives_first,
    )
    expected: Counter[tuple[int, LabelState, float]] = Counter()
    for index, (at, delay, is_positive, is_bad) in enumerate(rows):
        if is_bad:
            continue
        known = at + delay
        if policy is LabelDelay.WAIT:
            expected[index, KNOWN, known] += 1
            continue
        is_known = known <= at + observe and not (is_positive and negatives_first)
        expected[index, KNOWN if is_known else ASSUMED, at + observe] += 1
        if policy is LabelDelay.CORRECT and not is_known and (is_positive or confirms):
            expected[index, CORRECTED if is_positive else CONFIRMED, known] += 1
    times = np.array([np.nan if bad else float(at) for at, _, _, bad in rows])
    known = times + np.array([float(delay) for _, delay, _, _ in rows])
    found: Counter[tuple[int, LabelState, float]] = Counter()
    for lesson in lessons(times, known, np.array([y for _, _, y, _ in rows], dtype=bool), config=config):
        for index in np.flatnonzero(lesson.mask).tolist():
            found[index, lesson.state, float(lesson.at_s[index])] += 1
    assert found == expected


def conversions(num_rows: int, *, days: int, seed: int = 0, longest_days: float = 3.0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    at = START + rng.integers(0, days * DAY, num_rows)
    y = (rng.random(num_rows) < 0.4).astype(int)
    delay = np.where(y == 1, rng.exponential(0.8 * DAY, num_rows).clip(0, longest_days * DAY), longest_days * DAY)
    return pl.DataFrame({"x": rng.normal(size=num_rows), "y": y, "at": at, "known": at + delay.astype(int)})


def arrivals(folder: Path, *, delay: DelayConfig, by: str = "day", until: str = "", **data: object) -> Arrivals:
    config = StreamConfig(by=by, delay=delay, until=until)
    return Arrivals(folder, config=config, data=DataConfig(**data), schema=SCHEMA)  # type: ignore[arg-type]


def learned(held: Arrivals, window: Window) -> dict[LabelState, list[int]]:
    found: dict[LabelState, list[int]] = {}
    for state, chunk in held.lessons(window):
        found.setdefault(state, []).extend(chunk.global_rows.tolist())
    return {state: sorted(rows) for state, rows in found.items()}


@pytest.mark.parametrize("observe_s", [0.0, DAY / 4])
def test_each_row_is_learned_in_the_window_that_holds_its_moment(tmp_path: Path, observe_s: float) -> None:
    frame = conversions(900, days=6)
    frame[:500].write_parquet(tmp_path / "a.parquet", row_group_size=90)
    frame[500:].write_parquet(tmp_path / "b.parquet")
    held = arrivals(tmp_path / "stream", delay=correct(observe_s=observe_s, confirms=True))
    held.take([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    while held.finish_next(is_over=True):
        pass
    at = frame["at"].to_numpy()
    known = frame["known"].to_numpy()
    y = frame["y"].to_numpy()
    is_known = known <= at + observe_s
    first = np.floor((at + observe_s - START) / DAY)
    again = np.floor((known - START) / DAY)
    journal = held.journal
    assert [window.rows for window in journal.done] == [
        int((at // DAY == START // DAY + day).sum()) for day in range(6)
    ]
    for day, window in enumerate(journal.done):
        expected = {
            KNOWN: np.flatnonzero(is_known & (first == day)),
            ASSUMED: np.flatnonzero(~is_known & (first == day)),
            CORRECTED: np.flatnonzero(~is_known & (y == 1) & (again == day)),
            CONFIRMED: np.flatnonzero(~is_known & (y == 0) & (again == day)),
        }
        found = learned(held, window)
        assert found == {state: rows.tolist() for state, rows in expected.items() if len(rows)}
        mine = at // DAY == START // DAY + day
        labelled = sum(int(held.known_labels(chunk, window).sum()) for chunk in held.chunks(window))
        assert labelled == int((mine & (again <= day)).sum())
    waiting = int((first > 5).sum()) + int((~is_known & (again > 5)).sum())
    assert held.num_waiting == waiting > 0


def test_what_waits_is_learned_when_files_of_later_windows_come(tmp_path: Path) -> None:
    frame = conversions(400, days=4)
    frame.write_parquet(tmp_path / "a.parquet")
    held = arrivals(tmp_path / "stream", delay=correct())
    held.take([tmp_path / "a.parquet"])
    while held.finish_next(is_over=True):
        pass
    before = held.num_waiting
    held.forget(4)
    later = conversions(50, days=1, seed=2).with_columns(pl.col("at") + 9 * DAY, pl.col("known") + 9 * DAY)
    later.write_parquet(tmp_path / "b.parquet")
    again = arrivals(tmp_path / "stream", delay=correct())  # as another process reads the journal
    assert again.journal == held.journal
    again.take([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    while again.finish_next(is_over=True):
        pass
    found = learned(again, again.journal.done[-1])
    assert len([row for row in found[CORRECTED] if row < 400]) == before
    corrected = [row for row in found[CORRECTED] if row < 400]
    corrected += [row for window in held.journal.done for row in learned(held, window).get(CORRECTED, [])]
    assert len(set(corrected)) == len(corrected)


def test_all_rows_wait_as_long_as_a_positive_may_take(tmp_path: Path) -> None:
    frame = conversions(300, days=6, longest_days=2.0)
    frame = frame.with_columns(known=pl.when(pl.col("y") == 1).then("known"))
    frame.write_parquet(tmp_path / "a.parquet")
    delay = DelayConfig(policy=LabelDelay.WAIT, column="known", attribution_s=2.0 * DAY)
    held = arrivals(tmp_path / "stream", delay=delay)
    held.take([tmp_path / "a.parquet"])
    while held.finish_next(is_over=True):
        pass
    at = frame["at"].to_numpy()
    for day, window in enumerate(held.journal.done):
        rows = np.flatnonzero((at + 2 * DAY) // DAY == START // DAY + day).tolist()
        assert learned(held, window) == ({KNOWN: rows} if rows else {})


def test_late_rows_and_their_corrections_are_learned_once(tmp_path: Path) -> None:
    frame = conversions(300, days=4)
    frame.filter(pl.int_range(300) % 10 != 0).write_parquet(tmp_path / "a.parquet")
    held = arrivals(tmp_path / "stream", delay=correct(confirms=True))
    held.take([tmp_path / "a.parquet"])
    while held.finish_next(is_over=False):
        pass
    frame.filter(pl.int_range(300) % 10 == 0).write_parquet(tmp_path / "b.parquet")
    conversions(5, days=1).with_columns(pl.col("at", "known") + 20 * DAY).write_parquet(tmp_path / "c.parquet")
    assert held.take([tmp_path / "b.parquet"]).late > 0
    held.take([tmp_path / "c.parquet"])
    while held.finish_next(is_over=True):
        pass
    found: Counter[LabelState] = Counter()
    rows: set[tuple[LabelState, int]] = set()
    for window in held.journal.done:
        for state, numbers in learned(held, window).items():
            found[state] += len(numbers)
            rows |= {(state, number) for number in numbers}
    assert sum(found.values()) == len(rows)
    positives = int(frame["y"].sum())
    assert (found[ASSUMED], found[CORRECTED]) == (305, positives)
    assert found[CONFIRMED] == 300 - positives


def test_positives_that_come_at_once_are_known_unless_a_loss_takes_all_for_negatives_first() -> None:
    times = np.full(4, 100.0)
    is_positive = np.array([True, True, False, False])
    for policy in (LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT):
        config = DelayConfig(policy=policy, column="known")
        found = {each.state: int(each.mask.sum()) for each in lessons(times, times, is_positive, config=config)}
        assert found[KNOWN] == 4
        assert sum(found.values()) == 4, "none is trained twice"
    config = correct(negatives_first=True)
    found = {each.state: int(each.mask.sum()) for each in lessons(times, times, is_positive, config=config)}
    assert found == {KNOWN: 2, ASSUMED: 2, CORRECTED: 2}


def test_rows_from_until_on_are_learned_by_nobody(tmp_path: Path) -> None:
    conversions(300, days=4).write_parquet(tmp_path / "a.parquet")
    held = arrivals(tmp_path / "stream", delay=correct(), until="2000-05-04")
    held.take([tmp_path / "a.parquet"])
    assert held.journal.unlearned > 0
    while held.finish_next(is_over=True):
        pass
    assert held.num_waiting == 0


def test_a_label_before_its_row_is_an_error_or_put_aside(tmp_path: Path) -> None:
    frame = conversions(40, days=3)
    early = frame.with_columns(known=pl.when(pl.int_range(40) == 7).then(pl.col("at") - 60).otherwise("known"))
    early.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"(?s)known at the time of its row.*row 7, column 'known'"):
        arrivals(tmp_path / "one", delay=correct()).take([tmp_path / "a.parquet"])
    held = arrivals(tmp_path / "two", delay=correct(), bad_rows=BadRowPolicy.QUARANTINE)
    assert held.take([tmp_path / "a.parquet"]).bad == 1
    while held.finish_next(is_over=True):
        pass
    scored = [row for window in held.journal.done for chunk in held.chunks(window) for row in chunk.global_rows]
    firsts = [row for window in held.journal.done for row in learned(held, window).get(ASSUMED, [])]
    assert sorted(scored) == sorted(firsts) == [row for row in range(40) if row != 7]
    [aside] = (tmp_path / "two").rglob("quarantine/*.jsonl")
    assert '"reason": "early_label"' in aside.read_text()


@pytest.mark.parametrize(
    ("y", "attribution_s", "match"),
    [(0, 0.0, "--attribution-s 604800"), (1, 0.0, "write when the positive came"), (1, 100.0, "of a positive")],
)
def test_a_row_without_a_label_time_is_an_error(tmp_path: Path, y: int, attribution_s: float, match: str) -> None:
    frame = pl.DataFrame({"x": [1.0, 2.0], "y": [1, y], "at": [START, START], "known": [START + 5, None]})
    frame.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=match):
        arrivals(tmp_path / "stream", delay=correct(attribution_s=attribution_s)).take([tmp_path / "a.parquet"])


def test_a_label_time_in_another_unit_is_an_error(tmp_path: Path) -> None:
    conversions(40, days=3).with_columns(pl.col("known") * 1000).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="milliseconds"):
        arrivals(tmp_path / "stream", delay=correct()).take([tmp_path / "a.parquet"])


def test_an_empty_label_time_of_text_is_a_negative_that_is_known_later(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,y,at,known\n1,0,{START},\n2,1,{START},{START + 9}\n3,0,{START + 5 * DAY},\n")
    held = arrivals(tmp_path / "stream", delay=correct(attribution_s=2.0 * DAY, confirms=True))
    held.take([tmp_path / "a.csv"])
    while held.finish_next(is_over=True):
        pass
    first, last = (learned(held, window) for window in held.journal.done)
    assert first == {ASSUMED: [0, 1], CORRECTED: [1]}
    assert last == {ASSUMED: [2], CONFIRMED: [0]}


@pytest.mark.parametrize(
    ("delay", "by", "match"),
    [
        (DelayConfig(policy=LabelDelay.WAIT), "day", "--label-time COLUMN"),
        (DelayConfig(policy=LabelDelay.WAIT, column="known"), "rows:10", "windows of the calendar"),
        (DelayConfig(policy=LabelDelay.WAIT, column="known", observe_s=5.0), "day", "no --observe-s"),
        (DelayConfig(column="known"), "day", "--delay wait"),
        (correct(label="z"), "day", "one of y"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, delay: DelayConfig, by: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        arrivals(tmp_path / "stream", delay=delay, by=by)


def test_a_label_that_is_a_number_is_refused(tmp_path: Path) -> None:
    schema = dataclasses.replace(SCHEMA, labels=(zg.Label(name="y", task=Task.named("regression")),))
    config = StreamConfig(by="day", delay=correct())
    with pytest.raises(ConfigError, match="a binary label"):
        Arrivals(tmp_path / "stream", config=config, data=DataConfig(), schema=schema)


def test_other_settings_of_labels_are_refused_where_a_stream_goes_on(tmp_path: Path) -> None:
    conversions(40, days=3).write_parquet(tmp_path / "a.parquet")
    arrivals(tmp_path / "stream", delay=correct()).take([tmp_path / "a.parquet"])
    with pytest.raises(ConfigError, match="--observe-s"):
        arrivals(tmp_path / "stream", delay=correct(observe_s=60.0))
