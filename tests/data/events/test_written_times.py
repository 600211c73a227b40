"""However the times of a log are written, its samples are those of the same log with a column of dates."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.events.log import EventLog, date_order_of, read_events
from ziggurat.data.events.sequences import sequences_of
from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Schema

SCHEMA = Schema(
    features=(Categorical(name="item"),),
    group="user",
    time="time",
    items=Items(id="item"),
    events=Events(),
    missing_texts=("NULL",),
)
BEGIN = dt.datetime(2024, 1, 5, 13, 7)


def log_of(times: pl.Series) -> pl.DataFrame:
    """Twelve users who take turns, so that no file is in the order of a user's rows by chance."""
    numbers = range(len(times))
    users = [f"u{at * 5 % 12}" for at in numbers]
    items = [f"i{at * 7 % 9}" for at in numbers]
    return pl.DataFrame({"user": users, "item": items, "time": times})


MINUTES = pl.Series([BEGIN + dt.timedelta(minutes=977 * (at * 31 % 96)) for at in range(96)])
DATED = log_of(MINUTES)


def samples(
    path: Path, *, by: SplitBy = SplitBy.LEAVE_ONE_OUT, order: DateOrder = DateOrder.AUTO
) -> list[pl.DataFrame]:
    split = SplitConfig(by=by, valid_fraction=0.2, test_fraction=0.2, date_order=order)
    made = sequences_of(DataConfig(train=(str(path),), split=split), SCHEMA, folder=path.parent / f"made_{path.stem}")
    files = (*made.config.train, *made.config.valid, *made.config.test)
    assert len(files) == 3
    return [pl.read_parquet(file) for file in files]


def written(template: str) -> pl.Series:
    return MINUTES.dt.strftime(template)


WAYS = {
    "iso": written("%Y-%m-%d %H:%M:%S"),
    "iso with T": written("%Y-%m-%dT%H:%M"),
    "iso with a fraction": written("%Y-%m-%d %H:%M:%S.000000"),
    "iso in UTC": written("%Y-%m-%dT%H:%M:%SZ"),
    "iso with an offset": (MINUTES + dt.timedelta(hours=2)).dt.strftime("%Y-%m-%dT%H:%M:%S+02:00"),
    "points": written("%d.%m.%Y %H:%M"),
    "day first": written("%d/%m/%Y %H:%M"),
    "month first": written("%m/%d/%Y %I:%M %p"),
    "dates with a zone": MINUTES.dt.replace_time_zone("UTC").dt.convert_time_zone("America/Lima"),
    "milliseconds": MINUTES.dt.cast_time_unit("ms"),
    "categories": written("%Y-%m-%d %H:%M").cast(pl.Categorical()),
}
FILES: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "parquet": lambda frame, path: frame.write_parquet(path),
    "csv": lambda frame, path: frame.write_csv(path),
    "jsonl": lambda frame, path: frame.write_ndjson(path),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_times_gives_the_samples_of_dates(way: str, tmp_path: Path) -> None:
    DATED.write_parquet(tmp_path / "dated.parquet")
    kinds = ["parquet"] if WAYS[way].dtype != pl.String else list(FILES)
    for by in (SplitBy.LEAVE_ONE_OUT, SplitBy.TIME):
        wanted = samples(tmp_path / "dated.parquet", by=by)
        assert all(frame.height for frame in wanted)
        for kind in kinds:
            path = tmp_path / f"{kind}_{by}.{kind}"
            FILES[kind](log_of(WAYS[way]), path)
            assert inspect_file(path).schema.time == "time"  # so that what is called dates is what is read
            for mine, theirs in zip(samples(path, by=by), wanted, strict=True):
                assert mine.equals(theirs), kind


@pytest.mark.parametrize("kind", FILES)
def test_days_alone_are_the_beginnings_of_days(kind: str, tmp_path: Path) -> None:
    log_of(MINUTES.dt.date()).write_parquet(tmp_path / "dates.parquet")
    FILES[kind](log_of(written("%Y-%m-%d")), tmp_path / f"texts.{kind}")
    for mine, theirs in zip(samples(tmp_path / f"texts.{kind}"), samples(tmp_path / "dates.parquet"), strict=True):
        assert mine.equals(theirs)
        assert (mine["asked_at"].list.first() % 86_400_000_000 == 0).all()


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_texts_of_numbers_stay_these_numbers(kind: str, unit: str, tmp_path: Path) -> None:
    numbers = MINUTES.dt.epoch("s" if unit == "s" else "ms")
    FILES[kind](log_of(numbers.cast(pl.String)), tmp_path / f"log.{kind}")
    asked = pl.concat([frame["asked_at"] for frame in samples(tmp_path / f"log.{kind}")]).explode()
    assert set(asked) <= set(numbers)


def read(*columns: pl.Series, bad_rows: BadRows | None = None, order: DateOrder = DateOrder.AUTO) -> EventLog:
    """A log of one chunk a column of times."""
    start, chunks = 0, []
    for number, times in enumerate(columns):
        chunks.append(RawChunk.of(log_of(times), name=f"{number}.csv", start=start))
        start += len(times)
    return read_events(iter(chunks), SCHEMA, bad_rows=bad_rows or BadRows(), date_order=order)


def test_a_later_file_may_show_what_stands_first() -> None:
    unclear, clear = ["03/04/2024", "01/02/2024"], ["25/12/2023"]
    log = read(pl.Series(unclear), pl.Series(clear))
    assert log.date_order is DateOrder.DAY_FIRST
    told = read(pl.Series(unclear), order=DateOrder.DAY_FIRST)
    assert sorted(log.times)[1:] == sorted(told.times)
    other = read(pl.Series(unclear), order=DateOrder.MONTH_FIRST)
    assert other.date_order is DateOrder.MONTH_FIRST
    days = pl.Series(other.times).cast(pl.Datetime("us")).dt.date()
    assert sorted(days) == [dt.date(2024, 1, 2), dt.date(2024, 3, 4)]


def test_dates_that_nothing_explains_are_refused_until_somebody_says_it(tmp_path: Path) -> None:
    texts = pl.Series([f"0{1 + at % 9}/0{1 + at % 7}/2024 10:{at:02d}" for at in range(60)])
    log_of(texts).write_csv(tmp_path / "log.csv")
    with pytest.raises(ConfigError, match="and none that shows it in 60 rows") as refused:
        samples(tmp_path / "log.csv")
    assert "log.csv, line 2, row 0, column 'time'" in refused.value.where
    assert any("--data.split.date-order month_first" in way for way in refused.value.ways_out)
    by_order = [samples(tmp_path / "log.csv", order=order) for order in (DateOrder.DAY_FIRST, DateOrder.MONTH_FIRST)]
    assert not by_order[0][0].equals(by_order[1][0])
    with pytest.raises(ConfigError, match=r"as many that show the one as the other \(1\)"):
        read(pl.Series(["13/01/2024", "01/13/2024"]))


@pytest.mark.parametrize(
    ("times", "bad", "expected"),
    [
        (["2024-01-05 10:00", "yesterday", "2024-01-06"], 1, "a date like 2024-05-31 12:00:00"),
        (["2024-01-05 10:00", "2024-01-06", "1709648530"], 2, "a date like 2024-05-31 12:00:00"),
        (["31/01/2024", "02/03/2024", "01/31/2024", "30/01/2024"], 2, "a date like 2024-05-31 12:00:00"),
        (["1709648530", "1709648531", "2024-01-06"], 2, "a time as a whole number"),
        (["2024-01-05 10:00", "2024-01-06", "NULL"], 2, "the time of each event"),
        (["2024-01-05 10:00", "2024-01-06", "9024-01-06"], 2, "past by the clock"),
    ],
)
def test_a_time_that_cannot_be_read_is_a_bad_row(times: list[str], bad: int, expected: str, tmp_path: Path) -> None:
    log_of(pl.Series(times)).write_csv(tmp_path / "log.csv")
    config = DataConfig(train=(str(tmp_path / "log.csv"),))
    with pytest.raises(DataError) as refused:
        sequences_of(config, SCHEMA, folder=tmp_path / "made")
    assert expected in refused.value.expected
    assert refused.value.where == f"{tmp_path / 'log.csv'}, line {bad + 2}, row {bad}, column 'time'"
    aside = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
    with aside:
        log = read(pl.Series(times), bad_rows=aside)
    assert len(log.users) == len(times) - 1
    assert aside.kept_in is not None
    (line,) = map(json.loads, aside.kept_in.read_text().splitlines())
    assert (line["row"], line["column"]) == (bad, "time")
    assert expected in line["detail"]


def test_where_all_times_are_bad_the_files_and_the_quarantine_are_named(tmp_path: Path) -> None:
    log_of(pl.Series(["today", "tomorrow"])).write_csv(tmp_path / "log.csv")
    config = DataConfig(train=(str(tmp_path / "log.csv"),), bad_rows=BadRowPolicy.QUARANTINE)
    with pytest.raises(DataError, match="all 2 rows were put aside") as refused:
        sequences_of(config, SCHEMA, folder=tmp_path / "made")
    assert refused.value.where == str(tmp_path / "log.csv")
    (kept,) = (tmp_path / "made").rglob("*.jsonl")
    assert refused.value.ways_out[0].startswith(f"look at {kept}")
    assert 'line": 3' in kept.read_text()


@pytest.mark.parametrize("dates", [pl.Series(["2024-01-05", "2024-01-06"]), pl.Series([BEGIN])])
def test_dates_beside_numbers_have_no_order(dates: pl.Series) -> None:
    with pytest.raises(SchemaError, match="dates after numbers") as refused:
        read(pl.Series([5, 6]), dates)
    assert refused.value.where == "1.csv, row 0, column 'time'"
    with pytest.raises(SchemaError, match="numbers after dates"):
        read(dates, pl.Series(["5", "6"]))


def test_texts_with_and_without_a_zone_are_said() -> None:
    log = read(pl.Series(["2024-01-05 10:00", "2024-01-05T09:30Z"]))
    assert log.zones_note.startswith("column 'time': 1 of 2 dates name no time zone")


def test_a_run_knows_what_stood_first_in_its_dates(tmp_path: Path) -> None:
    log_of(WAYS["month first"]).write_csv(tmp_path / "log.csv")
    made = sequences_of(DataConfig(train=(str(tmp_path / "log.csv"),)), SCHEMA, folder=tmp_path)
    assert date_order_of(made.schema) is DateOrder.MONTH_FIRST
