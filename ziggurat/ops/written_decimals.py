"""Floats of 32 and 16 bits as the decimals that they were written from.

Problem: 0.7 in a column of 32-bit floats is 0.699999988079071, and 0.7 in a CSV file, a column of 64 bits or a request
is 0.7. Compared exactly (a threshold of a label, an edge between two buckets, a filter), one value lies on both sides.

Idea: of all decimals that round to a stored float, the shortest is the one that somebody wrote. It is what every
program prints for it. So 0.699999988 means 0.7, and is read as the float of 64 bits that is nearest to 0.7.

Cost: 5 ns a whole number; a fraction goes through its text, and takes as long as one that is read from a CSV file.
"""

from __future__ import annotations

import functools

import numpy as np
import polars as pl
from jaxtyping import Float32, Float64

_EXACT = float(1 << 24)  # whole numbers below have no shorter decimal


def written_decimals(values: Float32[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
    """Return the shortest decimals that round to floats of 32 bits, as floats of 64; infinities and NaN stay."""
    with np.errstate(invalid="ignore"):  # a NaN that signals
        found = values.astype(np.float64)
        is_fraction = np.isfinite(values) & ((np.abs(values) >= _EXACT) | (np.trunc(values) != values))
    if is_fraction.any():
        # polars prints the shortest decimal, and reads it correctly rounded.
        found[is_fraction] = pl.Series(values[is_fraction]).cast(pl.String).cast(pl.Float64).to_numpy()
    return found


def with_decimals(series: pl.Series) -> pl.Series:
    """Return a column with the decimals that its floats of 16 or 32 bits stand for, in 64; others as they are.

    Floats in lists are turned too, since ids may be written so; in fixed-size arrays, which are vectors, they stay.
    """
    dtype = series.dtype
    if dtype == pl.Float32:
        numbers = series.to_numpy()  # null becomes NaN
        found = pl.Series(series.name, written_decimals(numbers))
        return found.set(series.is_null(), None) if series.null_count() else found
    if dtype == pl.Float16:
        # There are 65,536 halves: a table is faster than their text.
        bits = series.fill_null(0.0).to_numpy().view(np.uint16)
        found = pl.Series(series.name, _decimals_of_halves()[bits])
        return found.set(series.is_null(), None) if series.null_count() else found
    if isinstance(dtype, pl.List) and dtype.inner in (pl.Float32, pl.Float16):
        return series.list.eval(pl.element().map_batches(with_decimals, return_dtype=pl.Float64))
    return series


def as_float64(series: pl.Series) -> pl.Series:
    """Return a column of numbers as floats of 64 bits, each the nearest to the decimal that it stands for.

    A Decimal goes through its text: polars multiplies its digits by 0.0001, say, which rounds twice.
    """
    if isinstance(series.dtype, pl.Decimal):
        series = series.cast(pl.String)
    return with_decimals(series).cast(pl.Float64)


def frame_with_decimals(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame each of whose columns `with_decimals` has turned."""
    changed = [series for series in frame.get_columns() if with_decimals(series.head(0)).dtype != series.dtype]
    return frame.with_columns(with_decimals(series) for series in changed) if changed else frame


@functools.cache
def _decimals_of_halves() -> Float64[np.ndarray, "65536"]:
    """Return the decimal of every float of 16 bits, by its bits."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    return np.array([float(str(value)) for value in halves])
