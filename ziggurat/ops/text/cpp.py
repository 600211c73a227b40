"""The C++ text kernel: `ziggurat/ops/csrc/text.cpp` behind the interface of `kernel.py`.

It touches each byte once, while it is in the cache, where numpy makes a pass over memory for each step.
Cost, on one core: split 1 to 2 ns a byte, hashing and parsing included; 5 to 15 ns to look up.
"""

from __future__ import annotations

import sys
from ctypes import c_char_p, c_int64, c_uint8, c_void_p
from pathlib import Path

import numpy as np

from ziggurat.ops.cpp_build import CppSource
from ziggurat.ops.text.kernel import Fields, KeySlots

_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "text.cpp", without="go on without: numpy gives the same results, slower"
)
_PROTOTYPES = {
    "ziggurat_count_byte": (c_int64, [c_char_p, c_int64, c_uint8]),
    "ziggurat_split": (
        c_int64,
        [c_char_p, c_int64, c_uint8, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "ziggurat_copy": (None, [c_char_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "ziggurat_hash": (None, [c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "ziggurat_find": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "ziggurat_add": (
        c_int64,
        [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4],
    ),
}


class CppTextKernel:
    """The text kernel in C++; `kernel.TextKernel` says what each method does.

    Raises:
        MissingDependencyError: it cannot be built or loaded here; says why.
    """

    def __init__(self) -> None:
        # Eight characters are read as one word, the first in its lowest byte.
        if sys.byteorder != "little":
            raise _SOURCE.unavailable("a big-endian processor")
        self._library = _SOURCE.load()
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self._library, name)
            function.restype = result
            function.argtypes = arguments

    @property
    def name(self) -> str:
        """The kernel's name in reports."""
        return "cpp"

    def split(self, data: bytes, *, delimiter: int, kinds: np.ndarray) -> Fields | None:
        """The fields of a block, or None."""
        kinds = _packed(kinds, np.uint8)
        # One pass to know how large the arrays are is cheaper than arrays that grow.
        num_records = self._library.ziggurat_count_byte(data, len(data), ord("\n"))
        shape = (len(kinds), num_records)
        starts = np.empty(shape, dtype=np.int32)
        lengths = np.empty(shape, dtype=np.int32)
        values = np.empty(shape, dtype=np.uint64)
        simple = np.ones(len(kinds), dtype=bool)
        longest = self._library.ziggurat_split(
            data,
            len(data),
            delimiter,
            *shape,
            *(_at(array) for array in (kinds, starts, lengths, values, simple)),
        )
        return Fields(starts, lengths, values, simple, longest) if longest >= 0 else None

    def copy(self, data: bytes, *, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Fields one behind the other."""
        starts = _packed(starts, np.int32)
        lengths = _packed(lengths, np.int32)
        copied = np.empty(int(lengths.sum(dtype=np.int64)), dtype=np.uint8)
        self._library.ziggurat_copy(data, _at(starts), _at(lengths), len(starts), _at(copied))
        return copied

    def hash_texts(self, data: np.ndarray, *, offsets: np.ndarray) -> np.ndarray:
        """Stable hashes of texts that lie one after the other."""
        data = _packed(data, np.uint8)
        offsets = _packed(offsets, np.int64)
        hashes = np.empty(len(offsets) - 1, dtype=np.uint64)
        self._library.ziggurat_hash(_at(data), len(data), _at(offsets), len(hashes), _at(hashes))
        return hashes

    def find(self, slots: KeySlots, keys: np.ndarray) -> np.ndarray:
        """Numbers of keys."""
        keys = _packed(keys, np.uint64)
        numbers = np.empty(len(keys), dtype=np.int32)
        self._library.ziggurat_find(_at(slots.keys), _at(slots.numbers), slots.bits, _at(keys), len(keys), _at(numbers))
        return numbers

    def add(
        self,
        slots: KeySlots,
        keys: np.ndarray,
        *,
        next_number: int,
        missing: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        most: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of keys, new ones put in, in the order of their first places."""
        keys = _packed(keys, np.uint64)
        missing = None if missing is None else _packed(missing, bool)
        numbers = np.empty(len(keys), dtype=np.int32)
        places = np.empty(len(keys), dtype=np.int64)
        done = np.empty(1, dtype=np.int64)
        num_new = self._library.ziggurat_add(
            _at(slots.keys),
            _at(slots.numbers),
            slots.bits,
            _at(keys),
            None if missing is None else _at(missing),
            len(keys),
            next_number,
            len(keys) if most is None else most,
            None if counts is None else _at(counts),
            _at(numbers),
            _at(places),
            _at(done),
        )
        # A copy of the few new ones: a view would keep places for all keys.
        return numbers[: int(done[0])], places[:num_new].copy()


def _at(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _packed(array: np.ndarray, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=dtype)
