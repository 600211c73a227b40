"""Times of rows as numbers that order the same way: numbers, dates, and text with one of them.

A split by time needs an order of rows, whatever way the time is written; see `splits.py`.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from ziggurat.data.preprocess.values.cells import Faults
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import DAY_OR_MONTH_FIRST, DateOrder, find_order, parse_dates
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.ops.written_decimals import as_float64


def time_keys(
    chunk: RawChunk, column: str, *, bad_rows: BadRows, is_date: bool, order: DateOrder = DateOrder.AUTO
) -> np.ndarray:
    """Times as numbers that order the same way: (n,) float64, NaN where a bad row was quarantined.

    Numbers are taken as they are (times closer than 2^-53 of their size count as equal); dates become microseconds
    since 1970. Text holds numbers, or dates as `raw/dates.py` reads them.

    Args:
        chunk: the rows.
        column: of the times.
        bad_rows: where rows without a time go.
        is_date: whether the column holds dates, and not numbers.
        order: of dates like 01/03/2024.

    Raises:
        DataError: a time is missing or cannot be read (policy ERROR).
        SchemaError: the column has an impossible type, or dates here and numbers in the chunks before.
    """
    series = chunk.frame[column]
    if is_date_column(series) not in (is_date, None):
        raise SchemaError(
            expected="dates (or numbers) in all of the time column",
            found=f"{'numbers' if is_date else 'dates'} after {'dates' if is_date else 'numbers'}",
            where=chunk.where(0, column=column),
            ways_out="convert the files to one type",
        )
    keys = _keys(series, is_date=is_date and is_date_column(series) is not None, order=order)
    bad = np.flatnonzero(~np.isfinite(keys))
    if len(bad):
        # polars may have given a view of its own memory.
        keys = keys.copy()
        keys[bad] = np.nan
        expected = "a date like 2024-05-31 12:00:00 or 31.05.2024 12:00"
        expected = expected if is_date else "a number (or dates in all rows)"
        report_unreadable(chunk, bad, column=column, expected=f"{expected} in the time column", bad_rows=bad_rows)
    return keys


def readable_times(series: pl.Series, *, order: DateOrder, is_date: bool | None = None) -> np.ndarray:
    """Times as `time_keys` gives them, NaN where none can be read; nothing is reported, and nothing an error.

    Args:
        series: the column of the times, or a part of it.
        order: of dates like 01/03/2024; AUTO: the day first.
        is_date: whether text holds dates, and not numbers; None: as the first cells of the part show.
    """
    try:
        seen = is_date_column(series)
    except SchemaError:
        return np.full(len(series), np.nan)
    is_date = bool(seen if is_date is None or series.dtype != pl.String else is_date)
    if is_date and series.dtype == pl.String and order is DateOrder.AUTO:
        order = DateOrder.DAY_FIRST
    keys = _keys(series, is_date=is_date, order=order)
    return np.where(np.isfinite(keys), keys, np.nan)


def _keys(series: pl.Series, *, is_date: bool, order: DateOrder) -> np.ndarray:
    times = _dates(series, order).dt.timestamp("us").cast(pl.Float64) if is_date else _numbers(series)
    return times.fill_null(np.nan).to_numpy()


def is_date_column(series: pl.Series) -> bool | None:
    """Return whether a time column holds dates; False for numbers, None where every cell is empty."""
    kind = series.dtype
    if kind.is_numeric():
        return False
    if isinstance(kind, pl.Date | pl.Datetime):
        return True
    if kind == pl.Null or (kind == pl.String and series.null_count() == len(series)):
        return None
    if kind == pl.String:
        return bool(_numbers(series.drop_nulls().head(100)).is_null().all())
    raise SchemaError(
        expected="numbers, dates or times, or text with one of them",
        found=f"type {kind}",
        where=f"time column {series.name!r}",
        ways_out=("name another column as time", "set the split by = random"),
    )


def order_of_dates(chunk: RawChunk, column: str) -> DateOrder:
    """Return the order that the dates of a chunk show; AUTO where no date needs one.

    Raises:
        ConfigError: there are dates like 01/03/2024, and none shows what stands first.
    """
    series = chunk.frame[column]
    order = find_order(series) if series.dtype == pl.String else DateOrder.AUTO
    if order is not None:
        return order
    first = int(series.str.contains(DAY_OR_MONTH_FIRST).fill_null(False).arg_true()[0])
    raise ConfigError(
        expected="a date that shows whether the day or the month stands first (25/12/2023), or a setting that says it",
        found=f"{series[first]!r}, and none that shows it in {chunk.num_rows:,} rows",
        where=chunk.where(first, column=column),
        ways_out=(
            "the day stands first: --data.split.date-order day_first",
            "the month stands first: --data.split.date-order month_first",
            "write dates with the year first: 2024-03-01",
        ),
    )


def kind_of_times(series: pl.Series) -> bool | None:
    """`is_date_column` of the first rows, which must look like times.

    Raises:
        SchemaError: they are text, and none of the first hundred is a number or a date; or another impossible type.
    """
    is_date = is_date_column(series)
    if not is_date or series.dtype != pl.String:
        return is_date
    first = series.drop_nulls().head(100)
    if all(parse_dates(first, order=order).is_null().all() for order in (DateOrder.DAY_FIRST, DateOrder.MONTH_FIRST)):
        raise SchemaError(
            expected="numbers or dates (2024-05-31 12:00:00, 31.05.2024 12:00) in the time column",
            found=f"text such as {', '.join(f'{text[:40]!r}' for text in first.unique(maintain_order=True)[:3])}",
            where=f"time column {series.name!r}",
            ways_out=("name another column as time", "set the split by = random"),
        )
    return is_date


def _numbers(series: pl.Series) -> pl.Series:
    if series.dtype == pl.String:
        return series.str.strip_chars().cast(pl.Float64, strict=False)
    return as_float64(series)


def _dates(series: pl.Series, order: DateOrder) -> pl.Series:
    """Dates as Datetime in microseconds, null where the text is none."""
    if series.dtype == pl.String:
        return parse_dates(series, order=order)
    plain = _in_calendar(series)
    return (plain.cast(pl.Datetime("us")) if plain.dtype == pl.Date else plain).dt.cast_time_unit("us")


def _in_calendar(series: pl.Series) -> pl.Series:
    """The same with null for dates outside of the years 1 to 9999: converting or showing them panics in polars."""
    unit = getattr(series.dtype, "time_unit", None)
    a_day = {None: 1, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}[unit]
    # Days from the beginning of year 1 to that of 1970, and from there to the end of year 9999.
    first = -719_162 * a_day
    last = min(2_932_897 * a_day, 1 << 63) - 1
    count = series.to_physical().cast(pl.Int64)
    inside = count.is_between(max(first, -(1 << 63)), last)
    return (
        series if inside.all() else count.to_frame("t").select(pl.when(inside).then("t")).to_series().cast(series.dtype)
    )


def report_unreadable(chunk: RawChunk, bad: np.ndarray, *, column: str, expected: str, bad_rows: BadRows) -> None:
    """Report cells of a chunk, by their index, as no time or no name of a split."""
    faults = Faults(chunk=chunk)
    for index in bad.tolist():
        found = chunk.frame[column].to_physical()[index]  # a date out of range cannot be shown
        faults.add(index, column=column, reason=BadReason.UNPARSABLE, expected=expected, found=found)
    faults.report(bad_rows)
