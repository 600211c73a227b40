"""Texts in a filter as values: every number or time that somebody writes is a range, from its first to its last value.

    3          an integer          [3, 3]
    3.5        for integers        [4, 3]: nothing equals it, `<3.5` is up to 3 and `>=3.5` from 4
    1999       a date              [1999-01-01, 1999-12-31]
    1999-12    a date              [1999-12-01, 1999-12-31]
    12:30      with its date       [12:30:00.000000, 12:30:59.999999]

With `[low, high]` of what is written: `:` is inside of it, `<` below low, `<=` up to high, `>` above high, `>=` from
low, `a..b` from the low of a to the high of b. Floats exclude a bound by going to the next float.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np

from ziggurat.retrieval.filters.expression import Number
from ziggurat.retrieval.filters.schema import Attribute, AttributeKind

_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?")
_DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?")
_TIME = re.compile(r"(\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?(Z|[+-]\d{2}:\d{2})?")
_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def range_of(text: str, attribute: Attribute) -> tuple[Number, Number]:
    """The first and the last value that a text means for an ordered attribute.

    Raises:
        ValueError: it means none; the message says what would.
    """
    if attribute.kind is AttributeKind.DATE:
        first, next_one = _day_range(text)
        return (first - dt.date(1970, 1, 1)).days, (next_one - dt.date(1970, 1, 1)).days
    if attribute.kind is AttributeKind.DATETIME:
        return _time_range(text, attribute)
    if not _NUMBER.fullmatch(text):
        raise ValueError("a number, such as 3, -2.5 or 1e6")
    if attribute.kind is AttributeKind.INTEGER:
        exact = Decimal(text)
        return math.ceil(exact), math.floor(exact)
    with np.errstate(over="ignore"):
        value = float(np.float32(text)) if attribute.float32 else float(text)
    if math.isinf(value):
        raise ValueError("a number that a float holds")
    return value, value


def below(value: Number) -> Number:
    """The next smaller value."""
    return math.nextafter(value, -math.inf) if isinstance(value, float) else value - 1


def above(value: Number) -> Number:
    """The next greater value."""
    return math.nextafter(value, math.inf) if isinstance(value, float) else value + 1


def boolean_of(text: str) -> str:
    """`true` or `false`, however it is written.

    Raises:
        ValueError: it is neither.
    """
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower()


def show_value(value: str | Number, attribute: Attribute) -> str:
    """A stored value as people write it."""
    if attribute.kind is AttributeKind.DATE:
        return str(np.datetime64(int(value), "D"))
    if attribute.kind is AttributeKind.DATETIME:
        with contextlib.suppress(OverflowError):  # beyond the year 9999
            moment = _EPOCH + int(value) * _MICROSECOND
            zone = ZoneInfo(attribute.zone) if attribute.zone else None
            return (moment.replace(tzinfo=dt.UTC).astimezone(zone) if zone else moment).isoformat()
        return str(np.datetime64(int(value), "us"))
    if attribute.float32 and isinstance(value, float):
        return str(np.float32(value))
    return str(value)


def _day_range(text: str) -> tuple[dt.date, dt.date]:
    """The first and the last day of a year, a month or a day."""
    found = _DATE.fullmatch(text)
    if not found:
        raise ValueError("a date, such as 1999-12-31, or 1999-12 for a month, or 1999 for a year")
    year, month, day = (int(part) if part else None for part in found.groups())
    try:
        first = dt.date(year or 0, month or 1, day or 1)
        if day:
            return first, first
        if month:
            return first, dt.date(first.year + month // 12, month % 12 + 1, 1) - dt.timedelta(days=1)
        return first, dt.date(first.year, 12, 31)
    except ValueError:
        if year == 9999 and month == 12 and not day:
            return dt.date(9999, 12, 1), dt.date.max
        raise ValueError("a date that the calendar has") from None


def _time_range(text: str, attribute: Attribute) -> tuple[int, int]:
    day, separator, clock = text.partition("T" if "T" in text else " ")
    first_day, last_day = _day_range(day)
    zone: dt.tzinfo | None = ZoneInfo(attribute.zone) if attribute.zone else None
    if not separator:
        return _microseconds(first_day, dt.time.min, zone), _microseconds(last_day, dt.time.max, zone)
    found = _TIME.fullmatch(clock)
    if not found or len(day) != len("1999-12-31"):
        raise ValueError("a date with a time, such as 1999-12-31T23:59 or 1999-12-31T23:59:30.5")
    hour, minute, second, fraction, offset = found.groups()
    if offset and not attribute.zone:
        raise ValueError("a time without a zone, since the column has none")
    try:
        if offset:
            zone = dt.datetime.fromisoformat(f"2000-01-01T00:00{offset.replace('Z', '+00:00')}").tzinfo
        first = dt.time(int(hour), int(minute), int(second or 0), int((fraction or "0").ljust(6, "0")))
        last = first.replace(second=59) if second is None else first
        last = last.replace(microsecond=int((fraction or "").ljust(6, "9")))
    except ValueError:
        raise ValueError("a time that the clock has") from None
    return _microseconds(first_day, first, zone), _microseconds(first_day, last, zone)


def _microseconds(day: dt.date, clock: dt.time, zone: dt.tzinfo | None) -> int:
    moment = dt.datetime.combine(day, clock)
    if zone is not None:
        try:
            moment = moment.replace(tzinfo=zone).astimezone(dt.UTC).replace(tzinfo=None)
        except OverflowError:
            raise ValueError("a date between the years 2 and 9998") from None
    return (moment - _EPOCH) // _MICROSECOND
