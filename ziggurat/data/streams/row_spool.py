"""Spool the rows of a raw file by window, on the disk until they are trained.

    chunk 0 ─┬─ window 3 ─► row group 0 ┐
             └─ window 5 ─► row group 1 │ arrived/00007.parquet
    chunk 1 ─── window 3 ─► row group 2 ┘
    chunk 2, of other types ──────────► arrived/00007-1.parquet

A `Piece` of the journal names the file and the row group. Rows carry their number in the raw file, since errors name
them by it. Where the types of a chunk differ from those before, as they may in text, another file begins.

Cost: one sort of a chunk's windows, and a copy of its columns unless its rows are in order of time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Int64

from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.journal import Piece
from ziggurat.errors import FileError
from ziggurat.features.label_state import LabelState
from ziggurat.files import writing_to
from ziggurat.files.parquet import ParquetFile

FILE_ROW = "file row:"  # no name of a feature has a colon


class RowSpool:
    """Write the rows of one raw file by window; `pieces` says where they lie.

    Args:
        folder: where they are written.
        number: of the raw file.
        stem: of their names; "": the number.
    """

    def __init__(self, folder: Path, *, number: int, stem: str = "") -> None:
        self._folder = folder
        self._number = number
        self._stem = stem or f"{number:05}"
        self._writer: ParquetFile | None = None
        self._schema: pa.Schema | None = None
        self._part = ""
        self._num_parts = 0
        self._num_groups = 0
        self.pieces: list[tuple[int, Piece]] = []

    def __enter__(self) -> RowSpool:
        return self

    def turn_to(self, number: int) -> None:
        """Take rows of another raw file from now on: they lie in the same file as those before."""
        self._number = number

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, chunk: RawChunk, windows: Int64[np.ndarray, " N"], *, state: LabelState | None = None) -> None:
        """Write the rows of a chunk by their windows; with a state those in which they are trained."""
        # The number in the file travels along, since the sort and the cut lose it.
        frame = chunk.frame.with_columns(pl.Series(FILE_ROW, chunk.file_rows, dtype=pl.Int64))
        # Files in order of time, the usual ones, spare the copy of all columns.
        if (windows[1:] < windows[:-1]).any():
            # Stable: within a window rows keep the order of the file.
            order = np.argsort(windows, kind="stable")
            frame = frame[order]
            windows = windows[order]
        table = frame.to_arrow()
        # Types can differ between chunks of a file of text, and a Parquet file has one schema.
        is_same = table.schema == self._schema
        writer = self._writer if self._writer is not None and is_same else self._begin(table.schema)
        # The keys are sorted, so a window is one slice, and its first index is where the slice begins.
        keys, firsts = np.unique(windows, return_index=True)
        ends = [*firsts[1:].tolist(), len(windows)]
        for key, first, end in zip(keys.tolist(), firsts.tolist(), ends, strict=True):
            with writing_to(self._folder / self._part, FileError):
                writer.write_table(table.slice(first, end - first), row_group_size=end - first)
            piece = Piece(file=self._number, part=self._part, group=self._num_groups, rows=end - first, state=state)
            self.pieces.append((key, piece))
            self._num_groups += 1

    def _begin(self, schema: pa.Schema) -> ParquetFile:
        self._close()
        suffix = f"-{self._num_parts}" if self._num_parts else ""
        self._part = f"{self._stem}{suffix}.parquet"
        self._schema = schema
        path = self._folder / self._part
        # Rows are read back once and whole, so statistics help nobody, and checksums find a damaged disk.
        # A dictionary of numbers doubles the time of writing; without one text is a third larger while it waits.
        with writing_to(path, FileError):
            writer = ParquetFile(
                path,
                schema,
                compression="lz4",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        self._writer = writer
        self._num_parts += 1
        self._num_groups = 0
        return writer

    def _close(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            with writing_to(self._folder / self._part, FileError):
                writer.close()
