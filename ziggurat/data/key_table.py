"""KeyTable: a growing hash table from 64-bit keys to numbers 0, 1, 2 …, worked in bulk with numpy.

Problem: a vocabulary is counted and looked up for every id of the data. Python's dict takes 100 ns an id and holds the
interpreter lock; a join builds its table anew for every chunk.

Idea: linear probing, with all keys of a column in step. The keys are hashes already, so a key's home slot is its top
bits; a round compares every key with what lies in its slot, and those that met another key go on to the next slot. At
a load of at most one half, the second round has a quarter of the keys, and so on.

    slot      0   1   2   3   4   5   6   7          find k6: home 2 ─► not k6 ─► slot 3: k6, number 4
    key       ·  k1  k5  k6   ·   ·  k4   ·          find k9: home 4 ─► empty: not in the table
    number        0   3   4           2

Insertion works the same way: all keys that meet an empty slot write themselves there (the last one stays), look who
stayed, and the others go on.

Cost: 10 to 30 ns a key on one core (cache misses of the table); 24 to 48 bytes a key.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt64

_EMPTY = np.uint64(0)
_MIN_BITS = 10


class KeyTable:
    """Numbers keys in the order in which they come. Keys must be well mixed; key 0 is taken as key 1."""

    def __init__(self) -> None:
        self._num_keys = 0
        self._allocate(_MIN_BITS)

    def __len__(self) -> int:
        return self._num_keys

    def find(self, keys: UInt64[np.ndarray, "N"]) -> Int64[np.ndarray, "N"]:
        """(N,) the number of each key, -1 for keys that are not in the table."""
        keys = np.maximum(keys, np.uint64(1))
        slots = (keys >> self._shift).astype(np.int64)
        found = self._keys[slots]
        same = found == keys
        numbers = np.where(same, self._numbers[slots], np.int64(-1))
        waiting = np.flatnonzero(~same & (found != _EMPTY))
        while len(waiting):
            at = (slots[waiting] + 1) & self._mask
            slots[waiting] = at
            wanted = keys[waiting]
            found = self._keys[at]
            same = found == wanted
            numbers[waiting[same]] = self._numbers[at[same]]
            waiting = waiting[~same & (found != _EMPTY)]
        return numbers

    def add(self, keys: UInt64[np.ndarray, "N"]) -> tuple[Int64[np.ndarray, "N"], Int64[np.ndarray, "M"]]:
        """Number the keys; new ones are put in.

        Returns:
            (N,) the number of each key, and (M,) where in `keys` each new one stands, in the order of the new numbers.
        """
        numbers = self.find(keys)
        missing = np.flatnonzero(numbers < 0)
        if len(missing) == 0:
            return numbers, missing
        self._make_room(self._num_keys + len(missing))
        new_numbers, where = self._insert(np.maximum(keys[missing], np.uint64(1)))
        numbers[missing] = new_numbers
        return numbers, missing[where]

    def _allocate(self, bits: int) -> None:
        self._bits = bits
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)
        self._keys = np.zeros(1 << bits, dtype=np.uint64)
        self._numbers = np.full(1 << bits, -1, dtype=np.int32)

    def _make_room(self, num_keys: int) -> None:
        bits = max(self._bits, int(2 * num_keys - 1).bit_length())
        if bits == self._bits:
            return
        full = self._keys != _EMPTY
        keys, order = self._keys[full], np.argsort(self._numbers[full])
        self._allocate(bits)
        self._num_keys = 0
        self._insert(keys[order], in_order=True)

    def _insert(self, keys: np.ndarray, *, in_order: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Put in keys that are not in the table; they may repeat, unless `in_order` asks to number them as they come.

        Returns:
            The number of each key, and where in `keys` each number stands.
        """
        numbers = np.empty(len(keys), dtype=np.int64)
        first_places: list[np.ndarray] = []
        waiting = np.arange(len(keys))
        slots = (keys >> self._shift).astype(np.int64)
        while len(waiting):
            at, wanted = slots[waiting], keys[waiting]
            free = self._keys[at] == _EMPTY
            self._keys[at[free]] = wanted[free]
            stayed = self._keys[at] == wanted
            fresh = stayed & (self._numbers[at] < 0)
            places, fresh_slots = waiting[fresh], at[fresh]
            if in_order:
                self._numbers[fresh_slots] = places
                self._num_keys += len(places)
            else:  # of a key that repeats, the one whose mark stays gets the number
                marks = np.arange(len(places), dtype=np.int32)
                self._numbers[fresh_slots] = marks
                owners = self._numbers[fresh_slots] == marks
                self._numbers[fresh_slots[owners]] = self._num_keys + np.arange(int(owners.sum()))
                first_places.append(places[owners])
                self._num_keys += int(owners.sum())
            numbers[waiting[stayed]] = self._numbers[at[stayed]]
            waiting = waiting[~stayed]
            slots[waiting] = (slots[waiting] + 1) & self._mask
        return numbers, np.concatenate(first_places) if first_places else waiting
