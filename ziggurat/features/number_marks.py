"""Number columns: how the numbers of one column of text are written, where they differ from those of the others.

    [[number]]
    column = "price"
    decimal = "comma"
    thousands = "point"

    [[number]]
    column = "discount"
    signs = "strip"

`--data.decimal`, `--data.thousands` and `--data.signs` say how the numbers of a file are written. A column with a block
of its own is read by that block alone, whatever reads it: a feature, a label, an extra, the weight. What a block leaves
out is as programs write it (a point before the fraction, nothing else), and not as those settings say. The blocks stay
with the run and its exports, so that files to score, frames and texts of requests are read in the same way.

What is read under these settings, and what is refused, `data/raw/written_numbers.py` says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.errors import SchemaError
from ziggurat.typed import checked


class DecimalMark(StrEnum):
    """The mark before the fraction of a number in text."""

    POINT = "point"  # 3.5
    COMMA = "comma"  # 3,5; a point in a number is then a fault, unless it stands between thousands


class ThousandsMark(StrEnum):
    """The mark between the thousands of a number in text."""

    NONE = "none"  # 1200
    COMMA = "comma"  # 1,200
    POINT = "point"  # 1.200
    SPACE = "space"  # 1 200, also with spaces that do not break
    APOSTROPHE = "apostrophe"  # 1'200


class NumberSigns(StrEnum):
    """Ways to treat signs of currencies and per cent around a number in text."""

    REFUSE = "refuse"  # they make it no number
    STRIP = "strip"  # $12.5 is 12.5, and 12% is 0.12


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class NumberColumn:
    """A column of text whose numbers are written in a way of their own.

    Args:
        column: the raw column, which features, labels, extras or the weight read as numbers.
        decimal: what stands before the fraction.
        thousands: what stands between thousands; numbers without any are read as well.
        signs: whether signs of currencies and per cent may stand around a number; 12% is then 0.12.

    Example:
        >>> zg.NumberColumn(column="price", decimal="comma", thousands="point").decimal.value
        'comma'
    """

    column: str
    decimal: DecimalMark = DecimalMark.POINT
    thousands: ThousandsMark = ThousandsMark.NONE
    signs: NumberSigns = NumberSigns.REFUSE

    def __post_init__(self) -> None:
        if self.decimal.value == self.thousands.value:
            raise SchemaError(
                expected="two marks: one between thousands, and another before the fraction",
                found=f"a {self.decimal.value} for both",
                where=f"number column {self.column!r}",
                ways_out=('1.234,5: decimal = "comma", thousands = "point"', '1,234.5: thousands = "comma" alone'),
            )
