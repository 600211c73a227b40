"""Say what stands first in dates like 01/03/2024: for a split, a log of events, and the times of requests.

Dates with the year first (2024-03-01) and dates with points (01.03.2024) need no order; `data/raw/dates.py` reads all.
"""

from __future__ import annotations

from enum import StrEnum


class DateOrder(StrEnum):
    """The part that stands first in dates like 01/03/2024; dates with the year first or with points need no order."""

    AUTO = "auto"  # as the dates of the column show; an error where none does
    DAY_FIRST = "day_first"  # 1 March
    MONTH_FIRST = "month_first"  # 3 January
