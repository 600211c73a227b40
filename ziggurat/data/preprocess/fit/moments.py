"""Moments: columns of times as whole numbers of 64 bits; nothing is rounded on the way.

A time in seconds has 31 bits and more, a float of 32 bits holds 24: it would put events of two minutes into one moment.
So times in floats are refused, and not converted. Dates, and dates in text, are counted in microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from jaxtyping import Int64

from ziggurat.data.preprocess.values.cells import Faults, wrong_type
from ziggurat.data.preprocess.values.time_units import of_another_unit, unit_of
from ziggurat.data.preprocess.values.times import microseconds_of_dates, without_categories
from ziggurat.data.raw.bad_rows import BadReason
from ziggurat.features.date_order import DateOrder


def read_moments(
    series: pl.Series,
    *,
    faults: Faults,
    role: str,
    seen: Sequence[int] = (),
    date_order: DateOrder = DateOrder.AUTO,
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " N"]]:
    """The times of lists, one after the other, and the length of each list; null is an empty list.

    Args:
        series: the raw column.
        faults: takes lists with a missing time.
        role: what the column is for, in errors.
        seen: earliest and latest time of training, where known: times of another unit are faults.
        date_order: of dates like 01/03/2024 in text. Dates count microseconds.

    Raises:
        SchemaError: no column of lists of whole numbers or dates.
    """
    dtype = series.dtype
    if dtype == pl.Null:
        return np.empty(0, np.int64), np.zeros(len(series), np.int64)
    if isinstance(dtype, pl.Array):
        series = series.arr.to_list()
        dtype = pl.List(dtype.inner)
    if not isinstance(dtype, pl.List) or not _holds_times(dtype.inner):
        raise wrong_type(
            series,
            faults.chunk,
            role=role,
            expected="lists of whole numbers or dates (times)",
            way_out="write times as whole seconds or milliseconds: a float of 32 bits rounds them to two minutes",
        )
    lengths = series.list.len().fill_null(0).to_numpy().astype(np.int64)
    written = without_categories(series.filter(pl.Series(lengths > 0)).explode())
    times = _whole_times(written, date_order=date_order)
    missing = times.is_null().to_numpy()
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for index in np.unique(owner[missing]).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.NOT_A_NUMBER,
            expected="a list of times: whole numbers, or dates like 2024-05-31 12:00:00",
            # The dates of no calendar cannot be shown.
            found=written.filter(pl.Series(owner == index)).to_physical().to_list()[:20],
        )
    found = times.fill_null(0).to_numpy()
    for index in np.unique(owner[of_another_unit(found, seen=seen)]).tolist():
        faults.add(
            index,
            column=series.name,
            reason=BadReason.OTHER_UNIT,
            expected=f"times in {unit_of(seen)}, as those of training: {seen[0]} to {seen[1]}",
            found=series[index].to_list()[:20],
            ways_out=(f"write them in {unit_of(seen)}",),
        )
    return found, lengths


def _holds_times(inner: object) -> bool:
    """Return whether lists of this type may be times."""
    if isinstance(inner, pl.DataType) and inner.is_integer():
        return True
    return inner in (pl.Null, pl.String, pl.Date) or isinstance(inner, pl.Datetime | pl.Categorical | pl.Enum)


def _whole_times(written: pl.Series, *, date_order: DateOrder) -> pl.Series:
    """Return the times as Int64, null where there is none; dates as microseconds since 1970."""
    dtype = written.dtype
    if dtype == pl.Date or isinstance(dtype, pl.Datetime):
        return microseconds_of_dates(written, order=date_order)
    numbers = written.cast(pl.Int64, strict=dtype != pl.String)
    if dtype != pl.String:
        return numbers
    return numbers.zip_with(numbers.is_not_null(), microseconds_of_dates(written, order=date_order))
