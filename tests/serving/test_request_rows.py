"""Rows of requests: times keep all their 64 bits."""

from __future__ import annotations

import datetime as dt

import polars as pl
import pytest

from ziggurat.errors import RequestError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Label, Moments, Schema, Sequence
from ziggurat.serving.request_rows import frame_of, series_of

SCHEMA = Schema(features=(Moments(name="at"),), labels=(Label(name="y"),))


def test_times_keep_all_their_bits() -> None:
    times = [2**53 + 1, -(2**62) - 1]
    assert frame_of([{"at": times}, {"at": None}], SCHEMA)["at"].to_list() == [times, None]


@pytest.mark.parametrize("wrong", ["5", 5, [1.5], ["today"]])
def test_what_is_no_time_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="at"):
        frame_of([{"at": wrong}], SCHEMA)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"history": ["a", "b"]}, "no 'history_times'"),
        ({"history": ["a", "b"], "history_times": [5]}, "1 values"),
        ({"history_times": [5]}, "1 values"),
    ],
)
def test_lists_of_the_same_events_have_one_length(row: dict[str, object], found: str) -> None:
    features = (Sequence(name="history"), Moments(name="history_times"))
    schema = Schema(features=features, labels=(Label(name="y"),))
    joined = (("history", "history_rating", "history_times"),)  # some of a group may belong to another side
    even = {"history": ["a", None], "history_times": [5, 6]}
    assert frame_of([even, {}], schema, joined=joined).height == 2
    with pytest.raises(RequestError, match="'history_times' of row 1") as raised:
        frame_of([even, row], schema, joined=joined)
    assert raised.value.found == found
    assert "send both" in str(raised.value)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 2.5])
def test_what_is_no_whole_number_is_refused(wrong: float) -> None:
    with pytest.raises(RequestError, match="whole number"):
        series_of("year", [wrong], dtype=pl.Int64())


@pytest.mark.parametrize(
    ("order", "written", "wanted"),
    [
        (DateOrder.AUTO, "2024-03-05 14:22:10", 1_709_648_530_000_000),
        (DateOrder.AUTO, "2024-03-05T16:22:10.5+02:00", 1_709_648_530_500_000),
        (DateOrder.AUTO, "05.03.2024 14:22", 1_709_648_520_000_000),
        (DateOrder.DAY_FIRST, "05/03/2024 14:22", 1_709_648_520_000_000),
        (DateOrder.MONTH_FIRST, "03/05/2024 02:22 PM", 1_709_648_520_000_000),
        (DateOrder.AUTO, "1709648530000000", 1_709_648_530_000_000),
        (DateOrder.AUTO, dt.date(2024, 3, 5), 1_709_596_800_000_000),
        (DateOrder.AUTO, dt.datetime(2024, 3, 5, 14, 22, tzinfo=dt.UTC), 1_709_648_520_000_000),
    ],
)
def test_dates_are_times_in_microseconds(order: DateOrder, written: object, wanted: int) -> None:
    seen = (1_700_000_000_000_000, 1_710_000_000_000_000)
    schema = Schema(features=(Moments(name="at", seen=seen, date_order=order),))
    times = [1_700_000_000_000_001, written, None]
    assert frame_of([{"at": times}], schema)["at"].to_list() == [[times[0], wanted, None]]


def test_a_date_that_may_be_two_is_refused() -> None:
    with pytest.raises(RequestError, match=r"a date like 2024-05-31(?s:.*)05/03/2024"):
        frame_of([{"at": ["05/03/2024 14:22"]}], SCHEMA)


def test_a_date_is_of_another_unit_than_seconds() -> None:
    schema = Schema(features=(Moments(name="at", seen=(1_700_000_000, 1_710_000_000)),))
    with pytest.raises(RequestError, match="times in seconds, as those of training"):
        frame_of([{"at": ["2024-03-05"]}], schema)


def test_seconds_where_training_had_dates_may_be_sent_as_dates() -> None:
    seen = (1_700_000_000_000_000, 1_710_000_000_000_000)
    schema = Schema(features=(Moments(name="at", seen=seen),))
    with pytest.raises(RequestError, match="times in microseconds") as refused:
        frame_of([{"at": [1_709_648_530]}], schema)
    assert refused.value.ways_out == ("send dates, like 2024-05-31 12:00:00", "send them in microseconds")
    assert frame_of([{"at": ["2024-05-31 12:00:00"]}], schema).height == 1
