"""KeyTable: a growing hash table from 64-bit keys to numbers 0, 1, 2 …, worked in bulk.

Problem: a vocabulary is counted and looked up for every id of the data. Python's dict takes 100 ns an id and holds the
interpreter lock; a join builds its table anew for every chunk.

Idea: linear probing over two flat arrays, a whole column at a time, by a text kernel (`ops/text`: numpy, or C++ with
the same results). The keys are hashes already, so a key's home slot is its top bits; at most half the slots are taken.

Cost: 5 to 15 ns a key in C++, 25 to 50 ns in numpy (cache misses of the table); 32 to 64 bytes a key.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.kernel import EMPTY_SLOT, KeySlots, TextKernel

_MIN_BITS = 10
_LARGE = 1 << 20  # keys from which on a table only doubles


class KeyTable:
    """Numbers keys in the order in which they come, and counts them. Keys must be well mixed; key 0 is taken as key 1.

    Args:
        kernel: does the work; the fastest one here unless given.
    """

    def __init__(self, *, kernel: TextKernel | None = None) -> None:
        self._kernel = kernel or text_kernel()
        self._slots = KeySlots.empty(_MIN_BITS)
        self._counts = np.zeros(1 << (_MIN_BITS - 1), dtype=np.int64)
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    @staticmethod
    def with_room(num_keys: int) -> KeyTable:
        """Return an empty table that need not grow for so many keys."""
        table = KeyTable()
        table._make_room(num_keys)
        return table

    def find(self, keys: UInt64[np.ndarray, " N"]) -> Int32[np.ndarray, " N"]:
        """(N,) the number of each key, -1 for keys that are not in the table."""
        return self._kernel.find(self._slots, keys)

    def add(
        self, keys: UInt64[np.ndarray, " N"], *, missing: Bool[np.ndarray, " N"] | None = None
    ) -> tuple[Int32[np.ndarray, " N"], Int64[np.ndarray, " M"]]:
        """Number and count the keys; new ones are put in.

        Args:
            keys: well-mixed 64-bit numbers.
            missing: keys to leave out.

        Returns:
            (N,) the number of each key, -1 where it is missing, and (M,) where in `keys` each new one stands, in the
            order of the new numbers.
        """
        done = 0
        parts = [(np.empty(0, np.int32), np.empty(0, np.int64))]
        while done < len(keys):
            numbers, places = self._kernel.add(
                self._slots,
                keys[done:],
                next_number=self._num_keys,
                missing=None if missing is None else missing[done:],
                counts=self._counts,
                most=len(self._counts) - self._num_keys,
            )
            self._num_keys += len(places)
            parts.append((numbers, places + done))
            done += len(numbers)
            if done < len(keys):  # grown as needed, small tables stay in the cache
                self._make_room((4 if self._num_keys < _LARGE else 2) * self._num_keys)
        if len(parts) == 2:
            return parts[1]
        return np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts])

    def merge(
        self, keys: UInt64[np.ndarray, " N"], *, counts: Int64[np.ndarray, " N"]
    ) -> tuple[Int32[np.ndarray, " N"], Int64[np.ndarray, " M"]]:
        """Number keys of which each stands once, and add to their counts; returns what `add` does."""
        self._make_room(self._num_keys + len(keys))
        numbers, places = self._kernel.add(self._slots, keys, next_number=self._num_keys)
        self._num_keys += len(places)
        self._counts[numbers] += counts
        return numbers, places

    @property
    def keys(self) -> UInt64[np.ndarray, " K"]:
        """(num_keys,) the keys in the order of their numbers."""
        taken = self._slots.keys != EMPTY_SLOT
        keys = np.empty(self._num_keys, dtype=np.uint64)
        keys[self._slots.numbers[taken]] = self._slots.keys[taken]
        return keys

    @property
    def counts(self) -> Int64[np.ndarray, " K"]:
        """(num_keys,) how often each key was added."""
        return self._counts[: self._num_keys]

    def _make_room(self, num_keys: int) -> None:
        # Half of the slots stay free, so that a search for a key ends soon.
        bits = max(self._slots.bits, int(2 * num_keys - 1).bit_length())
        if bits == self._slots.bits:
            return
        keys = self.keys
        self._slots = KeySlots.empty(bits)
        # Keys come in the order of their numbers, so each gets its own again.
        self._kernel.add(self._slots, keys, next_number=0)
        counts = np.zeros(1 << (bits - 1), dtype=np.int64)
        counts[: self._num_keys] = self.counts
        self._counts = counts
