"""RowMarks: one bit for each row of a table, for tables of 10⁹ rows. Rows that were never marked take no memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int64

_BLOCK_BYTES = 1 << 16


class RowMarks:
    """A set of rows.

    Args:
        num_rows: R; memory is R/8 bytes at most, taken by the system page by page as rows are marked.
    """

    def __init__(self, num_rows: int) -> None:
        self._bits = np.zeros(-(-num_rows // 8), dtype=np.uint8)
        self.count = 0

    def add(self, rows_N: Int64[np.ndarray, "N"]) -> None:
        """Mark distinct rows."""
        self.count += len(rows_N) - int(np.count_nonzero(self.has(rows_N)))
        np.bitwise_or.at(self._bits, rows_N >> 3, np.uint8(1) << (rows_N & 7).astype(np.uint8))

    def has(self, rows_N: Int64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        """Whether each row is marked."""
        return (self._bits[rows_N >> 3] >> (rows_N & 7).astype(np.uint8) & 1).astype(bool)

    def remove(self, rows: range) -> None:
        """Unmark the rows of a range."""
        for marked in self.parts(rows):
            np.bitwise_and.at(self._bits, marked >> 3, ~(np.uint8(1) << (marked & 7).astype(np.uint8)))
            self.count -= len(marked)

    def clear(self) -> None:
        """Unmark all rows."""
        if self.count:
            self._bits, self.count = np.zeros_like(self._bits), 0

    def parts(self, rows: range | None = None) -> Iterator[Int64[np.ndarray, "N"]]:
        """The marked rows in order, a piece at a time.

        Args:
            rows: within these; all by default.
        """
        rows = range(8 * len(self._bits)) if rows is None else rows
        for first in range(rows.start // 8, -(-rows.stop // 8), _BLOCK_BYTES):
            bits = self._bits[first : min(first + _BLOCK_BYTES, -(-rows.stop // 8))]
            if bits.any():
                found = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + 8 * first
                yield found[(found >= rows.start) & (found < rows.stop)]

    def among(self, rows: range) -> Int64[np.ndarray, "N"]:
        """The marked rows of a range."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self.parts(rows)])
