"""The numpy text kernel: splits, hashes, parses and looks up a whole column at a time.

*Split.* All separators of a block are found at once. In a clean block of n columns every n-th separator is a line feed
and the others are delimiters: one strided comparison proves it for all records.

    1⇥2⇥3⏎4⇥5⇥6⏎      separators  ⇥ ⇥ ⏎ ⇥ ⇥ ⏎      every third is ⏎: clean

*Integers.* Eight digits in a word are added up in pairs, then fours, then eight: three multiplications.

*Find, add.* All keys of a column probe the table in step: those that met another key go on to the next slot. Keys that
meet an empty slot write themselves there (the last one stays), look who stayed, and the others go on.

    slot      0   1   2   3   4   5   6   7          find k6: home 2 ─► not k6 ─► slot 3: k6, number 4
    key       ·  k1  k5  k6   ·   ·  k4   ·          find k9: home 4 ─► empty: not in the table
    number        0   3   4           2

Reference for the digits: Johnny Lee and Daniel Lemire, "Quickly parsing eight digits", 2018.
Cost, on one core: split 4 ns a byte; 25 ns to hash, 30 ns to parse, 25 to 50 ns to look up.
"""

from __future__ import annotations

import numpy as np

from ziggurat.features import hashing
from ziggurat.ops.text.kernel import EMPTY_SLOT, Fields, KeySlots, TextKind

_LINE_FEED = 10
_SCAN_BYTES = 1 << 18  # bytes compared at once: stays in the cache
_ZEROS = np.uint64(0x3030303030303030)


class NumpyTextKernel:
    """The text kernel in numpy, which defines the others; `kernel.TextKernel` says what each method does.

    Args:
        reason: why it is used instead of the C++ kernel, for reports.
    """

    def __init__(self, *, reason: str = "") -> None:
        self.reason = reason

    @property
    def name(self) -> str:
        """The kernel's name in reports."""
        return f"numpy ({self.reason})" if self.reason else "numpy"

    def split(self, data: bytes, *, delimiter: int, kinds: np.ndarray) -> Fields | None:
        """The fields of a block, or None."""
        num_fields = len(kinds)
        array = np.frombuffer(data, dtype=np.uint8)
        separators = positions(array, _LINE_FEED, delimiter)
        # If every line has all of its fields, each n-th separator is a line feed; the next lines check it.
        line_feeds = separators[num_fields - 1 :: num_fields]
        if len(separators) % num_fields or not bool((array[line_feeds] == _LINE_FEED).all()):
            return None
        if int(np.count_nonzero(array[separators] == _LINE_FEED)) != len(line_feeds):
            return None
        if len(data) != (int(line_feeds[-1]) + 1 if len(line_feeds) else 0):
            return None
        # A field begins behind the separator before it.
        begins = np.empty_like(separators)
        begins[:1] = 0
        begins[1:] = separators[:-1] + 1
        starts = np.ascontiguousarray(begins.reshape(-1, num_fields).T)
        lengths = np.ascontiguousarray((separators - begins).reshape(-1, num_fields).T)
        if b"\r" in data:
            last_bytes = array[np.maximum(starts[-1] + lengths[-1] - 1, 0)]
            lengths[-1] -= (last_bytes == ord("\r")) & (lengths[-1] > 0)
        values = np.empty(starts.shape, dtype=np.uint64)
        simple = np.ones(num_fields, dtype=bool)
        words = hashing.aligned_words(data)
        for column, kind in enumerate(kinds.tolist()):
            if kind == TextKind.ID:
                values[column] = hashing.hash_spans(starts[column], lengths=lengths[column], words=words)
                simple[column] = not _ends_in_point_zero(words, starts[column], lengths[column])
            elif kind == TextKind.NUMBER:
                numbers = _integers(hashing.load_words(words, starts[column]), lengths[column])
                simple[column] = numbers is not None
                values[column] = 0 if numbers is None else numbers.view(np.uint64)
        longest = int(np.diff(line_feeds, prepend=-1).max()) if len(line_feeds) else 0
        return Fields(starts, lengths, values, simple, longest)

    def copy(self, data: bytes, *, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Fields one behind the other."""
        offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        position = np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum(dtype=np.int64)))
        return np.frombuffer(data, dtype=np.uint8)[position]

    def hash_texts(self, data: np.ndarray, *, offsets: np.ndarray) -> np.ndarray:
        """Stable hashes of texts that lie one after the other."""
        return hashing.hash_texts(offsets, data=data)

    def find(self, slots: KeySlots, keys: np.ndarray) -> np.ndarray:
        """Numbers of keys."""
        # 0 marks an empty slot, so the key 0 is kept as 1.
        keys = np.maximum(keys, np.uint64(1))
        # The upper bits of a hash say where its search begins.
        places = (keys >> np.uint64(64 - slots.bits)).astype(np.int64)
        found = slots.keys[places]
        same = found == keys
        numbers = np.where(same, slots.numbers[places], np.int32(-1))
        # An empty slot ends a search: keys are never taken out.
        waiting = np.flatnonzero(~same & (found != EMPTY_SLOT))
        mask = np.int64((1 << slots.bits) - 1)
        while len(waiting):
            at = (places[waiting] + 1) & mask
            places[waiting] = at
            wanted = keys[waiting]
            found = slots.keys[at]
            same = found == wanted
            numbers[waiting[same]] = slots.numbers[at[same]]
            waiting = waiting[~same & (found != EMPTY_SLOT)]
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
        numbers = self.find(slots, keys)
        present = np.ones(len(keys), dtype=bool) if missing is None else ~missing
        fresh = np.flatnonzero(present & (numbers < 0))
        new_keys, first, inverse = np.unique(np.maximum(keys[fresh], 1), return_index=True, return_inverse=True)
        # `np.unique` sorts by key; numbers are given in the order of first appearance.
        order = np.argsort(first)
        if most is not None and len(order) > most:
            # Again, with the keys before the first one that is too many.
            done = int(fresh[first[order[most]]])
            missing = None if missing is None else missing[:done]
            return self.add(slots, keys[:done], next_number=next_number, missing=missing, counts=counts)
        rank = np.empty(len(order), dtype=np.int32)
        rank[order] = np.arange(next_number, next_number + len(order))
        _insert(slots, new_keys, numbers=rank)
        numbers[fresh] = rank[inverse]
        numbers[~present] = -1
        if counts is not None:
            np.add.at(counts, numbers[present], 1)
        return numbers, fresh[first[order]]


def positions(data: np.ndarray, *values: int) -> np.ndarray:
    """(S,) int32 where any of the byte values occurs."""
    parts = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(data), _SCAN_BYTES):
        piece = data[start : start + _SCAN_BYTES]
        hits = piece == values[0]
        for value in values[1:]:
            hits |= piece == value
        places = np.flatnonzero(hits).astype(np.int32)  # blocks are far below 2 GiB
        places += np.int32(start)
        parts.append(places)
    return np.concatenate(parts)


def _integers(words: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """(N,) float64 numbers, NaN where empty, if all fields are integers of at most eight characters; else None."""
    # Eight characters are what one word of 64 bits holds.
    if len(lengths) and int(lengths.max()) > 8:
        return None
    empty = lengths == 0
    negative = ((words & np.uint64(0xFF)) == np.uint64(ord("-"))) & ~empty
    num_digits = lengths - negative
    if bool((negative & (num_digits == 0)).any()):
        return None
    # Digits to the top, zeros ("0") below them: the first digits of a number that always has eight.
    unused_bits = ((8 - np.maximum(num_digits, 1)) << 3).astype(np.uint64)
    words = words >> (negative.astype(np.uint64) << np.uint64(3))
    words <<= unused_bits
    words |= _ZEROS & ((np.uint64(1) << unused_bits) - np.uint64(1))
    words[empty] = _ZEROS
    digits = words - _ZEROS
    # A byte below "0" has borrowed into the top bit of `digits`; one above "9" carries into that of this sum.
    words += np.uint64(0x4646464646464646)
    words |= digits
    if bool((words & np.uint64(0x8080808080808080)).any()):
        return None
    numbers = _eight_digits(digits).astype(np.float64)
    np.negative(numbers, where=negative, out=numbers)
    numbers[empty] = np.nan
    return numbers


def _ends_in_point_zero(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bool:
    """Say whether any text ends in ".0": it has the id of the text without it (see data/preprocess/values/cells.py)."""
    last_two = hashing.load_words(words, np.maximum(starts + lengths - 2, 0)) & np.uint64(0xFFFF)
    return bool(((last_two == np.uint64(int.from_bytes(b".0", "little"))) & (lengths >= 2)).any())


def _eight_digits(digits: np.ndarray) -> np.ndarray:
    """Numbers of eight decimal digits, one a byte, the first in the lowest byte."""
    # Each second byte now holds a number of two digits; the bytes between are masked below.
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    # The first pair times 10⁶ and the third times 10², the second times 10⁴ and the fourth: sums in the upper halves.
    upper = (pairs & np.uint64(0x000000FF000000FF)) * np.uint64(0x000F424000000064)
    lower = ((pairs >> np.uint64(16)) & np.uint64(0x000000FF000000FF)) * np.uint64(0x0000271000000001)
    return (upper + lower) >> np.uint64(32)


def _insert(slots: KeySlots, keys: np.ndarray, *, numbers: np.ndarray) -> None:
    """Put in keys that are not in the table and do not repeat."""
    places = (keys >> np.uint64(64 - slots.bits)).astype(np.int64)
    mask = np.int64((1 << slots.bits) - 1)
    waiting = np.arange(len(keys))
    while len(waiting):
        at = places[waiting]
        wanted = keys[waiting]
        free = slots.keys[at] == EMPTY_SLOT
        slots.keys[at[free]] = wanted[free]
        # Where several wanted one slot, the last that was written stays; the others go on.
        stayed = slots.keys[at] == wanted
        slots.numbers[at[stayed]] = numbers[waiting[stayed]]
        waiting = waiting[~stayed]
        places[waiting] = (places[waiting] + 1) & mask
