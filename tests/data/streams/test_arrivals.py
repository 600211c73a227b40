"""Raw files that arrive: every row once, in the window of its time, whatever the order of rows, files and kills."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.source import RawSource
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.intake import Taken
from ziggurat.data.streams.windows import LateRows, StreamConfig
from ziggurat.errors import CheckpointError, ConfigError, DataError, FileError, SchemaError

DAY = 86_400
START = 957_139_200  # 2000-05-01
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Dense(name="age")), labels=(zg.Label(name="click"),), time="at"
)


def rows_of(days: list[int], *, seed: int = 0) -> pl.DataFrame:
    """One row for each day of the list, in its order."""
    rng = np.random.default_rng(seed)
    at = [START + day * DAY + int(rng.integers(0, DAY)) for day in days]
    users = [f"u{each}" for each in rng.integers(0, 9, len(days))]
    clicks = rng.integers(0, 2, len(days))
    return pl.DataFrame({"user": users, "age": rng.normal(size=len(days)), "click": clicks, "at": at})


def arrivals_in(
    folder: Path,
    *,
    data: zg.DataConfig | None = None,
    schema: zg.Schema = SCHEMA,
    has_begun: bool = True,
    **settings: Any,
) -> Arrivals:
    return Arrivals(
        folder,
        config=StreamConfig(**settings),
        data=data or zg.DataConfig(train=("x",)),
        schema=schema,
        has_begun=has_begun,
    )


def take(arrivals: Arrivals, *paths: Path) -> Taken:
    return arrivals.take(RawSource(list(paths)).paths)


def all_done(arrivals: Arrivals) -> dict[str, list[int]]:
    """Row numbers of each window, by its name, once no more files come."""
    while arrivals.finish_next(is_over=True):
        pass
    return {window.name: numbers_of(arrivals, window) for window in arrivals.journal.done}


def numbers_of(arrivals: Arrivals, window: Any) -> list[int]:
    return [number for chunk in arrivals.chunks(window) for number in chunk.global_rows.tolist()]


def test_rows_in_any_order_come_to_the_window_of_their_time(tmp_path: Path) -> None:
    days = np.random.default_rng(1).integers(0, 5, 300).tolist()
    frame = rows_of(days)
    frame[:100].write_parquet(tmp_path / "a.parquet")
    frame[100:].write_csv(tmp_path / "b.csv")
    arrivals = arrivals_in(tmp_path / "stream")
    assert take(arrivals, tmp_path / "a.parquet", tmp_path / "b.csv") == Taken(files=2, rows=300)
    found = all_done(arrivals)
    assert found == {f"2000-05-0{day + 1}": [row for row, of in enumerate(days) if of == day] for day in range(5)}
    last = list(arrivals.chunks(arrivals.journal.done[-1]))
    times = pl.concat([chunk.frame["at"].cast(pl.Int64) for chunk in last])
    assert times.to_list() == frame["at"].gather(found["2000-05-05"]).to_list()
    assert last[-1].where(0).startswith(f"{tmp_path / 'b.csv'}, row ")


def test_a_window_is_done_when_a_row_of_a_later_one_has_come(tmp_path: Path) -> None:
    rows_of([0, 0, 1]).write_parquet(tmp_path / "a.parquet")
    rows_of([1, 2]).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet")
    assert arrivals.finish_next(is_over=False)
    assert not arrivals.finish_next(is_over=False)
    take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert arrivals.finish_next(is_over=False)
    assert [window.rows for window in arrivals.journal.done] == [2, 2]
    assert all_done(arrivals)["2000-05-03"] == [4]


@pytest.mark.parametrize("late", list(LateRows))
def test_late_rows_are_counted_and_trained_or_dropped(tmp_path: Path, late: LateRows) -> None:
    rows_of([0, 0, 1]).write_parquet(tmp_path / "a.parquet")
    rows_of([0, 2, 1, 0], seed=1).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream", late=late)
    take(arrivals, tmp_path / "a.parquet")
    assert arrivals.finish_next(is_over=False)
    assert take(arrivals, tmp_path / "b.parquet").late == 2
    found = all_done(arrivals)
    # Of day 1, still open, no row is late; those of day 0 come with the window that is done next.
    trained = [3, 6] if late is LateRows.TRAIN else []
    assert found == {"2000-05-01": [0, 1], "2000-05-02": [2, 5, *trained], "2000-05-03": [4]}
    assert [window.late for window in arrivals.journal.done] == [0, len(trained), 0]
    dropped = 2 - len(trained)
    assert arrivals.journal.dropped == dropped
    assert [window.dropped for window in arrivals.journal.done] == [0, dropped, 0]
    again = arrivals_in(tmp_path / "stream", late=late)  # as another process reads the journal
    assert again.journal == arrivals.journal
    rows_of([0, 5], seed=2).write_parquet(tmp_path / "c.parquet")
    take(again, tmp_path / "c.parquet")
    all_done(again)
    assert again.journal.done[-1].dropped == dropped // 2, "each is counted once"


def test_late_rows_alone_are_a_window_of_their_own_at_the_end(tmp_path: Path) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    rows_of([0, 0], seed=1).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet")
    all_done(arrivals)
    assert take(arrivals, tmp_path / "b.parquet") == Taken(files=1, rows=2, late=2)
    assert not arrivals.finish_next(is_over=False)
    assert all_done(arrivals)["late rows"] == [2, 3]


def test_a_file_is_taken_once_under_whatever_name(tmp_path: Path) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    os.utime(tmp_path / "a.parquet", (1, 1))  # touched, and the same
    assert take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet") == Taken(again=(str(tmp_path / "b.parquet"),))
    assert take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet") == Taken()
    assert arrivals.num_rows == 2
    rows_of([0, 1, 2]).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="other content") as refused:
        take(arrivals, tmp_path / "a.parquet")
    assert refused.value.where == str(tmp_path / "a.parquet")


def test_the_order_of_dates_is_that_of_all_files_that_are_there(tmp_path: Path) -> None:
    date = pl.from_epoch("at").dt.strftime("%d/%m/%Y %H:%M")
    rows_of([10, 10]).with_columns(at=date).write_csv(tmp_path / "a.csv")
    rows_of([14]).with_columns(at=date).write_csv(tmp_path / "b.csv")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.csv", tmp_path / "b.csv")
    assert all_done(arrivals) == {"2000-05-11": [0, 1], "2000-05-15": [2]}
    with pytest.raises(ConfigError, match="day or the month"):
        take(arrivals_in(tmp_path / "other"), tmp_path / "a.csv")


def test_windows_of_rows_are_full_in_order_of_time(tmp_path: Path) -> None:
    days = np.random.default_rng(2).permutation(17).tolist()
    rows_of(days[:9]).write_parquet(tmp_path / "a.parquet")
    rows_of(days[9:]).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream", by="rows:5", begin="2000-05-03")
    take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    found = all_done(arrivals)
    in_order = np.argsort(days).tolist()
    assert list(found) == ["before 2000-05-03", "rows 1-5", "rows 6-10", "rows 11-15"]
    assert [sorted(rows) for rows in found.values()] == [
        sorted(in_order[first:last]) for first, last in ((0, 2), (2, 7), (7, 12), (12, 17))
    ]
    rows_of([30, 1, 31]).write_parquet(tmp_path / "c.parquet")
    assert take(arrivals, tmp_path / "c.parquet").late == 1
    assert all_done(arrivals)["rows 16-20"] == [17, 19, 18]


def test_rows_without_a_time_are_windows_in_the_order_of_the_files(tmp_path: Path) -> None:
    schema = zg.Schema(features=SCHEMA.features, labels=SCHEMA.labels)
    rows_of(list(range(7))).write_parquet(tmp_path / "a.parquet")
    rows_of(list(range(4)), seed=1).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream", schema=schema, by="rows:4", begin="3")
    take(arrivals, tmp_path / "a.parquet")
    assert arrivals.finish_next(is_over=False)
    assert arrivals.finish_next(is_over=False)
    assert not arrivals.finish_next(is_over=False)
    take(arrivals, tmp_path / "b.parquet")
    assert list(all_done(arrivals).values()) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    with pytest.raises(ConfigError, match="no time in the schema"):
        arrivals_in(tmp_path / "other", schema=schema)


def test_what_a_killed_process_wrote_without_its_journal_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    rows_of([1, 2], seed=1).write_parquet(tmp_path / "b.parquet")
    whole = arrivals_in(tmp_path / "whole")
    take(whole, tmp_path / "a.parquet", tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "cut")
    saves: list[int] = []

    def dies(*, durable: bool = True) -> None:
        saves.append(1)
        if len(saves) == 2:
            raise KeyboardInterrupt
        saved(durable=durable)

    saved = arrivals._kept.save
    monkeypatch.setattr(arrivals._kept, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    again = arrivals_in(tmp_path / "cut")
    assert len(again.journal.files) == 1
    assert take(again, tmp_path / "a.parquet", tmp_path / "b.parquet").rows == 2
    assert all_done(again) == all_done(whole)


def test_rows_that_no_checkpoint_needs_are_removed_and_others_stay(tmp_path: Path) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    rows_of([1, 2], seed=1).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    all_done(arrivals)
    spooled = lambda: sorted(path.name for path in (tmp_path / "stream/arrived").iterdir())  # noqa: E731
    assert spooled() == ["00000.parquet", "00001.parquet"]
    arrivals.forget(1)
    assert len(spooled()) == 2
    arrivals.forget(2)
    assert spooled() == ["00001.parquet"]
    again = arrivals_in(tmp_path / "stream")
    assert [window.rows for window in again.journal.done] == [1, 2, 1]
    assert numbers_of(again, again.journal.done[2]) == [3]


def test_files_that_do_not_fit_are_errors_and_leave_the_stream_as_it_was(tmp_path: Path) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet")
    rows_of([2]).drop("age").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match="age"):
        take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    rows_of([2]).with_columns(at=pl.col("at") * 1000).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="milliseconds"):
        take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    rows_of([2]).with_columns(at=None).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="time column"):
        take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    rows_of([2]).write_parquet(tmp_path / "b.parquet")
    assert take(arrivals_in(tmp_path / "stream"), tmp_path / "a.parquet", tmp_path / "b.parquet").rows == 1


@pytest.mark.parametrize(
    ("column", "wrong"), [("age", pl.concat_list("age")), ("user", pl.struct("user")), ("click", pl.struct("click"))]
)
def test_a_file_with_a_column_of_another_type_is_refused_before_its_rows_are_taken(
    tmp_path: Path, column: str, wrong: pl.Expr
) -> None:
    """Once taken they stayed: neither without the file nor with a corrected one did the stream go on."""
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    take(arrivals, tmp_path / "a.parquet")
    rows_of([2]).with_columns(wrong.alias(column)).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=f"'{column}'") as refused:
        take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert str(tmp_path / "b.parquet") in refused.value.where
    assert "nothing of it was taken" in refused.value.ways_out[0]
    assert take(arrivals_in(tmp_path / "stream"), tmp_path / "a.parquet") == Taken()
    rows_of([2]).write_parquet(tmp_path / "b.parquet")
    assert take(arrivals_in(tmp_path / "stream"), tmp_path / "a.parquet", tmp_path / "b.parquet").rows == 1


def test_files_that_end_amid_a_line_are_taken_and_named(tmp_path: Path) -> None:
    text = rows_of([0, 1]).write_csv()
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text[:-4])
    taken = take(arrivals_in(tmp_path / "stream"), tmp_path / "a.csv", tmp_path / "b.csv")
    assert (taken.rows, taken.torn) == (4, (str(tmp_path / "b.csv"),))


def test_all_columns_that_a_file_lacks_are_named_the_time_among_them(tmp_path: Path) -> None:
    rows_of([0, 1]).drop("at", "age").write_parquet(tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="'age', 'at'") as refused:
        take(arrivals_in(tmp_path / "stream"), tmp_path / "a.parquet")
    assert (
        "take those that are features out of the schema; 'at' is named by time under [roles]" in refused.value.ways_out
    )
    rows_of([0, 1]).drop("at").write_parquet(tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"\[roles\] time"):
        take(arrivals_in(tmp_path / "stream"), tmp_path / "b.parquet")


def test_rows_without_a_time_are_put_aside_and_counted(tmp_path: Path) -> None:
    frame = rows_of([0, 1, 1]).with_columns(at=pl.when(pl.col("age") == pl.col("age").max()).then(None).otherwise("at"))
    frame.write_parquet(tmp_path / "a.parquet")
    data = zg.DataConfig(train=("x",), bad_rows=BadRowPolicy.QUARANTINE)
    arrivals = arrivals_in(tmp_path / "stream", data=data)
    take(arrivals, tmp_path / "a.parquet")
    assert arrivals.journal.files[0].bad == 1
    assert sum(map(len, all_done(arrivals).values())) == 2


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    rows_of([0, 1]).write_parquet(tmp_path / "a.parquet")
    take(arrivals_in(tmp_path / "stream"), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"--by day, given month"):
        arrivals_in(tmp_path / "stream", by="month")
    arrivals = arrivals_in(tmp_path / "stream")
    spool = tmp_path / "stream/arrived/00000.parquet"
    content = bytearray(spool.read_bytes())
    content[20] ^= 255
    spool.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged, or another one lies in its place"):
        all_done(arrivals)
    journal = tmp_path / "stream/stream.json"
    journal.write_bytes(journal.read_bytes().replace(b"2000-05-01", b"2000-05-07"))
    with pytest.raises(CheckpointError, match="journal of a stream"):
        arrivals_in(tmp_path / "stream")


def test_an_upcoming_window_is_the_one_that_is_called_done_and_asking_changes_nothing(tmp_path: Path) -> None:
    rows_of([0, 1, 2]).write_parquet(tmp_path / "a.parquet")
    rows_of([0, 1], seed=1).write_parquet(tmp_path / "b.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    assert arrivals.upcoming(1, is_over=True) is None
    take(arrivals, tmp_path / "a.parquet")
    first = arrivals.upcoming(1, is_over=False)
    assert arrivals.upcoming(2, is_over=False) is None  # one after the other
    assert arrivals.journal.done == []
    assert arrivals.finish_next(is_over=False)
    assert arrivals.journal.done == [first]
    assert arrivals.upcoming(1, is_over=False) == first
    second = arrivals.upcoming(2, is_over=False)
    take(arrivals, tmp_path / "a.parquet", tmp_path / "b.parquet")
    with_late = arrivals.upcoming(2, is_over=False)
    assert second is not None
    assert with_late is not None
    assert (second.rows, with_late.rows, with_late.late) == (1, 3, 1)
    assert arrivals.finish_next(is_over=False)
    assert arrivals.journal.done[1] == with_late
    assert arrivals.upcoming(3, is_over=False) is None
    third = arrivals.upcoming(3, is_over=True)
    assert arrivals.finish_next(is_over=True)
    assert arrivals.journal.done[2] == third


def test_a_copy_that_gets_other_rows_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    """A file that was left out as a copy is known by what it was then, as one whose rows were taken is."""
    file = tmp_path / "a.parquet"
    copy = tmp_path / "b.parquet"
    rows_of([0, 1]).write_parquet(file)
    shutil.copy(file, copy)
    arrivals = arrivals_in(tmp_path / "stream")
    assert take(arrivals, file, copy).again == (str(copy),)
    os.utime(copy, (1, 1))
    assert take(arrivals_in(tmp_path / "stream"), file, copy) == Taken()
    rows_of([1, 2], seed=1).write_parquet(copy)
    with pytest.raises(DataError, match="stay as they were"):
        take(arrivals_in(tmp_path / "stream"), file, copy)
    copy.rename(tmp_path / "c.parquet")  # a way out of the error
    assert take(arrivals_in(tmp_path / "stream"), file, tmp_path / "c.parquet") == Taken(files=1, rows=2)


def test_files_are_taken_anew_where_one_was_corrected_before_anything_was_trained(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    other = tmp_path / "b.parquet"
    rows_of([0, 1]).write_parquet(file)
    rows_of([1, 2], seed=1).write_parquet(other)
    take(arrivals_in(tmp_path / "stream"), file, other)
    rows_of([0, 3, 3], seed=2).write_parquet(file)
    begun = arrivals_in(tmp_path / "stream")
    with pytest.raises(DataError, match="stay as they were"):
        take(begun, file, other)
    arrivals = arrivals_in(tmp_path / "stream", has_begun=False)
    assert take(arrivals, file, other).rows == 5
    assert all_done(arrivals) == {"2000-05-01": [0], "2000-05-02": [3], "2000-05-03": [4], "2000-05-04": [1, 2]}
    arrivals = arrivals_in(tmp_path / "stream", has_begun=False)
    assert take(arrivals, other).rows == 2  # the first file was taken out
    rows_of([7], seed=3).write_parquet(other)
    with pytest.raises(DataError, match="stay as they were"):  # training may have begun meanwhile
        take(arrivals, other)


def test_a_full_disk_names_the_file_and_the_same_rows_are_taken_afterwards(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is full."""
    file = tmp_path / "a.parquet"
    rows_of([0] * 3000).write_parquet(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(FileError) as refused:
            take(arrivals_in(tmp_path / "stream"), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.where.endswith("arrived/00000.parquet")
    arrivals = arrivals_in(tmp_path / "stream")
    assert take(arrivals, file).rows == 3000
    assert len(all_done(arrivals)["2000-05-01"]) == 3000
