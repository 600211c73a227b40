"""JSON Lines as frames: one object a line, with the types that its writer gave; `.jsonl`, `.ndjson`, gzip too.

    {"user": 17, "item": "007", "tags": ["a", "b"], "click": true}
    {"user": 18, "item": "7", "tags": null}                            what a line leaves out is null

Problem: polars reads a block of lines fast, but refuses all of it for one bad line, and gives a column one type where a
log has several: a number of 17 digits beside a fraction loses its last ones, an escape of half a character becomes NUL.

Idea: polars takes the blocks in which none of that can be; Python's `json` takes the others line by line, names the bad
lines, and writes columns of several types as the texts that ids have (`data/preprocess/values/cells.py`). Both give the
same ids and numbers. Which columns there are, and which of them are lists, the first block says: by most of its
values, so that one row of another kind, or with a list in a list, is a bad row, and not all the others.

A line with a name twice is a bad row, since nobody can say which value is meant: programs take the first or the last.

Python writes NaN and Infinity, which JSON has not: NaN is nothing, as in other files, and infinities are bad rows where
numbers are read. Blank lines at the end are ignored, others are bad rows, as in CSV.

Cost, CPU time of one core: 35 MB a second, 4 MB of the blocks that Python reads.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np
import polars as pl
from polars.exceptions import PanicException, PolarsError

from ziggurat.commands import python_line
from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRows, shown
from ziggurat.data.raw.text_blocks import ByteStream, TextOptions, cut_behind_last_line, refuse_utf_16
from ziggurat.errors import DataError
from ziggurat.files.stores import DataPath
from ziggurat.plain import JSON

_UTF8_MARK = b"\xef\xbb\xbf"
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_WHOLE_CHARACTER = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
# A name that is written with an escape cannot be counted by its text.
_ESCAPED_NAME = re.compile(rb'"[^"\n]*\\u[0-9a-fA-F]{4}[^"\n]*"\s*:')
# Texts that polars may have made of numbers in its own way, of nested values, or of long digits.
_MAY_BE_NO_TEXT = r"^(-?[0-9.]+[eE].*|-0.*|[\[{].*|[0-9-][0-9]{15,}.*)$"
# Beyond it, FP64 has one number for several whole ones.
_LARGEST_EXACT = 2**53
_LARGEST_INT64 = 2**63 - 1
_HALF_WRITTEN = "the last line has no end, so perhaps the file is half written: give the command again when it is whole"
_OBJECT = 'a JSON object, such as {"user": 1, "item": 2}'


@dataclass(kw_only=True)
class _Lines:
    """Parsed lines of a block: the good ones as a frame, their places in the block, and what is wrong with others."""

    frame: pl.DataFrame
    places: np.ndarray
    faults: list[_Fault] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A line that cannot be used, by its place in the block."""

    place: int
    reason: BadReason
    expected: str
    found: str
    column: str = ""


class JsonLinesFile:
    """One file of JSON Lines.

    Args:
        path: the file; gzip is recognised.
        options: bytes of a block, and most bytes of a line.

    Raises:
        MissingFileError: no such file.
        DataError: it is empty or damaged, is no UTF-8, or none of its first lines is an object.
    """

    def __init__(self, path: DataPath, *, options: TextOptions) -> None:
        self.path = path
        self._options = options
        self.num_rows = 0  # that were read so far
        self._is_torn = False  # the last line of the block has no end
        self._types = self._first_types()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the objects of the first block, in order of appearance."""
        return tuple(self._types)

    def dtypes(self) -> dict[str, pl.DataType]:
        """The polars type of every column of the first block."""
        return dict(self._types)

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""

    def frames(
        self, *, columns: Sequence[str], chunk_rows: int, bad_rows: BadRows
    ) -> Iterator[tuple[pl.DataFrame, np.ndarray]]:
        """Read the file: frames of whole blocks, with the 0-based line of each row.

        Args:
            columns: those wanted, in this order.
            chunk_rows: not used: blocks are cut later.
            bad_rows: where faulty lines go.

        Raises:
            DataError: a damaged gzip stream, or a bad line (policy ERROR).
        """
        self.num_rows = 0
        for block in self._blocks(bad_rows):
            parsed = parse_lines(block, columns=columns, types=self._types, max_bytes=self._options.max_record_bytes)
            last = block.count(b"\n") - 1
            for fault in parsed.faults:
                self._report(fault, bad_rows, is_torn=self._is_torn and fault.place == last)
            # Places count within the block, and `num_rows` the lines of all blocks before it.
            rows = parsed.places + self.num_rows
            # Lines, not rows: bad ones keep their numbers.
            self.num_rows += block.count(b"\n")
            yield parsed.frame, rows

    def _blocks(self, bad_rows: BadRows) -> Iterator[bytes]:
        """Yield whole lines, each with its line feed; blank lines at the end are left out."""
        with ByteStream(self.path) as stream:
            rest = b""
            is_first = True
            while True:
                read = stream.read(self._options.block_bytes)
                # The mark can only be at the very beginning, and `json` would refuse it.
                if is_first and read.startswith(_UTF8_MARK):
                    read = read[len(_UTF8_MARK) :]
                is_first = False
                data = rest + read
                end = cut_behind_last_line(data, is_last=not read)
                if end:
                    block = data[:end]
                    # The last line of a file may lack its line feed, and all that follows counts by them.
                    self._is_torn = not block.endswith(b"\n")
                    yield block + b"\n" if self._is_torn else block
                rest = data[end:]
                if not read:
                    return
                # Without a line feed nothing of it can be given on, and it would grow without a bound.
                if len(rest) > self._options.max_record_bytes and b"\n" not in rest:
                    rest = yield from self._skip_long(stream, rest, bad_rows)

    def _skip_long(self, stream: ByteStream, start: bytes, bad_rows: BadRows) -> Iterator[bytes]:
        """Report a line that is too long to be held, and go on behind it; returns what was read of the lines after."""
        self._report(_too_long(start, 0, max_bytes=self._options.max_record_bytes), bad_rows)
        self.num_rows += 1
        # Makes this a generator: the caller goes on with `rest = yield from …`.
        yield from ()
        while read := stream.read(self._options.block_bytes):
            if (end := read.find(b"\n")) >= 0:
                return read[end + 1 :]
        return b""

    def _first_types(self) -> dict[str, pl.DataType]:
        with ByteStream(self.path) as stream:
            start = stream.read(self._options.max_record_bytes)
            while start and b"\n" not in start and len(start) < self._options.block_bytes:
                more = stream.read(self._options.max_record_bytes)
                if not more:
                    break
                start += more
        refuse_utf_16(self.path, start)
        start = start.removeprefix(_UTF8_MARK)
        # Less than was asked for: the file ends here, and its last line with it.
        is_whole = len(start) < self._options.max_record_bytes
        # One line longer than all that was read is looked at as it is.
        lines = start[: cut_behind_last_line(start, is_last=is_whole)] or start
        if not lines.strip():
            raise self._no_objects(b"", faults=())
        parsed = parse_lines(lines if lines.endswith(b"\n") else lines + b"\n", columns=None, types={})
        if not parsed.frame.width:
            raise self._no_objects(lines, faults=parsed.faults)
        return dict(parsed.frame.schema)

    def _no_objects(self, lines: bytes, *, faults: Sequence[_Fault]) -> DataError:
        """Return the error for a file whose first lines hold no column: by the first fault that is more than no JSON.

        Args:
            lines: the first ones of the file; empty if it is.
            faults: of them, in order.
        """
        ways_out: list[str] = []
        first = faults[0] if faults else None
        is_json = lines.lstrip()[:1] in (b"{", b"[")
        if first is not None and is_json and not first.expected.startswith(_OBJECT):
            return DataError(
                expected=first.expected,
                found=shown(first.found),
                where=self._bad_row(first).where,
                ways_out="correct the file: none of its first lines can be used",
            )
        if is_json and first is not None:
            name = str(self.path)
            target = str(PurePath(name).with_suffix(".parquet"))
            code = f"import polars; polars.read_json({name!r}).write_parquet({target!r})"
            ways_out.append(f"convert it, if it is one JSON document: {python_line(code)}")
        if lines and not is_json:
            ways_out.append("name the format where it is another one: --data.format csv")
        begin = lines.split(b"\n", 1)[0][:200].decode(errors="backslashreplace")
        return DataError(
            expected=f"{_OBJECT}, on each line",
            found=repr(begin) if lines else "an empty file",
            where=f"{self.path}, line 1" if lines else str(self.path),
            ways_out=(*ways_out, "write one object with names and values on each line"),
        )

    def _report(self, fault: _Fault, bad_rows: BadRows, *, is_torn: bool = False) -> None:
        bad = self._bad_row(fault)
        if is_torn:
            bad = replace(bad, ways_out=(_HALF_WRITTEN,))
        bad_rows.report(bad)

    def _bad_row(self, fault: _Fault) -> BadRow:
        row = self.num_rows + fault.place
        return BadRow(
            path=self.path,
            row=row,
            line=row + 1,
            column=fault.column,
            reason=fault.reason,
            expected=fault.expected,
            found=fault.found,
        )


def parse_lines(
    data: bytes, *, columns: Sequence[str] | None, types: dict[str, pl.DataType], max_bytes: int = sys.maxsize
) -> _Lines:
    """Parse whole lines, fast where that is safe.

    Args:
        data: lines, each with its line feed.
        columns: those wanted, in this order; None takes all.
        types: of the columns in the first block of the file.
        max_bytes: longer lines are bad.
    """
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
    # From one line feed to the next, less the feed itself; −1 stands for the one before the first line.
    longest = int(np.diff(ends, prepend=-1).max()) - 1
    frame = _parsed_by_polars(data, columns=columns, types=types) if longest <= max_bytes else None
    if frame is not None:
        return _Lines(frame=frame, places=np.arange(frame.height))
    return parse_line_by_line(data, columns=columns, types=types, max_bytes=max_bytes)


def _parsed_by_polars(
    data: bytes, *, columns: Sequence[str] | None, types: dict[str, pl.DataType]
) -> pl.DataFrame | None:
    """Read lines with polars; None where it refuses them, or may not say what they say."""
    # Lines with NUL are left to Python, which names them.
    if b"\0" in data or b"\\u0000" in data:
        return None
    # First a cheap look at all escapes of halves, then another one without the pairs that make a whole.
    if _HALF_CHARACTER.search(data) and _HALF_CHARACTER.search(_WHOLE_CHARACTER.sub(b"", data)):
        return None
    try:
        # Looked at here, so that nothing depends on what polars makes of wrong bytes.
        if not data.isascii():
            data.decode()
        # Types of all lines: what the first ones look like may not hold for the rest.
        frame = pl.read_ndjson(data, infer_schema_length=None)
    except (PolarsError, PanicException, UnicodeDecodeError):
        return None
    # Where polars passed over a line, the places of all lines behind it would be wrong.
    if frame.height != data.count(b"\n") or not frame.width:
        return None
    names = frame.columns if columns is None else columns
    if not _are_once(names, data=data, frame=frame):
        return None
    found: list[pl.Series] = []
    for name in names:
        # A name that stands in no line of this block is null in all of them.
        series = frame[name] if name in frame.columns else pl.Series(name, [None] * frame.height)
        fitted = _fitted(series, types.get(name))
        if fitted is None:
            return None
        found.append(fitted)
    return pl.DataFrame(found) if found else frame.select([])


def _are_once(names: Sequence[str], *, data: bytes, frame: pl.DataFrame) -> bool:
    """Return whether no line has a name twice; False also where that cannot be told without reading it.

    A name that is in no line twice is in every line once if there are as many of it as lines, and no value is null.
    """
    if b"\\u" in data and _ESCAPED_NAME.search(data):
        return False
    lines: pl.Series | None = None
    for name in names:
        if name not in frame.columns:
            continue
        # As it is written in a line, with its quotes and escapes.
        key = json.dumps(name, ensure_ascii=False)
        is_known = frame[name].is_not_null()
        if is_known.all() and data.count(key.encode()) == frame.height:
            continue
        if lines is None:
            # Made once and only where a name needs it, since it copies the whole block.
            lines = pl.Series([data[:-1].decode()]).str.split("\n").explode()
        counts = lines.str.count_matches(key, literal=True)
        if bool((is_known & (counts == 0)).any()):
            # Here a name is written with escapes, so that its text is not found where it does stand.
            return False
        several = lines.filter(counts > 1)  # as a value, perhaps
        # Followed by a colon it is a name; without one it is a value that looks the same.
        if bool((several.str.count_matches(re.escape(key) + r"\s*:") > 1).any()):
            return False
    return True


def _fitted(series: pl.Series, first: pl.DataType | None) -> pl.Series | None:
    """Return a column as the type of the first block where that changes nothing; None where only Python may read it."""
    dtype = series.dtype
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    flat = series.explode() if isinstance(dtype, pl.List) and not inner.is_nested() else series
    if inner == pl.String and bool(flat.str.contains(_MAY_BE_NO_TEXT).any()):
        return None  # perhaps numbers among texts, which polars writes in another way
    if inner.is_float() and bool((flat.abs() >= _LARGEST_EXACT).any()):
        return None  # a whole number beside fractions may have lost digits
    if first is None:
        return series
    # The type decides between a list and a single value, and only Python names the lines that differ.
    if isinstance(first, pl.List) != isinstance(dtype, pl.List) and dtype != pl.Null:
        return None
    if dtype == pl.Null or inner == pl.Null:
        return series.cast(first)
    # Whole numbers beyond that bound would lose digits as floats.
    if first == pl.Float64 and dtype == pl.Int64 and not bool((series.abs() > _LARGEST_EXACT).any()):
        return series.cast(first)
    return series


def parse_line_by_line(
    data: bytes, *, columns: Sequence[str] | None, types: dict[str, pl.DataType], max_bytes: int = sys.maxsize
) -> _Lines:
    """Parse whole lines with Python's `json`: the meaning of a file, which the fast way must keep to."""
    objects: list[dict[str, JSON]] = []
    places: list[int] = []
    faults: list[_Fault] = []
    # Behind the last line feed nothing is left, and `split` gives that as an empty line.
    for place, line in enumerate(data.split(b"\n")[:-1]):
        if len(line) > max_bytes:
            faults.append(_too_long(line, place, max_bytes=max_bytes))
            continue
        parsed, fault = _parsed_line(line, place, columns=columns)
        if fault is not None:
            faults.append(fault)
        else:
            objects.append(parsed)
            places.append(place)
    names = list(dict.fromkeys(name for each in objects for name in each)) if columns is None else list(columns)
    good = np.ones(len(objects), dtype=bool)
    for name in names:
        first = types.get(name)
        values = [each.get(name) for each in objects]
        if first is None or first == pl.Null:
            wants_list = _are_lists(values)
            wants_flat = _are_flat(values)
            of_whom = "most lines"
        else:
            wants_list = isinstance(first, pl.List)
            wants_flat = isinstance(first, pl.List) and not first.inner.is_nested()
            of_whom = "most of the first lines"
        for index, value in enumerate(values):
            is_other = value is not None and isinstance(value, list) != wants_list
            is_nested = wants_list and wants_flat and _is_nested(value)
            if good[index] and (is_other or is_nested):
                good[index] = False
                expected = f"a list, as in {of_whom}" if wants_list else f"no list, as in {of_whom}"
                if is_nested:
                    expected = f"a list of single values, as in {of_whom}"
                faults.append(
                    _Fault(
                        place=places[index],
                        reason=BadReason.UNPARSABLE,
                        expected=expected,
                        found=json.dumps(value)[:1000],
                        column=name,
                    )
                )
    kept = [each for each, is_good in zip(objects, good, strict=True) if is_good]
    frame = pl.DataFrame([_column(name, [each.get(name) for each in kept], first=types.get(name)) for name in names])
    # Faults of types were found behind all others, and are told in the order of the file.
    faults.sort(key=lambda fault: fault.place)
    return _Lines(frame=frame, places=np.array(places, dtype=np.int64)[good], faults=faults)


def _too_long(line: bytes, place: int, *, max_bytes: int) -> _Fault:
    return _Fault(
        place=place,
        reason=BadReason.TOO_LONG,
        expected=f"a line of at most {max_bytes:,} bytes",
        found=line[:1000].decode(errors="backslashreplace"),
    )


def _parsed_line(line: bytes, place: int, *, columns: Sequence[str] | None) -> tuple[dict[str, JSON], _Fault | None]:
    doubled: list[str] = []

    def first_of_each(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        # The object of the line is read last, after those in it.
        doubled[:] = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        return _first_of_each(pairs)

    shown = line.decode(errors="backslashreplace")
    reason = BadReason.UNPARSABLE
    expected = _OBJECT
    try:
        text = line.decode()
        value = json.loads(text, object_pairs_hook=first_of_each)
        if isinstance(value, dict):
            json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be encoded
            # Only names that somebody reads: the others do not change what the row becomes.
            asked = [name for name in doubled if columns is None or name in columns]
            if asked:
                expected = f"each name once in a line: {asked[0]!r} stands in it twice"
                return {}, _Fault(place=place, reason=reason, expected=expected, found=shown, column=asked[0])
            if "\0" not in text and "\\u0000" not in text:
                return value, None
            reason = BadReason.NUL_BYTE
            expected = "text without NUL bytes"
    except UnicodeError:
        reason = BadReason.INVALID_UTF8
        expected = "valid UTF-8, and whole characters"
    except RecursionError:
        expected = f"{_OBJECT}, not nested as deeply"
    except ValueError as error:
        expected = f"{_OBJECT} ({error})" if line.strip() else f"{_OBJECT}, not a blank line"
    return {}, _Fault(place=place, reason=reason, expected=expected, found=shown)


def _first_of_each(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """Take the first value of a name that an object in a line has twice, as polars does."""
    found: dict[str, JSON] = {}
    for name, value in pairs:
        found.setdefault(name, value)
    return found


def _are_lists(values: Iterable[JSON]) -> bool:
    """Return whether most values of a column are lists; null says nothing.

    One row that differs would otherwise make all others bad ones.
    """
    return _are_most([isinstance(value, list) for value in values if value is not None])


def _are_flat(values: Iterable[JSON]) -> bool:
    """Return whether most lists of a column hold single values alone; empty ones say nothing."""
    return _are_most([not _is_nested(value) for value in values if isinstance(value, list) and value])


def _are_most(kinds: Sequence[bool]) -> bool:
    """Return whether most are true; of as many of both the first one decides."""
    num_true = sum(kinds)
    if 2 * num_true == len(kinds):
        return bool(kinds) and kinds[0]
    return 2 * num_true > len(kinds)


def _is_nested(value: JSON) -> bool:
    """Return whether a value is a list with lists or objects in it."""
    return isinstance(value, list) and any(isinstance(element, list | dict) for element in value)


def _column(name: str, values: list[JSON], *, first: pl.DataType | None) -> pl.Series:
    """Return values of JSON as a column: of their own type if they have one, else as texts of ids."""
    present = [value for value in values if value is not None]
    if not present:
        return pl.Series(name, values, dtype=first or pl.Null())
    if any(isinstance(value, list) for value in present):
        # All are: lines that differ in that were taken out as bad rows.
        lists = [value if isinstance(value, list) else None for value in values]
        elements = [element for value in lists if value is not None for element in value]
        if any(isinstance(element, list | dict) for element in elements):
            # Lists of lists, or of objects, are kept as their text: no feature is made of them.
            return pl.Series(name, [json.dumps(value) if value is not None else None for value in lists])
        inner = _type_of(elements)
        cells = [None if value is None else [_as(element, inner) for element in value] for value in lists]
        # Empty lists say nothing of their elements, so the type of the first block stays.
        kept = first if inner == pl.Null and isinstance(first, pl.List) else pl.List(inner)
        return pl.Series(name, cells, dtype=kept)
    if all(isinstance(value, dict) for value in present):
        return pl.Series(name, values, strict=False)  # no feature is made of objects
    dtype = _type_of(present)
    if first == pl.Float64 and dtype == pl.Int64 and _are_exact(present):
        dtype = pl.Float64()
    return pl.Series(name, [_as(value, dtype) for value in values], dtype=dtype)


def _are_exact(values: Iterable[JSON]) -> bool:
    """Return whether 64-bit floats hold all whole numbers among some values."""
    return all(abs(value) <= _LARGEST_EXACT for value in values if isinstance(value, int))


def _type_of(values: Sequence[JSON]) -> pl.DataType:
    """Return the type that holds all of some scalars without a loss."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pl.Null()
    # A bool is an int in Python, so truths are told apart first.
    if kinds == {bool}:
        return pl.Boolean()
    whole = (value for value in values if isinstance(value, int))
    if kinds == {int} and all(-_LARGEST_INT64 - 1 <= value <= _LARGEST_INT64 for value in whole):
        return pl.Int64()
    if kinds == {float}:
        return pl.Float64()
    if kinds == {int, float} and _are_exact(values):
        return pl.Float64()
    return pl.String()


def _as(value: JSON, dtype: pl.DataType) -> JSON:
    if value is None:
        return None
    if dtype == pl.String:
        return _text(value)
    return float(value) if dtype == pl.Float64 and isinstance(value, int | float) else value


def _text(value: object) -> str | None:
    """Return the text that a value of JSON is as an id; None for NaN."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # NaN is the only number that differs from itself.
        if value != value:
            return None
        # Whole floats are written as whole numbers, as ids are everywhere.
        return str(int(value)) if value.is_integer() and abs(value) <= _LARGEST_INT64 else repr(value)
    return str(value) if isinstance(value, int) else json.dumps(value)
