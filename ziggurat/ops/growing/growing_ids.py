"""GrowingIds: which id has which row, as ids come and go.

Problem: a stream brings ids that no table was made for. A fixed hash lets them collide with others, and keeps the
rows of ids that never come again; a vocabulary that is fitted once does not know them at all.

    ids of a step ─► rows that they have            used: frequency + 1, last = step
                  └► none yet ─► different ids, in rising order ─► sightings + those of this step
                                                  │ fewer than admit_after    ─► unknown, all of them in this step
                                                  └ enough ─► a free row, else one that is taken away, else unknown

A step decides once for each id, in the order of the ids themselves, so its result is a function of the state and of
which ids the step has, whatever their order: ranks that see the ids of all take the decisions of one device. Nothing
else moves: an id keeps its row until it goes, and the row of an id that goes is drawn anew, with its optimizer's
numbers, before the new one is looked up.

Frequencies are halved each time that as many ids went as there are rows, so that ids which were hot once can go.
Sightings in the sketch are halved after as many as an eighth of its counters, or it would fill up: `admit_after` are
sightings within about that many look-ups of ids without a row. An estimate is never below the true count of that time
(halving rounds down), and above it with a probability of at most (1 − e^(−4/8))^4 = 2.4 % at the fullest.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8, UInt64

from ziggurat.errors import MissingDependencyError
from ziggurat.features.growing import Counting, Evict, Growing
from ziggurat.ops.growing.cpp import CppIndex
from ziggurat.ops.growing.reference import ReferenceIndex
from ziggurat.ops.growing.state import GrowingIndex, GrowingState, Number

_SKETCH_SHARE = 8  # sightings between two halvings: one for so many counters


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Outcome of a step.

    Args:
        rows: of the step's ids, -1 where one is unknown.
        new_ids: ids that got a row.
        new_rows: their rows.
        num_evicted: ids that lost theirs.
    """

    rows: Int64[np.ndarray, " N"]
    new_ids: UInt64[np.ndarray, " K"]
    new_rows: Int64[np.ndarray, " K"]
    num_evicted: int


class GrowingIds:
    """The ids of one table, and their rows 0 … num_ids − 1.

    Args:
        growing: how it grows.
        kernel: "cpp" or "reference"; None: C++ where it can be built, else the reference, with a warning.
    """

    def __init__(self, growing: Growing, *, kernel: Literal["cpp", "reference"] | None = None) -> None:
        self.growing = growing
        self.state = GrowingState.empty(growing)
        self._index = _index(growing, self.state, kernel)
        self._exact: dict[int, int] = {}

    def __len__(self) -> int:
        return self.state.used

    @property
    def num_bytes(self) -> int:
        """Memory of state and index."""
        return self.state.num_bytes + self._index.num_bytes

    def find(self, ids: UInt64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """(N,) rows, -1 for ids that have none; nothing changes."""
        return self._index.find(ids)

    def step(self, ids: UInt64[np.ndarray, " N"], *, step: int) -> Admission:
        """Look the ids of a step up, and take in those that are due.

        Args:
            ids: in any order, any number of times each.
            step: its number; never less than that of the step before.
        """
        numbers = self.state.numbers
        rows = self._index.use(ids, step=step)
        unknown = np.flatnonzero(rows < 0)
        keys, counts, number_of = self._index.distinct(ids[unknown])
        # Decisions are taken in the order of the ids: the same on every rank, however its ids came.
        order = np.argsort(keys)
        keys, counts, rows_of_numbers = keys[order], counts[order], np.empty(len(keys), np.int64)
        new_rows, num_evicted = self._index.admit(keys, seen=self._seen(keys, counts), step=step)
        rows_of_numbers[order] = new_rows
        rows[unknown] = rows_of_numbers[number_of]
        self._forget(keys[new_rows >= 0])
        num_unknown = int(np.count_nonzero(rows < 0))
        is_new = new_rows >= 0
        for name, more in {
            Number.KNOWN: len(ids) - num_unknown,
            Number.UNKNOWN: num_unknown,
            Number.NEW: int(np.count_nonzero(is_new)),
            Number.EVICTED: num_evicted,
            Number.RENEWED: num_evicted,
        }.items():
            numbers[name] += more
        # Old uses count half from now on, or an id that was hot once would never go.
        if numbers[Number.RENEWED] >= self.growing.num_ids and self.growing.evict is Evict.LEAST_FREQUENT:
            np.right_shift(self.state.frequency, 1, out=self.state.frequency)
            numbers[Number.RENEWED] = 0
        return Admission(rows=rows, new_ids=keys[is_new], new_rows=new_rows[is_new], num_evicted=num_evicted)

    def report(self) -> dict[str, int]:
        """Look-ups that found a row and that found none, ids that came and went, since the last report."""
        numbers = self.state.numbers
        names = (Number.KNOWN, Number.UNKNOWN, Number.NEW, Number.EVICTED)
        found = {name.name.lower(): int(numbers[name]) for name in names} | {"ids": len(self)}
        numbers[list(names)] = 0
        return found

    def begin_with(self, ids: UInt64[np.ndarray, " K"], *, frequency: UInt8[np.ndarray, " K"]) -> None:
        """Give ids the rows 0, 1, 2 … of a vocabulary that has none yet, as if they had been used before step 1.

        Args:
            ids: each once, at most `num_ids`.
            frequency: how often each counts as used.
        """
        assert not self.state.used
        assert len(ids) <= self.growing.num_ids
        self.state.keys[: len(ids)] = ids
        self.state.last[: len(ids)] = 0
        self.state.frequency[: len(ids)] = frequency
        self.state.numbers[Number.USED] = len(ids)
        self._index.rebuild()

    def rebuild(self) -> None:
        """The arrays of the state have been filled from elsewhere: go on from them."""
        self._index.rebuild()

    def _forget(self, keys: UInt64[np.ndarray, " K"]) -> None:
        """Exact counts of ids that have a row now."""
        for key in keys.tolist() if self._exact else ():
            del self._exact[key]

    def _seen(self, keys: UInt64[np.ndarray, " K"], counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Sightings of ids that have no row, with those of this step."""
        # Every id is due at once: nothing has to be remembered.
        if self.growing.admit_after == 1:
            return counts
        if self.growing.counting is Counting.EXACT:
            for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
                self._exact[key] = self._exact.get(key, 0) + count
            return np.array([self._exact[key] for key in keys.tolist()], dtype=np.int64)
        seen = self._index.count(keys, counts=counts)
        numbers = self.state.numbers
        sketch = self.state.sketch
        numbers[Number.SIGHTINGS] += counts.sum()
        # A fuller sketch would estimate too much for too many ids (see the top).
        if numbers[Number.SIGHTINGS] * _SKETCH_SHARE >= len(sketch):
            np.right_shift(sketch, 1, out=sketch)
            numbers[Number.SIGHTINGS] = 0
        return seen


def _index(growing: Growing, state: GrowingState, kernel: Literal["cpp", "reference"] | None) -> GrowingIndex:
    if kernel == "reference":
        return ReferenceIndex(growing, state)
    try:
        return CppIndex(growing, state)
    except MissingDependencyError as error:
        if kernel == "cpp":
            raise
        warnings.warn(f"ids are looked up in Python, a hundred times slower than in C++: {error.found}", stacklevel=3)
        return ReferenceIndex(growing, state)
