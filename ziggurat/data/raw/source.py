"""RawSource: raw files as a stream of chunks, in file order, in bounded memory, with exact row numbers.

    source = RawSource(["day_*.gz"], format=FileFormat.CRITEO)
    for chunk in source.frames(columns=["label", "I1", "C1"]):
        chunk.frame          # polars, at most chunk_rows rows
        chunk.global_rows    # position of each row over all files in order; quarantined rows keep their numbers

Formats: Parquet, Arrow (Feather, and what `datasets` saves), JSON Lines, CSV, TSV, and Criteo's TSV without a header;
text files and JSON Lines may be gzip. Text files give *text* columns, whatever they look like: the schema says what
they mean, so that "007" stays an id. Columns named in `numbers` come as Float64 where a whole block allows it. Files
are taken in the order given; a glob or a folder is sorted with numbers inside names by value (day_2 before day_10).
They may lie in stores (`s3://bucket/*.parquet`): see `files/stores.py`. Partitions as Hive writes them
(day=1/part.parquet) have their keys as further columns of text, unless the files have a column of that name.

Rows: *file rows* are numbered from 0 behind the header, *global rows* from 0 over all files, *lines* of text files
from 1 as an editor shows them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath

import numpy as np
import polars as pl

from ziggurat.commands import pasted, python_line
from ziggurat.data.raw.arrow_source import ArrowFile
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.json_lines import JsonLinesFile
from ziggurat.data.raw.names import documents_in, expand_path, guess_separator, missing_column, partition_keys
from ziggurat.data.raw.parquet_source import ParquetFile
from ziggurat.data.raw.text_blocks import ByteStream, TextOptions
from ziggurat.data.raw.text_parts import TextPart, cut_text
from ziggurat.data.raw.text_source import TextFile, TextPiece, open_text, read_text
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.files.stores import DataPath, StoreFile
from ziggurat.files.table_endings import READ_AS

DEFAULT_CHUNK_ROWS = 131_072
_DELIMITERS = {"csv": ",", "tsv": "\t", "criteo": "\t"}
# Label, 13 counts, 26 hashes of 8 hex digits; any of them may be empty, and the label absent.
_CRITEO_LINE = re.compile(rb"([01]?\t)?(-?[0-9]*\t){13}([0-9a-f]{8}|)(\t([0-9a-f]{8}|)){25}\r?(\n|$)")
_PARQUET_MAGIC, _ARROW_MAGIC = b"PAR1", b"ARROW1"
_HINT_BYTES = 1 << 20


class FileFormat(StrEnum):
    """Formats of raw files."""

    AUTO = "auto"  # by suffix; a text file whose first line looks like Criteo's is taken as such
    PARQUET = "parquet"
    ARROW = "arrow"  # Arrow's own files and streams: .arrow, .feather
    CSV = "csv"
    TSV = "tsv"
    JSONL = "jsonl"  # one JSON object a line: .jsonl, .ndjson, and .json whose first line is one
    CRITEO = "criteo"  # label, I1 … I13, C1 … C26; tab separated, no header


class RawSource:
    """Raw files as a stream of chunks.

    Args:
        paths: files, globs, or folders (all files of a known suffix in them but README.txt and the like, which are in
            `left_out`), in the order of the rows; of this machine, or URLs of stores.
        format: what they are; AUTO decides for each file.
        bad_rows: where faulty rows go; by default the first one is an error.
        text: how to read CSV and TSV.
        copies: a folder where whole copies of files in stores are kept and read; "" reads the stores each time.
        part: of the only file, which is text, to read that alone; from `parts_of`.

    Raises:
        MissingFileError: a path that does not exist, or a glob that matches nothing.
        ConfigError: a suffix from which AUTO cannot tell the format.
    """

    def __init__(
        self,
        paths: Sequence[str | DataPath] | str | DataPath,
        *,
        format: FileFormat = FileFormat.AUTO,
        bad_rows: BadRows | None = None,
        text: TextOptions | None = None,
        copies: str = "",
        part: TextPart | None = None,
    ) -> None:
        named = [paths] if isinstance(paths, str | DataPath) else list(paths)
        files = [expand_path(path, suffixes=READ_AS, copies=copies) for path in named]
        self.paths: tuple[DataPath, ...] = tuple(file for found in files for file in found)
        self.left_out = tuple(file for path in named for file in documents_in(path, suffixes=READ_AS))
        self.format = format
        self.num_read = 0  # rows of the files that `frames` has been through, bad ones included
        self.bad_rows = bad_rows or BadRows()
        self.text = text or TextOptions()
        self._part = part
        # A part is cut by bytes, and says nothing of any other file.
        assert part is None or len(self.paths) == 1
        if not self.paths:
            raise MissingFileError(
                expected="at least one data file", found="none", where="paths", ways_out="name a file or a glob"
            )

    def columns(self) -> dict[str, pl.DataType]:
        """Names and types of the first file's columns; those of text files are all text (`String`).

        Raises:
            DataError: the file is damaged or empty.
        """
        return self.columns_of(self.paths[0])

    def columns_of(self, path: DataPath) -> dict[str, pl.DataType]:
        """The same of one of the files."""
        types = self._own_columns(path)
        return types | {name: pl.String() for name in partition_keys(path) if name not in types}

    def keys_of(self, path: DataPath) -> tuple[str, ...]:
        """Keys of the partition that a file lies in, which are columns that it has not itself."""
        keys = partition_keys(path)
        own = self._own_columns(path) if keys else {}
        return tuple(name for name in keys if name not in own)

    def _own_columns(self, path: DataPath) -> dict[str, pl.DataType]:
        if not self.is_text(path):
            with self.open_table(path) as file:
                return file.dtypes()
        return {name: pl.String() for name in self._open_text(path).columns}

    def is_text(self, path: DataPath) -> bool:
        """Return whether a file is text without types: neither Parquet nor Arrow nor JSON Lines."""
        return self._format_of(path) not in _WITH_TYPES

    def knows_rows(self, path: DataPath) -> bool:
        """Return whether a file says how many rows it has, before they are read."""
        return self._format_of(path) in (FileFormat.PARQUET, FileFormat.ARROW)

    def all_parquet(self) -> bool:
        """Return whether all files are Parquet."""
        return all(self._format_of(path) is FileFormat.PARQUET for path in self.paths)

    def parts_of(self, path: DataPath, *, num_parts: int) -> tuple[TextPart, ...]:
        """About equal parts of a plain text file of this machine; none if it cannot be cut (see `text_parts.py`)."""
        if isinstance(path, StoreFile) or not self.is_text(path):
            return ()
        with ByteStream(path) as stream:
            # A compressed file has no place to begin in the middle.
            if stream.is_gzip:
                return ()
        file = self._open_text(path)
        return cut_text(path, header_bytes=len(file.header), quote=file.layout.quote, num_parts=num_parts)

    @contextmanager
    def open_table(self, path: DataPath) -> Iterator[ParquetFile | ArrowFile | JsonLinesFile]:
        """One of the files that is not text."""
        kind = self._format_of(path)
        if kind is FileFormat.JSONL:
            file = JsonLinesFile(path, options=self.text)
        else:
            file = ParquetFile(path) if kind is FileFormat.PARQUET else ArrowFile(path)
        try:
            yield file
        finally:
            file.close()

    def separator_of(self, path: DataPath) -> str:
        """Return the separator of the fields of a text file, as the file is read."""
        return self.text.delimiter or _DELIMITERS[self._format_of(path).value]

    def better_separator(self) -> str:
        """Return the separator of the first file's header, if that is not what the file's name says; else ""."""
        path = self.paths[0]
        if self._format_of(path) in (*_WITH_TYPES, FileFormat.CRITEO):
            return ""
        with ByteStream(path) as stream:
            # A cut character at the end does no harm to a guess.
            line = stream.read(self.text.max_record_bytes).split(b"\n", 1)[0].decode(errors="replace")
        guess = guess_separator(line)
        return "" if guess == self.separator_of(path) else guess

    def num_rows_hint(self) -> int | None:
        """Number of rows: exact for Parquet and Arrow, estimated for other plain files; None if only reading tells."""
        total = 0
        for path in self.paths:
            if self.knows_rows(path):
                with self.open_table(path) as file:
                    if isinstance(file, ArrowFile) and isinstance(path, StoreFile):
                        # To count the rows of one in a store, all of it might have to be read.
                        return None
                    total += file.num_rows
                continue
            with ByteStream(path) as stream:
                if stream.is_gzip:
                    return None
                sample = stream.read(_HINT_BYTES)
            lines = sample.count(b"\n")
            size = path.stat().st_size
            # The whole file was read, so an end without a line feed is known to be a line.
            if size <= len(sample):
                lines += bool(sample) and not sample.endswith(b"\n")
            has_header = self._format_of(path) not in (FileFormat.CRITEO, FileFormat.JSONL)
            # By bytes a line on average; the header is a line, and no row.
            total += max(round(size / max(len(sample), 1) * max(lines, 1)) - has_header, 0)
        return total

    def frames(
        self,
        *,
        columns: Sequence[str] | None = None,
        numbers: Sequence[str] = (),
        ids: Sequence[str] = (),
        chunk_rows: int = DEFAULT_CHUNK_ROWS,
    ) -> Iterator[RawChunk]:
        """The rows of all files in order.

        Args:
            columns: those wanted, in this order; None takes all columns of each file.
            numbers: those that will only be read as numbers; text files then give Float64 where they can.
            ids: those that will only be hashed or looked up; text files then give spans where they can.
            chunk_rows: most rows of a chunk. What a row becomes does not depend on it.

        Yields:
            Chunks with at least one row.

        Raises:
            SchemaError: a file lacks a column that was asked for; names the nearest one.
            DataError: a damaged file, or a bad row (policy ERROR).
        """
        assert chunk_rows > 0
        # Over all files, so that each row has one number for good.
        start = self.num_read = 0
        for path in self.paths:
            if not self.is_text(path):
                start = yield from self._table_chunks(path, columns, chunk_rows, start)
            else:
                hints = (frozenset(numbers), frozenset(ids))
                start = yield from self._text_chunks(path, columns, hints, chunk_rows, start)
            # After each file: whoever stops in the middle has not read the rest of it.
            self.num_read = start

    def _table_chunks(
        self, path: DataPath, columns: Sequence[str] | None, chunk_rows: int, start: int
    ) -> Iterator[RawChunk]:
        with self.open_table(path) as file:
            keys = _Keys.of(path, file.columns, columns)
            wanted = _check_columns(path, keys.known, columns)
            wanted = keys.without(wanted)
            gather = _Gather(path=path, start=start, chunk_rows=chunk_rows, text=self.text, keys=keys)
            for frame, rows in file.frames(columns=wanted, chunk_rows=chunk_rows, bad_rows=self.bad_rows):
                lines = rows + 1 if isinstance(file, JsonLinesFile) else None
                yield from gather.add(frame, rows, lines)
            yield from gather.rest()
            # Known when the file was read to its end: bad lines count, too.
            return start + file.num_rows

    def _text_chunks(
        self,
        path: DataPath,
        columns: Sequence[str] | None,
        hints: tuple[frozenset[str], frozenset[str]],
        chunk_rows: int,
        start: int,
    ) -> Iterator[RawChunk]:
        file = self._open_text(path)
        keys = _Keys.of(path, file.columns, columns)
        wanted = _check_columns(path, keys.known, columns, separator=file.layout.delimiter.decode())
        wanted = keys.without(wanted)
        # Rows of a part are numbered within the whole file, and `start` is that of its first row.
        start -= 0 if self._part is None else self._part.first_row  # of the file
        gather = _Gather(path=path, start=start, chunk_rows=chunk_rows, text=self.text, keys=keys)
        num_rows = 0
        numbers, ids = hints
        if not self.text.numbers.is_plain:
            numbers = frozenset()  # polars would read "1.234" as well, as one or the other
        for piece in read_text(file, columns=wanted, numbers=numbers, ids=ids, bad_rows=self.bad_rows, part=self._part):
            num_rows = piece.next_row
            # Spans point into their own block and are not joined with others; what was gathered before comes first.
            if piece.spans:
                yield from gather.rest()
                yield from gather.cut(piece)
            else:
                yield from gather.add(piece.frame, piece.rows, piece.lines)
        yield from gather.rest()
        return start + num_rows

    def _open_text(self, path: DataPath) -> TextFile:
        kind = self._format_of(path)
        criteo = kind is FileFormat.CRITEO
        return open_text(path, options=self.text, delimiter=_DELIMITERS[kind.value], criteo=criteo)

    def _format_of(self, path: DataPath) -> FileFormat:
        if self.format is not FileFormat.AUTO:
            return self.format
        suffixes = [suffix.lower() for suffix in path.suffixes]
        # In "day.csv.gz" the format is in the name before the last.
        last = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes[-1] if suffixes else "")
        known = FileFormat(READ_AS[last]) if last in READ_AS else None
        # The name is taken at its word where no other format hides behind it; tab separated text may be Criteo's.
        if known is not None and known in (*_WITH_TYPES, FileFormat.CSV):
            return known
        with ByteStream(path) as stream:
            start = stream.read(4096)
        # By the content: Criteo's files are called .txt, .tsv or nothing at all.
        if _CRITEO_LINE.match(start):
            return FileFormat.CRITEO
        if known is None and start[:4] == _PARQUET_MAGIC:
            return FileFormat.PARQUET
        if known is None and start[:6] == _ARROW_MAGIC:
            return FileFormat.ARROW
        if last == ".json" and _is_object(start):
            return FileFormat.JSONL
        if known is None and (way := _conversion(last, path)):
            raise ConfigError(
                expected="a file of Parquet, Arrow, JSON Lines, CSV or TSV",
                found=path.name,
                where=str(path),
                ways_out=f"convert it: {way}",
            )
        if known is None:
            raise ConfigError(
                expected="a file name that ends in .parquet, .arrow, .jsonl, .csv, .tsv or .txt, and perhaps .gz",
                found=path.name,
                where=str(path),
                ways_out=(
                    "rename the file, or make a link to it with such a name",
                    "to train on it: --data.format csv (or tsv, jsonl, parquet, arrow, criteo)",
                ),
            )
        return known


def _is_object(start: bytes) -> bool:
    """Return whether the first line of a file is a JSON object of its own."""
    # The mark of UTF-8 may stand before the first brace.
    line, ended, _ = start.lstrip(b"\xef\xbb\xbf").partition(b"\n")
    line = line.strip()
    # Without a line feed in what was read the object goes on, as one in a single line may.
    return line.startswith(b"{") and (line.endswith(b"}") or not ended) and len(line) > 1


def _conversion(suffix: str, path: DataPath) -> str:
    """Return the line that makes a file of another format one that is read; "" for a format that has none."""
    name = str(path)
    python = pasted(sys.executable or "python")
    target = str(PurePath(name).with_suffix(".parquet"))
    if suffix == ".zip":
        return f"{python} -m zipfile -e {pasted(name)} {pasted(PurePath(name).with_suffix(''))}"
    if suffix == ".json":
        code = f"import polars; polars.read_json({name!r}).write_parquet({target!r})"
        return python_line(code)
    if suffix in (".xlsx", ".xls"):
        code = f"import polars; polars.read_excel({name!r}).write_parquet({target!r})"
        is_installed = importlib.util.find_spec("fastexcel") is not None
        install = "" if is_installed else f"{python} -m pip install fastexcel && "
        return f"{install}{python_line(code)}"
    return ""


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The keys of a partition that are read as columns of a file in it.

    Args:
        own: columns that the file itself has.
        values: by the name of a key that is none of them.
        wanted: columns asked for, in their order; None for all.
    """

    own: tuple[str, ...]
    values: Mapping[str, str | None]
    wanted: tuple[str, ...] | None

    @staticmethod
    def of(path: DataPath, own: tuple[str, ...], wanted: Sequence[str] | None) -> _Keys:
        """Return the keys of a file's folders, by the columns that it has."""
        values = {name: value for name, value in partition_keys(path).items() if name not in own}
        return _Keys(own=own, values=values, wanted=None if wanted is None else tuple(dict.fromkeys(wanted)))

    @property
    def known(self) -> tuple[str, ...]:
        """All columns of the file and its keys."""
        return (*self.own, *self.values)

    def without(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return those columns that are read from the file: at least one, which says how many rows there are."""
        if not self.values:
            return columns
        # A frame without a column has no number of rows.
        return tuple(name for name in columns if name in self.own) or self.own[:1]

    def added_to(self, frame: pl.DataFrame, *, num_rows: int) -> pl.DataFrame:
        """Return a frame of the file with the keys that are wanted, in the order that is wanted.

        Args:
            frame: columns of the file; none where all are spans.
            num_rows: of the frame and its spans.
        """
        names = self.known if self.wanted is None else self.wanted
        keys = [name for name in names if name in self.values]
        if not keys:
            return frame
        columns = {series.name: series for series in frame.get_columns()}
        for name in keys:
            value = pl.Series(name, [self.values[name]], dtype=pl.String)
            # One value, repeated without a copy.
            columns[name] = value.new_from_index(0, num_rows)
        return pl.DataFrame([columns[name] for name in names if name in columns])


_WITH_TYPES = (FileFormat.PARQUET, FileFormat.ARROW, FileFormat.JSONL)


@dataclass(kw_only=True)
class _Gather:
    """Cuts pieces of any size into chunks of exactly `chunk_rows` rows; pieces of unlike types stay apart."""

    path: DataPath
    start: int
    chunk_rows: int
    text: TextOptions
    keys: _Keys
    frames: list[pl.DataFrame] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    lines: list[np.ndarray] = field(default_factory=list)
    num_rows: int = 0

    def add(self, frame: pl.DataFrame, rows: np.ndarray, lines: np.ndarray | None) -> Iterator[RawChunk]:
        """Take a piece; gives the chunks that are full."""
        if frame.height == 0:
            return
        # Texts of one block may be numbers in the next: pieces are joined only if their types are alike.
        if self.frames and self.frames[0].schema != frame.schema:
            yield from self.rest()
        position = 0
        while position < frame.height:
            take = min(self.chunk_rows - self.num_rows, frame.height - position)
            self.frames.append(frame.slice(position, take))
            self.rows.append(rows[position : position + take])
            if lines is not None:
                self.lines.append(lines[position : position + take])
            self.num_rows += take
            position += take
            if self.num_rows == self.chunk_rows:
                yield from self.rest()

    def cut(self, piece: TextPiece) -> Iterator[RawChunk]:
        """The chunks of a piece with spans, which stay with the bytes of their block."""
        for position in range(0, len(piece.rows), self.chunk_rows):
            part = slice(position, position + self.chunk_rows)
            # Rows that were put aside leave gaps, so the first row is asked for and not counted.
            first_row = int(piece.rows[position])
            yield RawChunk(
                frame=self.keys.added_to(piece.frame[part], num_rows=len(piece.rows[part])),
                path=self.path,
                first_row=first_row,
                start=self.start + first_row,
                lines=piece.lines[part],
                spans={name: column.take(part) for name, column in piece.spans.items()},
                numbers=self.text.numbers,
                list_separator=self.text.list_separator,
            )

    def rest(self) -> Iterator[RawChunk]:
        """Everything taken and not given yet, as one chunk."""
        if not self.frames:
            return
        rows = np.concatenate(self.rows)
        first_row = int(rows[0])
        # Rows without gaps are told by their first one, and take no memory.
        consecutive = int(rows[-1]) - first_row + 1 == len(rows)
        frame = pl.concat(self.frames) if len(self.frames) > 1 else self.frames[0]
        chunk = RawChunk(
            frame=self.keys.added_to(frame, num_rows=len(rows)),
            path=self.path,
            first_row=first_row,
            start=self.start + first_row,
            rows=None if consecutive else rows,
            lines=np.concatenate(self.lines) if self.lines else None,
            numbers=self.text.numbers,
            list_separator=self.text.list_separator,
        )
        self.frames = []
        self.rows = []
        self.lines = []
        self.num_rows = 0
        yield chunk


def _check_columns(
    path: DataPath, known: tuple[str, ...], wanted: Sequence[str] | None, *, separator: str = ""
) -> tuple[str, ...]:
    if wanted is None:
        return known
    there = set(known)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise missing_column(path, missing[0], known, separator=separator, others=missing[1:])
    # A column that is asked for twice is read once.
    return tuple(dict.fromkeys(wanted))
