"""Vocabularies: from ids to rows and back; counted and looked up by hash, in bulk.

Order: row 3 is the most frequent id of the training data, row 4 the next; ids seen equally often are in the order of
their UTF-8 bytes. So the rows do not depend on the order of the data, and hot rows lie together.

Ids are told apart by their stable 64-bit hash (`features/hashing.py`) in a `KeyTable`; their text is taken only when a
new one comes, to be saved. Two training ids of one hash count as one (for 10⁷ ids: one chance in 370,000); an id never
seen before finds a row that is not its own with probability 10⁷ / 2⁶⁴.

Cost: counting 40 ns an id, lookup 25 ns on one core; memory 24 to 48 bytes an id besides its text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Int32

from ziggurat.data.preprocess.values.key_table import KeyTable
from ziggurat.data.raw.spans import TextSpans
from ziggurat.features.schema import MISSING_ROW, NUM_RESERVED_ROWS, UNKNOWN_ROW
from ziggurat.ops.text.choose import text_kernel

_IDS_AT_ONCE = 1 << 20  # hashed at once: their texts are copied for it


@dataclass(frozen=True, kw_only=True)
class Ids:
    """Ids of a column, ready to be counted or looked up.

    Args:
        keys: (N,) uint64 stable hashes of the canonical texts; they mean nothing where an id is missing.
        missing: (N,) mask, or None if none is missing.
        texts: where the texts come from, should they be needed; None where they never are.
    """

    keys: np.ndarray
    missing: np.ndarray | None
    texts: pl.Series | TextSpans | None

    @staticmethod
    def of(texts: pl.Series | TextSpans) -> Ids:
        """Make ids from canonical texts (null where missing), or canonical spans."""
        if isinstance(texts, TextSpans):
            return Ids(keys=texts.hashes, missing=texts.missing(), texts=texts)
        missing = texts.is_null().to_numpy() if texts.null_count() else None
        return Ids(keys=hash_series(texts), missing=missing, texts=texts)

    def __len__(self) -> int:
        return len(self.keys)

    def texts_at(self, indices: np.ndarray) -> pl.Series:
        """The texts of some ids."""
        if isinstance(self.texts, TextSpans):
            return self.texts.take(indices).series()
        assert self.texts is not None
        return self.texts.gather(indices)


@dataclass(frozen=True)
class NumberedIds:
    """Ids that a `VocabularyCounter` numbered: (N,) int32 numbers, -1 where one is missing."""

    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Rows:
    """Ids whose rows need no vocabulary: (N,) int32 rows."""

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


def hash_series(texts: pl.Series) -> np.ndarray:
    """(N,) uint64 stable hashes of canonical texts; the value where the text is null means nothing."""
    # The oldest layout has 64-bit offsets into one buffer; polars' own string views have none.
    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if len(array) == 0:
        return np.empty(0, dtype=np.uint64)
    _, offsets, data = array.buffers()
    cuts = np.frombuffer(offsets, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    content = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.empty(0, dtype=np.uint8)
    return text_kernel().hash_texts(content, offsets=cuts)


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
        self._table: KeyTable | None = None
        self._row_of_key = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """Rows of the table, the reserved ones included."""
        return len(self.ids) + NUM_RESERVED_ROWS

    def rows(self, ids: Ids) -> np.ndarray:
        """(N,) int32 rows of ids: 1 for those that are not in the vocabulary, 2 for missing ones."""
        if self._table is None:
            table = KeyTable.with_room(len(self.ids))
            parts = [np.empty(0, dtype=np.int32)]
            for first in range(0, len(self.ids), _IDS_AT_ONCE):
                _, new = table.add(hash_series(self.ids.slice(first, _IDS_AT_ONCE)))
                parts.append((new + first).astype(np.int32))
            places = np.concatenate(parts)
            # Versions before kept "True" of a CSV file as it is; such a vocabulary has one of "True" and "true".
            older = self.ids.is_in(pl.Series(["True", "False"]).implode()).arg_true().to_numpy()
            _, new = table.add(hash_series(self.ids.gather(older).str.to_lowercase()))
            rows = np.empty(len(places) + len(new) + 1, dtype=np.int32)
            rows[: len(places)] = places
            rows[len(places) : -1] = older[new]
            rows += NUM_RESERVED_ROWS
            # One entry more, for number -1: an id that is not there.
            rows[-1] = UNKNOWN_ROW
            self._row_of_key = rows
            self._table = table
        rows = self._row_of_key.take(self._table.find(ids.keys))
        if ids.missing is not None:
            rows[ids.missing] = MISSING_ROW
        return rows

    def digest(self) -> str:
        """A hash of ids and order, independent of how they are stored."""
        content = hashlib.blake2b(digest_size=16)
        lengths = self.ids.str.len_bytes().cast(pl.UInt32).to_numpy()
        # Lengths first: without them, "ab" and "c" would look like "a" and "bc".
        content.update(lengths.astype("<u4").tobytes())
        for start in range(0, len(self.ids), 1 << 16):
            content.update("".join(self.ids[start : start + (1 << 16)].to_list()).encode())
        return content.hexdigest()


@dataclass(frozen=True, kw_only=True)
class CountedIds:
    """Different ids of a table and how often each came.

    Args:
        texts: canonical texts, each once.
        keys: (K,) uint64 their hashes.
        counts: (K,) int64.
    """

    texts: pl.Series
    keys: np.ndarray
    counts: np.ndarray


class VocabularyCounter:
    """Counts ids over chunks; memory grows with the number of different ids."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._texts: list[pl.Series] = [pl.Series(dtype=pl.String)]

    def add(self, ids: Ids) -> Int32[np.ndarray, " N"]:
        """Count ids; missing ones are left out.

        Returns:
            (N,) the number of each id, in the order in which different ids came; -1 where it is missing.
        """
        numbers, places = self._table.add(ids.keys, missing=ids.missing)
        if len(places):
            self._texts.append(ids.texts_at(places))
        return numbers

    def counted(self) -> CountedIds:
        """The ids so far, in the order of their numbers."""
        return CountedIds(texts=self._all_texts(), keys=self._table.keys, counts=self._table.counts)

    def absorb(self, counted: CountedIds) -> Int32[np.ndarray, " K"]:
        """Add what another counter has counted; returns the number of each of its ids here."""
        numbers, places = self._table.merge(counted.keys, counts=counted.counts)
        if len(places):
            self._texts.append(counted.texts.gather(places))
        return numbers

    def _all_texts(self) -> pl.Series:
        self._texts = [pl.concat([part.alias("id") for part in self._texts])]
        return self._texts[0]

    def finish(self, *, min_count: int, max_rows: int) -> tuple[Vocabulary, Int32[np.ndarray, " K"]]:
        """The ids seen at least `min_count` times, at most `max_rows` of them (0: all).

        Returns:
            The vocabulary, and the row of each number that `add` gave; the last one is the row of number -1.
        """
        texts = self._all_texts()
        numbers = pl.arange(len(texts), dtype=pl.Int32, eager=True).alias("number")
        counted = pl.DataFrame([texts, pl.Series("count", self._table.counts), numbers])
        kept = counted.lazy().filter(pl.col("count") >= min_count)
        # Equal counts are ordered by text, so that rows do not depend on the order in which ids came.
        kept = kept.sort(["count", "id"], descending=[True, False])
        kept = (kept.head(max_rows) if max_rows else kept).collect()
        row_of_number = np.full(len(texts) + 1, UNKNOWN_ROW, dtype=np.int32)
        row_of_number[kept["number"].to_numpy()] = np.arange(len(kept), dtype=np.int32) + NUM_RESERVED_ROWS
        row_of_number[-1] = MISSING_ROW
        return Vocabulary(kept["id"].rechunk(), kept["count"].rechunk()), row_of_number
