"""Rows of requests as frames: plain values of any JSON type become columns of the type that each feature reads.

A data set has one type a column; the users of one batch of requests may send 17, "17" and 17.0 for the same id. So ids
become their canonical text one by one (`data/preprocess/values/cells.py` says which), numbers floats, lists lists,
before the run's own preprocessing sees them: the same values then give the same rows as in a file.

Numbers in the text of a request are written as in the files of the run: where these have a decimal comma or marks
between thousands, "1.200" is 1200 in both, and a text that such a file could not have is refused. A number of JSON is
the number that it is.

What no feature can read (an object for a number, a list for an id) is a `RequestError` that names the column.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from ziggurat.data.preprocess.values.cells import MissingValues
from ziggurat.data.preprocess.values.time_units import of_another_unit, unit_of
from ziggurat.data.preprocess.values.times import microseconds_of_dates
from ziggurat.data.raw.bad_rows import BadRow
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenColumns, WrittenNumbers, other_numbers
from ziggurat.errors import BoundsError, DataError, RequestError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.events import HISTORY_TIMES
from ziggurat.features.schema import Schema, column_of
from ziggurat.serving.plain_values import shortest_text
from ziggurat.typed import nearest

_VALUE_WAYS = ("correct the value", "leave the column out: it is then missing")
MAX_TEXT = 10_000  # characters of one value


def frame_of(
    rows: Sequence[Mapping[str, object]], schema: Schema, *, joined: Iterable[Sequence[str]] = ()
) -> pl.DataFrame:
    """The columns of a schema's features; what a row leaves out is null.

    Args:
        rows: raw columns by name; others are ignored (`refuse_unknown` looks at them).
        schema: features.
        joined: groups of features that describe the same events, and so have one length in a row; see `Model`.

    Raises:
        RequestError: a value that its feature cannot read, or lists of the same events that differ in length; names
            the column.
    """
    columns: dict[str, pl.Series] = {}
    missing = MissingValues.of(schema.missing_texts)
    for feature in schema.features:
        name = column_of(feature)
        # Several features may read one column, and the first of them decides how.
        if name not in columns:
            given = [row.get(name) for row in rows]
            given = [None if missing.has(each) else each for each in given]
            read = ColumnReader(name)
            values = [None if each is None else feature.of_request(each, read) for each in given]
            columns[name] = pl.Series(name, values, dtype=feature.request_type(), strict=True)
    for group in joined:
        named = {each.name: column_of(each) for each in schema.features if each.name in group}
        _refuse_uneven([columns[named[name]] for name in group if name in named])
    return pl.DataFrame(columns)


@contextlib.contextmanager
def placed_in_request(place: Callable[[int, str], str]) -> Iterator[None]:
    """Turn the error about a row of a frame into one about the request that the row came from.

    Args:
        place: the part of the request that a row and a column came from ("user", "item 3").

    Raises:
        RequestError: a cell that preprocessing cannot use; names the part and the column.
    """
    try:
        yield
    except (DataError, BoundsError) as error:
        # Rows of the frame are requests or items, which `place` can name.
        bad = BadRow.of(error)
        if bad is None:
            raise
        raise RequestError(
            expected=error.expected,
            found=error.found,
            where=f"request, {place(bad.row, bad.column)}, column {bad.column!r}",
            ways_out=_VALUE_WAYS,
        ) from None


def _refuse_uneven(lists: Sequence[pl.Series]) -> None:
    """Refuse lists of the same events that differ in length; one that is left out has none."""
    lengths = [each.list.len().fill_null(0) for each in lists]
    for other, found in zip(lists[1:], lengths[1:], strict=True):
        if (rows := (found != lengths[0]).arg_true()).len():
            first = lists[0].name
            row = int(rows[0])
            num_events = int(lengths[0][row])
            num_found = int(found[row])
            raise RequestError(
                expected=f"as many values in {other.name!r} as in {first!r}, which has {num_events}: both describe the "
                "same events",
                found=f"{num_found} values" if num_found or other[row] is not None else f"no {other.name!r}",
                where=f"request, column {other.name!r}" + (f" of row {row}" if found.len() > 1 else ""),
                ways_out=(
                    f'send both, in the same order: {{"{first}": […], "{other.name}": […]}}, null where one is unknown',
                    f"leave both out: {first!r} is then empty",
                ),
            )


def in_plain_numbers(
    row: Mapping[str, object], *, columns: Collection[str], written: WrittenColumns, even_plain: bool = False
) -> Mapping[str, object]:
    """Return a row of a request in which texts of numbers are numbers, by the marks of the run's files.

    Args:
        row: raw columns by name, as a client sent them; none that an export keeps.
        columns: those that are numbers.
        written: the way in which the files of the run write numbers, by column.
        even_plain: read texts that are written as programs write them, too, which who reads the column would do.

    Raises:
        RequestError: a text that is none in this way; names the column.
    """
    if written.is_plain and not even_plain:
        return row
    texts = {name: value for name, value in row.items() if name in columns and isinstance(value, str)}
    numbers = {name: _written_number(value, column=name, written=written.of(name)) for name, value in texts.items()}
    return {**row, **numbers}


def _written_number(text: str, *, column: str, written: WrittenNumbers) -> float | str | None:
    """Return the number that a text means by some marks; a text without any digit is left to who reads the column."""
    if not any(each.isdigit() for each in text):
        return text
    # More digits than that are no number that anybody means, and cost time to read.
    number = _cast(text[:400], written)
    if number is None:
        others = other_numbers(text[:400], present=written)[:2]
        meant = tuple(f'if it is {each:.10g}, send the number itself: {{"{column}": {each!r}}}' for each in others)
        raise RequestError(
            expected=f"a number of JSON, or text of one as in the files of the run{written.in_words()}",
            found=f"{text!r:.80}",
            where=f"request, column {column!r}",
            ways_out=(
                *(meant or (f'send the number itself: {{"{column}": 1234.5}}',)),
                "write the text as those files do",
            ),
        )
    return number


@functools.lru_cache(maxsize=10_000)  # a column of one text takes as long as one of a thousand
def _cast(text: str, written: WrittenNumbers) -> float | None:
    return written.cast(pl.Series([text], dtype=pl.String))[0]


def series_of(
    name: str, values: Iterable[object], *, dtype: pl.DataType, written: WrittenNumbers = PLAIN_NUMBERS
) -> pl.Series:
    """A column of a catalogue from values of any JSON type, or of the column's own.

    Args:
        name: of the column.
        values: its cells.
        dtype: its type.
        written: the way in which texts of numbers are written.

    Raises:
        RequestError: a value that the column cannot hold.
    """
    if dtype.is_numeric():
        rows = ({name: value} for value in values)
        marks = WrittenColumns(files=written)
        # One row for each cell, so that a catalogue reads texts as a request does.
        values = [in_plain_numbers(row, columns=(name,), written=marks)[name] for row in rows]
    cells = [_cell(value, dtype, name) for value in values]
    try:
        return pl.Series(name, cells, dtype=dtype, strict=True)
    except (PolarsError, TypeError, OverflowError, ValueError) as problem:
        raise _wrong(f"values of the type {dtype}", str(problem).partition("\n")[0], name) from None


def _cell(value: object, dtype: pl.DataType, column: str) -> object:
    if value is None:
        return None
    if dtype == pl.String:
        return _id(value, column)
    # Before the casts below, to which a truth is a number.
    if dtype == pl.Boolean and not isinstance(value, bool):
        raise _wrong("true or false", value, column)
    if dtype.is_float():
        return number_of(value, column=column)
    if dtype.is_integer():
        return _whole(value, column)
    if isinstance(dtype, pl.List | pl.Array):
        if not isinstance(value, list | tuple):
            raise _wrong("a list", value, column)
        # The type of its values may be given as the class itself.
        inner = dtype.inner if isinstance(dtype.inner, pl.DataType) else dtype.inner()
        return [_cell(each, inner, column) for each in value]
    if dtype == pl.Date and isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            raise _wrong("a date, as 2026-01-31", value, column) from None
    return value


def _whole(value: object, column: str) -> int:
    # Not through a float, which holds no whole number above 2^53.
    number = value if isinstance(value, int) and not isinstance(value, bool) else number_of(value, column=column)
    if number is None or not math.isfinite(number) or number != int(number):
        raise _wrong("a whole number", value, column)
    return int(number)


def refuse_unknown(row: Mapping[str, object], known: Iterable[str], *, what: str) -> None:
    """Refuse columns that nothing reads: a misspelt name would be a missing value without a word.

    Raises:
        RequestError: there is one; names the nearest that is read.
    """
    known = tuple(known)
    for name in row:
        if name not in known:
            raise RequestError(
                expected=f"columns of the {what}: {', '.join(known[:30]) or 'there are none'}",
                found=f"{name!r:.80}",
                where=f"request, {what}",
                ways_out=nearest(str(name), known, instead="leave it out: nothing reads it"),
            )


def canonical_id(value: object, *, column: str = "id") -> str | None:
    """The canonical text of one id; None where it is missing.

    Args:
        value: of any type that JSON has.
        column: named in errors.

    Raises:
        RequestError: the value is no id.
    """
    text = _id(value, column)
    if text in ("True", "False"):
        return text.lower()
    # Ids that stood in a column with gaps come as floats: 17.0 is 17.
    if text is not None and text.endswith(".0") and text[:-2].lstrip("-").isdecimal() and text.isascii():
        whole = text[:-2]
        if whole == "-0":
            return "0"
        # Two signs are no number, so this is a text that happens to end in ".0".
        return whole if whole.count("-") <= 1 else text
    return text or None


class ColumnReader:
    """Ways to read the values of one column of requests: `RequestReader` of `features/kinds/feature.py`.

    Args:
        column: named in errors.
    """

    def __init__(self, column: str) -> None:
        self.column = column

    def number(self, value: object) -> float | None:
        """Return the number that a value of any type that JSON has means."""
        return number_of(value, column=self.column)

    def id(self, value: object) -> str | None:
        """Return the text of an id of any type that JSON has."""
        return _id(value, self.column)

    def ids(self, value: object, *, separator: str) -> list[str | None] | None:
        """Return the texts of the ids of a list, or of a text that is divided."""
        if isinstance(value, str) and separator:
            return list(value[: MAX_TEXT * 10].split(separator)) if value else None
        return [_id(each, self.column) for each in self._list(value, of="ids")]

    def numbers(self, value: object) -> list[float | None]:
        """Return the numbers of a list."""
        return [self.number(each) for each in self._list(value, of="numbers")]

    def times(
        self, value: object, *, feature: str, seen: tuple[int, ...], date_order: DateOrder = DateOrder.AUTO
    ) -> list[int | None]:
        """Return the times of a list, in the unit of those that training has seen; dates count microseconds."""
        times = self._without_dates(self._list(value, of="times"), date_order=date_order)
        known = np.array([each for each in times if each is not None and abs(each) < 1 << 63], dtype=np.int64)
        if len(other := of_another_unit(known, seen=seen)):
            unit = unit_of(seen)
            counted = (f"send them in {unit}",)
            raise RequestError(
                expected=f"times in {unit}, as those of training ({seen[0]} to {seen[1]})",
                found=str(int(known[other[0]])),
                where=f"request, column {self.column!r}",
                ways_out=("send dates, like 2024-05-31 12:00:00", *counted) if unit == "microseconds" else counted,
            )
        # Other lists of times, such as when it is asked, need no order.
        if feature == HISTORY_TIMES and len(earlier := np.flatnonzero(known[1:] < known[:-1])):
            at = int(earlier[0])
            raise RequestError(
                expected="the times of a history, its oldest event first",
                found=f"{known[at]} before {known[at + 1]}",
                where=f"request, column {self.column!r}",
                ways_out="sort the events by time, in all lists of the history alike",
            )
        return times

    def _without_dates(self, given: Sequence[object], *, date_order: DateOrder) -> list[int | None]:
        """The times as whole numbers; dates and texts of dates as microseconds since 1970."""
        values = [each.isoformat() if isinstance(each, datetime.date) else each for each in given]
        texts = {at: each for at, each in enumerate(values) if isinstance(each, str)}
        dates: dict[int, int | None] = {}
        if texts:
            read = microseconds_of_dates(pl.Series(list(texts.values()), dtype=pl.String), order=date_order)
            # Texts that are no date may still be whole numbers.
            dates = {at: found for at, found in zip(texts, read.to_list(), strict=True) if found is not None}
        times: list[int | None] = []
        for at, each in enumerate(values):
            if each is None or at in dates:
                times.append(dates.get(at))
                continue
            try:
                times.append(_whole(each, self.column))
            except RequestError as problem:
                if at not in texts:
                    raise
                expected = "a time as a whole number, or a date like 2024-05-31 12:00:00 or 31.05.2024 12:00"
                # Only of a text that is neither: another value is refused in words of numbers.
                raise _wrong(expected, each, self.column) from problem
        return times

    def refused(self, value: object, *, expected: str) -> RequestError:
        """Return the error for a value that cannot be, to be raised."""
        return _wrong(expected, value, self.column)

    def _list(self, value: object, *, of: str) -> Sequence[object]:
        if not isinstance(value, list | tuple):
            raise _wrong(f"a list of {of}", value, self.column)
        return value


def number_of(value: object, *, column: str) -> float | None:
    """The number that a value of any type that JSON has means; None where it is missing.

    Text is read as in files: ASCII digits alone, without anything between them.

    Args:
        value: a number, a truth value, or text of one.
        column: named in errors.

    Raises:
        RequestError: the value is no number.
    """
    if value is None:
        return None
    if isinstance(value, bool | int | float | Decimal):
        try:
            # Python's whole numbers have no bound, and floats have one.
            return float(value)
        except OverflowError:
            raise _wrong("a number within ±3.4e38", value, column) from None
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return None
        truth = {"true": 1.0, "false": 0.0}.get(text.lower())
        if truth is not None:
            return truth
        # float() would take digits of other scripts and 1_000, which are no numbers in files.
        if text.isascii() and "_" not in text:
            with contextlib.suppress(ValueError):
                return float(text[:400])
    raise _wrong("a number, in text with the digits 0 to 9 and nothing between them", value, column)


def _id(value: object, column: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise _wrong(f"text of at most {MAX_TEXT:,} characters", value, column)
        # JSON can hold one half of a pair of surrogates, which no file can.
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong("text that can be encoded as UTF-8", value, column) from None
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # Python refuses to write numbers of thousands of digits, with an error of its own.
        if value.bit_length() > 1024:
            raise _wrong("an id", f"a number of {value.bit_length():,} bits", column)
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            raise _wrong("an id", value, column)
        # From 2^63 on a whole number is written with its exponent, as in files.
        return str(int(value)) if value.is_integer() and abs(value) < 2.0**63 else repr(value)
    # A moment is a date in Python, too, and its text would have a time in it.
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return shortest_text(value)
    raise _wrong("an id: text, a number, true or false", value, column)


def _wrong(expected: str, found: object, column: str) -> RequestError:
    return RequestError(
        expected=expected,
        found=f"{found!r:.80} ({type(found).__name__})",
        where=f"request, column {column!r}",
        ways_out=_VALUE_WAYS,
    )
