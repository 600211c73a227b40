"""RowMarks: one bit for each row of a table, for tables of 10⁹ rows. Rows that were never marked take no memory.

`MarkedRows` counts the marked rows of a range, and gives the n-th of them, without a list of them: of 10⁹ rows that
would be 8 GB. It keeps one count for each 524,288 rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int64

_BLOCK_BYTES = 1 << 16  # 524,288 rows


class RowMarks:
    """A set of rows.

    Args:
        num_rows: R; memory is R/8 bytes at most, taken by the system page by page as rows are marked.
    """

    def __init__(self, num_rows: int) -> None:
        # Zeroed by the system, which gives a page only when a bit of it is set.
        self._bits = np.zeros(-(-num_rows // 8), dtype=np.uint8)
        self.count = 0

    def add(self, rows_N: Int64[np.ndarray, "N"]) -> None:
        """Mark distinct rows."""
        # Counted before the bits are set, while `has` still tells which are new.
        self.count += len(rows_N) - int(np.count_nonzero(self.has(rows_N)))
        # Not `bits[…] |= …`, which would keep one of the rows that share a byte.
        np.bitwise_or.at(self._bits, rows_N >> 3, np.uint8(1) << (rows_N & 7).astype(np.uint8))

    def has(self, rows_N: Int64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        """Return for each row whether it is marked."""
        return (self._bits[rows_N >> 3] >> (rows_N & 7).astype(np.uint8) & 1).astype(bool)

    def remove(self, rows: range) -> None:
        """Unmark the rows of a range."""
        for first, bits in self._blocks(rows):
            wanted = self._of_range(bits, first=first, rows=rows)
            self.count -= int(np.bitwise_count(wanted).sum())
            bits &= ~wanted  # a view: the marks themselves

    def clear(self) -> None:
        """Unmark all rows."""
        if self.count:
            self._bits = np.zeros_like(self._bits)
            self.count = 0

    def parts(self, rows: range | None = None) -> Iterator[Int64[np.ndarray, "N"]]:
        """The marked rows in order, a piece at a time.

        Args:
            rows: within these; all by default.
        """
        rows = range(8 * len(self._bits)) if rows is None else rows
        for first, bits in self._blocks(rows):
            # Row r is bit r & 7 of its byte, from the lowest on.
            found = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + 8 * first
            yield found[(found >= rows.start) & (found < rows.stop)]

    def among(self, rows: range) -> Int64[np.ndarray, "N"]:
        """The marked rows of a range."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self.parts(rows)])

    def counts(self, rows: range) -> tuple[list[range], list[int]]:
        """Count the marked rows in parts of a range; leave out parts without any."""
        parts = list[range]()
        counts = list[int]()
        for first, bits in self._blocks(rows):
            if found := int(np.bitwise_count(self._of_range(bits, first=first, rows=rows)).sum()):
                parts.append(range(max(8 * first, rows.start), min(8 * (first + len(bits)), rows.stop)))
                counts.append(found)
        return parts, counts

    def _blocks(self, rows: range) -> Iterator[tuple[int, np.ndarray]]:
        """First byte, and bytes that are no zeros altogether; what was never marked is read, and takes no memory."""
        last = -(-rows.stop // 8)
        for first in range(rows.start // 8, last, _BLOCK_BYTES):
            bits = self._bits[first : min(first + _BLOCK_BYTES, last)]
            if bits.any():
                yield first, bits

    def _of_range(self, bits: np.ndarray, *, first: int, rows: range) -> np.ndarray:
        """A copy of the bytes from `first` on without the bits of rows outside of a range."""
        bits = bits.copy()
        before = rows.start - 8 * first
        behind = 8 * (first + len(bits)) - rows.stop
        if before > 0:
            bits[0] &= 0xFF << before & 0xFF
        if behind > 0:
            bits[-1] &= 0xFF >> behind
        return bits


class MarkedRows:
    """The marked rows of a range, in order, by their number; right as long as no mark of the range changes.

    Args:
        marks: of all rows.
        rows: the range.
    """

    def __init__(self, marks: RowMarks, rows: range) -> None:
        self._marks = marks
        self._parts, counts = marks.counts(rows)
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of marked rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, first: int, count: int) -> Int64[np.ndarray, "N"]:
        """So many of them from the `first` on."""
        # `right`: a part that ends at `first` is behind us.
        index = int(np.searchsorted(self._ends, first, side="right"))
        skipped = first - (int(self._ends[index - 1]) if index else 0)
        found = list[Int64[np.ndarray, "M"]]()
        missing = count
        while missing > 0:
            some = self._marks.among(self._parts[index])[skipped : skipped + missing]
            found.append(some)
            index = index + 1
            skipped = 0
            missing = missing - len(some)
        return np.concatenate([np.empty(0, dtype=np.int64), *found])
