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
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ziggurat.data.encoded.ledger import expected_sum
from ziggurat.data.encoded.records import ROW_COLUMN, SESSION_COLUMN
from ziggurat.data.encoded.stored_once import store_once
from ziggurat.files.parquet import ParquetFile

_NUM_THREADS = 2
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of an encoded data set, as the manifest knows it.

    Args:
        name: of the file.
        group_rows: rows of each row group.
        bytes: its size.
        footer_sha256: of its footer.
        row_sum: of its row ids, for the ledger.
        digests: of the values of each row group, in hex.
    """

    name: str
    group_rows: tuple[int, ...]
    bytes: int
    footer_sha256: str
    row_sum: int
    digests: tuple[str, ...]


def part_name(index: int) -> str:
    """The file name of part `index`."""
    return f"part-{index:05}.parquet"


def write_part(path: Path, groups: Iterable[pa.Table]) -> Part:
    """Write row groups into one Parquet file; without any, no file is made.

    Args:
        path: the file.
        groups: encoded tables of one schema; each becomes a row group.
    """
    writer: ParquetFile | None = None
    group_rows: list[int] = []
    digests: list[str] = []
    row_sum = 0
    try:
        for group in groups:
            group = group.combine_chunks()
            stored = store_once(group) if SESSION_COLUMN in group.column_names else group
            writer = writer or _writer(path, stored.schema)
            writer.write_table(stored, row_group_size=max(1, group.num_rows))
            group_rows.append(group.num_rows)
            # Of the rows themselves, not of the form in which the file stores repeated lists.
            digests.append(group_digest(group).hex())
            row_sum += sum(expected_sum(chunk.to_numpy()) for chunk in group.column(ROW_COLUMN).chunks)
    finally:
        if writer is not None:
            writer.close()
    return Part(
        name=path.name,
        group_rows=tuple(group_rows),
        bytes=path.stat().st_size if path.exists() else 0,
        footer_sha256=footer_sha256(path),
        row_sum=row_sum % 2**64,
        digests=tuple(digests),
    )


def row_groups(tables: Iterable[pa.Table], *, rows_per_group: int) -> Iterator[pa.Table]:
    """Tables of any sizes cut and joined into tables of `rows_per_group` rows; the last one has what is left."""
    waiting: list[pa.Table] = []
    num_waiting = 0
    for table in tables:
        waiting.append(table)
        num_waiting += table.num_rows
        if num_waiting < rows_per_group:
            continue
        joined = pa.concat_tables(waiting)
        cut = num_waiting - num_waiting % rows_per_group
        for first in range(0, cut, rows_per_group):
            yield joined.slice(first, rows_per_group)
        waiting = [joined.slice(cut)]
        num_waiting = num_waiting - cut
    if num_waiting:
        yield pa.concat_tables(waiting)


def group_digest(group: pa.Table) -> bytes:
    """SHA-256 of the values of a row group, in Arrow's stream format; the same however the group lies in memory."""
    digest = hashlib.sha256()
    for batch in _exact(group.combine_chunks()).to_batches():
        digest.update(batch.serialize())
    return digest.digest()


def _exact(group: pa.Table) -> pa.Table:
    """The same columns in buffers that end with them: of a slice Arrow writes the values behind it as padding."""
    arrays = []
    for field, column in zip(group.schema, group.columns, strict=True):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_list(field.type):
            offsets = array.offsets.to_numpy()
            values = pa.array(array.flatten().to_numpy())
            first = offsets[0] if len(offsets) else 0
            array = pa.ListArray.from_arrays(pa.array(offsets - first), values, type=field.type)
        elif pa.types.is_fixed_size_list(field.type):
            array = pa.FixedSizeListArray.from_arrays(pa.array(array.flatten().to_numpy()), type=field.type)
        else:
            array = pa.array(array.to_numpy(), type=field.type)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=group.schema)


class PartFiles:
    """Writes row groups; call `close` or `abort` at the end.

    Args:
        folder: of the files; exists.
        groups_per_file: row groups of a file.
    """

    def __init__(self, folder: Path, *, groups_per_file: int) -> None:
        self._folder = folder
        self._groups_per_file = groups_per_file
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ziggurat-write")
        self._room = threading.Semaphore(_NUM_THREADS * groups_per_file)
        self._num_groups = 0
        self._waiting: queue.SimpleQueue[pa.Table | None] = queue.SimpleQueue()  # of the last file; None is its end
        self._files: list[Future[Part]] = []
        self._stop = threading.Event()

    def write(self, group: pa.Table) -> None:
        """Add a row group, in order.

        Raises:
            OSError: one before it could not be written.
        """
        # In short turns: after a failure no writer makes room any more.
        while not self._room.acquire(timeout=_POLL_S):
            self._raise_failure()
        self._raise_failure()
        if self._num_groups % self._groups_per_file == 0:
            self._waiting.put(None)
            self._waiting = queue.SimpleQueue()
            path = self._folder / part_name(len(self._files))
            self._files.append(self._pool.submit(write_part, path, self._groups(self._waiting)))
        self._waiting.put(group)
        self._num_groups += 1

    def close(self) -> list[Part]:
        """Finish all files."""
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

    def _groups(self, waiting: queue.SimpleQueue[pa.Table | None]) -> Iterator[pa.Table]:
        while (group := waiting.get()) is not None and not self._stop.is_set():
            yield group
            self._room.release()


def _writer(path: Path, schema: pa.Schema) -> ParquetFile:
    # One row group is one unit of reading, so statistics would only cost. Dictionaries decode fastest; compressing what
    # they make of single values costs more time than it saves bytes, while repeated lists shrink. Numbers of rows never
    # repeat, but their differences do.
    lists = {f"{field.name}.list.element": "lz4" for field in schema if pa.types.is_nested(field.type)}
    return ParquetFile(
        path,
        schema,
        compression=dict.fromkeys(schema.names, "none") | lists,  # pyright: ignore[reportArgumentType]
        use_dictionary=[name for name in schema.names if name != ROW_COLUMN],  # pyright: ignore[reportArgumentType]
        column_encoding={ROW_COLUMN: "DELTA_BINARY_PACKED"},
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
