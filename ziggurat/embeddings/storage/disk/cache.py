"""CachedRows: rows of a disk that are held in memory, written back when another row takes their place.

    place of row r  =  mix(r) modulo C          one place a row: finding is one look, no order is kept

A row that is asked for takes its place; the row that had it goes to the disk if it was changed since it came. What
comes back is what was put, wherever it lay meanwhile, so what a cache holds changes no number. It holds a batch of any
size: rows that find their place taken by another row of the same call go past it.

A flag of each place says whether its row is newer than the disk's, and whether it is newer than the last checkpoint's
(`unsaved.py`); a row is never the second without the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Float, Int64, UInt8

from ziggurat.embeddings.storage.disk.backing import DiskRows
from ziggurat.features.hashing import mix


class _Held(IntEnum):
    """States of a row that has a place."""

    AS_ON_DISK = 0
    SAVED = 1  # newer than the disk's; the last checkpoint has it
    CHANGED = 2  # newer than both


@dataclass
class CacheCounts:
    """Counts of the rows that lookups asked of a cache, each once a lookup, and of those that it held."""

    rows: int = 0
    hits: int = 0


class CachedRows:
    """Rows in memory in front of rows on a disk.

    Args:
        disk: all rows.
        num_places: C.

    Attributes:
        counts: of rows that lookups asked for.
    """

    def __init__(self, disk: DiskRows, *, num_places: int) -> None:
        self.disk = disk
        self.num_places = max(1, min(num_places, disk.num_rows))
        self.counts = CacheCounts()
        self._values: Float[np.ndarray, "C W"] | None = None
        self._rows: Int64[np.ndarray, "C"] = np.empty(0, dtype=np.int64)
        self._is: UInt8[np.ndarray, "C"] = np.empty(0, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """The bytes of the places, taken or still to be taken."""
        return self.num_places * (4 * self.disk.width + 9)  # 8 for which row, 1 for its state

    def take(self, rows: Int64[np.ndarray, "N"], *, counts: bool = False) -> Float[np.ndarray, "N W"]:
        """Numbers of sorted distinct rows, which are held from now on.

        Args:
            rows: which.
            counts: a lookup asks, which is counted.
        """
        values = self._held()
        places = self._places(rows)
        hit = self._rows[places] == rows
        if counts:
            self.counts.rows += len(rows)
            self.counts.hits += int(np.count_nonzero(hit))
        out = np.empty((len(rows), values.shape[1]), dtype=np.float32)
        out[hit] = values[places[hit]]
        if not hit.all():
            missing = np.flatnonzero(~hit)
            out[missing] = self.disk.take(rows[missing])
            self._admit(rows[missing], places[missing], out[missing], state=_Held.AS_ON_DISK, kept=places[hit])
        return out

    def put(self, rows: Int64[np.ndarray, "N"], numbers: Float[np.ndarray, "N W"]) -> None:
        """Replace sorted distinct rows."""
        values = self._held()
        places = self._places(rows)
        hit = self._rows[places] == rows
        values[places[hit]] = numbers[hit]
        self._is[places[hit]] = _Held.CHANGED
        if not hit.all():
            missing = np.flatnonzero(~hit)
            # A call may have more rows than there are places: those without one go past the cache.
            past = self._admit(rows[missing], places[missing], numbers[missing], state=_Held.CHANGED, kept=places[hit])
            self.disk.put(rows[missing[past]], numbers[missing[past]])

    def look(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Numbers of sorted distinct rows; what is held stays as it is."""
        values = self._held()
        places = self._places(rows)
        hit = self._rows[places] == rows
        out = np.empty((len(rows), values.shape[1]), dtype=np.float32)
        out[hit] = values[places[hit]]
        out[~hit] = self.disk.take(rows[~hit])
        return out

    def replace(self, rows: Int64[np.ndarray, "N"], numbers: Float[np.ndarray, "N W"]) -> None:
        """Replace sorted distinct rows; those that are not held go to the disk."""
        values = self._held()
        places = self._places(rows)
        hit = self._rows[places] == rows
        values[places[hit]] = numbers[hit]
        self._is[places[hit]] = _Held.CHANGED
        self.disk.put(rows[~hit], numbers[~hit])

    def missing(self, rows: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        """The rows that are not held."""
        self._held()
        return rows[self._rows[self._places(rows)] != rows]

    def flush(self) -> None:
        """Give every changed row to the disk; all stay held."""
        changed = np.flatnonzero(self._is)
        order = np.argsort(self._rows[changed])
        # In pieces: the rows that are given away are copied.
        for some in np.array_split(changed[order], -(-len(changed) // 65_536) or 1):
            self._write_back(some)
            self._is[some] = _Held.AS_ON_DISK

    def tell(self, rows: range) -> None:
        """Let the marks of the disk say which rows of a range were changed, those that are held among them."""
        mine = (self._rows >= rows.start) & (self._rows < rows.stop)
        self.disk.touched.add(self._rows[mine & (self._is > 0)])
        self.disk.unsaved.change(self._rows[mine & (self._is == _Held.CHANGED)])

    def saved(self, rows: range) -> None:
        """A checkpoint has the rows of a range as they are."""
        mine = (self._rows >= rows.start) & (self._rows < rows.stop)
        self._is[mine & (self._is == _Held.CHANGED)] = _Held.SAVED

    def drop(self, rows: range) -> None:
        """Hold no row of a range; changes that were not flushed are lost."""
        gone = (self._rows >= rows.start) & (self._rows < rows.stop)
        self._rows[gone], self._is[gone] = -1, _Held.AS_ON_DISK  # -1 is no row

    def empty(self) -> None:
        """Hold nothing; changes that were not flushed are lost."""
        self._values = None
        self._rows = np.empty(0, dtype=np.int64)
        self._is = np.empty(0, dtype=np.uint8)

    def _held(self) -> Float[np.ndarray, "C W"]:
        """The places; their memory is taken at the first use."""
        if self._values is None:
            self._values = np.empty((self.num_places, self.disk.width), dtype=np.float32)
            self._rows = np.full(self.num_places, -1, dtype=np.int64)
            self._is = np.zeros(self.num_places, dtype=np.uint8)
        return self._values

    def _places(self, rows: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        # A place for every row: as it is, none can take another's.
        if self.num_places == self.disk.num_rows:
            return rows
        return (mix(rows.astype(np.uint64)) % np.uint64(self.num_places)).astype(np.int64)

    def _admit(
        self,
        rows: Int64[np.ndarray, "N"],
        places: Int64[np.ndarray, "N"],
        numbers: Float[np.ndarray, "N W"],
        *,
        state: _Held,
        kept: Int64[np.ndarray, "K"],
    ) -> Int64[np.ndarray, "M"]:
        """Hold rows in their places, but for those whose place another row of the call has; which those are."""
        values = self._held()
        free = np.ones(len(rows), dtype=bool)
        if len(kept):
            free &= ~np.isin(places, kept)
        first = np.zeros(len(rows), dtype=bool)
        first[np.unique(places, return_index=True)[1]] = True
        chosen = np.flatnonzero(free & first)
        mine = places[chosen]
        leaving = mine[self._is[mine] > 0]
        # First what leaves, since the next lines put other rows over it.
        self._write_back(leaving[np.argsort(self._rows[leaving])])
        values[mine] = numbers[chosen]
        self._rows[mine], self._is[mine] = rows[chosen], state
        return np.flatnonzero(~(free & first))

    def _write_back(self, places: Int64[np.ndarray, "M"]) -> None:
        """Give the rows of some places to the disk, in the order of the rows."""
        if len(places) and self._values is not None:
            saved = self._is[places] == _Held.SAVED
            self.disk.put(self._rows[places], self._values[places], saved=saved)
