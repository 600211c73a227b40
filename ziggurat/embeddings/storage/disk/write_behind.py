"""WriteBehind: rows on their way to a file, written by a thread while training goes on.

    put ──► [rows, numbers] [rows, numbers] …  ──► thread: newest of each row, sorted ──► file
                          │
    take ◄────────────────┘  newest first

A row that is on its way is read from here, never from the file, and leaves only when the file has it: so nobody reads
half of a write, and the same row put twice is written once. What waits is bounded; `put` waits for the disk then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

MIN_WAITING_BYTES, MAX_WAITING_BYTES = 4 << 20, 32 << 20
_MAX_WAITING = 64


@dataclass(frozen=True, slots=True, eq=False)
class RowValues:
    """Rows with their numbers; rows are sorted, each once."""

    rows: Int64[np.ndarray, "N"]
    values: Float[np.ndarray, "N W"]

    def find(self, rows_N: Int64[np.ndarray, "N"]) -> tuple[Bool[np.ndarray, "N"], Int64[np.ndarray, "N"]]:
        """Return for each of some rows whether it is here, and where."""
        if not len(self.rows):
            return np.zeros(len(rows_N), dtype=bool), np.zeros(len(rows_N), dtype=np.int64)
        # A row behind the last would lie outside; the comparison tells that it is another.
        at = np.minimum(np.searchsorted(self.rows, rows_N), len(self.rows) - 1)
        return self.rows[at] == rows_N, at


class WriteBehind:
    """Rows that wait to be written.

    Args:
        write: writes sorted distinct rows to the file.
        limit_bytes: of numbers that wait; the thread holds as much again while it writes.

    Attributes:
        limit_bytes: see above; may be changed.
    """

    def __init__(self, write: Callable[[RowValues], None], *, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self._write = write
        self.limit_bytes = limit_bytes
        self._waiting: list[RowValues] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, values: RowValues) -> None:
        """Give rows to the thread.

        Raises:
            FileError: of an earlier write. What waits is kept, and tried again with the next `put` or `flush`.
        """
        with self._changed:
            self._raise()
            self._waiting.append(values)
            self._start()
            while self._error is None and self._is_full():
                self._changed.wait()

    def take(self, rows_N: Int64[np.ndarray, "N"], *, out: Float[np.ndarray, "N W"]) -> Bool[np.ndarray, "N"]:
        """Copy the rows that are on their way into their places of `out`; which those are."""
        with self._changed:
            waiting = list(self._waiting)
        found = np.zeros(len(rows_N), dtype=bool)
        for each in waiting:  # oldest first: the newest numbers stay
            hit, at = each.find(rows_N)
            out[hit] = each.values[at[hit]]
            found |= hit
        return found

    def flush(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            FileError: of a write.
        """
        with self._changed:
            self._error = None
            while self._waiting and self._error is None:
                self._start()
                self._changed.wait()
            self._raise()

    def forget(self) -> None:
        """Drop what waits, once the thread has ended."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()
            self._waiting = []
            self._error = None

    def _is_full(self) -> bool:
        waiting = sum(each.values.nbytes + each.rows.nbytes for each in self._waiting)
        return waiting > self.limit_bytes or len(self._waiting) > _MAX_WAITING

    def _start(self) -> None:
        if self._thread is None and self._waiting:
            self._thread = threading.Thread(target=self._drain, name="rows-to-disk", daemon=True)
            self._thread.start()

    def _drain(self) -> None:
        while True:
            with self._changed:
                batch = list(self._waiting)
                if not batch or self._error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            try:
                self._write(newest(batch))
            except BaseException as error:  # told by the next call
                with self._changed:
                    self._error = error
                continue
            with self._changed:
                # Only now that the file has them: until here readers found these rows in the list.
                del self._waiting[: len(batch)]
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error


def newest(batch: list[RowValues]) -> RowValues:
    """The last numbers of each row of some batches."""
    if len(batch) == 1:
        return batch[0]
    # Newest first, since `unique` finds the first of equals.
    rows = np.concatenate([each.rows for each in reversed(batch)])
    values = np.concatenate([each.values for each in reversed(batch)])
    distinct, first = np.unique(rows, return_index=True)
    return RowValues(distinct, values[first])
