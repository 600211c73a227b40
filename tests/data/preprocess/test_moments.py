"""Lists of times: whole numbers are kept, and dates in all their forms count microseconds."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.preprocess.fit.moments import read_moments
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.cells import Faults
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Moments, Schema
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml

AT = dt.datetime(2024, 3, 5, 14, 22)
MICROSECONDS = 1_709_648_520_000_000


def read(series: pl.Series, *, order: DateOrder = DateOrder.AUTO) -> tuple[list[int], list[int], Faults]:
    faults = Faults(chunk=RawChunk(frame=series.to_frame("at"), path=Path("log.parquet")))
    times, lengths = read_moments(series.alias("at"), faults=faults, role="moments 'at'", date_order=order)
    return times.tolist(), lengths.tolist(), faults


@pytest.mark.parametrize(
    "values",
    [
        pl.Series([[AT, AT], [], None]),
        pl.Series([[AT, AT], [], None]).cast(pl.List(pl.Datetime("ms"))),
        pl.Series([[AT, AT], [], None]).cast(pl.List(pl.Datetime("us", "UTC"))),
        pl.Series([["2024-03-05 14:22", "2024-03-05T15:22:00+01:00"], [], None]),
        pl.Series([["05.03.2024 14:22", str(MICROSECONDS)], [], None]),
        pl.Series([["2024-03-05 14:22"] * 2, [], None]).cast(pl.List(pl.Categorical())),
        pl.Series([[MICROSECONDS, MICROSECONDS], [], None]),
    ],
)
def test_lists_of_dates_are_microseconds(values: pl.Series) -> None:
    times, lengths, faults = read(values)
    assert (times, lengths, faults.found) == ([MICROSECONDS] * 2, [2, 0, 0], {})


def test_a_date_that_may_be_two_is_none_until_its_order_is_known() -> None:
    values = pl.Series([["2024-03-05 14:22"], ["05/03/2024 14:22"], ["soon"], [None]], dtype=pl.List(pl.String))
    faults = read(values)[2]
    assert sorted(faults.found) == [1, 2, 3]
    assert faults.found[1].found == "['05/03/2024 14:22']"
    assert "dates like 2024-05-31" in faults.found[1].expected
    times, _, faults = read(values.head(2), order=DateOrder.DAY_FIRST)
    assert (times, faults.found) == ([MICROSECONDS] * 2, {})


def test_a_date_that_no_calendar_has_is_a_fault() -> None:
    far = pl.Series([[400_000_000]]).cast(pl.List(pl.Int32)).cast(pl.List(pl.Date))
    assert read(far)[2].found[0].found == "[400000000]"


@pytest.mark.parametrize(
    "values", [pl.Series([[1.5]]), pl.Series([[True]]), pl.Series([[dt.time(4)]]), pl.Series(["1"])]
)
def test_what_is_no_list_of_times_is_refused(values: pl.Series) -> None:
    with pytest.raises(SchemaError, match="lists of whole numbers or dates"):
        read(values)


def test_a_schema_says_what_stands_first_in_the_dates_of_its_lists() -> None:
    schema = schema_from_toml('[[feature]]\nname = "at"\nkind = "moments"\ndate_order = "month_first"\n', "test")
    assert schema_from_toml(schema_to_toml(schema), "test") == schema
    assert schema.to_state() != Schema(features=(Moments(name="at"),)).to_state()
    frame = pl.DataFrame({"at": [["03/05/2024 14:22"], ["2024-03-05 14:22"]]})
    preprocessing = Preprocessing.fit(schema, iter([RawChunk.of(frame)]))
    encoded = preprocessing.encode(RawChunk.of(frame))
    assert encoded["at"].to_pylist() == [[MICROSECONDS]] * 2
