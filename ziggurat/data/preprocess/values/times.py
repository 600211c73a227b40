"""Times of rows as numbers that order the same way: numbers, dates, and text with one of them.

A split by time needs an order of rows, whatever way the time is written (`splits.py`), and so does a log of events
(`data/events/log.py`). What a column of text holds, numbers or dates, its first cells show; which part stands first in
dates like 01/03/2024, the first date that only one order allows. Cells of another kind are then bad rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl

from ziggurat.data.preprocess.values.cells import Faults
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import DAY_OR_MONTH_FIRST, OrderSigns, parse_dates
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.ops.written_decimals import as_float64

A_DATE = "a date like 2024-05-31 12:00:00 or 31.05.2024 12:00 in the time column"
_ORDERS = (DateOrder.DAY_FIRST, DateOrder.MONTH_FIRST)
_MAX_WAITING = 1 << 22  # rows in which a date must show what stands first
_MARKS = (",", r"\.", "'", "’", "_", " ", "\u00a0", "\u202f")  # between thousands
_EXACT = 1 << 53  # whole numbers below it are floats as they are
_GROUPED = "^(?:" + "|".join(rf"[0-9]{{1,3}}(?:{mark}[0-9]{{3}}){{2,}}" for mark in _MARKS) + ")$"


def time_keys(
    chunk: RawChunk,
    column: str,
    *,
    bad_rows: BadRows,
    is_date: bool,
    order: DateOrder = DateOrder.AUTO,
    by_row: bool = False,
) -> np.ndarray:
    """Times as numbers that order the same way: (n,) float64, NaN where a bad row was quarantined.

    Numbers are taken as they are (times closer than 2^-53 of their size count as equal). Whole ones that no float
    holds, such as nanoseconds, are rounded down, so that none comes to lie in the second after its own. Dates become
    microseconds since 1970. Text holds numbers, or dates as `raw/dates.py` reads them.

    Args:
        chunk: the rows.
        column: of the times.
        bad_rows: where rows without a time go.
        is_date: whether the column holds dates, and not numbers.
        order: of dates like 01/03/2024.
        by_row: whether each row has a writer of its own, so that a time of another kind is a bad row, and no error of
            all rows.

    Raises:
        DataError: a time is missing or cannot be read (policy ERROR).
        SchemaError: the column has an impossible type, or dates here and numbers in the chunks before.
    """
    series = without_categories(chunk.frame[column])
    if not by_row:
        kind_of_chunk(chunk, series, before=is_date)
        keys = _keys(series, is_date=is_date and series.dtype != pl.Null, order=order)
    elif series.dtype in (pl.String, pl.Null) or _is_of_kind(series.dtype, is_date=is_date):
        keys = _keys(series, is_date=is_date and series.dtype != pl.Null, order=order)
    else:
        keys = np.full(len(series), np.nan)
    bad = np.flatnonzero(~np.isfinite(keys))
    if len(bad):
        # polars may have given a view of its own memory.
        keys = keys.copy()
        keys[bad] = np.nan
        expected = A_DATE if is_date else "a number (or dates in all rows) in the time column"
        report_unreadable(chunk, bad, column=column, expected=expected, bad_rows=bad_rows)
    return keys


def _is_of_kind(kind: pl.DataType, *, is_date: bool) -> bool:
    return isinstance(kind, pl.Date | pl.Datetime) if is_date else kind.is_numeric()


def readable_times(series: pl.Series, *, order: DateOrder, is_date: bool | None = None) -> np.ndarray:
    """Times as `time_keys` gives them, NaN where none can be read; nothing is reported, and nothing an error.

    Args:
        series: the column of the times, or a part of it.
        order: of dates like 01/03/2024; AUTO: the day first.
        is_date: whether text holds dates, and not numbers; None: as the first cells of the part show.
    """
    series = without_categories(series)
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
    times = microseconds_of_dates(series, order=order).cast(pl.Float64) if is_date else _numbers(series)
    return times.fill_null(np.nan).to_numpy()


def microseconds_of_dates(series: pl.Series, *, order: DateOrder) -> pl.Series:
    """Return dates as whole microseconds since 1970 (Int64), null where the text is no date.

    Args:
        series: dates, times with or without a zone, or text with one of them.
        order: of dates like 01/03/2024, which are none under AUTO.
    """
    return _dates(series, order).dt.timestamp("us")


def without_categories(series: pl.Series) -> pl.Series:
    """Return the column, as text where it is stored as categories."""
    return series.cast(pl.String) if isinstance(series.dtype, pl.Categorical | pl.Enum) else series


def is_date_column(series: pl.Series) -> bool | None:
    """Return whether a time column holds dates; False for numbers, None where no cell shows it.

    Of text the first hundred cells decide, by what more of them are.
    """
    kind = series.dtype
    if kind.is_numeric():
        return False
    if isinstance(kind, pl.Date | pl.Datetime):
        return True
    if kind == pl.Null:
        return None
    if kind == pl.String:
        first = series.drop_nulls().head(100)
        num_numbers = _numbers(first).count()
        num_dates = max(parse_dates(first, order=order).count() for order in _ORDERS)
        return None if num_numbers == num_dates == 0 else num_dates > num_numbers
    raise SchemaError(
        expected="numbers, dates or times, or text with one of them",
        found=f"type {kind}",
        where=f"time column {series.name!r}",
        ways_out=("name another column as time", "set the split by = random"),
    )


def kind_of_chunk(chunk: RawChunk, series: pl.Series, *, before: bool | None) -> bool | None:
    """Return whether the times are dates, by this chunk and those before; None where nothing shows it yet.

    Args:
        chunk: named in errors.
        series: its times.
        before: what the chunks before have shown.

    Raises:
        SchemaError: dates here and numbers before, or the other way round.
    """
    found = is_date_column(series)
    if found is None or before is None:
        return before if found is None else found
    if found is not before:
        raise SchemaError(
            expected="dates (or numbers) in all of the time column",
            found=f"{'numbers' if before else 'dates'} after {'dates' if before else 'numbers'}",
            where=chunk.where(0, column=series.name),
            ways_out="convert the files to one type",
        )
    return found


def with_date_order(
    chunks: Iterable[RawChunk], column: str, *, order: DateOrder
) -> Iterator[tuple[RawChunk, DateOrder]]:
    """Give each chunk with the order of the dates in a column.

    Under AUTO a date shows it that only one order allows; the chunks before it wait, up to four million rows.

    Args:
        chunks: rows of all files.
        column: of the times.
        order: as somebody said it, or AUTO.

    Raises:
        ConfigError: there are dates like 01/03/2024, and none shows what stands first.
    """
    signs = OrderSigns()
    waiting: list[RawChunk] = []
    for chunk in chunks:
        waiting.append(chunk)
        if order is DateOrder.AUTO and chunk.has_column(column):
            times = without_categories(chunk.column(column))
            if times.dtype == pl.String and is_date_column(times) is not False:
                signs.add(times)
            if signs.order is None:
                if sum(each.num_rows for each in waiting) > _MAX_WAITING:
                    break
                continue
            order = signs.order
        for each in waiting:
            yield each, order
        waiting = []
    if waiting:
        raise _no_order(waiting, column, signs)


def _no_order(chunks: list[RawChunk], column: str, signs: OrderSigns) -> ConfigError:
    """The error for dates of which nothing shows how to read them."""
    columns = [(chunk, without_categories(chunk.column(column))) for chunk in chunks]
    columns = [(chunk, texts) for chunk, texts in columns if texts.dtype == pl.String]
    chunk, texts = next(each for each in columns if each[1].str.contains(DAY_OR_MONTH_FIRST).any())
    first = int(texts.str.contains(DAY_OR_MONTH_FIRST).fill_null(False).arg_true()[0])
    num_rows = sum(each.num_rows for each in chunks)
    shown = f"as many that show the one as the other ({signs.day_first:,})" if signs.day_first else "none that shows it"
    return ConfigError(
        expected="a date that shows whether the day or the month stands first (25/12/2023), or a setting that says it",
        found=f"{texts[first]!r}, and {shown} in {num_rows:,} rows",
        where=chunk.where(first, column=column),
        ways_out=(
            "the day stands first: --data.split.date-order day_first (of a training)",
            "the month stands first: --data.split.date-order month_first (of a training)",
            "write dates with the year first: 2024-03-01",
        ),
    )


def kind_of_times(series: pl.Series, *, file: str = "") -> bool | None:
    """`is_date_column` of the first rows, which must look like times.

    Args:
        series: the column of the times.
        file: named in the error.

    Raises:
        SchemaError: they are text, and none of the first hundred is a number or a date; or another impossible type.
    """
    series = without_categories(series)
    is_date = is_date_column(series)
    first = series.drop_nulls().head(100)
    if is_date is None and len(first):
        raise SchemaError(
            expected="numbers or dates (2024-05-31 12:00:00, 31.05.2024 12:00) in the time column",
            found=f"text such as {', '.join(f'{text[:40]!r}' for text in first.unique(maintain_order=True)[:3])}",
            where=", ".join(filter(None, (file, f"time column {series.name!r}"))),
            ways_out=("name another column as time", "set the split by = random"),
        )
    return is_date


def _numbers(series: pl.Series) -> pl.Series:
    if series.dtype != pl.String:
        written = series.cast(pl.String) if isinstance(series.dtype, pl.Decimal) else series
        return _rounded_down(as_float64(series), written)
    text = series.str.strip_chars()
    numbers = _rounded_down(text.cast(pl.Float64, strict=False), text)
    if numbers.null_count() == text.null_count():
        return numbers
    # A mark that comes twice stands between thousands: 1,700,000,000 can be read in one way alone, whatever settings
    # say of other columns, and times since 1970 have three such marks.
    grouped = text.str.contains(_GROUPED).fill_null(False)
    digits = text.str.replace_all(r"[^0-9]", "")
    plain = _rounded_down(digits.cast(pl.Float64, strict=False), digits)
    return pl.select(pl.when(grouped).then(plain).otherwise(numbers)).to_series()


def _rounded_down(numbers: pl.Series, written: pl.Series) -> pl.Series:
    """Return floats none of which is above the whole number that it stands for.

    Between floats of the size of nanoseconds since 1970 lie 256 of them: rounded to the nearest, the last ones of a day
    would be in the next day. Each multiple of 10⁹ below 2^62 is a float itself, so rounding down crosses no second.

    Args:
        numbers: the nearest floats.
        written: whole numbers, or text of numbers; others than whole numbers keep the nearest float.
    """
    if written.dtype.is_float() or not (numbers.abs() >= _EXACT).any():
        return numbers
    whole = written.cast(pl.Int64, strict=False)
    nearest = numbers.cast(pl.Int64, strict=False)
    # The nearest float of the largest integers is 2^63, which is none of 64 bits.
    is_above = whole.is_not_null() & (nearest > whole).fill_null(True)
    below = pl.Series(np.nextafter(numbers.to_numpy(), -np.inf))
    return numbers.zip_with(~is_above, below)


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
