"""Parquet files as frames, row group by row group, with page checksums verified.

Errors name the file, and the row group and column where these can be found out: after a failed read every column of
the row group is tried on its own. Text columns are checked to be UTF-8 (Parquet readers take that on trust); a row
with a broken text is a bad row like any other.

Page checksums cover the values, not the page headers or the footer. A file can carry a seal as well
(`parquet_seal.py`), which covers every byte; it is verified here whenever it is present.

Cost: about 0.2 s for a million rows of 40 columns on two cores; memory: one row group's column chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

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
from ziggurat.data.raw.parquet_seal import Seal
from ziggurat.errors import DataError, ZigguratError
from ziggurat.files.stores import DataPath, StoreFile

_MAX_METADATA_BYTES = 256 << 20


class ParquetFile:
    """One Parquet file, read row group by row group.

    Args:
        path: the file.

    Raises:
        MissingFileError: no such file.
        DataError: not a Parquet file, or a damaged one; names the file.
    """

    def __init__(self, path: DataPath) -> None:
        self.path = path
        refuse_absent(path, what="a Parquet file")
        self._opened = path.open("rb") if isinstance(path, StoreFile) else None
        try:
            self._seal = Seal.find(path, file=self._opened)
            self._file = pq.ParquetFile(
                self._opened or path,
                page_checksum_verification=True,
                pre_buffer=self._opened is not None,  # fewer, larger requests
                thrift_string_size_limit=_MAX_METADATA_BYTES,
                thrift_container_size_limit=_MAX_METADATA_BYTES,
            )
            self._schema = self._file.schema_arrow
            self._metadata = self._file.metadata
            check_schema(self._schema, path=path)
        except ZigguratError:
            raise
        except READ_ERRORS as error:
            refuse_changed(self._opened)
            raise _damaged(path, error, where="footer") from error

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the top-level columns."""
        return tuple(self._schema.names)

    @property
    def num_rows(self) -> int:
        """Rows, as the footer says."""
        return self._metadata.num_rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._opened is not None:
            self._opened.close()

    def dtypes(self) -> dict[str, pl.DataType]:
        """The polars type of every column; columns that polars has no type for are left out."""
        return polars_types(self._schema)

    def frames(
        self, *, columns: Sequence[str], chunk_rows: int, bad_rows: BadRows
    ) -> Iterator[tuple[pl.DataFrame, np.ndarray]]:
        """Frames of at most `chunk_rows` rows with the 0-based rows in the file, in order.

        Raises:
            DataError: damage (names row group and column), or a bad row (policy ERROR).
            SchemaError: a column of a type that polars has not.
        """
        first_row = 0
        for group in range(self._metadata.num_row_groups):
            expected = self._metadata.row_group(group).num_rows
            seen = 0
            self._check_seal(group)
            for batch in self._batches(group, columns=columns, chunk_rows=chunk_rows):
                rows = np.arange(first_row + seen, first_row + seen + batch.num_rows)
                seen += batch.num_rows
                batch, rows = without_broken_texts(batch, rows, path=self.path, bad_rows=bad_rows)
                yield frame_of(batch, columns, path=self.path), rows
            refuse_changed(self._opened)
            if seen != expected:
                raise _damaged(self.path, f"{seen} rows instead of {expected}", where=f"row group {group}")
            first_row += expected

    def sample(self, *, columns: Sequence[str], num_rows: int) -> pl.DataFrame:
        """Return at most so many rows from up to ten row groups, evenly spread; the first rows of each."""
        groups = self._metadata.num_row_groups
        chosen = sorted({place * (groups - 1) // 9 for place in range(10)}) if groups else []
        size = -(-num_rows // max(len(chosen), 1))
        parts = []
        for group in chosen:
            for batch in self._batches(group, columns=columns, chunk_rows=size):
                rows = np.arange(batch.num_rows)
                batch, _ = without_broken_texts(batch, rows, path=self.path, bad_rows=BadRows())
                parts.append(frame_of(batch, columns, path=self.path))
                break
        refuse_changed(self._opened)
        return pl.concat(parts).head(num_rows) if parts else pl.DataFrame(schema=self.dtypes())

    def _check_seal(self, group: int) -> None:
        if self._seal is None:
            return
        metadata = self._metadata.row_group(group)
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            start = column.dictionary_page_offset or column.data_page_offset
            what = f"row group {group}, column {column.path_in_schema.split('.')[0]!r}"
            self._seal.check(start, start + column.total_compressed_size, what=what)

    def _batches(self, group: int, *, columns: Sequence[str], chunk_rows: int) -> Iterator[pa.RecordBatch]:
        if not columns:
            num_rows = self._metadata.row_group(group).num_rows
            # Made of structs, because a batch without columns knows no number of rows otherwise.
            yield pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, type=pa.struct([])))
            return
        try:
            batches = self._file.iter_batches(batch_size=chunk_rows, row_groups=[group], columns=list(columns))
            yield from batches
        except ZigguratError:
            raise
        except READ_ERRORS as error:
            refuse_changed(self._opened)
            raise _damaged(self.path, error, where=self._locate(group, columns)) from error

    def _locate(self, group: int, columns: Sequence[str]) -> str:
        """Row group and, if it can be found out, the column that cannot be read."""
        for name in columns:
            try:
                self._file.read_row_group(group, columns=[name], use_threads=False)
            except READ_ERRORS:
                return f"row group {group}, column {name!r}"
        return f"row group {group}"


def _damaged(path: DataPath, error: object, *, where: str) -> DataError:
    return DataError(
        expected="a Parquet file that can be read and whose page checksums are right",
        found=str(error)[:500] or type(error).__name__,
        where=f"{path}, {where}",
        ways_out=("copy or write the file again: it is damaged or was cut short", "check that it is a Parquet file"),
    )
