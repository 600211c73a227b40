"""The growing vocabulary in C++: `ops/csrc/growing/growing_ids.cpp` behind the interface of `state.GrowingIndex`.

The index is slots of 32 bits, 4/3 of them a row: the lower bits are the row, the upper ones a tag of the id's hash, so
that a row is read where it is most likely right. Cost on one core: 0.2 µs a look-up among 10⁷ ids, which are two cache
misses, and a few µs for an id that takes the row of another.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64

from ziggurat.features.growing import Evict, Growing
from ziggurat.ops.cpp_build import CppSource
from ziggurat.ops.growing.state import GrowingState, num_slots

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "growing" / "growing_ids.cpp",
    without="go on without: Python gives the same rows, a hundred times slower",
)
# Numbers that growing_ids.cpp knows.
_EVICT = {Evict.NEVER: 0, Evict.LEAST_FREQUENT: 1, Evict.OLDEST: 2}


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("capacity", "num_slots", "row_bits", "queue_size", "evict")),
        *((name, c_void_p) for name in ("slots", "rows", "numbers", "queue")),
    )


class CppIndex:
    """The index in C++; `state.GrowingIndex` says what each method does.

    Args:
        growing: how the vocabulary grows.
        state: of the vocabulary.

    Raises:
        MissingDependencyError: it cannot be built or loaded here; says why.
    """

    def __init__(self, growing: Growing, state: GrowingState) -> None:
        self._library = _library()
        self._growing = growing
        self._state = state
        self._slots = np.zeros(num_slots(growing), np.uint32)
        # Addresses alone: state and slots live as long as this object, and their arrays are never replaced.
        self._map = _Map(
            capacity=growing.num_ids,
            num_slots=len(self._slots),
            row_bits=growing.num_ids.bit_length(),
            queue_size=len(state.queue),
            evict=_EVICT[growing.evict],
            slots=_at(self._slots),
            **{name: _at(getattr(state, name)) for name in ("rows", "numbers", "queue")},
        )
        self.rebuild()

    @property
    def num_bytes(self) -> int:
        """The bytes of the slots."""
        return self._slots.nbytes

    def rebuild(self) -> None:
        """Index the ids of the state."""
        self._library.ziggurat_growing_index(self._map)

    def find(self, ids: UInt64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Rows of ids."""
        ids, rows = _packed(ids), np.empty(len(ids), np.int64)
        self._library.ziggurat_growing_find(self._map, _at(ids), len(ids), _at(rows))
        return rows

    def use(self, ids: UInt64[np.ndarray, " N"], *, step: int) -> Int64[np.ndarray, " N"]:
        """Rows of ids, each used."""
        ids, rows = _packed(ids), np.empty(len(ids), np.int64)
        self._library.ziggurat_growing_use(self._map, _at(ids), len(ids), step, _at(rows))
        return rows

    def distinct(self, ids: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different ids, in order."""
        ids, keys = _packed(ids), np.empty(len(ids), np.uint64)
        counts = np.empty(len(ids), np.int64)
        numbers = np.empty(len(ids), np.int64)
        places = [_at(array) for array in (keys, counts, numbers)]
        found = self._library.ziggurat_growing_distinct(_at(ids), len(ids), *places)
        return keys[:found], counts[:found], numbers

    def count(self, keys: UInt64[np.ndarray, " K"], *, counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Sightings with these."""
        keys, seen, sketch = _packed(keys), np.empty(len(keys), np.int64), self._state.sketch
        places = (_at(keys), _at(counts), len(keys), _at(seen))
        self._library.ziggurat_growing_count(_at(sketch), len(sketch), *places)
        return seen

    def admit(
        self, keys: UInt64[np.ndarray, " K"], *, seen: Int64[np.ndarray, " K"], step: int
    ) -> tuple[Int64[np.ndarray, " K"], int]:
        """Rows of new ids."""
        keys, rows = _packed(keys), np.empty(len(keys), np.int64)
        threshold = self._growing.admit_after
        num_evicted = self._library.ziggurat_growing_admit(
            self._map, _at(keys), _at(seen), len(keys), threshold, step, _at(rows)
        )
        return rows, num_evicted


def _packed(ids: np.ndarray) -> UInt64[np.ndarray, " N"]:
    return np.ascontiguousarray(ids, dtype=np.uint64)


def _at(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


@functools.cache
def _library() -> ctypes.CDLL:
    library = _SOURCE.load()
    arguments = ctypes.POINTER(_Map)
    prototypes = {
        "index": (None, [arguments]),
        "find": (None, [arguments, c_void_p, c_int64, c_void_p]),
        "use": (None, [arguments, c_void_p, c_int64, c_int64, c_void_p]),
        "distinct": (c_int64, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
        "count": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p]),
        "admit": (c_int64, [arguments, c_void_p, c_void_p, *[c_int64] * 3, c_void_p]),
    }
    for name, (result, taken) in prototypes.items():
        function = getattr(library, f"ziggurat_growing_{name}")
        function.restype = result
        function.argtypes = taken
    return library
