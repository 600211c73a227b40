"""TextSpans: a column of a text file as positions in the file's bytes; hashed and parsed without making any strings.

Problem: of Criteo's 40 columns 26 are ids of eight characters. A parser makes 26 strings a row only for them to be
hashed once and forgotten: two thirds of the time of reading the file.

Idea: a text kernel (`ops/text`) says where every field starts, how long it is, and its stable hash, from which it is
counted and looked up. Its text is copied only when an id is new to a vocabulary.

    bytes   "  …⇥68fd1e64⇥80e2…"
                 └ start, length 8, hash 0x5673AF8FFA50F367              see features/hashing.py

A column is only given as spans if all of its fields in the block are canonical ids as they are (an id that ends in
".0" is not), so both ways give the same values.

Cost, a value: 3 to 5 ns to find and hash, 5 ns to copy; polars takes 40 ns to make a string.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.ops.text.kernel import TextKernel


@dataclass(frozen=True)
class TextSpans:
    """One column of ids: N fields of a block of text.

    Args:
        data: the block.
        kernel: copies texts.
        starts: (N,) int32 first byte of each field.
        lengths: (N,) int32 bytes of each field; 0 where it is empty, that is, missing. `without` makes others so.
        hashes: (N,) uint64 stable hashes of the texts.
    """

    data: bytes = field(repr=False)
    kernel: TextKernel
    starts: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    hashes: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, chosen: np.ndarray | slice) -> TextSpans:
        """Some of the fields: by mask, indices or slice."""
        return replace(self, starts=self.starts[chosen], lengths=self.lengths[chosen], hashes=self.hashes[chosen])

    def missing(self) -> np.ndarray | None:
        """(N,) mask of empty fields, or None if there are none."""
        empty = self.lengths == 0
        return empty if empty.any() else None

    def without(self, hashes: np.ndarray, *, longest: int) -> TextSpans:
        """The same with fields made empty whose hash is one of `hashes`, of texts of at most `longest` bytes.

        Costs a look at the lengths where all fields are longer.
        """
        short = np.flatnonzero(self.lengths <= longest)
        found = short[np.isin(self.hashes[short], hashes)] if len(short) else short
        if not len(found):
            return self
        # Other spans may be views of the same array.
        lengths = self.lengths.copy()
        lengths[found] = 0
        return replace(self, lengths=lengths)

    def has(self, hashes: np.ndarray, *, longest: int) -> bool:
        """Return whether a field has one of `hashes`, of texts of at most `longest` bytes; others are not looked at."""
        short = self.lengths <= longest
        return bool(short.any() and np.isin(self.hashes[short], hashes).any())

    def series(self, name: str = "") -> pl.Series:
        """The texts, null where empty."""
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        content = self.kernel.copy(self.data, starts=self.starts, lengths=self.lengths)
        array = pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(content))
        texts = pl.Series(name, array)
        empty = self.missing()
        return texts if empty is None else texts.set(pl.Series(empty), None)
