"""Rows of requests: times keep all their 64 bits."""

from __future__ import annotations

import polars as pl
import pytest

from ziggurat.errors import RequestError
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
