"""Cut a stream into windows: stretches of time that its rows belong to.

    --by day --from 2000-05 --until 2000-06

    │ rows before --from: history │ 2000-05-01 │ 2000-05-02 │ … │ 2000-05-31 │ left out

A window is a stretch of the calendar (hour, day, week, month), or so many rows in order of time. It is named by the
moment at which it begins (a week by its Monday), or by its number where it is one of rows. Times are taken as they are
written: as UTC where no zone is named. Counts of seconds, milliseconds, microseconds and nanoseconds since 1970 are
told apart by their size (`time_units.py`); once one is known, a file in another is an error, since its rows would all
come to lie in another century.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction

import numpy as np
from jaxtyping import Float64, Int64

from ziggurat.data.preprocess.values.time_units import is_modern, of_another_unit, per_second, unit_of
from ziggurat.data.preprocess.values.times import kind_of_times, readable_times, time_keys, with_date_order
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.label_delay import DelayConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.typed import CountOrNone, checked

HISTORY = -(1 << 62)  # the window of the rows before --from
LEFT_OUT = 1 << 62  # of the rows from --until on
UNREADABLE = LEFT_OUT + 1  # of rows without a time, which were put aside
_ROWS = re.compile(r"rows:([1-9][0-9_]*)")
_DATE = re.compile(r"\d{4}(-\d{2}(-\d{2}([T ]\d{2}(:\d{2}(:\d{2}(\.\d{1,9})?)?)?)?)?)?")
_DIGITS = (0, 3, 6, 9)  # of the fraction of a second, in a time for a person
_FIRST_S = -62_167_219_200  # 0000-01-01, the first moment that a date of four digits can name
_END_S = 253_402_300_800  # 10000-01-01
_PER_SECOND_OF_DATES = 1_000_000  # dates become microseconds


class Calendar(StrEnum):
    """Stretches of the calendar that a window may be."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class LateRows(StrEnum):
    """Choices of what becomes of rows that are older than a window that is done."""

    TRAIN = "train"  # they are scored and trained in the window that they arrive in
    DROP = "drop"  # they are counted, and nothing else


@dataclass(frozen=True, kw_only=True)
@checked
class StreamConfig:
    """Settings of how rows are cut into windows.

    Args:
        by: hour, day, week, month, or rows:N for N rows each.
        begin: the first moment of the first window, such as 2000-05 or 2000-05-17T08; a number where times are numbers
            of one's own; where the schema has no time, a number of rows. Rows before it are the history. "": the first
            window is the history.
        until: the first moment that is left out; "": none is.
        late: what becomes of rows that are older than a window that is done.
        growing: ids that have a row at a time, of tables that grow in the place of vocabularies that are fitted to the
            history; 0: tables stay as the schema has them.
        frozen: whether the history alone is trained, and all later windows are scored by that model: the control.
        delay: what becomes of rows whose label is known later.
    """

    by: str = Calendar.DAY.value
    begin: str = ""
    until: str = ""
    late: LateRows = LateRows.TRAIN
    growing: CountOrNone = 0
    frozen: bool = False
    delay: DelayConfig = field(default_factory=DelayConfig)

    def __post_init__(self) -> None:
        if self.by not in list(Calendar) and not _ROWS.fullmatch(self.by):
            raise ConfigError(
                expected=f"{', '.join(Calendar)}, or rows:N",
                found=repr(self.by),
                where="--by",
                ways_out=("--by day", "--by rows:100000"),
            )

    @property
    def rows(self) -> int:
        """Rows of a window; 0 where windows are stretches of the calendar."""
        found = _ROWS.fullmatch(self.by)
        return 0 if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Facts about the time column of a stream, known since its first rows were read.

    Args:
        column: its name; "" where the schema has no time.
        is_date: whether it holds dates, and not numbers.
        date_order: of dates like 01/03/2024.
        per_second: how many of its units a second has; 0 of numbers that count from a moment of their own.
        seen: the first whole time of the stream, by which the unit of others is judged; None of dates.
    """

    column: str = ""
    is_date: bool = False
    date_order: DateOrder = DateOrder.AUTO
    per_second: int = 0
    seen: int | None = None

    @staticmethod
    def of(chunk: RawChunk, column: str, *, date_order: DateOrder) -> Clock:
        """Return the clock that the first rows show.

        Raises:
            SchemaError: the column holds no times.
            ConfigError: dates whose order nothing shows.
        """
        if not column:
            return Clock()
        is_date = bool(kind_of_times(chunk.frame[column], file=str(chunk.path)))
        if is_date:
            _, order = next(with_date_order([chunk], column, order=date_order))
            return Clock(column=column, is_date=True, date_order=order, per_second=_PER_SECOND_OF_DATES)
        keys = readable_times(chunk.frame[column], order=DateOrder.AUTO, is_date=False)
        readable = _whole(keys[~np.isnan(keys)])
        # The first time of a calendar: a 0 before it, of whose clock was not set, says nothing of the unit.
        first = readable[np.flatnonzero(is_modern(readable))[:1]]
        if not unit_of(first.tolist()):
            return Clock(column=column)
        return Clock(column=column, per_second=int(per_second(first)[0]), seen=int(first[0]))

    def times(
        self, chunk: RawChunk, *, bad_rows: BadRows, latest_s: float = np.inf, by_row: bool = False
    ) -> Float64[np.ndarray, " N"]:
        """Return the times of rows, in the units of the column (dates: microseconds); NaN of rows that were put aside.

        Args:
            chunk: the rows.
            bad_rows: where rows without a time go, rows outside of the calendar, and rows of the future.
            latest_s: seconds since 1970; a later row has a wrong clock: it would call all windows before it done.
            by_row: whether each row has a writer of its own, as messages have. A time of another unit or kind is then
                a bad row; of one file another unit is an error where half of a chunk or more has it.

        Raises:
            DataError: a time is missing or cannot be read (policy ERROR), or is of another unit than those before.
            SchemaError: dates after numbers, or numbers after dates.
        """
        keys = time_keys(
            chunk, self.column, bad_rows=bad_rows, is_date=self.is_date, order=self.date_order, by_row=by_row
        )
        keys = self._without_impossible(keys, chunk, bad_rows=bad_rows, latest_s=latest_s)
        if self.seen is None:
            return keys
        readable = np.flatnonzero(~np.isnan(keys))
        others = readable[of_another_unit(_whole(keys[readable]), seen=[self.seen])]
        # A few rows of a file are its bad rows; where most are of another unit, the file is.
        if len(others) and (by_row or 2 * len(others) < len(readable)):
            keys = keys.copy()
            for index in others.tolist():
                self._report_unit(chunk, index, time=float(keys[index]), bad_rows=bad_rows)
                keys[index] = np.nan
            return keys
        if len(others):
            first = int(others[0])
            expected, found = self._units(float(keys[first]))
            raise DataError(
                expected=expected,
                found=found,
                where=chunk.where(first, column=self.column),
                ways_out=(f"write the times of this file in {self._unit}", "take the file out of the stream"),
            )
        return keys

    @property
    def _unit(self) -> str:
        assert self.seen is not None, "dates have no unit"
        return unit_of([self.seen])

    def _units(self, time: float) -> tuple[str, str]:
        """Return the unit that times have, and that of one that differs, as an error says them."""
        other = unit_of(_whole(np.array([time])).tolist())
        return (
            f"times in {self._unit}, as in the rows before (the first was {self.seen})",
            f"{int(time)}, which is one in {other} by its size",
        )

    def _report_unit(self, chunk: RawChunk, index: int, *, time: float, bad_rows: BadRows) -> None:
        """Report a row whose time is in another unit."""
        expected, found = self._units(time)
        bad_rows.report(
            chunk.bad_row(
                index,
                column=self.column,
                reason=BadReason.OTHER_UNIT,
                expected=expected,
                found=found,
                ways_out=(f"have its writer send times in {self._unit}",),
            )
        )

    def newest(self, chunk: RawChunk) -> float:
        """Return the latest time of rows that have one, in the units of the column; minus infinity of none."""
        keys = readable_times(chunk.frame[self.column], order=self.date_order, is_date=self.is_date)
        return float(np.nanmax(keys, initial=-np.inf))

    def _without_impossible(
        self, keys: Float64[np.ndarray, " N"], chunk: RawChunk, *, bad_rows: BadRows, latest_s: float
    ) -> Float64[np.ndarray, " N"]:
        """Report rows outside of the calendar, or later than `latest_s`, which are NaN afterwards."""
        if not self.per_second:
            return keys
        # A time in another unit looks like one of the far future, and is reported as what it is.
        same_unit = np.ones(len(keys), dtype=np.bool_)
        if self.seen is not None:
            readable = np.flatnonzero(~np.isnan(keys))
            same_unit[readable[of_another_unit(_whole(keys[readable]), seen=[self.seen])]] = False
        # A year without a date would be a window of its own, before all others or behind them.
        in_calendar = (keys >= _FIRST_S * self.per_second) & (keys < _END_S * self.per_second)
        wrong = np.flatnonzero((~in_calendar | (keys > latest_s * self.per_second)) & same_unit & ~np.isnan(keys))
        if not len(wrong):
            return keys
        keys = keys.copy()
        for index in wrong.tolist():
            time = float(keys[index])
            keys[index] = np.nan
            if in_calendar[index] or (time > 0 and latest_s < np.inf):
                reason = BadReason.IN_FUTURE
                expected = f"times up to {self.shown(math.floor(latest_s) * self.per_second)}, a day from now"
                ways_out = (
                    "set the clock of who writes these rows",
                    "take rows of the future, where they are made data: --future take",
                )
            else:
                reason = BadReason.NOT_READABLE
                expected = "times from the year 0 to the year 9999"
                ways_out = ("correct the clock of who writes these rows",)
            number = f"{time:.15g}"
            bad_rows.report(
                chunk.bad_row(
                    index,
                    column=self.column,
                    reason=reason,
                    expected=expected,
                    found=f"{number} ({self.shown(time)})" if in_calendar[index] else number,
                    ways_out=ways_out,
                )
            )
        return keys

    def moment(self, text: str, *, flag: str) -> float:
        """Return a moment of the command line as a time of the column.

        Raises:
            ConfigError: it cannot be read, or the column has no calendar.
        """
        if not self.per_second:
            try:
                return float(text)
            except ValueError as error:
                what = f"a number, as in the column {self.column!r}" if self.column else "a number of rows"
                raise ConfigError(
                    expected=what,
                    found=repr(text),
                    where=flag,
                    ways_out=(f"{flag} 1000", 'name a column of dates or of Unix times: time = "COLUMN" in the schema'),
                ) from error
        if not _DATE.fullmatch(text):
            raise ConfigError(
                expected="a date: YYYY, YYYY-MM, YYYY-MM-DD, YYYY-MM-DDTHH:MM, or one with seconds, HH:MM:SS.123",
                found=repr(text),
                where=flag,
                ways_out=(f"{flag} 2000-05", f"{flag} 2000-05-17T08:00"),
            )
        whole, _, fraction = text.partition(".")
        try:
            seconds = int(np.datetime64(whole.replace(" ", "T"), "s").astype(np.int64))
        except ValueError as error:
            raise ConfigError(
                expected="a date that is in the calendar", found=repr(text), where=flag, ways_out=f"{flag} 2000-05-31"
            ) from error
        # Of whole numbers the quotient is the nearest float: the same that a column of this moment is read as.
        scale = 10 ** len(fraction)
        return (seconds * scale + int(fraction or 0)) * self.per_second / scale

    def shown(self, time: float) -> str:
        """Return a time for a person, which `moment` reads as the same time, or as one just behind it.

        A fraction of a second is kept where there is one: a watermark that is cut would be before the newest row.
        """
        # Behind the calendar's end, or before its begin, a time has no date: a bad row may have any number.
        if not self.per_second or not _FIRST_S <= time / self.per_second < _END_S:
            short = f"{time:.15g}"
            return short if float(short) == time else repr(float(time))
        digits, count = _in_digits(Fraction(time) / self.per_second, read_as=float(time) / self.per_second)
        seconds, rest = divmod(count, 10**digits)
        text = str(np.datetime64(seconds, "s")).replace("T", " ")
        return f"{text}.{rest:0{digits}d}" if rest else text


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Settings and clock of a stream together: which window each time belongs to.

    Args:
        config: the settings.
        clock: of the time column.
        begin: `config.begin` as a time of the column; minus infinity without one.
        until: `config.until`, likewise; infinity without one.
    """

    config: StreamConfig
    clock: Clock
    begin: float = -np.inf
    until: float = np.inf

    @staticmethod
    def of(config: StreamConfig, clock: Clock) -> Cut:
        """Return the cut, once the clock is known.

        Raises:
            ConfigError: windows of the calendar without one, or a moment that cannot be read.
        """
        if not config.rows and not clock.per_second:
            found = f"numbers that are none in the column {clock.column!r}" if clock.column else "no time in the schema"
            raise ConfigError(
                expected=f"times in a calendar, which windows by {config.by} need: dates, or counts since 1970",
                found=found,
                where=f"--by {config.by}",
                ways_out=("windows of so many rows: --by rows:100000", 'time = "COLUMN" under [roles] of the schema'),
            )
        cut = Cut(config=config, clock=clock)
        if config.begin:
            cut = replace(cut, begin=clock.moment(config.begin, flag="--from"))
        if config.until:
            cut = replace(cut, until=clock.moment(config.until, flag="--until"))
        if not cut.begin < cut.until:
            raise ConfigError(
                expected="--from before --until",
                found=f"--from {config.begin} --until {config.until}",
                where="command line",
                ways_out=("exchange them", "leave --until out"),
            )
        return cut

    def windows(self, times: Float64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Return the window of each time: a number that rises with time; `HISTORY`, `LEFT_OUT` or `UNREADABLE`.

        Windows of rows are numbered by whoever knows the rows before (`arrivals.py`): all of them are 0 here.
        """
        found = np.zeros(len(times), dtype=np.int64)
        readable = ~np.isnan(times)
        if not self.config.rows:
            found[readable] = self._of_calendar(times[readable])
        found[times < self.begin] = HISTORY
        found[times >= self.until] = LEFT_OUT
        found[~readable] = UNREADABLE
        return found

    def _of_calendar(self, times: Float64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        seconds = np.floor_divide(times, self.clock.per_second).astype(np.int64)
        by = Calendar(self.config.by)
        if by is Calendar.HOUR:
            return seconds // 3600
        if by is Calendar.DAY:
            return seconds // 86_400
        if by is Calendar.WEEK:
            return (seconds // 86_400 + 3) // 7  # day 0 was a Thursday
        return seconds.astype("datetime64[s]").astype("datetime64[M]").astype(np.int64)

    def end(self, window: int) -> float:
        """Return the first moment behind a window of the calendar, or behind the history, as a time of the column."""
        if window == HISTORY:
            return self.begin
        by = Calendar(self.config.by)
        if by is Calendar.HOUR:
            seconds = (window + 1) * 3600
        elif by is Calendar.DAY:
            seconds = (window + 1) * 86_400
        elif by is Calendar.WEEK:
            seconds = (window + 1) * 7 * 86_400 - 3 * 86_400
        else:
            seconds = int(np.datetime64(window + 1, "M").astype("datetime64[s]").astype(np.int64))
        return float(seconds * self.clock.per_second)

    def name(self, window: int) -> str:
        """Return the name of a window."""
        if window == HISTORY:
            return f"before {self.config.begin}"
        if self.config.rows:
            return f"rows {(window - 1) * self.config.rows + 1}-{window * self.config.rows}"
        by = Calendar(self.config.by)
        if by is Calendar.HOUR:
            return str(np.datetime64(window, "h"))
        if by is Calendar.DAY:
            return str(np.datetime64(window, "D"))
        if by is Calendar.WEEK:
            return str(np.datetime64(window * 7 - 3, "D"))
        return str(np.datetime64(window, "M"))


def _in_digits(seconds: Fraction, *, read_as: float) -> tuple[int, int]:
    """Return how few digits of a fraction are needed to read a time as a float again, and the time in their unit."""
    for digits in _DIGITS:
        count = round(seconds * 10**digits)
        if count / 10**digits == read_as:
            return digits, count
    # Of times near 1970 alone floats are finer than that: later, and never before.
    return _DIGITS[-1], math.ceil(seconds * 10 ** _DIGITS[-1])


def _whole(times: Float64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    return np.clip(times, -(2.0**62), 2.0**62).astype(np.int64)
