"""A writer of Parquet whose end says nothing beside the error that is on its way already.

When a disk is full, pyarrow's writer raises as it writes or closes, and once more as it is collected, where Python can
only print "Exception ignored in … __del__" with a traceback, and Arrow "Error ignored when destroying file". Whoever
wrote has the error; the second is no news.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


class ParquetFile(pq.ParquetWriter):
    """`pyarrow.parquet.ParquetWriter`, collected without a word where its file could not be written."""

    def __del__(self) -> None:
        """Close what an error has left open; the file alone where its very first bytes could not be written."""
        if getattr(self, "is_open", False):
            with contextlib.suppress(Exception):
                self.writer.close()
            self.is_open = False
        file = getattr(self, "file_handle", None)
        if file is not None:
            with contextlib.suppress(Exception):
                file.close()


def write_table(table: pa.Table, path: str | os.PathLike[str], *, row_group_size: int | None = None) -> None:
    """Write a table as a compressed file with checksums of its pages; no part of a file is left where that fails.

    `pyarrow.parquet.write_table` has a writer of its own inside, whose file speaks as it is collected.

    Args:
        table: the rows.
        path: the file.
        row_group_size: rows of a row group; None: as many as pyarrow thinks right.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with ParquetFile(path, table.schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_table(table, row_group_size=row_group_size)
    except OSError:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
