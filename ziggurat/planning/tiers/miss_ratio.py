"""Miss-ratio curves: which share of the rows that steps need is not in a cache, for caches of all sizes.

A *touch* is one row of one batch: however often a batch looks a row up, the row is moved once. The caches meant here
evict the row that was touched longest ago, never one of the present batch; a miss that finds no room is trained in the
backing format. Touches of batches before `counted_from` only fill the cache.

    caches of twice a batch or more   stack distances (`stack_distances.py`), one pass for all sizes, exact:
                                      misses(C) = share of touches whose distance is C or more, or that are first ones
    smaller ones                      simulated, each by itself: rows of a batch keep each other out, so that those that
                                      are in stay as long as each batch needs them, which distances cannot say

A cache in which each row has one place, as that of rows on a disk, misses more: `one_place`.
A set-associative cache of 32 ways misses a little more, and a cache of the most frequent rows a little less on streams
that do not change.

Large data are sampled by rows (SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015): rows
whose hash lies below a share R are kept with all their touches, and a cache of C rows among all is one of R·C among
these. If they have fewer touches than R of all, hot rows were left out, and the difference counts as hits
("SHARDS-adj"). The standard error of a sampled curve is that of its eight parts by another hash: their deviation / √8.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ziggurat.data.mixing import splitmix64
from ziggurat.planning.tiers.stack_distances import stack_distances

_PARTS = 8  # of the standard error
_HASH_BITS = 24  # of a row's hash, that choose the sample; those above choose its parts


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTrace:
    """Rows of one table, or of several that share a cache, in the order in which batches touch them.

    Args:
        num_rows: rows that there are.
        rows: touched rows, each once a batch.
        lookups: how often the batch looks each of them up.
        bounds: where batches begin, and the end of the last one.
        counted_from: batches from this one on are counted.
        share: of the rows that were kept, chosen by hash; 1: all.
        all_touches: that are counted, with those of rows that were not kept.
        all_lookups: likewise.
        most_touches: of one batch, with those of rows that were not kept.
    """

    num_rows: int
    rows: Int64[np.ndarray, " N"]
    lookups: Int64[np.ndarray, " N"]
    bounds: Int64[np.ndarray, " batches+1"]
    counted_from: int = 0
    share: float = 1.0
    all_touches: int
    all_lookups: int
    most_touches: int

    @staticmethod
    def of_batches(
        batches: Sequence[tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]],
        *,
        num_rows: int,
        counted_from: int = 0,
        share: float = 1.0,
    ) -> RowTrace:
        """The trace of all batches, of whose rows a share is kept.

        Args:
            batches: of each its distinct rows, and how often it looks them up.
            num_rows: rows that there are.
            counted_from: batches from this one on are counted.
            share: of rows to keep, by hash.
        """
        counted = batches[counted_from:]
        kept: list[tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]] = []
        for rows, lookups in batches:
            is_kept = is_sampled(rows, share=share)
            kept.append((rows[is_kept], lookups[is_kept]))
        nothing = np.empty(0, dtype=np.int64)
        return RowTrace(
            num_rows=num_rows,
            rows=np.concatenate([nothing, *(rows for rows, _ in kept)]),
            lookups=np.concatenate([nothing, *(lookups for _, lookups in kept)]),
            bounds=np.cumsum([0, *(len(rows) for rows, _ in kept)]),
            counted_from=counted_from,
            share=share,
            all_touches=sum(len(rows) for rows, _ in counted),
            all_lookups=sum(int(lookups.sum()) for _, lookups in counted),
            most_touches=max((len(rows) for rows, _ in batches), default=0),
        )

    @property
    def first_counted(self) -> int:
        """The place of the first touch that counts."""
        return int(self.bounds[self.counted_from])

    def part(self, index: int) -> RowTrace:
        """One of the parts that the standard error comes from."""
        chosen_N = (splitmix64(self.rows) >> np.uint64(_HASH_BITS)) % np.uint64(_PARTS) == index
        return RowTrace(
            num_rows=self.num_rows,
            rows=self.rows[chosen_N],
            lookups=self.lookups[chosen_N],
            bounds=np.concatenate([[0], np.cumsum(chosen_N)])[self.bounds],
            counted_from=self.counted_from,
            share=self.share / _PARTS,
            all_touches=self.all_touches,
            all_lookups=self.all_lookups,
            most_touches=self.most_touches,
        )


@dataclass(frozen=True, kw_only=True)
class Misses:
    """The misses of one cache.

    Args:
        touches: share of rows that a step has to fetch.
        lookups: share of lookups whose row is not there.
    """

    touches: float
    lookups: float


@dataclass(frozen=True, kw_only=True, eq=False)
class MissRatioCurve:
    """The misses of caches of all sizes; see the module's docstring.

    Args:
        trace: what it is of.
        distances: of the touches that count; −1 for first ones.
        parts: curves of the parts of a sample; () where all rows were counted.
    """

    trace: RowTrace = field(repr=False)
    distances: Int64[np.ndarray, " N"] = field(repr=False)
    parts: tuple[MissRatioCurve, ...] = field(default=(), repr=False)
    _simulated: dict[int, Misses] = field(default_factory=dict, init=False, repr=False)

    def at(self, cache_rows: float) -> Misses:
        """Return the misses of a cache of so many rows, of all rows that there are."""
        trace = self.trace
        if not trace.all_touches:
            return Misses(touches=0.0, lookups=0.0)
        if cache_rows >= min(2 * trace.most_touches, trace.num_rows):
            hit_N = (self.distances >= 0) & (self.distances < cache_rows * trace.share)
            return _misses(trace, hit_N)
        # In smaller caches the rows of a batch keep each other out, which distances cannot say.
        size = round(cache_rows * trace.share)
        if size not in self._simulated:
            self._simulated[size] = _misses(trace, simulated_hits(trace, cache_rows=size)[trace.first_counted :])
        return self._simulated[size]

    def misses(self, cache_rows: float) -> float:
        """The share of touches that a cache of so many rows misses: what a step has to fetch."""
        return self.at(cache_rows).touches

    def one_place(self, cache_rows: float) -> Misses:
        """Return the misses of a cache where each row has one place, that of its hash.

        A row is there if none of the d others touched since has taken its place, which (1 − 1/C)^d ≈ e^(−d/C) are.

        Args:
            cache_rows: C.
        """
        if not self.trace.all_touches:
            return Misses(touches=0.0, lookups=0.0)
        if cache_rows >= self.trace.num_rows:
            return self.at(np.inf)
        stay_N = np.exp(-self.distances / max(cache_rows * self.trace.share, 1e-9))
        return _misses(self.trace, np.where(self.distances >= 0, stay_N, 0.0))

    def error(self, cache_rows: float) -> float:
        """Standard error of `misses` that comes from counting a sample of the rows; 0 where all were counted."""
        if not self.parts:
            return 0.0
        return float(np.std([part.misses(cache_rows) for part in self.parts], ddof=1) / len(self.parts) ** 0.5)

    @cached_property
    def first_touches(self) -> float:
        """The share of touches that no cache hits: of rows that the sample had not touched before."""
        return self.misses(np.inf)


def miss_ratio_curve(trace: RowTrace) -> MissRatioCurve:
    """The curve of a trace.

    Args:
        trace: touches, of all rows or of a share of them.
    """
    parts = () if trace.share == 1.0 else tuple(_curve(trace.part(index)) for index in range(_PARTS))
    return _curve(trace, parts=parts)


def simulated_hits(trace: RowTrace, *, cache_rows: int) -> Bool[np.ndarray, " N"]:
    """Mark, batch by batch, the touches that hit a cache of so many of the kept rows.

    Args:
        trace: touches.
        cache_rows: of the cache.
    """
    known, names_N = np.unique(trace.rows, return_inverse=True)
    stamps = np.full(len(known), -1)
    is_cached = np.zeros(len(known), dtype=bool)
    members = np.empty(0, dtype=np.int64)
    hit_N = np.zeros(len(names_N), dtype=bool)
    for number, (begin, end) in enumerate(itertools.pairwise(trace.bounds.tolist())):
        names = names_N[begin:end]
        hit_N[begin:end] = is_cached[names]
        stamps[names] = number
        missed = names[~is_cached[names]]
        # Rows of the present batch stay: its step needs them all at once.
        evictable = np.flatnonzero(stamps[members] < number)
        count = min(len(evictable), max(0, len(missed) - (cache_rows - len(members))))
        gone = evictable[np.argsort(stamps[members[evictable]], kind="stable")[:count]]
        is_cached[members[gone]] = False
        members = np.delete(members, gone)
        admitted = missed[: cache_rows - len(members)]
        is_cached[admitted] = True
        members = np.concatenate([members, admitted])
    return hit_N


def is_sampled(rows_N: Int64[np.ndarray, " N"], *, share: float) -> Bool[np.ndarray, " N"]:
    """Mark the rows that belong to a sample of a share of all rows: always the same ones."""
    return (splitmix64(rows_N) & np.uint64((1 << _HASH_BITS) - 1)) < np.uint64(round(share * (1 << _HASH_BITS)))


def _curve(trace: RowTrace, *, parts: tuple[MissRatioCurve, ...] = ()) -> MissRatioCurve:
    return MissRatioCurve(trace=trace, distances=stack_distances(trace.rows)[trace.first_counted :], parts=parts)


def _misses(trace: RowTrace, hit_N: Bool[np.ndarray, " N"] | Float64[np.ndarray, " N"]) -> Misses:
    """Shares of misses, of touches that hit or do so with a probability; what a sample has wrong are hits."""
    lookups_N = trace.lookups[trace.first_counted :]
    missed_N = 1.0 - hit_N
    missed_touches = float(missed_N.sum())
    missed_lookups = float(missed_N @ lookups_N)
    return Misses(
        touches=min(1.0, missed_touches / (trace.share * trace.all_touches)),
        lookups=min(1.0, missed_lookups / (trace.share * trace.all_lookups)),
    )
