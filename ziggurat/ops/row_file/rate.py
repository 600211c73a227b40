"""DiskRate: rows a second that a disk gives in random order, measured on a file of its own.

    disk_rate       a small file, tens of milliseconds: what a run asks before it starts
    DiskSample      how large a file, and how many rows: `ziggurat cluster probe` takes longer

Rows are read, and then replaced, through the `RowFile` that a table on a disk uses: past the page cache where the
system lets it. A file that is small may lie in a cache of the disk itself, so a large one tells more.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ziggurat.ops.row_file.file import RowFile
from ziggurat.ops.row_file.reference import RowLayout

_FILLED_AT_ONCE = 4096


@dataclass(frozen=True)
class DiskRate:
    """Rates that a disk gave: rows in random order, a second.

    Args:
        read_rows_per_s: read.
        written_rows_per_s: replaced, each with what lies in its page.
    """

    read_rows_per_s: float
    written_rows_per_s: float

    def text(self) -> str:
        """Return the rates in words."""
        read, written = (f"{rate / 1000:,.1f}" for rate in (self.read_rows_per_s, self.written_rows_per_s))
        return f"{read} thousand rows/s read, {written} thousand/s written, in random order"


@dataclass(frozen=True, kw_only=True)
class DiskSample:
    """Size of a measurement.

    Args:
        file_bytes: of the file, all of it written first.
        num_rows: read and replaced at once, in the order of the file, as steps do.
        seconds: new rows are drawn until reading or replacing took so long; 0: one round.
    """

    file_bytes: int = 4 << 20
    num_rows: int = 512
    seconds: float = 0.0


@functools.cache
def disk_rate(folder: str, *, payload_bytes: int, sample: DiskSample | None = None) -> DiskRate:
    """Measure the disk of a folder, once a process.

    Args:
        folder: on the disk.
        payload_bytes: of a row's numbers.
        sample: how much; by default a file of 4 MiB, which takes tens of milliseconds.

    Raises:
        FileError: the disk refuses.
    """
    sample = sample or DiskSample()
    layout = RowLayout(payload_bytes)
    num_rows = max(sample.num_rows, sample.file_bytes // layout.unit_bytes * layout.rows_per_unit)
    file = RowFile(folder, num_rows=num_rows, payload_bytes=payload_bytes)
    try:
        for first in range(0, num_rows, _FILLED_AT_ONCE):
            rows = np.arange(first, min(first + _FILLED_AT_ONCE, num_rows))
            file.write(rows, np.zeros((len(rows), payload_bytes), dtype=np.uint8))
        return _rates(file, sample)
    finally:
        file.close()


def rate_while_written(file: RowFile, *, chunks: int, num_rows: int) -> float:
    """Rows a second that are read in random order while as many others are replaced, of a filled file.

    Args:
        file: whose rows keep their numbers.
        chunks: how often.
        num_rows: read, and replaced, at once.
    """
    drawn = np.random.default_rng(1)
    read, written = ([_drawn(drawn, file, num_rows) for _ in range(chunks)] for _ in range(2))
    # Read first, outside of the time: rows are replaced by what they hold.
    numbers = [file.read(each)[0] for each in written]
    with ThreadPoolExecutor(2) as threads:
        begin = time.perf_counter()
        reading = threads.submit(lambda: [file.read(each) for each in read])
        writing = threads.submit(lambda: [file.write(*each) for each in zip(written, numbers, strict=True)])
        reading.result()
        writing.result()
        return chunks * num_rows / (time.perf_counter() - begin)


def _rates(file: RowFile, sample: DiskSample) -> DiskRate:
    """Measure the rates of reading rows, and of replacing those that were read, in turns."""
    drawn = np.random.default_rng(0)
    count = 0
    read_s = written_s = 0.0
    while not count or max(read_s, written_s) < sample.seconds:
        rows = _drawn(drawn, file, sample.num_rows)
        begin = time.perf_counter()
        values = file.read(rows)[0]
        middle = time.perf_counter()
        file.write(rows, values)
        read_s = read_s + middle - begin
        written_s = written_s + time.perf_counter() - middle
        count += len(rows)
    return DiskRate(count / read_s, count / written_s)


def _drawn(drawn: np.random.Generator, file: RowFile, num_rows: int) -> Int64[np.ndarray, " n"]:
    """Rows of a file, sorted, each once."""
    # Sorted, as `RowFile` wants rows; which ones they are is still random.
    return np.sort(drawn.choice(file.num_rows, min(num_rows, file.num_rows), replace=False))
