"""The growing vocabulary with a dict: readable, slow, and the definition of what the C++ one does.

Which ids go: rows used in this step never do. When a row is needed and none is queued, the R/64 rows with the least
(frequency, last use, row), or (last use, row), are queued in that order; a queued row that is used again before its
turn stays. So nobody goes before the room is needed, and a step costs what it changes.

The sketch is a count-min sketch with conservative update (Estan and Varghese, SIGCOMM 2002) whose four hashes share one
array: the estimate of an id is the least of its four counters, and only counters below the new estimate are raised.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt64

from ziggurat.features.growing import MAX_SIGHTINGS, Evict, Growing
from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops.growing.state import SKETCH_HASHES, GrowingState, Number


class ReferenceIndex:
    """The index as a dict; `state.GrowingIndex` says what each method does.

    Args:
        growing: how the vocabulary grows.
        state: of the vocabulary.
    """

    def __init__(self, growing: Growing, state: GrowingState) -> None:
        self._growing = growing
        self._state = state
        self._row_of: dict[int, int] = {}
        self.rebuild()

    @property
    def num_bytes(self) -> int:
        """Not known of a dict: about 100 an id."""
        return 100 * self._state.used

    def rebuild(self) -> None:
        """Index the ids of the state."""
        self._row_of = {int(key): row for row, key in enumerate(self._state.keys[: self._state.used])}

    def find(self, ids: UInt64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Rows of ids."""
        return np.array([self._row_of.get(key, -1) for key in ids.tolist()], dtype=np.int64)

    def use(self, ids: UInt64[np.ndarray, " N"], *, step: int) -> Int64[np.ndarray, " N"]:
        """Rows of ids, each used."""
        rows = self.find(ids)
        for row in rows[rows >= 0].tolist():
            self._state.frequency[row] = min(MAX_SIGHTINGS, int(self._state.frequency[row]) + 1)
            self._state.last[row] = step
        return rows

    def distinct(self, ids: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different ids, in order."""
        number_of: dict[int, int] = {}
        numbers = np.array([number_of.setdefault(key, len(number_of)) for key in ids.tolist()], dtype=np.int64)
        counts = np.bincount(numbers, minlength=len(number_of)).astype(np.int64)
        return np.array(list(number_of), dtype=np.uint64), counts, numbers

    def count(self, keys: UInt64[np.ndarray, " K"], *, counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Sightings with these."""
        sketch = self._state.sketch
        seen = np.empty(len(keys), dtype=np.int64)
        hashes = mix(keys + GOLDEN)
        shifts = np.arange(1, SKETCH_HASHES + 1, dtype=np.uint64) * GOLDEN
        cells = _scaled(mix(hashes + shifts[:, None]), len(sketch))
        for number, count in enumerate(counts.tolist()):
            mine = cells[:, number]
            seen[number] = min(MAX_SIGHTINGS, int(sketch[mine].min()) + count)
            # Conservative: counters that are above the new estimate belong to other ids and stay.
            sketch[mine] = np.maximum(sketch[mine], np.uint8(seen[number]))
        return seen

    def admit(
        self, keys: UInt64[np.ndarray, " K"], *, seen: Int64[np.ndarray, " K"], step: int
    ) -> tuple[Int64[np.ndarray, " K"], int]:
        """Rows of new ids."""
        state = self._state
        rows = np.full(len(keys), -1, dtype=np.int64)
        num_evicted = 0
        for number, key in enumerate(keys.tolist()):
            if seen[number] < self._growing.admit_after:
                continue
            if state.used < self._growing.num_ids:
                row = state.used
                state.numbers[Number.USED] += 1
            else:
                # Full: one id has to go, or this one stays unknown.
                row = self._victim(step)
                if row < 0:
                    continue
                del self._row_of[int(state.keys[row])]
                num_evicted += 1
            state.keys[row], state.last[row] = key, step
            state.frequency[row] = min(MAX_SIGHTINGS, seen[number])
            self._row_of[key] = rows[number] = row
        return rows, num_evicted

    def _victim(self, step: int) -> int:
        """A row that may be taken, -1 if all are in use."""
        if self._growing.evict is Evict.NEVER:
            return -1
        row = self._queued()
        if row < 0:
            self._scan(step)
            row = self._queued()
        return row

    def _queued(self) -> int:
        """The next row of the queue that was not used since it was queued, -1 if there is none."""
        state = self._state
        numbers = self._state.numbers
        while numbers[Number.QUEUE_NEXT] < numbers[Number.QUEUE_END]:
            row = int(state.queue[numbers[Number.QUEUE_NEXT]])
            numbers[Number.QUEUE_NEXT] += 1
            # Used since it was queued, it stays; it is not looked for again until the queue is empty.
            if state.last[row] < numbers[Number.SCAN_STEP]:
                return row
        return -1

    def _scan(self, step: int) -> None:
        """Queue the rows that go first."""
        state = self._state
        numbers = self._state.numbers
        rows = np.flatnonzero(state.last[: state.used] < step)
        order = [rows, state.last[rows]]
        if self._growing.evict is Evict.LEAST_FREQUENT:
            order.append(state.frequency[rows])
        # The last key counts most: frequency, then last use, then row.
        first = rows[np.lexsort(order)][: len(state.queue)]
        state.queue[: len(first)] = first
        numbers[Number.QUEUE_NEXT], numbers[Number.QUEUE_END] = 0, len(first)
        numbers[Number.SCAN_STEP] = step


def _scaled(hashes: UInt64[np.ndarray, " N"], size: int) -> Int64[np.ndarray, " N"]:
    """⌊hash · size / 2^64⌋ for sizes below 2^32, in 64 bits: by halves of the hash."""
    high = hashes >> np.uint64(32)
    low = hashes & np.uint64(0xFFFFFFFF)
    carried = (low * np.uint64(size)) >> np.uint64(32)
    return ((high * np.uint64(size) + carried) >> np.uint64(32)).astype(np.int64)
