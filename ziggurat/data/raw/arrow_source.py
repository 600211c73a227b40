"""Arrow files as frames, batch by batch: Feather (version 2), `.arrow` files, and the streams that `datasets` writes.

Two layouts share the suffix. The *file* has a footer that lists its batches, and may be compressed. The *stream* has
none: it ends with a mark of eight bytes, and one that was cut between two batches reads like a shorter one, so the mark
is required. Bytes behind the mark (two streams in one file, as `cat` makes them) are refused: they would be rows that
nobody reads. Neither has checksums: every batch is validated (offsets, lengths, texts) before it is used.

Memory: one batch, as it was written. Cost: that of reading the bytes, and of the validation.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.data.raw.arrow_rows import (
    READ_ERRORS,
    check_schema,
    frame_of,
    polars_types,
    refuse_absent,
    refuse_changed,
    without_broken_texts,
)
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.errors import DataError, ZigguratError
from ziggurat.files.stores import DataPath, OpenedFile, StoreFile

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_OLD_FEATHER = b"FEA1"


class ArrowFile:
    """One Arrow file or stream, read batch by batch.

    Args:
        path: the file.

    Raises:
        MissingFileError: no such file.
        DataError: not an Arrow file, or a damaged one; names the file.
    """

    def __init__(self, path: DataPath) -> None:
        self.path = path
        refuse_absent(path, what="an Arrow file")
        self._opened = path.open("rb") if isinstance(path, StoreFile) else pa.OSFile(str(path), "rb")
        try:
            start = self._opened.read(8)
            self._size = self._opened.seek(0, io.SEEK_END)
            self._opened.seek(max(0, self._size - 8))
            end = self._opened.read(8)
            self._opened.seek(0)
            if start.startswith(_OLD_FEATHER):
                raise self._damaged("Feather of version 1, which pyarrow reads no more")
            self.is_stream = not start.startswith(_FILE_MAGIC)
            if self.is_stream and end != _END_OF_STREAM:
                raise self._damaged(
                    f"{self._size:,} bytes that end with {end.hex(' ') or 'nothing'}: no end of a stream"
                )
            self._schema = self._reader(self._opened).schema
            check_schema(self._schema, path=path)
        except ZigguratError:
            self._opened.close()
            raise
        except READ_ERRORS as error:
            refuse_changed(self._opened)
            self._opened.close()
            raise self._damaged(error) from error
        self._num_rows: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the top-level columns."""
        return tuple(self._schema.names)

    @property
    def num_rows(self) -> int:
        """Rows of all batches, counted once: of a file of this machine without reading the values."""
        if self._num_rows is None:
            mapped = None if isinstance(self.path, StoreFile) else pa.memory_map(str(self.path))
            self._num_rows = sum(batch.num_rows for batch in self._batches(mapped))
        return self._num_rows

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def dtypes(self) -> dict[str, pl.DataType]:
        """The polars type of every column; columns that polars has no type for are left out."""
        return polars_types(self._schema)

    def frames(
        self, *, columns: Sequence[str], chunk_rows: int, bad_rows: BadRows
    ) -> Iterator[tuple[pl.DataFrame, np.ndarray]]:
        """Frames of at most `chunk_rows` rows with the 0-based rows in the file, in order.

        Raises:
            DataError: damage, or a bad row (policy ERROR).
            SchemaError: a column of a type that polars has not.
        """
        first_row = 0
        for number, whole in enumerate(self._batches()):
            chosen = whole.select(list(columns))
            self._check(chosen, number)
            for start in range(0, chosen.num_rows, chunk_rows):
                batch = chosen.slice(start, chunk_rows)
                rows = np.arange(first_row, first_row + batch.num_rows)
                first_row += batch.num_rows
                batch, rows = without_broken_texts(batch, rows, path=self.path, bad_rows=bad_rows)
                yield frame_of(batch, columns, path=self.path), rows
        self._num_rows = first_row

    def sample(self, *, columns: Sequence[str], num_rows: int) -> pl.DataFrame:
        """Read the file and return at most so many rows, evenly spread."""
        step = max(1, self.num_rows // max(num_rows, 1))
        parts = []
        first = 0
        for frame, rows in self.frames(columns=columns, chunk_rows=1 << 17, bad_rows=BadRows()):
            # Every step-th row of the file, wherever this frame begins in it.
            parts.append(frame[(-first) % step :: step])
            first += len(rows)
        return pl.concat(parts).head(num_rows) if parts else pl.DataFrame(schema=self.dtypes())

    def _reader(self, source: pa.NativeFile | OpenedFile) -> pa.RecordBatchStreamReader | pa.RecordBatchFileReader:
        source.seek(0)
        return pa.ipc.open_stream(source) if self.is_stream else pa.ipc.open_file(source)

    def _batches(self, mapped: pa.MemoryMappedFile | None = None) -> Iterator[pa.RecordBatch]:
        number = 0
        source = self._opened if mapped is None else mapped
        try:
            reader = self._reader(source)
            if self.is_stream:
                for number, batch in enumerate(reader):  # noqa: B007  the error names it
                    yield batch
            else:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
            refuse_changed(self._opened)
            if self.is_stream:
                self._refuse_more(source)
        except ZigguratError:
            raise
        except READ_ERRORS as error:
            refuse_changed(self._opened)
            raise self._damaged(error, where=f"batch {number}") from error

    def _refuse_more(self, source: pa.NativeFile | OpenedFile) -> None:
        """Refuse bytes behind the end of the stream, where a reader of a stream stops."""
        end = source.tell()
        if end == self._size:
            return
        raise DataError(
            expected="one Arrow stream that ends with the file",
            found=f"{self._size - end:,} more bytes behind the end of the first stream",
            where=str(self.path),
            ways_out="write each stream to a file of its own, and name all of them: cat joins text, and no streams",
        )

    def _check(self, batch: pa.RecordBatch, number: int) -> None:
        """Refuse offsets and lengths that lie; texts of plain columns that are not UTF-8 are bad rows instead."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            kind = column.type
            binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind)
            try:
                column.validate()
                # As bytes: a text that is not UTF-8 makes a bad row later, and no damaged file.
                if binary is not None:
                    column.view(binary).validate(full=True)
                else:
                    column.validate(full=True)
            except READ_ERRORS as error:
                raise self._damaged(error, where=f"batch {number}, column {name!r}") from error

    def _damaged(self, error: object, *, where: str = "") -> DataError:
        return DataError(
            expected="an Arrow file (Feather version 2) or a whole Arrow stream",
            found=str(error)[:500] or type(error).__name__,
            where=f"{self.path}, {where}" if where else str(self.path),
            ways_out=("copy or write the file again: it is damaged or was cut short", "write it as Parquet"),
        )
