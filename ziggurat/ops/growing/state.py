"""GrowingState: all that a growing vocabulary remembers, in flat arrays of a size that never changes.

    rows    13 bytes a row   the id that has the row (8), the step of its last use (4), and how often it was used (1):
                             stops at 255, halved as the vocabulary renews itself
    queue   4/64 bytes       the rows that go next
    sketch  1.5 bytes        sightings of ids that have no row (with `Counting.SKETCH`; at least 1 MiB in all)

Both implementations work on these arrays, leave the same bits in them, and keep an index of their own from ids to rows:
a dict, or slots of 5.33 bytes a row. So an id costs 19.9 bytes in C++, all counted. Saving the arrays saves everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt64

from ziggurat.features.growing import Counting, Growing

QUEUE_SHARE = 64  # one row in so many is found at a time, when rows are needed
SKETCH_HASHES = 4
ROW = np.dtype([("key", np.uint64), ("last", np.int32), ("frequency", np.uint8)])  # packed: 13 bytes, most in one line
_MIN_SKETCH_BYTES = 1 << 20


class Number(IntEnum):
    """Entries of `GrowingState.numbers`; the first four are known to C++."""

    USED = 0  # rows that have an id
    QUEUE_NEXT = 1  # place in the queue of the next row to go
    QUEUE_END = 2  # rows in the queue
    SCAN_STEP = 3  # step at which the queue was filled: rows used since then stay
    RENEWED = 4  # ids that lost their row since frequencies were halved
    SIGHTINGS = 5  # in the sketch since it was halved
    KNOWN = 6  # look-ups since the last report that found a row
    UNKNOWN = 7  # that found none
    NEW = 8  # ids that got a row
    EVICTED = 9  # ids that lost theirs


@dataclass(frozen=True, kw_only=True)
class GrowingState:
    """The arrays of one vocabulary of R rows, changed in place.

    Args:
        rows: `ROW` for each row; those beyond `used` mean nothing.
        numbers: see `Number`.
        queue: rows in the order in which they go.
        sketch: counters of sightings.
    """

    rows: np.ndarray = field(repr=False)
    numbers: Int64[np.ndarray, " 10"]
    queue: Int32[np.ndarray, " Q"] = field(repr=False)
    sketch: UInt8[np.ndarray, " M"] = field(repr=False)

    @staticmethod
    def empty(growing: Growing) -> GrowingState:
        """A vocabulary without ids."""
        return GrowingState(
            rows=np.zeros(growing.num_ids, ROW),
            numbers=np.zeros(len(Number), np.int64),
            queue=np.zeros(_queue_rows(growing), np.int32),
            sketch=np.zeros(_sketch_bytes(growing), np.uint8),
        )

    @property
    def keys(self) -> UInt64[np.ndarray, " R"]:
        """The id of each row."""
        return self.rows["key"]

    @property
    def last(self) -> Int32[np.ndarray, " R"]:
        """The step of each row's last use."""
        return self.rows["last"]

    @property
    def frequency(self) -> UInt8[np.ndarray, " R"]:
        """The number of times that each row was used."""
        return self.rows["frequency"]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def used(self) -> int:
        """Rows that have an id."""
        return int(self.numbers[Number.USED])

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())


def map_bytes(growing: Growing) -> int:
    """Compute the bytes of a vocabulary's state and its index in C++, before either exists."""
    state = ROW.itemsize * growing.num_ids + 8 * len(Number) + 4 * _queue_rows(growing) + _sketch_bytes(growing)
    return state + 4 * num_slots(growing)


def num_slots(growing: Growing) -> int:
    """Slots of the index in C++, of 32 bits each."""
    # Three quarters full at most, so that probing ends soon.
    return growing.num_ids + growing.num_ids // 3 + 16


def _queue_rows(growing: Growing) -> int:
    return max(1, growing.num_ids // QUEUE_SHARE)


def _sketch_bytes(growing: Growing) -> int:
    counts = growing.counting is Counting.SKETCH and growing.admit_after > 1
    return max(_MIN_SKETCH_BYTES, growing.num_ids + growing.num_ids // 2) if counts else 0


class GrowingIndex(Protocol):
    """Finds the row of an id, and changes who has one; works on the state that it was made for."""

    @property
    def num_bytes(self) -> int:
        """Memory beside the state."""
        ...

    def rebuild(self) -> None:
        """The state has been replaced: index it anew."""
        ...

    def find(self, ids: UInt64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """(N,) rows, -1 for ids that have none."""
        ...

    def use(self, ids: UInt64[np.ndarray, " N"], *, step: int) -> Int64[np.ndarray, " N"]:
        """Return the rows that `find` gives; each find counts as a use of the row at this step."""
        ...

    def distinct(
        self, ids: UInt64[np.ndarray, " N"]
    ) -> tuple[UInt64[np.ndarray, " K"], Int64[np.ndarray, " K"], Int64[np.ndarray, " N"]]:
        """Different ids as they come, how often each does, and which one each of the N is."""
        ...

    def count(self, keys: UInt64[np.ndarray, " K"], *, counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Add sightings to the sketch; the estimate of each id's after that."""
        ...

    def admit(
        self, keys: UInt64[np.ndarray, " K"], *, seen: Int64[np.ndarray, " K"], step: int
    ) -> tuple[Int64[np.ndarray, " K"], int]:
        """Give rows to ids that were seen often enough: their rows (-1: none), and how many ids lost theirs."""
        ...
