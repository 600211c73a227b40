"""Dates in text, as people and programs write them, to microseconds since 1970.

    2024-03-01, 2024-03-01T03:35:10.5Z, 2024-03-01 03:35 UTC, 2024/3/1 03:35    year first: ISO, and what is near it
    01.03.2024 03:35                                                            points: the day first, everywhere
    01/03/2024, 1-3-2024 03:35 PM                                               1 March or 3 January: nobody can say

Whether the day or the month stands first is decided for a whole column, by a date that only one of both can be
(25/12/2023). Where no date shows it the order is *ambiguous*: whoever reads the column must be told (`DateOrder`), and
nothing is guessed. Years have four digits. Zones are converted to UTC; times without one are taken as they are.

Idea: the pieces of a date are put into the order of ISO, and one set of templates reads them all. Cells that are
in ISO form already are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ziggurat.features.date_order import DateOrder

_TEMPLATES = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d",
    "%Y-%m-%d %I:%M:%S %p",
    "%Y-%m-%d %I:%M %p",
)
_ZONED_TEMPLATES = ("%Y-%m-%d %H:%M:%S%.f%#z", "%Y-%m-%d %H:%M%#z")
_YEAR_FIRST = r"^\d{4}-\d{1,2}-\d{1,2}"
DAY_OR_MONTH_FIRST = r"^\s*(\d{1,2})[/-](\d{1,2})[/-](\d{4})"
_ZONE = r"( ?UTC|Z|[+-]\d{2}:?\d{2})"
_CLOCK = r"([T ]+\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?" + _ZONE + r"?)?$"
_DATE = r"^(\d{4}[-./]\d{1,2}[-./]\d{1,2}|\d{1,2}[-./]\d{1,2}[-./]\d{4})" + _CLOCK


_DATE_WITH_CLOCK = r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}[T ]+\d{1,2}:"


_AS_ISO = (
    (r"^(\d{4})[./](\d{1,2})[./](\d{1,2})", "${1}-${2}-${3}"),
    (r"^(\d{1,2})\.(\d{1,2})\.(\d{4})", "${3}-${2}-${1}"),
    (r" ?UTC$", "Z"),
    (r"[T ]+", " "),  # the first of them: between date and clock
    (r"(:\d\d),(\d)", "${1}.${2}"),
    (r"(\d)([AaPp][Mm])$", "${1} ${2}"),
)
_ORDERED = {
    DateOrder.AUTO: (),
    DateOrder.DAY_FIRST: ((DAY_OR_MONTH_FIRST, "${3}-${2}-${1}"),),
    DateOrder.MONTH_FIRST: ((DAY_OR_MONTH_FIRST, "${3}-${1}-${2}"),),
}


def look_like_dates(texts: pl.Series) -> bool:
    """Return whether all texts have the form of a date; nulls aside, and False if there is no text."""
    present = texts.drop_nulls().str.strip_chars()
    return bool(len(present)) and bool(present.str.contains(_DATE).all())


def find_order(texts: pl.Series) -> DateOrder | None:
    """Return the order that the dates of a column show.

    Returns:
        AUTO where no date needs an order; the order that more dates demand; None if there are dates like 01/03/2024
        and nothing shows how to read them.
    """
    signs = OrderSigns()
    signs.add(texts)
    return signs.order


@dataclass(kw_only=True)
class OrderSigns:
    """Signs of the order of the dates seen so far, for columns that come in chunks.

    Args:
        in_question: whether a date needs an order.
        day_first: dates that can only have the day first.
        month_first: dates that can only have the month first.
    """

    in_question: bool = False
    day_first: int = 0
    month_first: int = 0

    def add(self, texts: pl.Series) -> None:
        """Look at more texts of the column."""
        if not texts.str.contains(DAY_OR_MONTH_FIRST).any():
            return
        parts = texts.drop_nulls().str.strip_chars().str.extract_groups(DAY_OR_MONTH_FIRST).struct.unnest()
        first, second = (parts.to_series(place).drop_nulls().cast(pl.Int32) for place in (0, 1))
        self.in_question = True
        self.day_first += int((first > 12).sum())
        self.month_first += int((second > 12).sum())

    @property
    def order(self) -> DateOrder | None:
        """The order that `find_order` returns for all texts."""
        if not self.in_question:
            return DateOrder.AUTO
        if self.day_first == self.month_first:
            return None
        return DateOrder.DAY_FIRST if self.day_first > self.month_first else DateOrder.MONTH_FIRST


@dataclass(kw_only=True)
class ZoneSigns:
    """Counts of the dates seen so far that name a zone, for columns that come in chunks.

    Args:
        zoned: dates with a zone, and columns of a type that has one.
        plain: dates without; they count as UTC.
    """

    zoned: int = 0
    plain: int = 0

    def add(self, series: pl.Series) -> None:
        """Look at more dates of the column; numbers have no zone and need none."""
        present = series.drop_nulls()
        if series.dtype == pl.String:
            texts = present.str.strip_chars()
            dates = texts.filter(texts.str.contains(_DATE_WITH_CLOCK))
            zoned = int(dates.str.contains(r":\d{2}([.,]\d+)?" + _ZONE + "$").sum())
        elif isinstance(series.dtype, pl.Datetime):
            dates = present
            zoned = len(present) if series.dtype.time_zone else 0
        else:
            return
        self.zoned += zoned
        self.plain += len(dates) - zoned

    @property
    def are_mixed(self) -> bool:
        """True if some dates name a zone and others do not."""
        return bool(self.zoned and self.plain)

    def note(self, column: str) -> str:
        """Say what is done with those without a zone."""
        return (
            f"column {column!r}: {self.plain:,} of {self.zoned + self.plain:,} dates name no time zone, and others do; "
            "those count as UTC, write the zone into them where that is wrong"
        )


def parse_dates(texts: pl.Series, *, order: DateOrder) -> pl.Series:
    """Dates as Datetime in microseconds (UTC where a zone is named), null where the text is none.

    Args:
        texts: of one column.
        order: of dates like 01/03/2024, which are none under AUTO; see `find_order`.
    """
    texts = texts.str.strip_chars()
    # Most columns have ISO dates: only the others pay for rewriting their texts.
    found = _parse(texts.str.replace("T", " ", literal=True))
    if found.null_count() == texts.null_count():
        return found
    rewritten = texts
    for pattern, as_iso in (*_AS_ISO, *_ORDERED[order]):
        rewritten = rewritten.str.replace(pattern, as_iso)
    return found.zip_with(found.is_not_null(), _parse(rewritten))


def _parse(texts: pl.Series) -> pl.Series:
    """Texts with the year first; other years than of four digits are none."""
    texts = texts.set(~texts.str.contains(_YEAR_FIRST), None)
    found = pl.Series(texts.name, [None], dtype=pl.Datetime("us")).extend_constant(None, len(texts))[: len(texts)]
    for template in _TEMPLATES:
        if found.null_count() == texts.null_count():
            return found
        found = found.zip_with(found.is_not_null(), texts.str.to_datetime(template, strict=False, time_unit="us"))
    for template in _ZONED_TEMPLATES:
        if found.null_count() > texts.null_count():
            zoned = texts.str.to_datetime(template, strict=False, time_unit="us", time_zone="UTC")
            found = found.zip_with(found.is_not_null(), zoned.dt.replace_time_zone(None))
    return found
