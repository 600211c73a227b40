"""Splits: shares are met, ties stay together, nothing depends on the chunk size, bad times are named."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.preprocess import splits
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig, Splitter, fit_splitter
from ziggurat.data.preprocess.values.times import is_date_column, kind_of_times, readable_times
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Categorical, Schema

SCHEMA = Schema(features=(Categorical(name="user"),), time="time")
NO_TIME = Schema(features=(Categorical(name="user"),))


def chunks_of(values, *, size: int = 1000, column: str = "time") -> list[RawChunk]:
    series = values if isinstance(values, pl.Series) else pl.Series(values)
    frame = pl.DataFrame({column: series})
    return [
        RawChunk(frame=frame.slice(start, size), path=Path("raw.csv"), first_row=start, start=start)
        for start in range(0, frame.height, size)
    ]


def assigned(splitter: Splitter, chunks: list[RawChunk], bad_rows: BadRows | None = None) -> np.ndarray:
    parts = [splitter.assign(chunk, bad_rows=bad_rows or BadRows()) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int8)


def by_time(values, *, size: int = 1000, valid: float = 0.1, test: float = 0.1) -> np.ndarray:
    chunks = chunks_of(values, size=size)
    config = SplitConfig(by=SplitBy.TIME, valid_fraction=valid, test_fraction=test)
    return assigned(fit_splitter(config, chunks, schema=SCHEMA), chunks)


def test_time_split_trains_on_the_past():
    codes = by_time(np.random.default_rng(0).permutation(1000))
    assert np.bincount(codes).tolist() == [800, 100, 100]
    times = np.random.default_rng(0).permutation(1000)
    assert times[codes == 0].max() < times[codes == 1].min()
    assert times[codes == 1].max() < times[codes == 2].min()


@settings(deadline=None)
@given(
    times=st.lists(st.integers(0, 20), min_size=1, max_size=200),
    valid=st.sampled_from([0.0, 0.1, 0.3]),
    test=st.sampled_from([0.0, 0.1, 0.45]),
    size=st.integers(1, 50),
)
def test_ties_never_straddle_and_the_order_is_kept(times, valid, test, size):
    wanted = 1 + (valid > 0) + (test > 0)
    if len(set(times)) < wanted:
        with pytest.raises(ConfigError, match="distinct times"):
            by_time(times, valid=valid, test=test)
        return
    codes = by_time(times, valid=valid, test=test, size=size)
    assert codes.tolist() == by_time(times, valid=valid, test=test, size=1000).tolist()
    by_value: dict[int, set[int]] = {}
    for time, code in zip(times, codes.tolist(), strict=True):
        by_value.setdefault(time, set()).add(code)
    assert all(len(found) == 1 for found in by_value.values())
    ordered = [min(by_value[time]) for time in sorted(by_value)]
    assert ordered == sorted(ordered)
    assert set(codes.tolist()) == {0} | ({1} if valid else set()) | ({2} if test else set())


@pytest.mark.parametrize(
    "values",
    [
        pl.Series(range(100), dtype=pl.Int32),
        pl.Series(range(100), dtype=pl.UInt64),
        pl.Series([value / 7 for value in range(100)], dtype=pl.Float32),
        pl.Series([dt.date(2024, 1, 1) + dt.timedelta(days=day) for day in range(100)]),
        pl.Series([dt.datetime(2024, 1, 1) + dt.timedelta(seconds=7 * n) for n in range(100)]),
        pl.Series([dt.datetime(1960, 1, 1) + dt.timedelta(days=700 * n) for n in range(100)], dtype=pl.Datetime("ms")),
        pl.Series([dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=n) for n in range(100)]),
        pl.Series([str(value) for value in range(100)]),
        pl.Series([f" {value}.5" for value in range(100)]),
        pl.Series([f"2024-05-01 12:{n // 60:02}:{n % 60:02}" for n in range(100)]),
        pl.Series([f"2024-05-01T12:{n // 60:02}:{n % 60:02}.25" for n in range(100)]),
        pl.Series([f"2024-05-01T12:{n // 60:02}:{n % 60:02}Z" for n in range(100)]),
        pl.Series([f"2024-05-01T12:{n // 60:02}:{n % 60:02}+02:00" for n in range(100)]),
        pl.Series([str(dt.date(2024, 1, 1) + dt.timedelta(days=day)) for day in range(100)]),
    ],
    ids=lambda series: f"{series.dtype} {series[0]}",
)
def test_every_kind_of_time_is_ordered(values):
    order = np.random.default_rng(1).permutation(100)
    codes = by_time(values[order], size=30)
    expected = np.repeat([0, 1, 2], [80, 10, 10])
    assert codes[np.argsort(order)].tolist() == expected.tolist()


def test_dates_with_and_without_time_of_day_mix():
    values = ["2024-01-01", "2024-01-02 10:00:00", "2024-01-03", "2024-01-01T23:00", "2024-01-04"]
    assert by_time(values, valid=0.2, test=0.2).tolist() == [0, 0, 1, 0, 2]


def test_column_in_the_settings_wins_over_the_schema():
    frame = pl.DataFrame({"time": [1, 2, 3, 4], "other": [4, 3, 2, 1]})
    chunk = RawChunk.of(frame)
    config = SplitConfig(by=SplitBy.TIME, column="other", valid_fraction=0.0, test_fraction=0.25)
    assert assigned(fit_splitter(config, [chunk], schema=SCHEMA), [chunk]).tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("values", [[1.0, None, 3.0, 4.0], [1.0, float("nan"), 3.0, 4.0], ["1", "soon", "3", "4"]])
def test_row_without_a_time_is_an_error_or_quarantined(tmp_path, values):
    with pytest.raises(DataError, match=r"raw\.csv, row 1, column 'time'"):
        by_time(values)
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
    chunks = chunks_of(values)
    config = SplitConfig(by=SplitBy.TIME, valid_fraction=0.0, test_fraction=0.3)
    splitter = fit_splitter(config, chunks, schema=SCHEMA, bad_rows=bad_rows)
    assert assigned(splitter, chunks, bad_rows).tolist() == [0, -1, 0, 2]
    assert bad_rows.num_rows == 1
    bad_rows.close()
    (file,) = (tmp_path / "quarantine").iterdir()
    assert json.loads(file.read_text())["column"] == "time"


@pytest.mark.parametrize("factor", [1_000, 1_000_000])
@pytest.mark.parametrize("dtype", [pl.Int64, pl.Float64, pl.String])
def test_seconds_beside_smaller_units_are_refused(factor, dtype):
    seconds = np.arange(1_700_000_000, 1_700_000_100)
    mixed = pl.Series(np.concatenate([seconds, seconds * factor])).cast(pl.Int64).cast(dtype)
    with pytest.raises(DataError, match=r"1700000000 to 17.*: seconds and m.*seconds, by their sizes") as refused:
        by_time(mixed)
    assert refused.value.where == "split by time, column 'time'"
    assert np.bincount(by_time(pl.Series(seconds * factor).cast(dtype))).tolist() == [80, 10, 10]
    own = np.concatenate([np.arange(100), seconds * factor])  # counted from a moment of their own
    assert len(by_time(own)) == 200


def test_impossible_time_columns():
    with pytest.raises(SchemaError, match="List"):
        by_time(pl.Series([[1], [2]]))
    mixed = chunks_of(["2024-01-01"]) + chunks_of([5])
    with pytest.raises(SchemaError, match="numbers after dates"):
        fit_splitter(SplitConfig(by=SplitBy.TIME), mixed, schema=SCHEMA)
    with pytest.raises(ConfigError, match="none in the schema"):
        fit_splitter(SplitConfig(by=SplitBy.TIME), [], schema=NO_TIME)
    with pytest.raises(DataError, match="at least one row") as refused:
        fit_splitter(SplitConfig(by=SplitBy.TIME), [], schema=SCHEMA, where="log.csv")
    assert refused.value.where == "log.csv"
    assert not any("aside" in way for way in refused.value.ways_out), "nothing was put aside"


def test_more_distinct_times_than_fit_are_still_cut_well(monkeypatch):
    monkeypatch.setattr(splits, "_MAX_DISTINCT", 1000)
    times = np.random.default_rng(2).permutation(50_000) // 2
    codes = by_time(times, size=777)
    shares = np.bincount(codes) / len(codes)
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)  # 25 times too many
    assert times[codes == 0].max() < times[codes == 1].min()
    assert times[codes == 1].max() < times[codes == 2].min()


@given(size=st.integers(1, 300), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_random_split_depends_on_seed_and_row_alone(size, seed):
    config = SplitConfig(by=SplitBy.RANDOM, seed=seed)
    one, many = chunks_of(np.zeros(500)), chunks_of(np.zeros(500), size=size)
    splitter = fit_splitter(config, [], schema=NO_TIME)
    assert assigned(splitter, one).tolist() == assigned(splitter, many).tolist()
    other = fit_splitter(SplitConfig(by=SplitBy.RANDOM, seed=seed + 1), [], schema=NO_TIME)
    assert assigned(splitter, one).tolist() != assigned(other, one).tolist()


def test_random_split_meets_its_shares_and_keeps_the_test_rows():
    chunks = chunks_of(np.zeros(100_000))
    codes = assigned(Splitter(config=SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.2, test_fraction=0.1)), chunks)
    assert np.bincount(codes) / len(codes) == pytest.approx([0.7, 0.2, 0.1], abs=0.005)
    other = assigned(Splitter(config=SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.05, test_fraction=0.1)), chunks)
    assert ((codes == 2) == (other == 2)).all()
    assert codes[:40].tolist() == FROZEN


FROZEN = [int(code) for code in "0002100022110000110000000000020000100001"]


def test_time_order_cuts_by_row_number_whatever_rows_are_missing():
    chunks = chunks_of(np.zeros(1000), size=130)
    rows = np.delete(np.arange(130, 260), [3, 7])
    chunks[1] = RawChunk(frame=chunks[1].frame[:128], path=Path("raw.csv"), first_row=130, start=130, rows=rows)
    config = SplitConfig(by=SplitBy.TIME_ORDER, valid_fraction=0.05, test_fraction=0.15)
    codes = assigned(fit_splitter(config, chunks, schema=NO_TIME), chunks)
    assert np.bincount(codes).tolist() == [798, 50, 150]
    assert (np.diff(codes) >= 0).all()


def test_split_by_column(tmp_path):
    values = ["train", "valid", "test", " Train ", "val", "TEST", "validation"]
    config = SplitConfig(by=SplitBy.COLUMN, column="part")
    chunks = chunks_of(values, column="part")
    assert assigned(fit_splitter(config, chunks, schema=NO_TIME), chunks).tolist() == [0, 1, 2, 0, 1, 2, 1]
    wrong = chunks_of(["train", "holdout", None], column="part")
    with pytest.raises(DataError, match=r"(?s)one of train.*'holdout'.*row 1, column 'part'"):
        assigned(Splitter(config=config, column="part"), wrong)
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
    assert assigned(Splitter(config=config, column="part"), wrong, bad_rows).tolist() == [0, -1, -1]


@pytest.mark.parametrize(
    "settings",
    [
        {"valid_fraction": 0.5, "test_fraction": 0.5},
        {"valid_fraction": -0.1},
        {"test_fraction": float("nan")},
        {"by": SplitBy.COLUMN},
        {"by": SplitBy.RANDOM, "column": "part"},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=r"split settings|SplitConfig"):
        SplitConfig(**settings)


def test_description_names_the_cuts():
    dates = chunks_of([dt.datetime(2024, 1, 1) + dt.timedelta(days=n) for n in range(10)])
    config = SplitConfig(by=SplitBy.TIME)
    assert fit_splitter(config, dates, schema=SCHEMA).describe() == (
        "by time column 'time': valid from 2024-01-09 00:00:00, test from 2024-01-10 00:00:00"
    )
    rows = SplitConfig(by=SplitBy.TIME_ORDER, valid_fraction=0.0)
    assert fit_splitter(rows, dates, schema=NO_TIME).describe() == "by row number: test from 9"
    assert "seed 0" in Splitter(config=SplitConfig(by=SplitBy.RANDOM)).describe()


@pytest.mark.parametrize("kind", [pl.Date, pl.Datetime("ms"), pl.Datetime("us")])
def test_a_date_that_no_calendar_has_is_a_bad_row(kind: pl.DataType) -> None:
    days = pl.Series(range(40), dtype=pl.Int32).cast(pl.Date).cast(kind)
    far = pl.Series([(1 << 31) - 1 if kind == pl.Date else (1 << 63) - 1]).cast(kind)
    values = days.extend(far)
    with pytest.raises(DataError, match="a date like") as caught:
        by_time(values)
    assert "row 40" in caught.value.where
    assert "'time'" in caught.value.where


EUROPEAN = ["01.03.2024 03:35", "01.03.2024 17:00:05", "02.03.2024", "1.4.2024 08:00", "31.12.2024 23:59"]
DAY_FIRST = ["01/03/2024 03:35", "01/03/2024 05:00 PM", "2/3/2024", "01-04-2024T08:00", "31/12/2024"]
MONTH_FIRST = ["03/01/2024 03:35", "03/01/2024 05:00pm", "3/2/2024", "04-01-2024T08:00", "12/31/2024"]
ZONED = ["2024-03-01T03:35Z", "2024-03-01 18:00:05+01:00", "2024-03-02 00:00:00 UTC", "2024/4/1 08:00", "2024.12.31"]


@pytest.mark.parametrize("values", [EUROPEAN, DAY_FIRST, MONTH_FIRST, ZONED], ids=lambda values: values[0])
def test_dates_are_read_as_people_write_them(values):
    order = [3, 0, 4, 2, 1]
    assert by_time([values[at] for at in order], valid=0.2, test=0.2).tolist() == [1, 0, 2, 0, 0]


def test_what_decides_the_order_of_day_and_month_is_described():
    config = SplitConfig(by=SplitBy.TIME, valid_fraction=0.0, test_fraction=0.2)
    splitter = fit_splitter(config, chunks_of(MONTH_FIRST), schema=SCHEMA)
    assert splitter.describe() == "by time column 'time' (dates with the month first): test from 2024-12-31 00:00:00"
    assert "first" not in fit_splitter(config, chunks_of(EUROPEAN), schema=SCHEMA).describe()


def test_dates_that_show_no_order_are_an_error_until_somebody_says_it():
    unclear = ["01/03/2024", "01/02/2024", "02/01/2024", "04/04/2024"]
    with pytest.raises(ConfigError, match=r"'01/03/2024', and none that shows it") as caught:
        by_time(unclear)
    assert "row 0" in caught.value.where
    assert "--data.split.date-order month_first" in str(caught.value)
    shares = {"by": SplitBy.TIME, "valid_fraction": 0.0, "test_fraction": 0.5}
    for order, codes in ((DateOrder.DAY_FIRST, [2, 0, 0, 2]), (DateOrder.MONTH_FIRST, [0, 0, 2, 2])):
        splitter = fit_splitter(SplitConfig(**shares, date_order=order), chunks_of(unclear), schema=SCHEMA)
        assert assigned(splitter, chunks_of(unclear)).tolist() == codes


def test_date_that_the_order_of_the_others_forbids_is_a_bad_row():
    with pytest.raises(DataError, match=r"'12/31/2024'\nwhere:\s+raw\.csv, row 6"):
        by_time([*DAY_FIRST, "30/11/2024", "12/31/2024"])
    with pytest.raises(DataError, match="01-03-24"):
        by_time(["2024-03-01", "01-03-24", "2024-03-02"])


def test_text_that_is_no_time_says_to_name_another_column():
    with pytest.raises(SchemaError, match="numbers or dates") as caught:
        kind_of_times(pl.Series("brand", ["Müller", None, "Söhne"]))
    assert caught.value.ways_out[0] == "name another column as time"
    for times, is_date in ((["12.5", "x"], False), (["x", "13/01/2024"], True), (["01/13/2024"], True), ([None], None)):
        assert kind_of_times(pl.Series("t", times, dtype=pl.String)) is is_date


def test_a_file_without_a_time_is_named(tmp_path):
    with pytest.raises(SchemaError) as caught:
        fit_splitter(SplitConfig(by=SplitBy.TIME), chunks_of(["soon", "later"]), schema=SCHEMA)
    assert caught.value.where == "raw.csv, time column 'time'"
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path)
    with bad_rows, pytest.raises(DataError, match=r"none but 2 that were put aside \(2 unparsable\)") as refused:
        fit_splitter(SplitConfig(by=SplitBy.TIME), chunks_of([None, None]), schema=SCHEMA, bad_rows=bad_rows)
    assert str(bad_rows.kept_in) in refused.value.ways_out[0]


def test_a_later_chunk_may_show_what_stands_first():
    late = ["03/04/2024", "01/02/2024", "02/02/2024", "25/12/2023", "04/02/2024"]
    splitter = fit_splitter(SplitConfig(by=SplitBy.TIME, valid_fraction=0.0), chunks_of(late, size=2), schema=SCHEMA)
    assert splitter.describe() == "by time column 'time' (dates with the day first): test from 2024-04-03 00:00:00"


def test_one_number_among_dates_is_a_bad_row():
    with pytest.raises(DataError, match=r"a date like(?s:.*)raw\.csv, row 1"):
        by_time(["2024-03-01", "12", "2024-03-02", "2024-03-03"])


@pytest.mark.parametrize("mark", [",", ".", "'", " ", "_"])
def test_times_with_marks_between_thousands_are_numbers(mark: str) -> None:
    """With two marks or more they can be read in one way alone, so no setting has to say it."""
    seconds = [1_700_000_000 + 300 * row for row in range(200)]
    texts = [f"{second:,}".replace(",", mark) for second in seconds]
    series = pl.Series("at", [*texts, "1,700", "1,70,000", "x", None])
    assert is_date_column(series) is False
    found = readable_times(series, order=DateOrder.AUTO)
    assert found[:200].tolist() == seconds
    assert np.isnan(found[200:]).all(), "one mark may be that of decimals"
    plain = pl.Series("at", ["12", " 3.5 ", "1e3"])
    assert readable_times(plain, order=DateOrder.AUTO).tolist() == [12.0, 3.5, 1000.0]
