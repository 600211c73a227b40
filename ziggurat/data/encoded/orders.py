"""Orders: which rows of an epoch one rank takes in each step, and what it must read for them. Pure arithmetic.

A pass is a row of windows. A rank stores some rows of each window, and the rows that it takes in a step lie together
there, in runs:

    window k       part: rows 0 … 65,535 of row group 12     ─► stored rows 40, 7, 1023, …   (`places`)
                   part: rows 0 … 32,767 of row group 3      ─► stored rows 12, 65,540, …
    step s         run: window k, first stored row, number of rows      (several, where a step crosses windows)

Three orders share this form: as stored (`StoredOrder`: a window is a row group, nothing is moved), a permutation of the
whole window (`BufferOrder`), and permuted lanes of it (`lanes.py`), the only one in which ranks read different groups.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from ziggurat.data.encoded.epoch_stream import EpochStream, RankSlices, Window


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one row group that a rank stores.

    Args:
        group: number of the row group.
        first: its first row that is stored.
        num_rows: how many from there on are looked at.
    """

    group: int
    first: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """Rows of a window that one rank stores.

    Args:
        start: position in the epoch of the window's first row.
        end: position after its last one.
        num_rows: rows that the rank stores.
        parts: where they come from; empty if it stores none.
        places: for each row of a part the row at which it is stored, -1 where it is not; None: one part, as it is.
    """

    start: int
    end: int
    num_rows: int
    parts: tuple[Part, ...]
    places: Callable[[int], Int32[np.ndarray, " N"]] | None = None


class RankOrder(Protocol):
    """The rows of one rank in one pass, from a position in the epoch on."""

    @property
    def windows(self) -> Sequence[RankWindow]:
        """The windows of the pass, in order."""
        ...

    @property
    def num_steps(self) -> int:
        """Batches of the pass."""
        ...

    def runs(self, step: int) -> Int64[np.ndarray, "K 3"]:
        """List what the rank takes in a step: number of the window, first stored row, number of rows; windows rise."""
        ...


class StoredOrder:
    """Rows in the order of the files; every global batch is cut into one slice a rank.

    Args:
        group_sizes: rows of each row group.
        slices: of the rank.
    """

    def __init__(self, group_sizes: Sequence[int], *, slices: RankSlices) -> None:
        self._slices = slices
        self.num_steps = slices.num_steps
        ends = np.cumsum(np.asarray(group_sizes, dtype=np.int64))
        self.windows: list[RankWindow] = []
        for group, (end, size) in enumerate(zip(ends.tolist(), group_sizes, strict=True)):
            if not size or end <= slices.first_row:
                continue
            is_read = slices.rows_before(end) > slices.rows_before(end - size)
            parts = (Part(group, 0, size),) if is_read else ()
            self.windows.append(RankWindow(start=end - size, end=end, num_rows=size if parts else 0, parts=parts))
        self._starts = np.array([window.start for window in self.windows], dtype=np.int64)

    def runs(self, step: int) -> Int64[np.ndarray, "K 3"]:
        """Return the runs of rows that the rank takes in a step."""
        slices = self._slices
        first = slices.first_row + (step * slices.world_size + slices.rank) * slices.batch_size
        last = first + slices.batch_rows(step)
        found: list[tuple[int, int, int]] = []
        number = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:
            window = self.windows[number]
            taken = min(last, window.end) - first
            found.append((number, first - window.start, taken))
            first = first + taken
            number = number + 1
        return np.array(found, dtype=np.int64).reshape(-1, 3)


class BufferOrder:
    """Rows of each window in the order of one permutation; every global batch is cut into one slice a rank.

    A rank stores its rows in the order in which it takes them; it reads every row group of the window.

    Args:
        stream: the order of the epoch.
        slices: of the rank.
        group_sizes: rows of each row group.
    """

    def __init__(self, stream: EpochStream, *, slices: RankSlices, group_sizes: Sequence[int]) -> None:
        self._stream = stream
        self._slices = slices
        self._sizes = group_sizes
        self.num_steps = slices.num_steps
        found = [window for window in stream.windows if window.end > slices.first_row]
        self.windows = [self._rank_window(window) for window in found]
        ends = [slices.rows_before(window.end) for window in found]
        self._ends = np.array(ends, dtype=np.int64)

    def _rank_window(self, window: Window) -> RankWindow:
        num_rows = self._slices.rows_before(window.end) - self._slices.rows_before(window.start)
        parts = tuple(Part(group, 0, self._sizes[group]) for group in window.groups if self._sizes[group])
        ends = np.cumsum([part.num_rows for part in parts])
        lock = threading.Lock()

        @functools.cache
        def of_window() -> np.ndarray:
            order = self._stream.order(window)
            positions = self._slices.positions(window)
            mine = order if positions is None else order[positions]
            places = np.full(window.num_rows, -1, dtype=np.int32)
            places[mine] = np.arange(len(mine), dtype=np.int32)
            return places

        def places(part: int) -> np.ndarray:
            # Several threads place parts; without the lock, each of them would compute the whole order.
            with lock:
                return of_window()[ends[part] - parts[part].num_rows : ends[part]]

        return RankWindow(
            start=window.start, end=window.end, num_rows=num_rows, parts=parts if num_rows else (), places=places
        )

    def runs(self, step: int) -> Int64[np.ndarray, "K 3"]:
        """Return the runs of rows that the rank takes in a step."""
        first = step * self._slices.batch_size
        last = first + self._slices.batch_rows(step)
        found: list[tuple[int, int, int]] = []
        number = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            begin = int(self._ends[number - 1]) if number else 0
            taken = min(last, int(self._ends[number])) - first
            if taken:
                found.append((number, first - begin, taken))
            first = first + taken
            number = number + 1
        return np.array(found, dtype=np.int64).reshape(-1, 3)
