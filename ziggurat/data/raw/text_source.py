"""CSV, TSV and Criteo files as frames of text (or numbers and spans, where asked), block by block.

Every value of a text file is *text*; the schema says what it means. Columns that are only read as numbers can be
parsed as such on the way (`numbers`), and columns of ids that are only hashed can stay where they are (`ids`, see
`spans.py`): that saves making the text. A block in which a number is not plain and finite, or an id not canonical, is
parsed as text instead, so that values never depend on it and errors can quote the file exactly.

polars parses; `text_structure.py` has proved before that every record has the right number of fields. Should polars
refuse a record all the same, the block is halved until the one record to blame is found. The next block is read (and
decompressed) in a thread while this one is used.

Criteo (Kaggle and 1 TB alike): tab separated, no header, no quotes; label, I1 … I13 (counts), C1 … C26 (eight hex
digits). Kaggle's test file has no label: 39 fields.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from ziggurat.commands import pasted
from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRows
from ziggurat.data.raw.names import doubled
from ziggurat.data.raw.spans import TextSpans
from ziggurat.data.raw.text_blocks import ByteStream, TextOptions, cut_behind_last_line, refuse_utf_16
from ziggurat.data.raw.text_parts import TextPart
from ziggurat.data.raw.text_structure import Fault, Records, TextLayout, find_records
from ziggurat.errors import DataError
from ziggurat.files.stores import DataPath
from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.kernel import Fields, TextKernel, TextKind

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
_UTF8_MARK = b"\xef\xbb\xbf"
_SHOWN_BYTES = 100_000  # of a bad record kept for the quarantine


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A text file and how to read it, before its first row."""

    path: DataPath
    columns: tuple[str, ...]
    layout: TextLayout
    options: TextOptions
    header: bytes
    header_lines: int


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """The good rows of one block: frame, columns left as spans, 0-based row in the file and 1-based line of each."""

    frame: pl.DataFrame
    spans: dict[str, TextSpans]
    rows: np.ndarray
    lines: np.ndarray
    next_row: int  # rows of the file up to here, bad ones included


def open_text(path: DataPath, *, options: TextOptions, delimiter: str, criteo: bool) -> TextFile:
    """Read the header of a text file.

    Args:
        path: the file.
        options: delimiter (if set), quote and limits.
        delimiter: the format's own delimiter.
        criteo: no header and no quotes; columns are `CRITEO_COLUMNS`, or those without the label.

    Raises:
        DataError: empty, not UTF-8, no header within max_record_bytes, or two columns of one name.
    """
    with ByteStream(path) as stream:
        start = stream.read(options.max_record_bytes)
    refuse_utf_16(path, start)
    # Programs of today read such a file as one line, and its header would be all of it.
    if b"\r" in start and b"\n" not in start:
        raise _bad_file(
            path,
            "lines that end in a line feed",
            "carriage returns alone, as old Macintosh programs write them",
            f"convert them: tr '\\r' '\\n' < {pasted(path)} > data.csv",
        )
    delimiter_byte = (options.delimiter or delimiter).encode()
    if criteo:
        num_fields = start.split(b"\n", 1)[0].count(delimiter_byte) + 1
        # Kaggle's test file lacks the label.
        columns = CRITEO_COLUMNS[1:] if num_fields == len(CRITEO_COLUMNS) - 1 else CRITEO_COLUMNS
        layout = TextLayout(
            num_fields=len(columns),
            delimiter=delimiter_byte,
            quote=b"",
            max_record_bytes=options.max_record_bytes,
        )
        return TextFile(path=path, columns=columns, layout=layout, options=options, header=b"", header_lines=0)
    # The mark belongs to the header's bytes, so that rows begin behind both.
    mark = len(_UTF8_MARK) if start.startswith(_UTF8_MARK) else 0
    columns, header_bytes = _header(path, start[mark:], delimiter_byte, options)
    layout = TextLayout(
        num_fields=len(columns),
        delimiter=delimiter_byte,
        quote=options.quote.encode(),
        max_record_bytes=options.max_record_bytes,
    )
    return TextFile(
        path=path,
        columns=columns,
        layout=layout,
        options=options,
        header=start[: mark + header_bytes],
        header_lines=start[: mark + header_bytes].count(b"\n"),
    )


def read_text(
    file: TextFile,
    *,
    columns: Sequence[str],
    numbers: frozenset[str],
    ids: frozenset[str],
    bad_rows: BadRows,
    part: TextPart | None = None,
) -> Iterator[TextPiece]:
    """The rows of a file, block by block.

    Args:
        file: from `open_text`.
        columns: those wanted, in this order.
        numbers: those parsed as Float64 wherever a whole block of them is made of plain finite numbers.
        ids: those left as spans wherever a whole block of them is made of canonical ids (see cells.py).
        bad_rows: where faulty records go.
        part: of the file, to read that alone.

    Raises:
        DataError: a bad row (policy ERROR), or a damaged file.
    """
    first_row = 0 if part is None else part.first_row
    parser = _Parser(file=file, columns=tuple(columns), numbers=numbers, ids=ids, bad_rows=bad_rows, next_row=first_row)
    with ByteStream(file.path) as stream, ThreadPoolExecutor(1, thread_name_prefix="read") as pool:
        # Read to be passed over, and compared: the file may have changed since it was opened.
        if stream.read(len(file.header)) != file.header:
            raise _bad_file(
                file.path, "the header that was read before", "another one", "read it when nobody writes it"
            )
        if part is not None:
            stream.narrow(part.first_byte, part.last_byte)
        block_bytes = file.options.block_bytes
        upcoming = pool.submit(stream.read, block_bytes)
        buffer = b""
        is_last = False
        while not is_last:
            block = upcoming.result()
            # `read` gives fewer bytes at the end of the file only.
            is_last = len(block) < block_bytes
            if not is_last:
                upcoming = pool.submit(stream.read, block_bytes)
            buffer = parser.skip_rest_of_long_record(buffer + block, is_last=is_last)
            cut = cut_behind_last_line(buffer, is_last=is_last)
            if cut:
                data = buffer[:cut]
                # Everything behind counts line feeds, so the last line gets one.
                piece, consumed = parser.parse(data if data.endswith(b"\n") else data + b"\n", is_last=is_last)
                buffer = buffer[consumed:]
                yield piece
        yield parser.empty_piece()  # tells the number of rows when the last record was too long to keep


@dataclass(kw_only=True)
class _Parser:
    """Turns blocks into pieces and keeps count of rows and lines."""

    file: TextFile
    columns: tuple[str, ...]
    numbers: frozenset[str]
    ids: frozenset[str]
    bad_rows: BadRows
    kernel: TextKernel = field(default_factory=text_kernel)
    next_row: int = 0
    next_line: int = field(default=0)  # 0-based
    skipping: bool = False
    kinds: np.ndarray = field(init=False, repr=False)
    places: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.next_line = self.file.header_lines + self.next_row  # parts of files without quotes start behind row 0
        self.kinds = np.full(len(self.file.columns), TextKind.OTHER, dtype=np.uint8)
        self.places = {name: index for index, name in enumerate(self.file.columns)}
        read = set(self.columns) & (self.ids | self.numbers)
        for index, name in enumerate(self.file.columns):
            if name in read:
                self.kinds[index] = TextKind.ID if name in self.ids else TextKind.NUMBER

    def parse(self, data: bytes, *, is_last: bool) -> tuple[TextPiece, int]:
        """The piece of a block of whole lines, and the number of bytes used."""
        records = find_records(data, self.file.layout, is_last=is_last, kernel=self.kernel, kinds=self.kinds)
        spans: dict[str, TextSpans] = {}
        # Null values would have to be compared cell by cell, which is done by polars alone.
        if records.fields is not None and not self.file.options.null_values:
            frame, spans = self._simple_frame(data, records.fields)
            keep = np.arange(len(records.ends))
        else:
            frame, keep = self._frame(data, records)
        rows = self.next_row + keep
        lines = self.next_line + 1 + records.lines[keep]
        self.next_row += len(records.ends)
        self.next_line += records.num_lines
        return TextPiece(frame=frame, spans=spans, rows=rows, lines=lines, next_row=self.next_row), records.consumed

    def empty_piece(self) -> TextPiece:
        """No rows."""
        nothing = np.empty(0, dtype=np.int64)
        return TextPiece(frame=self._empty(), spans={}, rows=nothing, lines=nothing, next_row=self.next_row)

    def skip_rest_of_long_record(self, buffer: bytes, *, is_last: bool) -> bytes:
        """Drop the start of a record that is already too long and has no end in sight; report it once."""
        if self.skipping:
            end = buffer.find(b"\n")
            if end < 0:
                return b""
            self.skipping = False
            self.next_line += 1
            return buffer[end + 1 :]
        if not is_last and len(buffer) > self.file.layout.max_record_bytes and b"\n" not in buffer:
            expected = f"a record of at most {self.file.layout.max_record_bytes:,} bytes"
            self._report(Fault(record=0, reason=BadReason.TOO_LONG, expected=expected, found=buffer), line=0)
            self.skipping = True
            self.next_row += 1
            return b""
        return buffer

    def _simple_frame(self, data: bytes, fields: Fields) -> tuple[pl.DataFrame, dict[str, TextSpans]]:
        """A clean block: integers parsed and ids left as spans here, everything else parsed by polars."""
        spans: dict[str, TextSpans] = {}
        series: dict[str, pl.Series] = {}
        rest: list[str] = []
        for name in self.columns:
            index = self.places[name]
            kind = self.kinds[index] if fields.simple[index] else TextKind.OTHER
            if kind == TextKind.ID:
                spans[name] = self._spans(data, fields, name)
            elif kind == TextKind.NUMBER:
                # The kernel has put the bits of floats where it puts the keys of ids.
                numbers = fields.values[index].view(np.float64)
                series[name] = pl.Series(name, numbers, nan_to_null=True)
            else:
                rest.append(name)
        if rest:
            frame = self._read(data, num_rows=fields.starts.shape[1], has_quotes=False, columns=rest)
            if frame is None:
                # Polars refuses the block, or finds another number of records: the kernel's own cells are taken.
                frame = pl.DataFrame([self._spans(data, fields, name).series(name) for name in rest])
            series |= {each.name: each for each in frame.get_columns()}
        return pl.DataFrame([series[name] for name in self.columns if name in series]), spans

    def _spans(self, data: bytes, fields: Fields, name: str) -> TextSpans:
        index = self.places[name]
        return TextSpans(data, self.kernel, fields.starts[index], fields.lengths[index], fields.values[index])

    def _frame(self, data: bytes, records: Records) -> tuple[pl.DataFrame, np.ndarray]:
        """The good records as a frame, and their numbers in the block."""
        good = np.ones(len(records.ends), dtype=bool)
        for fault in records.faults:
            good[fault.record] = False
            self._report(fault, line=int(records.lines[fault.record]))
        keep = np.flatnonzero(good)
        # Bad records are cut out before polars sees the block, or it would refuse all of it.
        text = _joined(data[: records.consumed], records, good)
        frame = self._read(text, num_rows=len(keep), has_quotes=records.has_quotes)
        if frame is not None:
            return frame, keep
        frames: list[pl.DataFrame] = []
        used: list[np.ndarray] = []
        self._read_halves(data, records, keep, frames=frames, used=used)
        return pl.concat(frames), np.concatenate(used)

    def _read_halves(
        self, data: bytes, records: Records, keep: np.ndarray, *, frames: list[pl.DataFrame], used: list[np.ndarray]
    ) -> None:
        """Parse what polars refused as a whole in halves, down to the single records that it refuses."""
        good = np.zeros(len(records.ends), dtype=bool)
        good[keep] = True
        text = _joined(data[: records.consumed], records, good)
        frame = self._read(text, num_rows=len(keep), has_quotes=records.has_quotes)
        if frame is not None:
            frames.append(frame)
            used.append(keep)
        elif len(keep) > 1:
            middle = len(keep) // 2
            self._read_halves(data, records, keep[:middle], frames=frames, used=used)
            self._read_halves(data, records, keep[middle:], frames=frames, used=used)
        else:
            expected = "a record that polars can parse"
            fault = Fault(record=int(keep[0]), reason=BadReason.UNPARSABLE, expected=expected, found=text)
            self._report(fault, line=int(records.lines[keep[0]]))
            frames.append(self._empty())
            used.append(keep[:0])

    def _read(
        self, text: bytes, *, num_rows: int, has_quotes: bool, columns: Sequence[str] = ()
    ) -> pl.DataFrame | None:
        """Parse records; None if polars refuses them or finds another number."""
        if num_rows == 0:
            return self._empty()
        columns = columns or self.columns
        asked = self.numbers & frozenset(columns)
        # Numbers are parsed first; if a cell of the block is no plain number, all of it is read as text.
        for numbers in (asked, frozenset()) if asked else (frozenset(),):
            try:
                frame = self._polars(text, columns=columns, numbers=numbers, has_quotes=has_quotes)
            except PolarsError:
                continue
            # A number beyond FP64 becomes infinity here; read as text, it is reported as it stands.
            if frame.height == num_rows and not _has_infinity(frame):
                return frame
        return None

    def _polars(
        self, text: bytes, *, columns: Sequence[str], numbers: frozenset[str], has_quotes: bool
    ) -> pl.DataFrame:
        layout = self.file.layout
        names = self.file.columns
        if self.file.header and text.startswith(_UTF8_MARK):
            text = _UTF8_MARK + text  # polars drops one, and this one belongs to the first field
        wanted = [self.places[name] for name in columns]
        frame = pl.read_csv(
            text,
            has_header=False,
            separator=layout.delimiter.decode(),
            # Without quotes in the block polars need not look for them.
            quote_char=layout.quote.decode() if has_quotes else None,
            schema={f"f{i}": pl.Float64 if name in numbers else pl.String for i, name in enumerate(names)},
            # Polars gives columns in the order of the file, whatever order is asked for.
            columns=sorted(wanted),
            null_values=list(self.file.options.null_values) or None,
        )
        return frame.select(pl.col(f"f{i}").alias(names[i]) for i in wanted)

    def _empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema={name: pl.String for name in self.columns})

    def _report(self, fault: Fault, *, line: int) -> None:
        self.bad_rows.report(
            BadRow(
                path=self.file.path,
                row=self.next_row + fault.record,
                line=self.next_line + 1 + line,
                column="",
                reason=fault.reason,
                expected=fault.expected,
                found=fault.found[:_SHOWN_BYTES].decode(errors="backslashreplace"),
            )
        )


def _has_infinity(frame: pl.DataFrame) -> bool:
    numbers = [name for name, dtype in frame.schema.items() if dtype == pl.Float64]
    return bool(numbers) and any(frame.select(pl.col(numbers).is_infinite().any()).row(0))


def _joined(data: bytes, records: Records, good: np.ndarray) -> bytes:
    """The bytes of the good records, with rewritten ones in their place."""
    special = ~good
    special[list(records.rewritten)] = True
    if not special.any():
        return data
    parts: list[bytes] = []
    position = 0
    for record in np.flatnonzero(special).tolist():
        parts.append(data[position : records.starts[record]])
        if good[record]:
            parts.append(records.rewritten[record])
        position = int(records.ends[record])
    parts.append(data[position:])
    return b"".join(parts)


def _header(path: DataPath, start: bytes, delimiter: bytes, options: TextOptions) -> tuple[tuple[str, ...], int]:
    """Column names and the number of bytes of the header record."""
    # A file may have a header without a line feed.
    line = start[: start.find(b"\n") + 1] or start
    if not start.strip(b"\r\n"):
        raise _bad_file(path, "a header with column names", "an empty file", "write the names in the first line")
    if not start.count(b"\n") and len(start) >= options.max_record_bytes:
        found = f"no line end in the first {len(start):,} bytes"
        raise _bad_file(path, "a header with column names", found, "check that this is a text file")
    if not line.strip(b"\r\n"):
        raise _bad_file(path, "a header with column names", "a blank first line", "write the names in the first line")
    if b"\0" in line:
        raise _bad_file(path, "a text file", "NUL bytes in the first line", "check that this is a text file")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _bad_file(path, "a UTF-8 text file", f"{error}", "convert it to UTF-8") from error
    quote = options.quote or None
    quoting = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(text.rstrip("\r\n"), newline=""), delimiter=delimiter.decode(), quotechar=quote, quoting=quoting
    )
    try:
        names = tuple(next(reader))
    except csv.Error as error:
        raise _bad_file(path, "a header with column names", f"{error}", "correct the first line") from error
    doubles = doubled(names)
    if doubles:
        raise _bad_file(path, "column names without doubles", f"{doubles} more than once", "rename the columns")
    return names, len(line)


def _bad_file(path: DataPath, expected: str, found: str, way_out: str) -> DataError:
    return DataError(expected=expected, found=found, where=str(path), ways_out=way_out)
