"""Units of times: how many of it a second has, by the size of a whole number; and whether times go with those seen.

    978300760         below 10^11      seconds             a time is modern if it is of 1990 or later in the unit
    978300760000      below 10^14      milliseconds        that its size suggests; counts of one's own (days since
    978300760000000   below 10^17      microseconds        the start, 0 … 1,000) are not, and are never refused

A model that was trained on seconds and is asked in milliseconds answers, and is wrong: every duration is a thousand
times too long. So times of another unit than those of training are refused. Times of the same unit that lie far from
them are said: a model of times has seen nothing like them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

_MODERN = (630_000_000, 4_200_000_000)  # 1990 … 2103 in seconds
_UNITS = ((10**11, 1), (10**14, 10**3), (10**17, 10**6))  # below this it is so many a second
_NAMES = {1: "seconds", 10**3: "milliseconds", 10**6: "microseconds", 10**9: "nanoseconds"}
_FAR = 10  # so many times the length of what was seen


def per_second(times: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Return how many of each time's units a second has, by the size of the time."""
    found = np.full(len(times), 10**9, dtype=np.int64)
    for bound, factor in reversed(_UNITS):
        found[times < bound] = factor
    return found


def is_modern(times: Int64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Mark the times of 1990 to 2103, each in the unit that its size suggests."""
    seconds = times // per_second(times)
    return (_MODERN[0] <= seconds) & (seconds < _MODERN[1])


def unit_of(times: Sequence[int]) -> str:
    """The unit that the sizes of times suggest; "" where it cannot be told."""
    found = np.asarray(times, dtype=np.int64)
    units = np.unique(per_second(found))
    return _NAMES[int(units[0])] if len(found) and len(units) == 1 and is_modern(found).all() else ""


def two_units(times: Int64[np.ndarray, " N"]) -> str:
    """The units of times where they are of several ("seconds and milliseconds"), by their sizes; else ""."""
    units = np.unique(per_second(times))
    return " and ".join(_NAMES[int(each)] for each in units) if len(units) > 1 and is_modern(times).all() else ""


def of_another_unit(times: Int64[np.ndarray, " N"], *, seen: Sequence[int]) -> Int64[np.ndarray, " K"]:
    """Places of the times that are of another unit than those seen.

    Args:
        times: to compare.
        seen: the earliest and the latest time of training; none where nobody knows.
    """
    if not unit_of(seen) or not len(times):
        return np.empty(0, np.int64)
    return np.flatnonzero((per_second(times) != per_second(np.asarray(seen[:1]))[0]) & is_modern(times))


def far_from_seen(times: Int64[np.ndarray, " N"], *, seen: Sequence[int]) -> str:
    """Describe times that lie far before or behind those seen; return "" where none does.

    Args:
        times: to compare.
        seen: the earliest and the latest time of training; none where nobody knows.
    """
    if not seen or not len(times):
        return ""
    first = seen[0]
    last = seen[1]
    length = max(1, last - first)
    earliest = int(times.min())
    latest = int(times.max())
    distance = max(first - earliest, latest - last)
    if distance <= _FAR * length:
        return ""
    return (
        f"times from {earliest} to {latest} lie far from those of training, {first} to {last}: {distance / length:.3g} "
        "times their length away; check the unit, and what the model makes of such times"
    )
