"""TextSpans: a column of a text file as positions in the file's bytes; hashed and parsed without making any strings.

Problem: of Criteo's 40 columns 26 are ids of eight characters. A parser makes 26 strings a row only for them to be
hashed once and forgotten: two thirds of the time of reading the file.

Idea: `text_structure.py` knows where every field starts and ends. The first eight bytes of all fields are taken in one
sweep over the block, in order, and turned column by column: an id of up to eight bytes is one 64-bit number, ready for
the stable hash, and a short integer is parsed by three multiplications of that number:

    bytes   "  …⇥68fd1e64⇥80e2…"     ids      hash(word)                               see features/hashing.py
                 └ start, length 8        numbers  word of digits d₀…d₇ ─► pairs ─► fours ─► d₀·10⁷ + … + d₇

What does not fit (an id that ends in ".0", a number with a point) is left to polars: a column is only given as spans,
or parsed here, if all of its fields in the block are of the simple form, so both ways give the same values.

Reference for the digits: Johnny Lee and D. Lemire, "Quickly parsing eight digits", 2018 and 2022.
Cost, a value: 10 ns to hash, 12 ns to parse; polars takes 40 ns to make a string and 60 ns to parse a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.features.hashing import aligned_words, hash_spans, hash_words, load_words

_ZEROS = np.uint64(0x3030303030303030)
_TILE_ROWS = 512  # rows of separators transposed at once, to stay in the cache


@dataclass(frozen=True)
class TextBlock:
    """The bytes of a block."""

    data: bytes = field(repr=False)

    @cached_property
    def words(self) -> np.ndarray:
        """The bytes as aligned words."""
        return aligned_words(self.data)

    @cached_property
    def has_point(self) -> bool:
        """Whether there is any point: without one, every text is a canonical id."""
        return b"." in self.data


@dataclass(frozen=True)
class TextSpans:
    """One column: N fields of a block.

    Args:
        block: the bytes.
        starts: (N,) int32 first byte of each field.
        lengths: (N,) int32 bytes of each field; 0 where it is empty, that is, missing.
        words: (N,) uint64 the eight bytes from the start of each field on, whatever its length.
    """

    block: TextBlock
    starts: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    words: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, chosen: np.ndarray | slice) -> TextSpans:
        """Some of the fields: by mask, indices or slice."""
        return TextSpans(self.block, self.starts[chosen], self.lengths[chosen], self.words[chosen])

    def hashes(self) -> np.ndarray:
        """(N,) uint64 stable hashes of the texts."""
        if len(self) and int(self.lengths.max()) <= 8:
            return hash_words(self.words, lengths=self.lengths)
        return hash_spans(self.starts, lengths=self.lengths, words=self.block.words)

    def missing(self) -> np.ndarray | None:
        """(N,) mask of empty fields, or None if there are none."""
        empty = self.lengths == 0
        return empty if empty.any() else None

    def is_canonical(self) -> bool:
        """Whether no text ends in ".0", so that all are canonical ids as they are (see cells.py)."""
        if not self.block.has_point:
            return True
        last_two = load_words(self.block.words, np.maximum(self.starts + self.lengths - 2, 0)) & np.uint64(0xFFFF)
        ends = last_two == np.uint64(int.from_bytes(b".0", "little"))
        return not bool((ends & (self.lengths >= 2)).any())

    def series(self, name: str = "") -> pl.Series:
        """The texts, null where empty."""
        lengths = self.lengths.astype(np.int64)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if len(lengths) and bool((lengths == 8).all()):
            content = self.words.astype("<u8", copy=False).view(np.uint8)
        else:
            position = np.repeat(self.starts - offsets[:-1], lengths) + np.arange(offsets[-1])
            content = np.frombuffer(self.block.data, dtype=np.uint8)[position]
        array = pa.LargeStringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(content))
        texts = pl.Series(name, array)
        empty = self.missing()
        return texts if empty is None else texts.set(pl.Series(empty), None)

    def integers(self) -> np.ndarray | None:
        """(N,) float64 numbers, NaN where empty, if all fields are integers of at most eight characters; else None."""
        if len(self) and int(self.lengths.max()) > 8:
            return None
        empty = self.lengths == 0
        negative = (self.words & np.uint64(0xFF)) == np.uint64(ord("-"))
        negative &= ~empty
        any_negative = bool(negative.any())
        words, num_digits = self.words, self.lengths
        if any_negative:
            words = words >> (negative.astype(np.uint64) << np.uint64(3))
            num_digits = num_digits - negative
            if bool((negative & (num_digits == 0)).any()):
                return None
        # Digits to the top, zeros ("0") below them: the first digits of a number that always has eight.
        unused_bits = ((8 - np.maximum(num_digits, 1)) << 3).astype(np.uint64)
        words = words << unused_bits
        words |= _ZEROS & ((np.uint64(1) << unused_bits) - np.uint64(1))
        words[empty] = _ZEROS
        digits = words - _ZEROS
        words += np.uint64(0x4646464646464646)
        words |= digits
        if bool((words & np.uint64(0x8080808080808080)).any()):
            return None
        numbers = _eight_digits(digits).astype(np.float64)
        if any_negative:
            np.negative(numbers, where=negative, out=numbers)
        numbers[empty] = np.nan
        return numbers


def _eight_digits(digits: np.ndarray) -> np.ndarray:
    """Numbers of eight decimal digits, one a byte, the first in the lowest byte."""
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    upper = (pairs & np.uint64(0x000000FF000000FF)) * np.uint64(0x000F424000000064)
    lower = ((pairs >> np.uint64(16)) & np.uint64(0x000000FF000000FF)) * np.uint64(0x0000271000000001)
    return (upper + lower) >> np.uint64(32)


@dataclass(frozen=True)
class TextColumns:
    """All fields of a clean block without quotes: R records of n fields.

    Args:
        block: the bytes.
        starts: (n, R) int32 first byte of each field.
        lengths: (n, R) int32 bytes of each field.
        words: (n, R) uint64 first eight bytes of each field.
    """

    block: TextBlock
    starts: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    words: np.ndarray = field(repr=False)

    @staticmethod
    def of(data: bytes, *, separators: np.ndarray, num_fields: int) -> TextColumns:
        """From the positions of all separators in order; every `num_fields`-th one is a line feed."""
        num_records = len(separators) // num_fields
        starts = np.empty((num_fields, num_records), dtype=np.int32)
        lengths = np.empty((num_fields, num_records), dtype=np.int32)
        words = np.empty((num_fields, num_records), dtype=np.uint64)
        anywhere = np.ndarray((len(data) + 1,), dtype="<u8", buffer=data + bytes(8), strides=(1,))
        first = 0
        for record in range(0, num_records, _TILE_ROWS):
            tile = slice(record, record + _TILE_ROWS)
            ends = separators[record * num_fields : (record + _TILE_ROWS) * num_fields].astype(np.int64)
            begins = np.empty_like(ends)
            begins[0] = first
            np.add(ends[:-1], 1, out=begins[1:])
            first = int(ends[-1]) + 1
            starts[:, tile] = begins.reshape(-1, num_fields).T
            lengths[:, tile] = (ends - begins).reshape(-1, num_fields).T
            words[:, tile] = anywhere[begins].reshape(-1, num_fields).T
        if b"\r" in data:
            last_bytes = np.frombuffer(data, dtype=np.uint8)[np.maximum(starts[-1] + lengths[-1] - 1, 0)]
            lengths[-1] -= (last_bytes == ord("\r")) & (lengths[-1] > 0)
        return TextColumns(TextBlock(data), starts, lengths, words)

    def column(self, index: int) -> TextSpans:
        """The fields of one column."""
        return TextSpans(self.block, self.starts[index], self.lengths[index], self.words[index])
