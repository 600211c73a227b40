"""A writer of Parquet whose end says nothing beside the error that is on its way already.

When a disk is full, pyarrow's writer raises as it writes or closes, and once more as it is collected, where Python can
only print "Exception ignored in … __del__" with a traceback. Whoever wrote has the error; the second is no news.
"""

from __future__ import annotations

import contextlib

import pyarrow.parquet as pq


class ParquetFile(pq.ParquetWriter):
    """`pyarrow.parquet.ParquetWriter`, collected without a word where its file could not be written."""

    def __del__(self) -> None:
        """Close what an error has left open."""
        if getattr(self, "is_open", False):
            with contextlib.suppress(Exception):
                self.writer.close()
            self.is_open = False
            if self.file_handle is not None:
                with contextlib.suppress(Exception):
                    self.file_handle.close()
