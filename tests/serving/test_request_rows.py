"""Rows of requests: times keep all their 64 bits."""

from __future__ import annotations

import polars as pl
import pytest

from ziggurat.errors import RequestError
from ziggurat.features.schema import Label, Moments, Schema
from ziggurat.serving.request_rows import frame_of, series_of

SCHEMA = Schema(features=(Moments(name="at"),), labels=(Label(name="y"),))


def test_times_keep_all_their_bits() -> None:
    times = [2**53 + 1, -(2**62) - 1]
    assert frame_of([{"at": times}, {"at": None}], SCHEMA)["at"].to_list() == [times, None]


@pytest.mark.parametrize("wrong", ["5", 5, [1.5], ["today"]])
def test_what_is_no_time_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="at"):
        frame_of([{"at": wrong}], SCHEMA)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 2.5])
def test_what_is_no_whole_number_is_refused(wrong: float) -> None:
    with pytest.raises(RequestError, match="whole number"):
        series_of("year", [wrong], dtype=pl.Int64())
