"""Messages as rows: the fields of a broker's messages become columns of the schema.

    user=u7 item=12 click=1 at=957139200        a row: fields are columns by name, cells are texts as in a CSV file
    json={"user": "u7", "item": 12, …}          a row: an object of JSON; numbers as they are written, lists as lists
    arrow=ARROW STREAM                          rows: as many as the stream has, with the types that it has

A field that is absent or empty is a missing value; fields that the schema does not name are left out. What can be none
of this is a bad message: text that is not UTF-8 or has NUL bytes, no object, a damaged Arrow stream or one that lacks a
column, and a message that has no column of the schema at all. Whether a text is a number or a time is asked later, of
all raw rows alike.

Cost: one pass over the cells in C for messages whose fields are columns; an object of JSON is read by Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Bool, Int64

from ziggurat.data.raw.bad_rows import BadReason
from ziggurat.data.streams.brokers.broker import Cell, Messages


class Payload(StrEnum):
    """Names of fields that hold whole rows, unless the schema has a column of that name."""

    JSON = "json"
    ARROW = "arrow"


@dataclass(frozen=True, kw_only=True)
class BadMessage:
    """A message that is no row.

    Args:
        index: of the message.
        reason: why.
        expected: what would have been right.
        found: instead.
        column: that is wrong; "" where all of it is.
    """

    index: int
    reason: BadReason
    expected: str
    found: str
    column: str = ""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of messages, all of one kind.

    Args:
        frame: the columns of the schema.
        messages: (N,) index of the message of each row.
    """

    frame: pl.DataFrame
    messages: Int64[np.ndarray, " N"]


def rows_of(
    messages: Messages,
    *,
    columns: Sequence[str],
    report: Callable[[BadMessage], object],
    default_cells: Mapping[str, str] | None = None,
) -> Iterator[Rows]:
    """Give the rows of messages in their order, those that are alike together.

    Args:
        messages: from a broker.
        columns: of the schema.
        report: called with each message that is no row; it is left out.
        default_cells: cells of messages that lack a field, by column; a missing value where none is given.
    """
    read = _Reading(messages=messages, columns=columns, report=report, default_cells=default_cells or {})
    payloads = [name for name in Payload if name.value in messages.columns and name.value not in columns]
    kinds = np.zeros(len(messages.ids), dtype=np.int64)
    for number, name in enumerate(payloads, start=1):
        kinds[[cell is not None for cell in messages.columns[name.value]]] = number
    ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    begin = 0
    for end in ends:
        if begin == end:
            continue
        if not kinds[begin]:
            yield from _of_fields(read, begin=begin, end=end)
        elif payloads[int(kinds[begin]) - 1] is Payload.JSON:
            yield from _of_json(read, begin=begin, end=end)
        else:
            yield from _of_arrow(read, begin=begin, end=end)
        begin = end


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Messages, and what is asked of them; see `rows_of`."""

    messages: Messages
    columns: Sequence[str]
    report: Callable[[BadMessage], object]
    default_cells: Mapping[str, str]

    @property
    def needed(self) -> list[str]:
        """Columns that a message cannot do without."""
        return [name for name in self.columns if name not in self.default_cells]


def _of_fields(read: _Reading, *, begin: int, end: int) -> Iterator[Rows]:
    """Give the rows of messages whose fields are columns."""
    messages = read.messages
    columns = read.columns
    report = read.report
    num_rows = end - begin
    keep = np.ones(num_rows, dtype=np.bool_)
    has_any = np.zeros(num_rows, dtype=np.bool_)
    series: list[pl.Series] = []
    for name in columns:
        cells = messages.columns.get(name)
        default = read.default_cells.get(name)
        if cells is None:
            series.append(pl.Series(name, [default] * num_rows, dtype=pl.String))
            continue
        raw = pl.Series(name, pa.array(cells[begin:end], type=pa.binary()))
        text = _as_text(raw)
        if default is None:
            has_any |= raw.is_not_null().to_numpy()
        _refuse_cells(raw, text, keep=keep, report=report, begin=begin)
        # As an empty cell of a CSV file, which has no other way to say that nothing is known.
        text = text.set(text == "", None)
        series.append(text if default is None else text.set(raw.is_null(), default))
    for index in np.flatnonzero(~has_any & keep).tolist():
        found = ", ".join(name for name, cells in messages.columns.items() if cells[begin + index] is not None)
        keep[index] = False
        report(_without_columns(begin + index, columns=columns, found=f"fields {found}" if found else "no field"))
    rows = np.arange(begin, end)
    frame = pl.DataFrame(series)
    if not keep.all():
        frame = frame.filter(pl.Series(keep))
        rows = rows[keep]
    if len(rows):
        yield Rows(frame=frame, messages=rows)


def _as_text(raw: pl.Series) -> pl.Series:
    """Return bytes as text; null where they are none."""
    try:
        return raw.cast(pl.String)
    except pl.exceptions.ComputeError:
        return pl.Series(raw.name, [_decoded(cell) for cell in raw], dtype=pl.String)


def _decoded(cell: bytes | None) -> str | None:
    try:
        return None if cell is None else cell.decode()
    except UnicodeDecodeError:
        return None


def _refuse_cells(
    raw: pl.Series, text: pl.Series, *, keep: Bool[np.ndarray, " N"], report: Callable[[BadMessage], object], begin: int
) -> None:
    """Report cells that are no text, and drop their rows."""
    no_text = (raw.is_not_null() & text.is_null()).to_numpy()
    has_nul = text.str.contains("\0", literal=True).fill_null(False).to_numpy()
    for index in np.flatnonzero((no_text | has_nul) & keep).tolist():
        keep[index] = False
        report(
            BadMessage(
                index=begin + index,
                reason=BadReason.NUL_BYTE if has_nul[index] else BadReason.INVALID_UTF8,
                expected="text without NUL bytes" if has_nul[index] else "text in UTF-8",
                found=bytes(raw[index]).decode(errors="replace"),
                column=text.name,
            )
        )


def _without_columns(index: int, *, columns: Sequence[str], found: str) -> BadMessage:
    return BadMessage(
        index=index,
        reason=BadReason.NUM_FIELDS,
        expected=f"fields named as columns of the schema: {', '.join(columns)}",
        found=found,
    )


def _of_json(read: _Reading, *, begin: int, end: int) -> Iterator[Rows]:
    """Give the rows of messages that are objects of JSON."""
    columns = read.columns
    report = read.report
    payload = read.messages.columns[Payload.JSON.value]
    found: list[dict[str, Any]] = []
    rows: list[int] = []
    for index in range(begin, end):
        cell = payload[index]
        try:
            # Numbers stay as they were written: 007 is no JSON, but 1.10 and 17 digits are.
            row = json.loads(cell or b"", parse_float=str, parse_int=str)
        except (ValueError, RecursionError) as error:
            row = str(error)
        if not isinstance(row, dict):
            expected = f"an object of JSON in the field {Payload.JSON.value!r}"
            shown = _shown(cell)
            report(BadMessage(index=index, reason=BadReason.UNPARSABLE, expected=expected, found=shown))
        elif _may_hold_half_a_pair(cell) and not _is_text(row):
            expected = f"text in the field {Payload.JSON.value!r} that UTF-8 can hold"
            shown = f"half of a pair of surrogates in {_shown(cell)}"
            report(BadMessage(index=index, reason=BadReason.INVALID_UTF8, expected=expected, found=shown))
        elif not any(name in row for name in read.needed):
            report(_without_columns(index, columns=columns, found=f"keys {', '.join(row)}" if row else "no key"))
        else:
            found.append({**read.default_cells, **row})
            rows.append(index)
    for first, last in _alike(found, columns=columns):
        part = found[first:last]
        frame = pl.DataFrame([_series_of_values(name, [row.get(name) for row in part]) for name in columns])
        yield Rows(frame=frame, messages=np.array(rows[first:last]))


def _may_hold_half_a_pair(cell: Cell) -> bool:
    r"""Return whether a message may hold half a pair of surrogates; of nearly all bytes alone say that it does not.

    In UTF-8 a half is an escape, or begins with the byte ED; bytes of UTF-16, which JSON may have too, hold zeros.
    """
    if isinstance(cell, bytes):
        return b"\\u" in cell or b"\xed" in cell or b"\0" in cell
    return cell is not None and ("\\u" in cell or not cell.isascii())


def _is_text(row: Mapping[str, Any]) -> bool:
    r"""Return whether all texts of an object can be written: JSON allows "\ud800" alone, UTF-8 does not."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _alike(rows: Sequence[dict[str, Any]], *, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last places of runs of rows of which a column has lists in all or in none.

    A column has one type, so that a list would make lists of the texts beside it, and all of them unreadable.
    """
    first = 0
    kinds: dict[str, bool] = {}
    for place, row in enumerate(rows):
        now = {name: isinstance(row[name], list) for name in columns if row.get(name) is not None}
        if any(kinds.get(name, is_list) != is_list for name, is_list in now.items()):
            yield first, place
            first = place
            kinds = {}
        kinds |= now
    if rows:
        yield first, len(rows)


def _series_of_values(name: str, values: list[Any]) -> pl.Series:
    """Return a column of texts, or of lists of texts where its values are lists."""
    if any(isinstance(value, list) for value in values):
        cells = [None if each is None else [_text_of(value) for value in each] for each in values]
        return pl.Series(name, cells, dtype=pl.List(pl.String))
    return pl.Series(name, [_text_of(value) or None for value in values], dtype=pl.String)


def _text_of(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _of_arrow(read: _Reading, *, begin: int, end: int) -> Iterator[Rows]:
    """Give the rows of messages that are Arrow streams."""
    columns = read.columns
    report = read.report
    payload = read.messages.columns[Payload.ARROW.value]
    for index in range(begin, end):
        cell = payload[index]
        try:
            data = cell.encode("latin-1") if isinstance(cell, str) else cell or b""
            with pa.ipc.open_stream(data) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            expected = f"an Arrow stream in the field {Payload.ARROW.value!r}"
            shown = f"{str(error).partition(chr(10))[0][:200]} in {_shown(cell)}"
            report(BadMessage(index=index, reason=BadReason.UNPARSABLE, expected=expected, found=shown))
            continue
        for name, default in read.default_cells.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([default] * table.num_rows, type=pa.string()))
        missing = [name for name in columns if table.column_names.count(name) != 1]
        if missing:
            expected = f"the columns {', '.join(columns)} in the Arrow stream, once each"
            shown = ", ".join(table.column_names)
            report(BadMessage(index=index, reason=BadReason.NUM_FIELDS, expected=expected, found=shown))
        elif table.num_rows:
            frame = pl.from_arrow(table.select(list(columns)))
            assert isinstance(frame, pl.DataFrame)
            yield Rows(frame=frame, messages=np.full(table.num_rows, index))


def _shown(cell: Cell) -> str:
    text = cell if isinstance(cell, str) else (cell or b"").decode(errors="replace")
    return text[:200]
