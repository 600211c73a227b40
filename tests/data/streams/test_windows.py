"""Windows: each time belongs to one, in every unit that times are written in."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ziggurat.data.raw.bad_rows import BadReason, BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import HISTORY, LEFT_OUT, Clock, Cut, StreamConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.date_order import DateOrder

MOMENTS = [
    dt.datetime(1999, 12, 31, 23, 59, 59),
    dt.datetime(2000, 1, 1),
    dt.datetime(2000, 2, 29, 12),
    dt.datetime(2000, 5, 1),
    dt.datetime(2000, 5, 7, 23, 59, 59),  # a Sunday
    dt.datetime(2000, 5, 8),
    dt.datetime(2001, 1, 1, 7, 30),
]
SECONDS = [int((moment - dt.datetime(1970, 1, 1)).total_seconds()) for moment in MOMENTS]
COLUMNS = {
    "seconds": pl.Series("at", SECONDS),
    "floats": pl.Series("at", [second + 0.5 for second in SECONDS]),
    "milliseconds": pl.Series("at", [second * 1000 for second in SECONDS]),
    "microseconds": pl.Series("at", [second * 10**6 for second in SECONDS]),
    "nanoseconds": pl.Series("at", [second * 10**9 for second in SECONDS]),
    "text of numbers": pl.Series("at", [str(second) for second in SECONDS]),
    "datetimes": pl.Series("at", MOMENTS),
    "text of dates": pl.Series("at", [moment.isoformat() for moment in MOMENTS]),
}
NAMES = {
    "hour": lambda moment: moment.strftime("%Y-%m-%dT%H"),
    "day": lambda moment: moment.strftime("%Y-%m-%d"),
    "week": lambda moment: (moment - dt.timedelta(days=moment.weekday())).strftime("%Y-%m-%d"),
    "month": lambda moment: moment.strftime("%Y-%m"),
}


def cut_of(series: pl.Series, **settings: str) -> tuple[Cut, np.ndarray]:
    chunk = RawChunk.of(pl.DataFrame({"at": series}))
    clock = Clock.of(chunk, "at", date_order=DateOrder.AUTO)
    return Cut.of(StreamConfig(**settings), clock), clock.times(chunk, bad_rows=BadRows())  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", COLUMNS)
@pytest.mark.parametrize("by", NAMES)
def test_a_time_lies_in_its_stretch_of_the_calendar(unit: str, by: str) -> None:
    cut, times = cut_of(COLUMNS[unit], by=by)
    assert [cut.name(window) for window in cut.windows(times).tolist()] == [NAMES[by](moment) for moment in MOMENTS]


@pytest.mark.parametrize("unit", COLUMNS)
def test_rows_before_from_are_the_history_and_those_from_until_on_are_left_out(unit: str) -> None:
    cut, times = cut_of(COLUMNS[unit], by="month", begin="2000-05", until="2001")
    found = cut.windows(times).tolist()
    assert found[:3] == [HISTORY] * 3
    assert found[6] == LEFT_OUT
    assert [cut.name(window) for window in found[3:6]] == ["2000-05"] * 3
    assert cut.name(HISTORY) == "before 2000-05"


MIDNIGHT = 1_767_225_600 * 10**9  # 2026-01-01


@pytest.mark.parametrize("kind", ["whole", "text", "marks", "decimal", "unsigned", "64-bit limit"])
def test_nanoseconds_before_midnight_are_of_the_day_before(kind: str) -> None:
    """Floats of this size are 256 apart, so that the nearest one may be midnight itself."""
    rng = np.random.default_rng(0)
    nanoseconds = [MIDNIGHT, *(MIDNIGHT + int(each) for each in rng.integers(-600, 600, 60)), MIDNIGHT - 1]
    nanoseconds += [MIDNIGHT + 200 * 86_400 * 10**9 - 1]
    series = pl.Series("at", nanoseconds)
    match kind:
        case "text":
            series = series.cast(pl.String)
        case "marks":
            series = pl.Series("at", [f"{each:,}" for each in nanoseconds])
        case "decimal":
            series = series.cast(pl.Decimal(20, 0))
        case "unsigned":
            series = series.cast(pl.UInt64)
        case "64-bit limit":
            series = pl.Series("at", [*nanoseconds, 2**63 - 1])
            nanoseconds.append(2**63 - 1)
    for by, a_window in (("day", 86_400), ("hour", 3_600)):
        cut, times = cut_of(series, by=by)
        assert cut.windows(times)[:63].tolist() == [each // (a_window * 10**9) for each in nanoseconds][:63]
    assert all(float(time) <= each for time, each in zip(times.tolist(), nanoseconds, strict=True))
    assert np.abs(times[:63] - np.array(nanoseconds[:63], dtype=np.int64).astype(np.float64)).max() <= 256


def test_the_history_may_end_inside_a_window() -> None:
    cut, times = cut_of(COLUMNS["seconds"], by="month", begin="2000-05-07T23:59")
    found = cut.windows(times).tolist()
    assert found[3] == HISTORY
    assert cut.name(found[4]) == cut.name(found[5]) == "2000-05"


def test_a_file_in_another_unit_is_named_with_its_row() -> None:
    clock = Clock.of(RawChunk.of(pl.DataFrame({"at": COLUMNS["seconds"]})), "at", date_order=DateOrder.AUTO)
    chunk = RawChunk.of(pl.DataFrame({"at": [SECONDS[0], SECONDS[1] * 1000]}), name="second.parquet")
    with pytest.raises(DataError, match="milliseconds") as refused:
        clock.times(chunk, bad_rows=BadRows())
    assert "second.parquet, row 1" in refused.value.where
    assert "in seconds" in refused.value.expected


def test_one_row_in_another_unit_is_a_bad_row_of_its_file(tmp_path: Path) -> None:
    """It was an error of the whole file, which nothing but editing could mend."""
    clock = Clock.of(RawChunk.of(pl.DataFrame({"at": COLUMNS["seconds"]})), "at", date_order=DateOrder.AUTO)
    chunk = RawChunk.of(pl.DataFrame({"at": [SECONDS[0], SECONDS[1], SECONDS[0] * 1000]}), name="second.parquet")
    with pytest.raises(DataError, match="milliseconds") as refused:
        clock.times(chunk, bad_rows=BadRows())
    assert "second.parquet, row 2" in refused.value.where
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        times = clock.times(chunk, bad_rows=bad_rows)
    assert np.isnan(times).tolist() == [False, False, True]
    assert bad_rows.counts == {BadReason.OTHER_UNIT: 1}


def test_a_clock_that_was_not_set_does_not_hide_the_unit_of_the_times_behind_it() -> None:
    frame = pl.DataFrame({"at": [0, None, SECONDS[0] * 1000, SECONDS[1] * 1000]})
    clock = Clock.of(RawChunk.of(frame), "at", date_order=DateOrder.AUTO)
    assert (clock.per_second, clock.seen) == (1000, SECONDS[0] * 1000)
    assert Cut.of(StreamConfig(by="day"), clock).windows(np.array([0.0])).tolist() == [0]  # 1970-01-01


@pytest.mark.parametrize("latest_s", [math.inf, SECONDS[-1] + 86_400.0])
@pytest.mark.parametrize("unit", ["floats", "milliseconds"])
def test_a_time_outside_of_the_calendar_is_a_bad_row(tmp_path: Path, unit: str, latest_s: float) -> None:
    """One row of the year minus thirty thousand million was the first window: the vocabularies were its alone."""
    clock = Clock.of(RawChunk.of(pl.DataFrame({"at": COLUMNS[unit]})), "at", date_order=DateOrder.AUTO)
    good = float(COLUMNS[unit][0])
    chunk = RawChunk.of(pl.DataFrame({"at": [good, -1e18 * clock.per_second, 1e300, good]}))
    with pytest.raises(DataError, match="year"):
        clock.times(chunk, bad_rows=BadRows(), latest_s=latest_s)
    with BadRows(BadRowPolicy.QUARANTINE, folder=tmp_path) as bad_rows:
        times = clock.times(chunk, bad_rows=bad_rows, latest_s=latest_s)
    assert np.isnan(times).tolist() == [False, True, True, False]
    assert sum(bad_rows.counts.values()) == 2


@pytest.mark.parametrize("time", [1e300, -1e300, 1e19, float(2**63), 253_402_300_800.0])
def test_a_time_without_a_date_is_shown_as_its_number(time: float) -> None:
    assert float(Clock(column="at", per_second=1).shown(time)) == time


def test_numbers_of_ones_own_have_windows_of_rows_alone() -> None:
    series = pl.Series("at", [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="calendar"):
        cut_of(series, by="day")
    cut, times = cut_of(series, by="rows:2", begin="1", until="3")
    assert cut.windows(times).tolist() == [HISTORY, 0, 0, LEFT_OUT]
    assert StreamConfig(by="rows:2").rows == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"by": "year"}, "hour, day, week, month, or rows:N"),
        ({"by": "rows:0"}, "rows:N"),
        ({"begin": "May 2000"}, "YYYY-MM"),
        ({"begin": "2000-13"}, "calendar"),
        ({"begin": "2001", "until": "2000"}, "--from before --until"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cut_of(COLUMNS["seconds"], **settings)


def test_moments_are_shown_as_dates() -> None:
    cut, times = cut_of(COLUMNS["milliseconds"], by="day")
    assert cut.clock.shown(times[2]) == "2000-02-29 12:00:00"
    assert math.isinf(cut.until)


NEW_YEAR = 1_767_225_600  # 2026-01-01


@pytest.mark.parametrize(
    ("per_second", "time"),
    [
        (1, NEW_YEAR + 0.9),
        (1, NEW_YEAR + 0.1234567),
        (1, float(NEW_YEAR)),
        (1, -0.5),
        (1, 1e-12),
        (1000, NEW_YEAR * 1000 + 900.0),
        (1_000_000, NEW_YEAR * 1e6 + 900_001.0),
        (1_000_000_000, NEW_YEAR * 1e9 + 123_456_768.0),
        (0, 0.1 + 0.2),
        (0, 12.0),
    ],
)
def test_a_time_that_is_shown_is_never_before_the_time(per_second: int, time: float) -> None:
    shown = Clock(per_second=per_second).shown(time)
    seconds = time / (per_second or 1)
    read = Clock(per_second=min(per_second, 1)).moment(shown, flag="--watermark")
    assert read == pytest.approx(seconds, abs=1e-9)
    assert read >= seconds
    if abs(seconds) > 1e-9:
        assert read == seconds


def test_whole_seconds_are_shown_as_before() -> None:
    assert Clock(per_second=1).shown(float(NEW_YEAR)) == "2026-01-01 00:00:00"
    assert Clock(per_second=1_000_000).shown(NEW_YEAR * 1e6 + 900_000) == "2026-01-01 00:00:00.900"


def test_fractions_beyond_nanoseconds_are_refused() -> None:
    with pytest.raises(ConfigError, match="a date"):
        Clock(per_second=1).moment("2026-01-01T00:00:00.1234567890", flag="--watermark")
