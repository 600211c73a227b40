"""PartFiles: row groups into Parquet files, several files at the same time.

Encoding and compressing a row group takes longer than making it, and Arrow's writer uses one core. So each file has a
thread of its own, and while one is still written, the next one begins:

    row groups   0 1 2 3 4 5 6 7 │ 8 9 10 …       in order, a fixed number to a file
    thread 1     part-00000: 0 1 2 3 4 5 6 7
    thread 2     part-00001:           8 9 10 …

What the files hold does not depend on the threads. At most two files' row groups wait in memory.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.data.encoded.records import ROW_COLUMN

_NUM_THREADS = 2
_POLL_S = 0.1


class PartFiles:
    """Writes row groups; call `close` or `abort` at the end.

    Args:
        folder: of the files; exists.
        groups_per_file: row groups of a file.
    """

    def __init__(self, folder: Path, *, groups_per_file: int) -> None:
        self._folder, self._groups_per_file = folder, groups_per_file
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ziggurat-write")
        self._room = threading.Semaphore(_NUM_THREADS * groups_per_file)
        self._num_groups = 0
        self._waiting: queue.SimpleQueue[pa.Table | None] = queue.SimpleQueue()  # of the last file; None is its end
        self._files: list[Future[dict[str, Any]]] = []
        self._stop = threading.Event()

    def write(self, group: pa.Table) -> None:
        """Add a row group, in order.

        Raises:
            OSError: one before it could not be written.
        """
        while not self._room.acquire(timeout=_POLL_S):
            self._raise_failure()
        self._raise_failure()
        if self._num_groups % self._groups_per_file == 0:
            self._waiting.put(None)
            self._waiting = queue.SimpleQueue()
            path = self._folder / f"part-{len(self._files):05}.parquet"
            self._files.append(self._pool.submit(self._write_file, path, self._waiting))
        self._waiting.put(group)
        self._num_groups += 1

    def close(self) -> list[dict[str, Any]]:
        """Finish all files; returns name, rows of the row groups, size and hash of the footer of each."""
        self._waiting.put(None)
        try:
            return [file.result() for file in self._files]
        finally:
            self._pool.shutdown()

    def abort(self) -> None:
        """Stop writing; what is on the disk is left there."""
        self._stop.set()
        self._waiting.put(None)
        self._pool.shutdown(cancel_futures=True)

    def _raise_failure(self) -> None:
        for file in self._files:
            if file.done():
                file.result()

    def _write_file(self, path: Path, groups: queue.SimpleQueue[pa.Table | None]) -> dict[str, Any]:
        writer: pq.ParquetWriter | None = None
        group_rows: list[int] = []
        try:
            while (group := groups.get()) is not None and not self._stop.is_set():
                writer = writer or _writer(path, group.schema)
                writer.write_table(group, row_group_size=max(1, group.num_rows))
                group_rows.append(group.num_rows)
                self._room.release()
        finally:
            if writer is not None:
                writer.close()
        size = path.stat().st_size if path.exists() else 0
        return {"name": path.name, "group_rows": group_rows, "bytes": size, "footer_sha256": footer_sha256(path)}


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    # One row group is one unit of reading, so statistics would only cost; dictionaries decode fastest, but for
    # numbers of rows, which never repeat.
    return pq.ParquetWriter(
        path,
        schema,
        compression="lz4",
        use_dictionary=[name for name in schema.names if name != ROW_COLUMN],  # pyright: ignore[reportArgumentType]
        write_statistics=False,
        write_page_checksum=True,
    )


def footer_sha256(path: Path) -> str:
    """SHA-256 of a Parquet file's footer: metadata, its length and the magic bytes at the end; "" if it has none."""
    if not path.exists():
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little") + 8 if len(tail) == 8 else 0
        if not 8 < length <= size:
            return ""
        file.seek(size - length)
        return hashlib.sha256(file.read(length)).hexdigest()
