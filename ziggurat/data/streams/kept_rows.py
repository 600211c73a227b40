"""KeptRows: the journal of a stream, and the rows that it names, on the disk for as long as anything needs them.

    change ─► apply: in memory ─► save: with all others since, one line of the journal
    piece  ─► chunks: rows of `arrived/`, in bounded parts
    files whose last piece the journal has no longer ─► gone

Parquet's checksums cover the values of pages, and neither their headers nor the footer: one flipped bit in a footer had
records of labels read as fewer, without an error. So the journal has the SHA-256 of each file, which a process compares
before it first reads the file: 1 ms a MB. A file that lies in the place of another one is found, too.

What arrives is one matter (`arrivals.py`), what waits for its labels another (`awaiting_labels.py`); both keep rows
here. A file goes behind the change by which the journal needs it no longer: a kill in between leaves a file that nobody
needs, and no piece without its file.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from ziggurat.data.encoded.open_files import OpenFiles
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import DEFAULT_CHUNK_ROWS
from ziggurat.data.streams.journal import Change, Journal, JournalFile, Piece
from ziggurat.data.streams.row_spool import FILE_ROW
from ziggurat.errors import CheckpointError
from ziggurat.features.label_state import LabelState
from ziggurat.files import sha256_of
from ziggurat.files.stores import StoreFile, is_url
from ziggurat.files.system_text import text_of

_WAYS_OUT = ("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER")


class KeptRows:
    """The journal of a stream, and its rows on the disk. One process holds them.

    Args:
        folder: of journal and rows.
        data: how files are read.

    Raises:
        CheckpointError: the journal is damaged.
    """

    journal: Journal

    def __init__(self, folder: Path, *, data: DataConfig) -> None:
        self.folder = folder
        self.rows = folder / "arrived"
        self._data = data
        self._file = JournalFile(folder)
        self._open = OpenFiles()
        self._lock = threading.Lock()  # a thread that encodes ahead looks up records, which are folded meanwhile
        self._pending: list[Change] = []  # made, and not written yet
        self._needed = Counter[str]()
        self._whole: set[str] = set()  # files below `arrived/` that were compared with the journal
        self._is_tidy = False  # what a killed process left below `arrived/` was removed
        self.found = self._file.read()  # the journal that was there, if one was

    @property
    def path(self) -> Path:
        """Return the file of the journal."""
        return self._file.path

    def begin(self, journal: Journal) -> None:
        """Take a journal: that which was found, or a new one."""
        self.journal = journal
        # Pieces of each file of rows that are needed, so that forgetting a window looks at its own files alone.
        self._needed = Counter(piece.part for piece in self.pieces())
        self._needed.update(log.part for log in journal.logs)
        self._needed.update(window.truth for window in journal.done if window.truth)
        # A process that was killed behind the last change has let files go whose digests are left.
        journal.digests = {part: digest for part, digest in journal.digests.items() if part in self._needed}

    def clear(self) -> None:
        """Remove all that there is."""
        self._open = OpenFiles()
        shutil.rmtree(self.folder)
        self._file = JournalFile(self.folder)

    def pieces(self) -> Iterator[Piece]:
        """Give all pieces that the journal names; one that is needed twice, twice."""
        for window in (*self.journal.done, *self.journal.open):
            yield from window.pieces
            yield from window.lessons
        yield from self.journal.late
        for pieces in self.journal.lessons.values():
            yield from pieces
        for held in self.journal.held.values():
            yield from held.pieces

    # ---------------------------------------------------------------------------------------------------- changes

    def apply(self, change: Change) -> None:
        """Make a change; it is on the disk after the next `save`."""
        with self._lock:
            self.journal.apply(change)
        self._pending.append(change)

    def save(self, *, durable: bool = True) -> None:
        """Write all changes since the last call, together."""
        self._file.write(self.journal, self._pending, durable=durable)
        self._pending = []

    def need(self, parts: Iterable[str]) -> None:
        """Keep files below `arrived/`, which are written whole: each once for each time that it is named."""
        named = Counter(parts)
        new = [part for part in named if not self._needed[part]]
        self._needed.update(named)
        if new:
            self._whole.difference_update(new)
            self.apply(Change(digests={part: sha256_of(self.rows / part) for part in new}))

    def save_without(self, gone: Counter[str]) -> None:
        """Write all changes since the last call, and remove files below `arrived/` that nothing needs any more.

        Journal first: a crash before the files go leaves files that nobody needs, and no piece without its file.

        Args:
            gone: how many pieces of each file are in the journal no longer.
        """
        self._needed.subtract(gone)
        unneeded = [part for part in gone if not self._needed[part]]
        for part in unneeded:
            del self._needed[part]
        if any(part in self.journal.digests for part in unneeded):
            self.apply(Change(undigested=unneeded))
        self.save()
        candidates = list(gone) if self._is_tidy else [path.name for path in self.rows.glob("*.parquet")]
        self._is_tidy = True
        for part in candidates:
            if part not in self._needed:
                (self.rows / part).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------- rows

    def chunks(self, pieces: Iterable[Piece]) -> Iterator[tuple[LabelState | None, RawChunk]]:
        """Give the rows of pieces in their order, in bounded chunks, with what is known of their labels.

        Raises:
            CheckpointError: what was kept of them is damaged or gone.
        """
        waiting: list[tuple[Piece, pl.DataFrame]] = []
        for piece in pieces:
            frame = self.frame(piece)
            # Numbers of rows and types hold within one file, so pieces of two files are never joined.
            is_other = waiting and (waiting[0][0].file != piece.file or waiting[0][1].schema != frame.schema)
            is_other = is_other or (waiting and waiting[0][0].state is not piece.state)
            if is_other or sum(each.rows for each, _ in waiting) + piece.rows > DEFAULT_CHUNK_ROWS:
                yield from self._chunk(waiting)
                waiting = []
            waiting.append((piece, frame))
        yield from self._chunk(waiting)

    def _chunk(self, pieces: Sequence[tuple[Piece, pl.DataFrame]]) -> Iterator[tuple[LabelState | None, RawChunk]]:
        if pieces:
            yield pieces[0][0].state, self.chunk_of(pieces[0][0], pl.concat([each for _, each in pieces]))

    def chunk_of(self, piece: Piece, frame: pl.DataFrame) -> RawChunk:
        """Return rows of a piece, or of several of one file, as a chunk of the raw file that they are from.

        Args:
            piece: one of them.
            frame: from `frame`.
        """
        with self._lock:
            file = self.journal.file(piece.file)
        rows = frame[FILE_ROW].to_numpy()
        text = self._data.text
        return RawChunk(
            frame=frame.drop(FILE_ROW),
            path=StoreFile(file.path) if is_url(file.path) else Path(file.path),
            # Behind a filter rows of the file have gaps, so `rows` below says each number again.
            first_row=int(rows[0]),
            # Positions over all files of the stream, by which a row is known for good.
            start=file.first_row + int(rows[0]),
            rows=rows,
            numbers=text.numbers,
            list_separator=text.list_separator,
        )

    def frame(self, piece: Piece, *, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return the rows of a piece, with their numbers in the raw file.

        Args:
            piece: of the journal.
            columns: that are wanted beside these numbers; None: all.
        """
        wanted = None if columns is None else [FILE_ROW, *columns]
        frame = pl.from_arrow(self.table(piece.part, piece.group, columns=wanted))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def table(self, part: str, group: int, *, columns: list[str] | None = None) -> pa.Table:
        """Return a row group of a file below `arrived/`.

        Raises:
            CheckpointError: it is damaged or gone.
        """
        path = self.rows / part
        if part not in self._whole:
            refuse_other_part(path, digest=self.journal.digests.get(part, ""))
            self._whole.add(part)
        try:
            return self._open.read_row_group(path, group, columns=columns)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                expected="the rows of a window as they arrived",
                found=str(error).partition("\n")[0],
                where=f"{path}, row group {group}",
                ways_out=_WAYS_OUT,
            ) from error


def refuse_other_part(path: Path, *, digest: str) -> None:
    """Refuse a file below `arrived/` that is not as it was written.

    Args:
        path: of the file.
        digest: of the journal; "" where that is from before digests were kept.

    Raises:
        CheckpointError: its content is another one, or it is gone.
    """
    if not digest:
        return
    found = "another content: the file is damaged, or another one lies in its place"
    problem = None
    try:
        if sha256_of(path) == digest:
            return
    except OSError as error:
        found = text_of(error)
        problem = error
    raise CheckpointError(
        expected="rows, keys or labels as they were written when they arrived",
        found=found,
        where=str(path),
        ways_out=_WAYS_OUT,
    ) from problem
