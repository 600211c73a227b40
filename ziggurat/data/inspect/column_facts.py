"""What can be measured about one raw column: kind of values, distinct count, nulls, range, examples.

Guessing what a column *means* (`column_rules.py`) needs a few numbers and the values of a sample; they are collected
here once, and said in one sentence, so that every guess shows its evidence. Text files give text alone: text that reads
as numbers, truth values or dates throughout becomes such, but "007" and "7" are different ids, so numbers with leading
zeros stay text. In Parquet the writer's choice of text is respected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import polars as pl

from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.raw.dates import ZoneSigns, find_order, look_like_dates, parse_dates
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, MarksFound, WrittenNumbers, find_marks
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import MISSING_TEXTS
from ziggurat.ops.written_decimals import as_float64

NULL_MARKERS = ("null", "na", "n/a", "none", "nan", "\\n", "nil", "?", "-", "#n/a", "unknown", "missing", "")
_WHOLE_NUMBER = r"^[+-]?\d+$"
_MANY_DIGITS = r"\d{17}"
_LEADING_ZERO = r"^[+-]?0\d"
_LONGEST_EXAMPLE = 30


class Values(StrEnum):
    """Kinds of values in a column."""

    WHOLE = "whole numbers"
    NUMBERS = "numbers"
    TRUTH = "truth values"
    TEXT = "texts"
    DATES = "dates"
    LISTS_OF_IDS = "lists of ids"
    LISTS_OF_NUMBERS = "lists of numbers"
    NOTHING = "nothing"
    OTHER = "other"


@dataclass(frozen=True)
class ColumnFacts:
    """Measurements of one column.

    Args:
        name: of the column.
        dtype: its type in the file, for people.
        kind: what its values are.
        values: the sample, as that kind: Int64, Float64, Boolean, String, Datetime or List.
        num_distinct: distinct values without null: of the sample, or of the file if `exact`.
        exact: whether distinct and null counts are those of the whole file.
        null_share: share of nulls.
        num_rows: rows of the whole file; estimated for text files.
        missing_texts: texts of the sample that mean that there is no value ("NULL"); they count as nulls.
        date_order: what stands first in its dates like 01/03/2024; AUTO if there are none, None if nothing shows it.
        lacks_zones: some of its dates name a time zone, and others do not.
        is_marked: its numbers have marks between thousands, or signs around them: they measure, and are no ids.
        examples: up to three distinct values, in order of appearance, as the file says them.
    """

    name: str
    dtype: str
    kind: Values
    values: pl.Series
    num_distinct: int
    exact: bool
    null_share: float
    num_rows: int
    missing_texts: tuple[str, ...] = ()
    date_order: DateOrder | None = DateOrder.AUTO
    lacks_zones: bool = False
    is_marked: bool = False
    examples: tuple[str, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Rows of the sample."""
        return len(self.values)

    @cached_property
    def present(self) -> pl.Series:
        """The sample without nulls and NaN."""
        values = self.values.drop_nulls()
        return values.drop_nans() if values.dtype.is_float() else values

    @cached_property
    def minimum(self) -> float:
        """Smallest number; 0 where there is none."""
        return number(self.present.min()) if self.present.dtype.is_numeric() else 0.0

    @cached_property
    def maximum(self) -> float:
        """Largest number; 0 where there is none."""
        return number(self.present.max()) if self.present.dtype.is_numeric() else 0.0

    @property
    def distinct_share(self) -> float:
        """Distinct values over rows with a value, of the file if exact, else of the sample."""
        # Of an exact count the rows are those of the file, less its nulls.
        rows = self.num_rows * (1 - self.null_share) if self.exact else len(self.present)
        return self.num_distinct / max(rows, 1.0)

    @property
    def scope(self) -> str:
        """The rows in which the values were counted: 'in all 1,000 rows'."""
        if self.exact or self.num_sampled >= self.num_rows:
            return f"in all {self.num_rows:,} rows"
        return f"in {self.num_sampled:,} rows read"

    @property
    def evidence(self) -> str:
        """One clause: distinct count, nulls, examples."""
        if not self.examples:
            return f"no value {self.scope}"
        what = f"{self.num_distinct:,} distinct {self.kind.value}" if self.num_distinct else f"{self.kind.value}"
        nulls = "no nulls" if self.null_share == 0 else f"{percent(self.null_share)} null"
        if self.missing_texts:
            nulls += f" (also written {', '.join(map(repr, self.missing_texts))})"
        return f"{what} {self.scope}, {nulls}, e.g. {', '.join(self.examples)}"


def number(value: object) -> float:
    """Convert the aggregate of a polars column to a float; 0 where there was nothing to aggregate."""
    return float(value) if isinstance(value, int | float) else 0.0


def short_number(value: float) -> str:
    """Write a number in some six digits, and all digits before the point: 1000000999 is not 1e+09."""
    return f"{value:.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:g}"


def percent(share: float) -> str:
    """A share in per cent with enough digits to be told from 0 and 100."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    text = f"{share:.1%}" if 0.001 <= share <= 0.999 else f"{share:.3%}"
    return {"0.000%": "<0.001%", "100.000%": ">99.999%"}.get(text, text)


def measure(
    series: pl.Series,
    *,
    from_text: bool,
    num_rows: int,
    exact: tuple[int, int] | None = None,
    written: WrittenNumbers = PLAIN_NUMBERS,
    is_marked: bool = False,
) -> ColumnFacts:
    """The facts of one column.

    Args:
        series: the sample.
        from_text: the column comes from a text file, so its type is to be found out.
        num_rows: rows of the whole file.
        exact: (distinct values without null, nulls) of the whole file, where they were counted.
        written: how numbers in text are written.
        is_marked: those of this column need that, whatever type the file gives it.
    """
    dtype = "text" if from_text else str(series.dtype)
    in_file = series
    missing: tuple[str, ...] = ()
    if isinstance(series.dtype, pl.Categorical | pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.String:
        series = series.set(series == "", None)
        # Texts such as NULL, as exports of databases write them: they are no values, and no ids.
        marks = series.is_in(pl.Series(MISSING_TEXTS).implode()).fill_null(False)
        missing = tuple(series.filter(marks).unique().sort().to_list())
        series = series.set(marks, None) if missing else series
        exact = None if missing else exact  # it counted them as values
    dates, order = _as_dates(series) if series.dtype == pl.String else (None, DateOrder.AUTO)
    zones = ZoneSigns()
    if dates is not None:
        # From the texts: once they are dates, nothing shows which of them had named a zone.
        zones.add(series)
    if dates is not None:
        series = dates
    elif from_text or is_marked:
        series, more = _typed(series, written=written)
        missing = (*missing, *more)
    kind, series = _kind(series)
    nulls = series.null_count() + (int(series.is_nan().sum()) if series.dtype.is_float() else 0)
    distinct = 0
    if kind not in (Values.LISTS_OF_IDS, Values.LISTS_OF_NUMBERS, Values.OTHER, Values.NOTHING):
        present = series.drop_nulls()
        distinct = (present.drop_nans() if present.dtype.is_float() else present).n_unique()
    whole = exact is not None or len(series) >= num_rows
    if exact is not None and distinct:
        distinct, nulls = exact
    rows = num_rows if exact is not None and distinct else len(series)
    return ColumnFacts(
        name=series.name,
        dtype=dtype,
        kind=kind,
        values=series,
        num_distinct=distinct,
        exact=whole and (exact is None or distinct == exact[0]),
        null_share=nulls / max(rows, 1),
        num_rows=num_rows,
        missing_texts=missing,
        date_order=order,
        lacks_zones=zones.are_mixed,
        is_marked=is_marked,
        # From the column as it was: a date that was parsed would be shown in another form.
        examples=_examples(in_file.filter(series.is_not_null())),
    )


def _examples(present: pl.Series) -> tuple[str, ...]:
    """Return up to three distinct values, in order of appearance, as the file says them."""
    values = present.drop_nans() if present.dtype.is_float() else present
    if isinstance(values.dtype, pl.Decimal) or values.dtype == pl.Float32:
        # Written as the nearest double: 0.1 in 32 bits would show as 0.10000000149.
        values = as_float64(values)
    found: list[str] = []
    # Enough to find three different ones where there are any to speak of.
    for value in values.head(200).to_list():
        text = _float_text(value) if isinstance(value, float) else str(value)
        # An example stands within a line.
        text = text.replace("\r", "\\r").replace("\n", "\\n")
        text = text if len(text) <= _LONGEST_EXAMPLE else text[: _LONGEST_EXAMPLE - 3] + "…"
        if text not in found:
            found.append(text)
        if len(found) == 3:
            break
    return tuple(found)


def _float_text(value: float) -> str:
    """Write the shortest decimal of a number, with an exponent only where it is too long without."""
    if not math.isfinite(value):
        return str(value)
    text = np.format_float_positional(value, trim="-")
    return text if len(text) <= _LONGEST_EXAMPLE else repr(value)


def find_marks_in(frame: pl.DataFrame, *, separator: str) -> MarksFound:
    """Find out how the numbers in columns of text are written, for all of them alike.

    Args:
        frame: the sample.
        separator: what divides the fields of the file; "" if it is no text file.
    """
    columns: dict[str, pl.Series] = {}
    nothing = pl.Series([*MISSING_TEXTS, *NULL_MARKERS]).implode()
    for series in frame.get_columns():
        if series.dtype == pl.String:
            present = series.drop_nulls()
            # In small letters, so that "N/A" and "n/a" are one mark.
            columns[series.name] = present.filter(~present.str.strip_chars().str.to_lowercase().is_in(nothing))
    return find_marks(columns, separator=separator)


def numbers_in_text(columns: Sequence[ColumnFacts]) -> list[str]:
    """Name columns of text in a file with types whose texts all are numbers, with fractions: no ids are written so.

    Args:
        columns: of such a file.
    """
    notes: list[str] = []
    for facts in columns:
        if facts.kind is not Values.TEXT or not len(facts.present):
            continue
        odd = facts.present.str.strip_chars().str.to_lowercase().is_in(pl.Series(NULL_MARKERS).implode())
        texts = facts.present.filter(~odd)
        fractions = texts.str.contains(r"^[+-]?\d*\.\d+$")
        # By more than half: a few numbers with a point may stand among ids.
        if number(fractions.mean()) > 0.5 and texts.cast(pl.Float64, strict=False).null_count() == 0:
            notes.append(
                f"{facts.name!r} is a column of text, and all its texts are numbers, such as "
                f"{texts.filter(fractions)[0]!r}: "
                'kind = "dense" in the schema reads them as numbers'
            )
    return notes


def _kind(series: pl.Series) -> tuple[Values, pl.Series]:
    """The kind of values, and the series in its standard type."""
    dtype = series.dtype
    if dtype == pl.Null or series.null_count() == len(series):
        return Values.NOTHING, series
    if dtype == pl.Boolean:
        return Values.TRUTH, series
    if dtype.is_integer():
        integers = series.cast(pl.Int64, strict=False)
        # A null that the cast has added is a number beyond 64 bits.
        return (Values.WHOLE, integers) if integers.null_count() == series.null_count() else _texts_of_ids(series)
    if isinstance(dtype, pl.Decimal):
        texts = canonical_text(series)
        # A decimal without places that is longer than a float holds is rather an id.
        if texts is not None and _are_long_ids(texts.drop_nulls()):
            return Values.TEXT, texts
    if dtype.is_float() or isinstance(dtype, pl.Decimal):
        numbers = as_float64(series)
        finite = numbers.filter(numbers.is_finite())
        # Beyond 2^53 a float may be whole by rounding alone.
        if len(finite) and (finite == finite.round()).all() and number(finite.abs().max()) < 2**53:
            return Values.WHOLE, numbers.set(~numbers.is_finite(), None).cast(pl.Int64)  # pandas' integers with nulls
        return Values.NUMBERS, numbers
    if dtype == pl.String:
        return Values.TEXT, series
    if dtype == pl.Date or isinstance(dtype, pl.Datetime):
        # One unit for all dates.
        return Values.DATES, series.cast(pl.Datetime("us"))
    if isinstance(dtype, pl.Array):
        series = series.arr.to_list()
        dtype = pl.List(dtype.inner)
    if isinstance(dtype, pl.List):
        inner = dtype.inner
        if inner.is_float() or isinstance(inner, pl.Decimal):
            return Values.LISTS_OF_NUMBERS, series
        if inner.is_integer() or inner == pl.String or isinstance(inner, pl.Categorical | pl.Enum):
            return Values.LISTS_OF_IDS, series
    return Values.OTHER, series


def _are_long_ids(texts: pl.Series) -> bool:
    """Return whether texts are whole numbers, some of more digits than a float holds: it would merge different ids."""
    return bool(texts.str.contains(_WHOLE_NUMBER).all() and texts.str.contains(_MANY_DIGITS).any())


def _texts_of_ids(series: pl.Series) -> tuple[Values, pl.Series]:
    """Read whole numbers beyond 64 bits as texts: only ids are that large, and only texts still tell them apart."""
    return Values.TEXT, series.cast(pl.String)


def _typed(series: pl.Series, *, written: WrittenNumbers) -> tuple[pl.Series, tuple[str, ...]]:
    """Text as numbers or truth values if (nearly) every cell reads as such; and marks of nothing among them."""
    present = series.drop_nulls()
    if present.is_empty():
        return series, ()
    # Of the first cells, before all of them are put into small letters.
    lowered = present.head(1000).str.to_lowercase()
    if lowered.is_in(["true", "false"]).all() and present.str.to_lowercase().is_in(["true", "false"]).all():
        return series.str.to_lowercase() == "true", ()
    # Whole numbers with leading zeros are ids, such as postcodes: as numbers they would lose them.
    if present.str.contains(_LEADING_ZERO).any() and not present.str.contains(r"[.,eE]").any():
        return series, ()
    numbers = written.cast(series)
    odd = series.filter(numbers.is_null() & series.is_not_null()).unique()
    # A few marks of nothing among numbers leave it a column of numbers.
    if len(odd) == 0 or (len(odd) <= 5 and set(odd.str.strip_chars().str.to_lowercase()) <= set(NULL_MARKERS)):
        integers = series.cast(pl.Int64, strict=False)
        exact_integers = integers.null_count() == numbers.null_count()  # beyond 2^53 a float would lose digits
        if not exact_integers and _are_long_ids(present.filter(~present.is_in(odd.implode()))):
            return series, ()
        return (integers if exact_integers else numbers), tuple(sorted(odd.to_list()))
    return series, ()


def _as_dates(series: pl.Series) -> tuple[pl.Series | None, DateOrder | None]:
    """Text as dates if every cell reads as one, with what they show about the order of day and month; else None."""
    # A cheap look at the first cells, which most columns of text do not pass.
    if not look_like_dates(series.drop_nulls().head(50)):
        return None, DateOrder.AUTO
    order = find_order(series)
    # Where nothing shows the order, either one tells whether the cells are dates.
    dates = parse_dates(series, order=order or DateOrder.DAY_FIRST)
    return (dates, order) if dates.null_count() == series.null_count() else (None, DateOrder.AUTO)
