"""Vocabularies: from ids to rows and back, fitted by counting, looked up with a flat hash index.

Order: row 3 is the most frequent id of the training data, row 4 the next; ids seen equally often are in the order of
their UTF-8 bytes. So the rows do not depend on the order of the data, and hot rows lie together.

Lookup: the index is a sorted array with gaps. An id's 64-bit hash (`features/hashing.py`) names its home slot by its
top bits; keys are laid out in order of hash, each at its home or behind the key before:

    slot(key_i) = max(home_i, slot(key_{i−1}) + 1)          one running maximum builds the whole index
    home  0   1   2   3   4   5   6   7
          ·  k1  k2  k3   ·   ·  k4   ·                     load 1/2; a lookup probes until key or gap: 1.5 on average

All ids of a column probe together, so that a column costs a few vectorised passes. Two training ids of one hash (for
10⁷ ids: one chance in 370,000) share the row of the more frequent one; an id never seen finds a row that is not its
own with probability 10⁷ / 2⁶⁴.

Cost: counting 40 ns an id; lookup 25 ns an id on one core, 24 bytes an id in the vocabulary besides its text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.features.hashing import hash_texts
from ziggurat.features.schema import MISSING_ROW, NUM_RESERVED_ROWS, UNKNOWN_ROW

_COMPACT_ROWS = 1 << 20  # partial counts are merged when this many have gathered (or as many as were merged before)
_EMPTY_KEY = np.uint64(0)


def hash_series(texts: pl.Series) -> np.ndarray:
    """(N,) uint64 stable hashes of canonical texts; the value where the text is null means nothing."""
    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if len(array) == 0:
        return np.empty(0, dtype=np.uint64)
    _, offsets, data = array.buffers()
    cuts = np.frombuffer(offsets, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    content = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.empty(0, dtype=np.uint8)
    return hash_texts(cuts, data=content)


class Vocabulary:
    """The ids of one table in the order of their rows, the first one at row 3.

    Args:
        ids: canonical texts, most frequent first.
        counts: how often each was seen in the training data.
    """

    def __init__(self, ids: pl.Series, counts: pl.Series) -> None:
        assert ids.dtype == pl.String
        assert len(ids) == len(counts)
        self.ids = ids
        self.counts = counts.cast(pl.Int64)
        self._index: _Index | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """Rows of the table, the reserved ones included."""
        return len(self.ids) + NUM_RESERVED_ROWS

    def rows(self, texts: pl.Series) -> np.ndarray:
        """(N,) int32 rows of canonical texts: 1 for ids that are not in the vocabulary, 2 for nulls."""
        if self._index is None:
            self._index = _Index.build(hash_series(self.ids))
        rows = self._index.rows(hash_series(texts))
        if texts.null_count():
            rows[texts.is_null().to_numpy()] = MISSING_ROW
        return rows

    def digest(self) -> str:
        """A hash of ids and order, independent of how they are stored."""
        content = hashlib.blake2b(digest_size=16)
        lengths = self.ids.str.len_bytes().cast(pl.UInt32).to_numpy()
        content.update(lengths.astype("<u4").tobytes())
        for start in range(0, len(self.ids), 1 << 16):
            content.update("".join(self.ids[start : start + (1 << 16)].to_list()).encode())
        return content.hexdigest()


@dataclass(frozen=True)
class _Index:
    """Keys in order of hash, with gaps; see the module."""

    keys: np.ndarray
    values: np.ndarray
    shift: np.uint64

    @staticmethod
    def build(hashes: np.ndarray) -> _Index:
        keys, first = np.unique(_nonzero(hashes), return_index=True)  # of equal keys the most frequent id stays
        bits = max(4, int(2 * len(keys)).bit_length())
        shift = np.uint64(64 - bits)
        order = np.arange(len(keys))
        slots = np.maximum.accumulate((keys >> shift).astype(np.int64) - order) + order if len(keys) else order
        size = max(1 << bits, int(slots[-1]) + 1 if len(keys) else 0) + 1  # the last slot is always a gap
        table = np.full(size, _EMPTY_KEY)
        table[slots] = keys
        values = np.full(size, UNKNOWN_ROW, dtype=np.int32)
        values[slots] = first + NUM_RESERVED_ROWS
        return _Index(keys=table, values=values, shift=shift)

    def rows(self, hashes: np.ndarray) -> np.ndarray:
        hashes = _nonzero(hashes)
        slots = (hashes >> self.shift).astype(np.int64)
        rows = np.full(len(hashes), UNKNOWN_ROW, dtype=np.int32)
        found = self.keys[slots]
        hit = found == hashes
        rows[hit] = self.values[slots[hit]]
        # Keys are sorted along the slots, so a larger key (or a gap) ends the search.
        waiting = np.flatnonzero(~hit & (found != _EMPTY_KEY) & (found < hashes))
        while len(waiting):
            slots[waiting] += 1
            at = slots[waiting]
            wanted = hashes[waiting]
            found = self.keys[at]
            hit = found == wanted
            rows[waiting[hit]] = self.values[at[hit]]
            waiting = waiting[~hit & (found != _EMPTY_KEY) & (found < wanted)]
        return rows


def _nonzero(hashes: np.ndarray) -> np.ndarray:
    """Hashes with 0, which marks gaps, moved to 1."""
    return np.maximum(hashes, np.uint64(1))


@dataclass
class VocabularyCounter:
    """Counts ids over chunks; memory grows with the number of different ids."""

    _parts: list[pl.DataFrame] = field(default_factory=list)
    _merged_rows: int = 0
    _part_rows: int = 0

    def add(self, texts: pl.Series) -> None:
        """Count canonical texts; nulls are left out."""
        part = texts.alias("id").value_counts(sort=False, name="count")
        self._parts.append(part)
        self._part_rows += part.height
        if self._part_rows > max(_COMPACT_ROWS, self._merged_rows):
            self._parts = [self._compact()]
            self._merged_rows, self._part_rows = self._parts[0].height, 0

    def finish(self, *, min_count: int, max_rows: int) -> Vocabulary:
        """The vocabulary: ids seen at least `min_count` times, at most `max_rows` of them (0: all)."""
        kept = self._compact().lazy().filter(pl.col("id").is_not_null() & (pl.col("count") >= min_count))
        kept = kept.sort(["count", "id"], descending=[True, False])
        kept = (kept.head(max_rows) if max_rows else kept).collect()
        return Vocabulary(kept["id"].rechunk(), kept["count"].rechunk())

    def _compact(self) -> pl.DataFrame:
        empty = pl.LazyFrame(schema={"id": pl.String, "count": pl.Int64})
        parts = [part.lazy().select("id", pl.col("count").cast(pl.Int64)) for part in self._parts]
        return pl.concat([empty, *parts]).group_by("id").agg(pl.col("count").sum()).collect()
