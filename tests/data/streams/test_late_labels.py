"""Records of labels find their rows by a key, in whatever order both come; what is not used is counted by its name."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.intake import Taken
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay, positives_of
from ziggurat.data.streams.late_labels import (
    AFTER,
    BEFORE,
    EARLY,
    LATE,
    NO_ROW,
    TWICE,
    Keyed,
    KeyedRuns,
    LateLabels,
    label_cells,
)
from ziggurat.data.streams.windows import Clock, LateRows, StreamConfig
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.label_state import LabelState

DAY = 86_400
START = 957_139_200  # 2000-05-01
REACH = 1.5 * DAY
SCHEMA = zg.Schema(features=(zg.Categorical(name="user"),), labels=(zg.Label(name="click"),), time="at")
LAST = (11, 20)  # days of two rows so late that all windows before the second are released


def both(num_rows: int, *, days: int = 6, seed: int = 0, negatives: bool = False) -> pl.DataFrame:
    """Rows in order of time with their labels and label times, of which negatives have none; two of them far behind."""
    rng = np.random.default_rng(seed)
    at = np.sort(START + rng.integers(0, days * DAY, num_rows))
    at[-2:] = START + np.array(LAST) * DAY
    click = rng.integers(0, 2, num_rows)
    click[-2:] = 1
    known = at + rng.integers(0, int(REACH), num_rows)
    frame = pl.DataFrame(
        {"id": np.arange(num_rows) + 1000, "user": [f"u{row % 7}" for row in range(num_rows)], "at": at, "click": click}
    )
    known_at = pl.Series("known", known)
    return frame.with_columns(known_at if negatives else pl.when(pl.col("click") == 1).then(known_at))


def logs_of(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the log of rows, and that of labels in the order in which they are known."""
    return frame.drop("click", "known"), frame.drop_nulls("known").sort("known").select("id", "known", "click")


def delay_of(policy: LabelDelay = LabelDelay.CORRECT, **settings: Any) -> DelayConfig:
    return DelayConfig(policy=policy, column="known", attribution_s=REACH, **settings)


def arrivals_in(
    folder: Path,
    *,
    key: str = "id",
    schema: zg.Schema = SCHEMA,
    bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
    until: str = "",
    **more: Any,
) -> Arrivals:
    delay = delay_of(key=key, **more)
    data = zg.DataConfig(train=("x",), bad_rows=bad_rows)
    return Arrivals(folder, config=StreamConfig(by="day", delay=delay, until=until), data=data, schema=schema)


def trained_in(arrivals: Arrivals) -> dict[str, dict[str, list[tuple[Any, ...]]]]:
    """Rows of each window, and rows by what is known of them with which it is trained, once no more files come."""
    while arrivals.finish_next(is_over=True):
        pass
    found: dict[str, dict[str, list[tuple[Any, ...]]]] = {}
    for number, window in enumerate(arrivals.journal.done, start=1):
        parts: dict[str, list[tuple[Any, ...]]] = {"scored": []}
        labelled = 0
        truth = arrivals.truth(number) if window.awaits else None
        for chunk in arrivals.chunks(window):
            if truth is None and not window.awaits:
                parts["scored"] += rows_of(chunk.global_rows, chunk.frame)
                labelled += int(arrivals.known_labels(chunk, window).sum())
            elif truth is not None:
                labels = dict(zip(truth.rows.tolist(), truth.is_positive.tolist(), strict=True))
                values = [float(labels[row]) for row in chunk.global_rows.tolist()]
                parts["scored"] += rows_of(chunk.global_rows, chunk.frame.with_columns(click=pl.Series(values)))
        if truth is not None:
            labelled = int(truth.is_labelled.sum())
        for state, chunk in arrivals.lessons(window):
            frame = chunk.frame
            if state is LabelState.ASSUMED:  # whatever it will turn out to be
                frame = frame.with_columns(click=pl.lit(0.0))
            parts.setdefault(state.value, []).extend(rows_of(chunk.global_rows, frame))
        found[window.name] = {name: sorted(rows) for name, rows in parts.items()}
        found[window.name]["labelled"] = [(labelled,)]
    return found


def rows_of(numbers: np.ndarray, frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    return list(zip(numbers.tolist(), frame["user"], frame["click"].cast(pl.Float64), strict=True))


def interleaved(
    arrivals: Arrivals, folder: Path, frame: pl.DataFrame, *, seed: int, num_parts: int = 9, again: Any = None
) -> Arrivals:
    """Give both logs file by file, each in its order, and either of them ahead at random."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    rows, labels = logs_of(frame)
    cuts = [np.sort(rng.integers(0, log.height + 1, num_parts - 1)).tolist() for log in (rows, labels)]
    there: tuple[list[Path], list[Path]] = ([], [])
    turns = rng.permutation([0] * num_parts + [1] * num_parts).tolist()
    for turn in turns:
        log = (rows, labels)[turn]
        number = len(there[turn])
        first, last = [0, *cuts[turn], log.height][number : number + 2]
        path = folder / f"{'rows' if turn == 0 else 'labels'}-{number}.parquet"
        log[first:last].write_parquet(path)
        there[turn].append(path)
        arrivals.take(*there[:1], labels=there[1])
        while arrivals.finish_next(is_over=False):
            pass
        if again is not None:
            arrivals = again()
    return arrivals


@pytest.mark.parametrize("policy", [LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE, LabelDelay.CORRECT])
@pytest.mark.parametrize("negatives", [False, True])
def test_two_logs_train_what_one_file_with_both_trains(tmp_path: Path, policy: LabelDelay, negatives: bool) -> None:
    observe: dict[str, Any] = {} if policy is LabelDelay.WAIT else {"observe_s": DAY / 4}
    frame = both(400, negatives=negatives)
    frame.write_parquet(tmp_path / "both.parquet")
    one = arrivals_in(tmp_path / "one", key="", policy=policy, **observe)
    one.take([tmp_path / "both.parquet"])
    expected = trained_in(one)
    assert list(expected)[-2:] == ["2000-05-12", "2000-05-21"]
    assert len(expected) == 8
    expected["2000-05-21"] |= {"scored": [], "labelled": [(0,)]}  # of its row nobody knows yet
    if policy is LabelDelay.CORRECT:
        assert sum(len(window.get("corrected", [])) for window in expected.values()) > 20
    kept = []
    for seed in range(4):
        arrivals = arrivals_in(tmp_path / f"two-{seed}", policy=policy, **observe)
        arrivals = interleaved(arrivals, tmp_path / f"files-{seed}", frame, seed=seed)
        found = trained_in(arrivals)
        assert found == expected
        assert arrivals.num_held == 1
        kept.append([[chunk.global_rows.tolist() for chunk in arrivals.chunks(each)] for each in arrivals.journal.done])
    # Cut into chunks otherwise, as files were, and in the same order: that of the rows.
    rows = [[[row for chunk in window for row in chunk] for window in windows] for windows in kept]
    assert all(each == rows[0] for each in rows)


@pytest.mark.parametrize(
    ("policy", "confirms"), [(LabelDelay.WAIT, False), (LabelDelay.CORRECT, False), (LabelDelay.CORRECT, True)]
)
def test_rows_whose_labels_come_behind_until_are_counted_as_those_of_one_file(
    tmp_path: Path, policy: LabelDelay, confirms: bool
) -> None:
    frame = both(400)
    frame.write_parquet(tmp_path / "both.parquet")
    settings: dict[str, Any] = {"policy": policy, "confirms": confirms, "until": "2000-05-04"}
    settings |= {} if policy is LabelDelay.WAIT else {"observe_s": DAY / 4}
    one = arrivals_in(tmp_path / "one", key="", **settings)
    one.take([tmp_path / "both.parquet"])
    at = frame["at"].to_numpy()
    end = START + 3 * DAY
    known = np.where(frame["click"].to_numpy() == 1, frame["known"].fill_null(0).to_numpy(), at + REACH)
    known = np.maximum(known, at + REACH) if policy is LabelDelay.WAIT else known
    observed = known if policy is LabelDelay.WAIT else at + DAY / 4
    is_again = (known > observed) & (known >= end) & ((frame["click"].to_numpy() == 1) | confirms)
    expected = int(((at < end) & (observed >= end)).sum() + ((at < end) & is_again).sum())
    assert expected > 20
    assert one.journal.unlearned == expected
    for seed in range(3):
        two = interleaved(arrivals_in(tmp_path / f"two-{seed}", **settings), tmp_path / f"{seed}", frame, seed=seed)
        trained_in(two)
        assert two.journal.unlearned == expected


def test_what_was_known_is_known_again_after_each_look(tmp_path: Path) -> None:
    frame = both(300, seed=3)
    whole = interleaved(arrivals_in(tmp_path / "whole"), tmp_path / "a", frame, seed=5)
    cut = interleaved(
        arrivals_in(tmp_path / "cut"), tmp_path / "b", frame, seed=5, again=lambda: arrivals_in(tmp_path / "cut")
    )
    assert cut.journal.label_counts == whole.journal.label_counts
    assert cut.journal.logs == whole.journal.logs
    assert [window.pieces for window in cut.journal.done] == [window.pieces for window in whole.journal.done]
    assert trained_in(cut) == trained_in(whole)


def write(folder: Path, name: str, **columns: Any) -> Path:
    path = folder / name
    pl.DataFrame(columns).write_parquet(path)
    return path


def take(arrivals: Arrivals, rows: list[Path], labels: list[Path]) -> Taken:
    taken = arrivals.take(rows, labels=labels)
    while arrivals.finish_next(is_over=False):
        pass
    return taken


def test_records_that_are_not_used_are_counted_by_name(tmp_path: Path) -> None:
    arrivals = arrivals_in(tmp_path / "stream")
    at = lambda day: START + int(day * DAY)  # noqa: E731
    rows = [write(tmp_path, "r0.parquet", id=[1, 2], user=["a", "b"], at=[at(0.1), at(0.2)])]
    ahead = [write(tmp_path, "l0.parquet", id=[1, 3, 9, 1], known=[at(0.5), at(0.9), at(0.9), at(0.6)])]
    assert take(arrivals, rows, ahead).label_counts == {TWICE: 1}
    rows.append(write(tmp_path, "r1.parquet", id=[3], user=["c"], at=[at(0.8)]))
    assert take(arrivals, rows, ahead).label_counts == {BEFORE: 1}
    labels = [*ahead, write(tmp_path, "l1.parquet", id=[2], known=[at(1.9)])]
    assert take(arrivals, rows, labels).label_counts == {AFTER: 1}
    # Both logs go on, and the first day is released.
    rows.append(write(tmp_path, "r2.parquet", id=[4], user=["d"], at=[at(2.35)]))
    labels.append(write(tmp_path, "l2.parquet", id=[4], known=[at(2.36)]))
    assert take(arrivals, rows, labels).label_counts == {}
    assert [window.name for window in arrivals.journal.done] == ["2000-05-01"]
    # Out of order: for a row that was released as a negative, and a second one for a row that was a positive.
    labels.append(write(tmp_path, "l3.parquet", id=[2, 3], known=[at(0.3), at(1.1)]))
    assert take(arrivals, rows, labels).label_counts == {AFTER: 1, TWICE: 1}
    # Of key 9 no row has come, and none may come any more.
    rows.append(write(tmp_path, "r3.parquet", id=[5], user=["e"], at=[at(6)]))
    labels.append(write(tmp_path, "l4.parquet", id=[5], known=[at(6.2)]))
    assert take(arrivals, rows, labels).label_counts == {NO_ROW: 1}
    assert arrivals.journal.label_counts == {TWICE: 2, BEFORE: 1, AFTER: 2, NO_ROW: 1}
    found = trained_in(arrivals)
    assert [(user, label) for _, user, label in found["2000-05-01"]["scored"]] == [
        ("a", 1.0),
        ("b", 0.0),
        ("c", 1.0),
    ]
    assert arrivals.num_held == 1


def test_a_label_behind_the_end_of_its_window_corrects_its_row_in_the_next_one(tmp_path: Path) -> None:
    at = lambda day: START + int(day * DAY)  # noqa: E731
    arrivals = arrivals_in(tmp_path / "stream")
    rows = [write(tmp_path, "r0.parquet", id=[1, 2, 3], user=["a", "b", "c"], at=[at(0.1), at(0.2), at(1.1)])]
    labels = [write(tmp_path, "l0.parquet", id=[1, 3], known=[at(0.5), at(1.2)])]
    take(arrivals, rows, labels)
    assert [window.name for window in arrivals.journal.done] == ["2000-05-01"]
    labels.append(write(tmp_path, "l1.parquet", id=[2], known=[at(0.9)]))
    assert take(arrivals, rows, labels).label_counts == {LATE: 1}
    # A late row, whose label is known at once, and one whose label comes in a file behind it.
    rows.append(write(tmp_path, "r1.parquet", id=[4, 5], user=["d", "e"], at=[at(0.3), at(0.4)]))
    labels.append(write(tmp_path, "l2.parquet", id=[4, 5, 6], known=[at(0.3), at(0.8), at(2.1)]))
    again = arrivals_in(tmp_path / "stream")  # as after a kill
    assert again.take(rows, labels=labels).late == 2
    rows.append(write(tmp_path, "r2.parquet", id=[6], user=["f"], at=[at(2.05)]))
    take(again, rows, labels)
    found = trained_in(again)
    assert [name for name, window in found.items() if window["scored"]] == ["2000-05-01"]
    first = found["2000-05-01"]
    assert [(user, label) for _, user, label in first["scored"]] == [("a", 1.0), ("b", 1.0)]
    assert [(user, label) for _, user, label in first["assumed"]] == [("a", 0.0), ("b", 0.0)]
    assert [user for _, user, _ in first["corrected"]] == ["a"]
    second = found["2000-05-02"]
    assert [(user, label) for _, user, label in second["corrected"]] == [("b", 1.0), ("c", 1.0), ("e", 1.0)]
    assert [(user, label) for _, user, label in second["known"]] == [("d", 1.0)]
    assert [user for _, user, _ in second["assumed"]] == ["c", "e"]
    corrected = [user for window in found.values() for _, user, _ in window.get("corrected", [])]
    assert sorted(corrected) == ["a", "b", "c", "e", "f"]


def test_windows_whose_labels_may_still_come_wait_also_at_the_end(tmp_path: Path) -> None:
    frame = both(200)[:-2]  # without the last rows, which are days behind
    rows, labels = logs_of(frame)
    rows.write_parquet(tmp_path / "rows.parquet")
    labels.write_parquet(tmp_path / "labels.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, [tmp_path / "rows.parquet"], [tmp_path / "labels.parquet"])
    found = trained_in(arrivals)
    at = frame["at"].to_numpy()
    end = max(at.max(), labels["known"].to_numpy().max())
    newest = [at[(at - START) // DAY == day].max() for day in range(6)]
    complete = [f"2000-05-0{day + 1}" for day in range(6) if newest[day] + REACH < end]
    assert [name for name, window in found.items() if window["scored"]] == complete
    assert list(found) == [f"2000-05-0{day + 1}" for day in range(6)]
    assert arrivals.num_held == frame.filter((pl.col("at") - START) // DAY >= len(complete)).height
    assert arrivals.labels_until(len(complete)) == ""
    until = Clock(column="at", per_second=1).shown(newest[len(complete)] + REACH)
    assert arrivals.labels_until(len(complete) + 1) == until


def test_memory_and_disk_have_what_is_needed_alone(tmp_path: Path) -> None:
    frame = both(600, days=10)
    arrivals = interleaved(arrivals_in(tmp_path / "stream"), tmp_path / "files", frame, seed=1, num_parts=30)
    journal = arrivals.journal
    assert journal.records_before is not None
    assert journal.rows_before is not None
    assert arrivals._awaiting is not None
    late = arrivals._awaiting.labels
    assert len(late) < 80
    assert len(late._rows) < 300

    def needed() -> set[str]:
        others = [log.part for log in journal.logs] + [window.truth for window in journal.done if window.truth]
        return {piece.part for piece in arrivals._kept.pieces()} | set(others)

    assert {path.name for path in (tmp_path / "stream/arrived").iterdir()} == needed()
    arrivals.forget(len(journal.done))
    assert {path.name for path in (tmp_path / "stream/arrived").iterdir()} == needed()
    assert not any("-keys" in log.part and log.newest < journal.rows_before for log in journal.logs)


def test_rows_and_records_that_do_not_fit_are_errors_with_a_way_out(tmp_path: Path) -> None:
    rows = write(tmp_path, "r.parquet", id=[1, 2], user=["a", "b"], at=[START, START + 60])
    labels = write(tmp_path, "l.parquet", id=[1], known=[START + 10])
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, [rows], [labels])
    with pytest.raises(SchemaError, match="id"):
        take(arrivals, [rows, write(tmp_path, "no-key.parquet", user=["a"], at=[START])], [labels])
    second = write(tmp_path, "second.parquet", id=[3, 2], user=["a", "b"], at=[START, START + 70])
    with pytest.raises(DataError, match="a key that no row before has") as refused:
        take(arrivals, [rows, second], [labels])
    assert "second.parquet, row 1" in refused.value.where
    with pytest.raises(DataError, match="milliseconds"):
        take(arrivals, [rows], [labels, write(tmp_path, "ms.parquet", id=[2], known=[(START + 90) * 1000])])
    with pytest.raises(SchemaError, match="known"):
        take(arrivals, [rows], [labels, write(tmp_path, "no-time.parquet", id=[2])])
    with pytest.raises(DataError, match="a key, by which a label finds its row"):
        take(arrivals, [rows], [labels, write(tmp_path, "null.parquet", id=[None, 2], known=[START + 90] * 2)])
    write(tmp_path, "l.parquet", id=[1, 2], known=[START + 10, START + 90])
    with pytest.raises(DataError, match="other content"):
        take(arrivals, [rows], [labels])
    aside = arrivals_in(tmp_path / "stream", bad_rows=BadRowPolicy.QUARANTINE)
    taken = aside.take([rows, second], labels=[tmp_path / "null.parquet"])
    assert (taken.bad, taken.rows, taken.labels) == (2, 2, 2)


def test_a_label_before_its_row_by_its_time_makes_a_bad_row(tmp_path: Path) -> None:
    rows = write(
        tmp_path, "r.parquet", id=[1, 2, 3], user=["a", "b", "c"], at=[START + 60, START + 60, START + 4 * DAY]
    )
    labels = write(tmp_path, "l.parquet", id=[1, 3], known=[START, START + 4 * DAY])
    with pytest.raises(DataError, match="a label that is known at the time of its row"):
        take(arrivals_in(tmp_path / "stream"), [rows], [labels])
    aside = arrivals_in(tmp_path / "stream", bad_rows=BadRowPolicy.QUARANTINE)
    take(aside, [rows], [labels])
    assert aside.journal.label_counts == {EARLY: 1}
    assert [window.rows for window in aside.journal.done] == [1]


def test_text_files_dates_and_labels_with_texts_are_read_as_those_of_rows(tmp_path: Path) -> None:
    schema = zg.Schema(
        features=SCHEMA.features, labels=(zg.Label(name="click", positive="yes", negative="no"),), time="at"
    )
    (tmp_path / "r.csv").write_text(
        "id,user,at\n7,a,2000-05-01 10:00\n8,b,2000-05-01 11:00\n9,c,2000-05-01 12:00\n10,d,2000-05-05 00:00\n"
    )
    (tmp_path / "l.jsonl").write_text(
        '{"id": "7", "known": "2000-05-02 10:00", "click": "yes"}\n'
        '{"id": 8, "known": "2000-05-01 11:30", "click": "no"}\n'
        '{"id": 10, "known": "2000-05-05 01:00", "click": "yes"}\n'
    )
    arrivals = arrivals_in(tmp_path / "stream", schema=schema)
    take(arrivals, [tmp_path / "r.csv"], [tmp_path / "l.jsonl"])
    while arrivals.finish_next(is_over=True):
        pass
    first, last = arrivals.journal.done
    assert [state for state, _ in arrivals.lessons(first)] == [LabelState.ASSUMED]
    lessons = [(state, each.frame) for state, each in arrivals.lessons(last) if each.num_rows == 1]
    state, frame = lessons[0]
    assert state is LabelState.CORRECTED
    assert frame["click"].to_list() == ["yes"]
    assert [str(each) for each in frame["known"]] == ["2000-05-02 10:00:00"]


def test_cells_of_labels_mean_what_they_meant() -> None:
    is_positive = np.array([True, False])
    for label in (
        zg.Label(name="like", column="stars", positive_from=4.0),
        zg.Label(name="like", positive="yes"),
        zg.Label(name="like"),
    ):
        cells = label_cells(label, is_positive)
        chunk = RawChunk.of(pl.DataFrame({cells.name: cells}))
        schema = zg.Schema(features=SCHEMA.features, labels=(label,))
        assert positives_of(chunk, schema, label).tolist() == [True, False]


def test_settings_under_which_rows_would_wait_for_ever_are_refused() -> None:
    with pytest.raises(ConfigError, match="the seconds in which a positive may come"):
        DelayConfig(policy=LabelDelay.WAIT, column="known", key="id").check(SCHEMA, by="day", is_by_time=True)
    with pytest.raises(ConfigError, match="which only records have"):
        delay_of(key="click").check(SCHEMA, by="day", is_by_time=True)
    with pytest.raises(ConfigError, match="reads from rows for something else"):
        DelayConfig(policy=LabelDelay.WAIT, column="user", key="id", attribution_s=1.0).check(
            SCHEMA, by="day", is_by_time=True
        )
    with pytest.raises(ConfigError, match="--delay wait"):
        DelayConfig(key="id").check(SCHEMA, by="day", is_by_time=True)


def test_runs_find_the_first_of_each_key_whatever_their_digests_end_with() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (5000, 16), dtype=np.uint8)
    raw[::3, -1] = 0
    keys = raw.view("S16").reshape(-1)
    runs = KeyedRuns()
    for first in range(0, 5000, 7):
        part = slice(first, first + 7)
        runs.add(Keyed.from_table(Keyed.of(keys[part], np.arange(5000.0)[part]).table()))
    runs.add(Keyed.of(keys[:10], np.full(10, -1.0)))
    assert runs.find(keys).times.tolist() == list(range(5000))
    assert np.isnan(runs.find(np.array([b"x" * 16])).times).all()
    runs.cut(4000.0)
    assert len(runs) == 1000


def shuffled(log: pl.DataFrame, *, seed: int, share: float) -> pl.DataFrame:
    """The log with a share of its records moved up to two days behind."""
    rng = np.random.default_rng(seed)
    time = "known" if "known" in log.columns else "at"
    behind = np.where(rng.random(log.height) < share, rng.integers(0, 2 * DAY, log.height), 0)
    return log.with_columns(came=pl.col(time).cast(pl.Float64) + behind).sort("came", maintain_order=True).drop("came")


@pytest.mark.parametrize("late", [LateRows.TRAIN, LateRows.DROP])
@pytest.mark.parametrize("seed", range(6))
def test_out_of_order_every_row_is_trained_once_and_by_the_label_that_it_is_judged_by(
    tmp_path: Path, seed: int, late: LateRows
) -> None:
    """Rows and labels come late, files in any interleaving, and a process ends after each look."""
    frame = both(250, negatives=seed % 4 > 1, seed=seed)
    rows, labels = (shuffled(log, seed=seed, share=0.2) for log in logs_of(frame))
    policy = [LabelDelay.CORRECT, LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE][seed % 3]
    settings: dict[str, Any] = {} if policy is LabelDelay.WAIT else {"observe_s": DAY / 4}
    if policy is LabelDelay.CORRECT:
        settings["confirms"] = True
    delay = delay_of(policy, key="id", **settings)

    def again() -> Arrivals:
        config = StreamConfig(by="day", delay=delay, late=late)
        return Arrivals(tmp_path / "stream", config=config, data=zg.DataConfig(train=("x",)), schema=SCHEMA)

    rng = np.random.default_rng(seed)
    there: tuple[list[Path], list[Path]] = ([], [])
    for turn in [0, *rng.permutation([0] * 8 + [1] * 9).tolist()]:
        log = (rows, labels)[turn]
        number = len(there[turn])
        path = tmp_path / f"{turn}-{number}.parquet"
        log[number * log.height // 9 : (number + 1) * log.height // 9].write_parquet(path)
        there[turn].append(path)
        arrivals = again()
        arrivals.take(there[0], labels=there[1])
        while arrivals.finish_next(is_over=False):
            pass
    end = START + 40 * DAY
    there[0].append(write(tmp_path, "end.parquet", id=[999_999], user=["z"], at=[end]))
    there[1].append(write(tmp_path, "end-label.parquet", id=[999_999], known=[end + 10], click=[1]))
    arrivals = again()
    arrivals.take(there[0], labels=there[1])
    while arrivals.finish_next(is_over=True):
        pass
    scored: Counter[int] = Counter()
    positives: set[int] = set()
    trained: dict[LabelState, Counter[int]] = {state: Counter() for state in LabelState}
    learned: set[int] = set()
    for number, window in enumerate(arrivals.journal.done[:-1], start=1):
        truth = arrivals.truth(number)
        assert truth is not None
        scored.update(truth.rows.tolist())
        positives |= set(truth.rows[truth.is_positive].tolist())
        assert sorted(truth.rows.tolist()) == sorted(
            row for chunk in arrivals.chunks(window) for row in chunk.global_rows.tolist()
        )
    for window in arrivals.journal.done:
        for state, chunk in arrivals.lessons(window):
            trained[state].update(chunk.global_rows.tolist())
            if state in (LabelState.KNOWN, LabelState.CORRECTED):
                learned |= set(chunk.global_rows[(chunk.frame["click"] == 1).to_numpy()].tolist())
    (last,) = (row for chunk in arrivals.chunks(arrivals.journal.done[-1]) for row in chunk.global_rows.tolist())
    for counts in trained.values():
        counts.pop(last, None)
    first = trained[LabelState.KNOWN] + trained[LabelState.ASSUMED]
    dropped = arrivals.journal.dropped
    assert len(scored) == 250 - dropped if late is LateRows.DROP else len(scored) == 250
    assert max(scored.values()) == 1
    assert first == scored
    if policy is not LabelDelay.ASSUME_NEGATIVE:
        assert learned - {last} == positives
    if policy is LabelDelay.CORRECT:
        assert trained[LabelState.ASSUMED] == trained[LabelState.CORRECTED] + trained[LabelState.CONFIRMED]


@pytest.mark.parametrize("policy", [LabelDelay.CORRECT, LabelDelay.WAIT, LabelDelay.ASSUME_NEGATIVE])
@pytest.mark.parametrize("seed", range(3))
def test_portions_that_end_at_any_moment_lose_no_label(tmp_path: Path, policy: LabelDelay, seed: int) -> None:
    """A stream that ends closes its newest window early: labels that come in the rest of it were called too late."""
    rng = np.random.default_rng(seed)
    frame = both(200, seed=seed).sort("at")
    rows, labels = logs_of(frame)
    settings: dict[str, Any] = {} if policy is LabelDelay.WAIT else {"observe_s": DAY / 4}
    if policy is LabelDelay.CORRECT:
        settings["confirms"] = True
    delay = delay_of(policy, key="id", **settings)
    config = StreamConfig(by="day", delay=delay)
    # Each portion has all rows and all labels of before its end, in order.
    ends = np.sort(START + rng.integers(DAY, 6 * DAY, 5)).tolist()
    there: tuple[list[Path], list[Path]] = ([], [])
    begin = 0
    for number, end in enumerate([*ends, START + 40 * DAY]):
        for log, column, paths in ((rows, "at", there[0]), (labels, "known", there[1])):
            part = log.filter((pl.col(column) >= begin) & (pl.col(column) < end))
            if part.height:
                paths.append(tmp_path / f"{column}-{number}.parquet")
                part.write_parquet(paths[-1])
        begin = end
        arrivals = Arrivals(tmp_path / "stream", config=config, data=zg.DataConfig(train=("x",)), schema=SCHEMA)
        arrivals.take(there[0], labels=there[1])
        while arrivals.finish_next(is_over=True):
            pass
    counts = arrivals.journal.label_counts
    assert not {name: counts[name] for name in (AFTER, TWICE, LATE, EARLY) if counts.get(name)}
    trained: dict[LabelState, Counter[int]] = {state: Counter() for state in LabelState}
    learned: set[int] = set()
    negatives: set[int] = set()
    for window in arrivals.journal.done:
        for state, chunk in arrivals.lessons(window):
            trained[state].update(chunk.global_rows.tolist())
            is_positive = (chunk.frame["click"] == 1).to_numpy()
            if state in (LabelState.KNOWN, LabelState.CORRECTED):
                learned |= set(chunk.global_rows[is_positive].tolist())
            if state in (LabelState.KNOWN, LabelState.CONFIRMED):
                negatives |= set(chunk.global_rows[~is_positive].tolist())
    assert all(count == 1 for counter in trained.values() for count in counter.values())
    # The last two rows are days behind all others, and nothing comes behind them.
    early = set(range(frame.height - 2))
    positives = set(np.flatnonzero(frame["known"].is_not_null().to_numpy()).tolist())
    if policy is LabelDelay.ASSUME_NEGATIVE:
        assert not negatives & positives
    else:
        assert learned & early == positives & early
        assert negatives & early == early - positives


@pytest.mark.parametrize("row_first", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_of_several_records_of_a_key_the_first_that_may_be_used_counts_however_they_are_read(
    row_first: bool, order: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    """A record beyond the attribution window hid a good one behind it, if both were read at once."""
    reach = 100.0
    records = [(150.0, True), (60.0, False), (70.0, True)]  # of a row at 10: too late, used, or the second
    mine = [records[at] for at in order]
    key = np.array([b"k" * 16])
    row = Keyed.of(key, np.array([10.0]))
    labels = LateLabels()
    counts = Counter[str]()
    if row_first:
        counts += labels.add_rows(row, reach=reach)
    for first, last in itertools.pairwise((0, *cuts, 3)):
        part = mine[first:last]
        times = np.array([time for time, _ in part])
        more = Keyed.of(np.repeat(key, len(part)), times, np.array([positive for _, positive in part]))
        kept, others = labels.judged(more, reach=reach, over=np.zeros(len(part), dtype=np.bool_))
        counts += others
        labels.add_records(kept)
    if not row_first:
        counts += labels.add_rows(row, reach=reach)
    used = next(record for record in mine if record[0] <= 110.0)
    known, is_positive = labels.of_rows(key, np.array([10.0]), reach=reach)
    assert (known[0], is_positive[0]) == used
    # The late one is called late before the first that is used, and one of several behind it.
    is_behind = mine.index(records[0]) > mine.index(used)
    assert counts[AFTER] == (not is_behind)
    assert counts[TWICE] == 1 + is_behind
    assert counts[BEFORE] == (not row_first)
    assert len(labels) == 1
