"""CachedRows: rows of a disk that are held in memory, written back when another row takes their place.

    place of row r  =  mix(r) modulo C          one place a row: finding is one look, no order is kept

A row that is asked for takes its place; the row that had it goes to the disk if it was changed since it came. What
comes back is what was put, wherever it lay meanwhile, so what a cache holds changes no number. It holds a batch of any
size: rows that find their place taken by another row of the same call go past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from ziggurat.embeddings.storage.disk.backing import DiskRows
from ziggurat.features.hashing import mix


@dataclass
class CacheCounts:
    """What lookups asked of a cache: rows, each once a lookup, and those of them that it held."""

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
        self.disk, self.num_places, self.counts = disk, max(1, min(num_places, disk.num_rows)), CacheCounts()
        self._values: Float[np.ndarray, "C W"] | None = None
        self._rows: Int64[np.ndarray, "C"] = np.empty(0, dtype=np.int64)
        self._dirty: Bool[np.ndarray, "C"] = np.empty(0, dtype=bool)

    @property
    def num_bytes(self) -> int:
        """Of the places, taken or still to be taken."""
        return self.num_places * (4 * self.disk.width + 9)

    def take(self, rows: Int64[np.ndarray, "N"], *, counts: bool = False) -> Float[np.ndarray, "N W"]:
        """Numbers of sorted distinct rows, which are held from now on.

        Args:
            rows: which.
            counts: a lookup asks, which is counted.
        """
        values, places = self._held(), self._places(rows)
        hit = self._rows[places] == rows
        if counts:
            self.counts.rows += len(rows)
            self.counts.hits += int(np.count_nonzero(hit))
        out = np.empty((len(rows), values.shape[1]), dtype=np.float32)
        out[hit] = values[places[hit]]
        if not hit.all():
            missing = np.flatnonzero(~hit)
            out[missing] = self.disk.take(rows[missing])
            self._admit(rows[missing], places[missing], out[missing], dirty=False, kept=places[hit])
        return out

    def put(self, rows: Int64[np.ndarray, "N"], numbers: Float[np.ndarray, "N W"]) -> None:
        """Replace sorted distinct rows."""
        values, places = self._held(), self._places(rows)
        hit = self._rows[places] == rows
        values[places[hit]] = numbers[hit]
        self._dirty[places[hit]] = True
        if not hit.all():
            missing = np.flatnonzero(~hit)
            past = self._admit(rows[missing], places[missing], numbers[missing], dirty=True, kept=places[hit])
            self.disk.put(rows[missing[past]], numbers[missing[past]])

    def look(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Numbers of sorted distinct rows; what is held stays as it is."""
        values, places = self._held(), self._places(rows)
        hit = self._rows[places] == rows
        out = np.empty((len(rows), values.shape[1]), dtype=np.float32)
        out[hit] = values[places[hit]]
        out[~hit] = self.disk.take(rows[~hit])
        return out

    def replace(self, rows: Int64[np.ndarray, "N"], numbers: Float[np.ndarray, "N W"]) -> None:
        """Replace sorted distinct rows; those that are not held go to the disk."""
        values, places = self._held(), self._places(rows)
        hit = self._rows[places] == rows
        values[places[hit]] = numbers[hit]
        self._dirty[places[hit]] = True
        self.disk.put(rows[~hit], numbers[~hit])

    def missing(self, rows: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        """The rows that are not held."""
        self._held()
        return rows[self._rows[self._places(rows)] != rows]

    def flush(self) -> None:
        """Give every changed row to the disk; all stay held."""
        changed = np.flatnonzero(self._dirty)
        order = np.argsort(self._rows[changed])
        for some in np.array_split(changed[order], -(-len(changed) // 65_536) or 1):
            if len(some) and self._values is not None:
                self.disk.put(self._rows[some], self._values[some])
        self._dirty[:] = False

    def dirty(self, rows: range) -> Int64[np.ndarray, "N"]:
        """Rows of a range that are held and were changed since they came, in order."""
        held = self._rows[self._dirty]
        return np.sort(held[(held >= rows.start) & (held < rows.stop)])

    def drop(self, rows: range) -> None:
        """Hold no row of a range; changes that were not flushed are lost."""
        gone = (self._rows >= rows.start) & (self._rows < rows.stop)
        self._rows[gone], self._dirty[gone] = -1, False

    def empty(self) -> None:
        """Hold nothing; changes that were not flushed are lost."""
        self._values = None
        self._rows, self._dirty = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)

    def _held(self) -> Float[np.ndarray, "C W"]:
        """The places; their memory is taken at the first use."""
        if self._values is None:
            self._values = np.empty((self.num_places, self.disk.width), dtype=np.float32)
            self._rows = np.full(self.num_places, -1, dtype=np.int64)
            self._dirty = np.zeros(self.num_places, dtype=bool)
        return self._values

    def _places(self, rows: Int64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        if self.num_places == self.disk.num_rows:
            return rows
        return (mix(rows.astype(np.uint64)) % np.uint64(self.num_places)).astype(np.int64)

    def _admit(
        self,
        rows: Int64[np.ndarray, "N"],
        places: Int64[np.ndarray, "N"],
        numbers: Float[np.ndarray, "N W"],
        *,
        dirty: bool,
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
        leaving = mine[self._dirty[mine]]
        if len(leaving):
            leaving = leaving[np.argsort(self._rows[leaving])]
            self.disk.put(self._rows[leaving], values[leaving])
        values[mine] = numbers[chosen]
        self._rows[mine], self._dirty[mine] = rows[chosen], dirty
        return np.flatnonzero(~(free & first))
