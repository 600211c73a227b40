"""Add a kind of feature: a time of day as two numbers, its place on the circle of a clock.

As one number, 23:59 and 00:01 are a day apart, and no weight makes "around midnight" of it. On a circle they are
neighbours, and each hour has a direction:

    angle = 2π · (share of the day that is over)         00:00 (0, 1)      06:00 (1, 0)
    value = (sin angle, cos angle)                       12:00 (0, -1)     18:00 (-1, 0)
                                                         missing (0, 0), as far from all hours

A column may hold times or moments (of a Parquet file), text (17:30, 17:30:15, 2026-01-31 17:30), or numbers from 0 up
to `per_day`: hours unless the schema says another unit.

    import time_of_day                          # lists it; on the command line: --extension time_of_day

    [[feature]]
    name = "at"
    kind = "time_of_day"
    per_day = 1440                              # the column counts minutes
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from jaxtyping import Float32, Float64

from ziggurat.errors import SchemaError
from ziggurat.features.inputs import VectorSpec
from ziggurat.features.kinds import Cells, Feature, Fitted, RequestReader
from ziggurat.typed import PositiveFloat, checked

_SECONDS = 86_400
_CLOCK = r"^\s*(?:\d{4}-\d{2}-\d{2}[ T])?(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?\s*$"


@Feature.add
@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class TimeOfDay(Feature):
    """A time of day: the sine and the cosine of its angle on a clock of 24 hours.

    Args:
        per_day: where the column holds numbers, how many of them make a day.
    """

    kind: Literal["time_of_day"] = "time_of_day"
    per_day: PositiveFloat = 24.0

    json_schema: ClassVar[dict[str, Any]] = {"type": ["string", "number", "null"]}

    def spec(self) -> VectorSpec:
        """Return two numbers a sample."""
        return VectorSpec(name=self.name, dim=2)

    def parse(self, cells: Cells) -> Float64[np.ndarray, " N"]:
        """Return the share of the day that is over, NaN where the time is missing."""
        series = cells.series
        shares = _shares(series, per_day=self.per_day)
        if shares is None:
            raise SchemaError(
                expected="times, moments, text like 17:30, or numbers",
                found=f"a column of the type {series.dtype}",
                where=f"time_of_day feature {self.name!r}",
                ways_out="correct the schema",
            )
        is_there = series.is_not_null().to_numpy()
        if series.dtype == pl.String:
            is_there = is_there & (series.str.strip_chars() != "").fill_null(False).to_numpy()
        is_read = (shares >= 0) & (shares <= 1)
        for row in np.flatnonzero(is_there & ~is_read).tolist():
            cells.refuse(
                row,
                expected=f"a time like 17:30 or 17:30:15, or a number from 0 to {self.per_day:g}",
                ways_out=("say in the schema how many make a day: per_day = 1440 for minutes, 86400 for seconds",),
            )
        return np.where(is_read, shares, np.nan)

    def encode(self, parsed: Float64[np.ndarray, " N"], fitted: Fitted) -> Float32[np.ndarray, "N 2"]:
        """Return sine and cosine, zeros where the time is missing."""
        del fitted  # nothing is learned from the training rows
        angle = 2 * math.pi * parsed
        return np.nan_to_num(np.stack([np.sin(angle), np.cos(angle)], axis=1)).astype(np.float32)

    def of_request(self, value: Any, read: RequestReader) -> str | None:
        """Return text, which `parse` reads as it does in a file."""
        if isinstance(value, str):
            return value
        number = read.number(value)
        return None if number is None else repr(number)

    def request_type(self) -> Any:
        """Return texts."""
        return pl.String


def _shares(series: pl.Series, *, per_day: float) -> Float64[np.ndarray, " N"] | None:
    """Return the shares of the day that are over, NaN of what cannot be read; None for a column of another type."""
    if isinstance(series.dtype, pl.Datetime):
        series = series.dt.time()
    if series.dtype == pl.Time:
        shares = series.cast(pl.Int64).cast(pl.Float64) / (_SECONDS * 1e9)
    elif series.dtype.is_numeric() or series.dtype == pl.Null:
        shares = series.cast(pl.Float64) / per_day
    elif series.dtype == pl.String:
        parts = [series.str.extract(_CLOCK, group).cast(pl.Float64) for group in (1, 2, 3)]
        hours, minutes, seconds = parts
        clock = hours * 3600 + minutes * 60 + seconds.fill_null(0)
        is_clock = (hours < 24) & (minutes < 60) & (seconds.fill_null(0) < 60)
        number = series.str.strip_chars().cast(pl.Float64, strict=False) / per_day
        of_clock = (clock / _SECONDS).set(~is_clock.fill_null(False), None)
        shares = of_clock.zip_with(hours.is_not_null(), number)
    else:
        return None
    return shares.fill_null(float("nan")).to_numpy()
