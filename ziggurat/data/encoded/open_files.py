"""OpenFiles: Parquet files that stay open between reads, each read by one thread at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_MAX_IDLE = 16


class OpenFiles:
    """Parquet files with checksums verified on every read; safe to call from several threads."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Path, list[pq.ParquetFile]] = OrderedDict()
        self._lock = threading.Lock()

    def read_row_group(self, path: Path, group: int, *, columns: list[str] | None = None) -> pa.Table:
        """The columns of a row group, decoded in the thread of the caller."""
        file = self._take(path)
        table = file.read_row_group(group, columns=columns, use_threads=False)
        self._give_back(path, file)
        return table

    def _take(self, path: Path) -> pq.ParquetFile:
        """An open file that no other thread reads."""
        with self._lock:
            if idle := self._idle.pop(path, None):
                file = idle.pop()
                if idle:
                    self._idle[path] = idle
                return file
        return pq.ParquetFile(path, page_checksum_verification=True)

    def _give_back(self, path: Path, file: pq.ParquetFile) -> None:
        """Keep a file open for its next reader; close one of the least recently read if there are many."""
        with self._lock:
            self._idle[path] = [*self._idle.pop(path, ()), file]
            if sum(map(len, self._idle.values())) > _MAX_IDLE:
                oldest, files = self._idle.popitem(last=False)
                files.pop().close()
                if files:
                    self._idle[oldest] = files
                    self._idle.move_to_end(oldest, last=False)
