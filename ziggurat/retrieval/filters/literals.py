"""Texts in a filter as values: every number or time that somebody writes is a range, from its first to its last value.

    3          an integer          [3, 3]
    3.5        for integers        [4, 3]: nothing equals it, `<3.5` is up to 3 and `>=3.5` from 4
    1999       a date              [1999-01-01, 1999-12-31]
    1999-12    a date              [1999-12-01, 1999-12-31]
    12:30      with its date       [12:30:00.000000, 12:30:59.999999]

With `[low, high]` of what is written: `:` is inside of it, `<` below low, `<=` up to high, `>` above high, `>=` from
low, `a..b` from the low of a to the high of b, so that 2002-09..2002 is September to December. Floats exclude a bound
by going to the next float.

*Days of a zone* begin at the first instant of that date and end before that of the next, whatever a clock does. A time
that the clock of the zone skipped or showed twice (where it is set forward or back) is refused: with an offset,
2024-10-27T02:30+01:00, it is one. So is a day at whose begin the clock went back into the day before.
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

_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
_DATE = re.compile(r"(\d{4})(?:-(\d{2})(?:-(\d{2}))?)?", re.ASCII)
_TIME = re.compile(r"(\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?(Z|[+-]\d{2}:\d{2})?", re.ASCII)
_EPOCH = dt.datetime(1970, 1, 1)
_DAY = dt.timedelta(days=1)
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
        # The range of 3.5 is empty, from 4 to 3; yet "< 3.5" becomes "≤ 3" of it, and "> 3.5" becomes "≥ 4".
        return math.ceil(exact), math.floor(exact)
    with np.errstate(over="ignore"):
        # Stored values were rounded to FP32: the text must be, too, to equal one of them.
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
        if zone is None:
            return _since_epoch(_combined(first_day, dt.time.min)), _since_epoch(_combined(last_day, dt.time.max))
        try:
            return _begin_of_day(first_day, zone), _begin_of_day(last_day + _DAY, zone) - 1
        except OverflowError:
            raise ValueError("a date between the years 2 and 9998") from None
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
    return _instant(first_day, first, zone), _instant(first_day, last, zone)


def _combined(day: dt.date, clock: dt.time) -> dt.datetime:
    return dt.datetime.combine(day, clock)


def _since_epoch(moment: dt.datetime) -> int:
    """Microseconds since 1970 of a time without zone, or of an instant."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(dt.UTC).replace(tzinfo=None)
    return (moment - _EPOCH) // _MICROSECOND


def _instant(day: dt.date, clock: dt.time, zone: dt.tzinfo | None) -> int:
    """The one instant at which the clock of a zone shows a time; ValueError if it never does, or twice."""
    moment = _combined(day, clock).replace(tzinfo=zone)
    try:
        found = _since_epoch(moment)
        # Another instant only where the clock was set back or forward over this time.
        later = _since_epoch(moment.replace(fold=1))
    except OverflowError:
        raise ValueError("a date between the years 2 and 9998") from None
    if found != later:
        offsets = [_shown_offset(moment.replace(fold=fold)) for fold in (0, 1)]
        text = moment.replace(tzinfo=None).isoformat(timespec="minutes")
        what = "showed it twice" if later > found else "skipped it"
        raise ValueError(f"a time with its offset, {text}{offsets[0]} or {text}{offsets[1]} (the clock {what})")
    return found


def _begin_of_day(day: dt.date, zone: dt.tzinfo) -> int:
    """The first instant of a date in a zone; ValueError if the clock went back to the day before after it."""
    midnight = _combined(day, dt.time.min).replace(tzinfo=zone)
    found = _since_epoch(midnight)
    later = _since_epoch(midnight.replace(fold=1))
    if later < found:  # there is no midnight: the day begins when the clock was set forward
        return _jump(later, found, zone)
    if later > found and _date_at(later - 1, zone) < day:
        what = f"the clock went back from {day} to the day before"
        raise ValueError(f"times with their offsets, such as {day}T00:00{_shown_offset(midnight)} ({what})")
    return found


def _jump(before: int, after: int, zone: dt.tzinfo) -> int:
    """The instant between two at which the offset of a zone changes."""
    old = _at(before, zone).utcoffset()
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (middle, after) if _at(middle, zone).utcoffset() == old else (before, middle)
    return after


def _at(instant: int, zone: dt.tzinfo) -> dt.datetime:
    return (_EPOCH + instant * _MICROSECOND).replace(tzinfo=dt.UTC).astimezone(zone)


def _date_at(instant: int, zone: dt.tzinfo) -> dt.date:
    return _at(instant, zone).date()


def _shown_offset(moment: dt.datetime) -> str:
    return moment.isoformat()[len("1999-12-31T23:59:59") :].removeprefix(f".{moment.microsecond:06}")
