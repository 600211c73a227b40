"""Places: which rows of the host's memory have a place on the device, decided from batches that are announced.

    batch k + 1, announced while step k runs
      rows that are held        stay: their ways are stamped k + 1, and so are those of batch k
      rows that are not         take the ways of rows that were needed longest ago (`ops/row_cache`, LRU)
      rows that find no way     take places of their own behind the cache, until no batch under way needs them

    places     0          1 … C              C + 1 …
               padding    32 ways a set      rows without a way

The host alone decides, from its copy of the batch, so the device is asked nothing. What step k reads or updates never
leaves while it may still run: a way with the stamp of k or k + 1 is spared, whatever else its set holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.ops.row_cache import NEVER, NO_WAY, NUM_WAYS, CachePolicy, Ways


@dataclass
class DeviceCounts:
    """Counts of distinct rows that announced batches asked for, and of those that were on the device already."""

    rows: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Rows that travel for a batch. A place that one leaves may be taken by another.

    Args:
        leaving: rows that go back to the host's memory.
        left: the place of each.
        entering: rows that come from it.
        taken: the place of each.
    """

    leaving: Int64[Tensor, "L"]
    left: Int64[Tensor, "L"]
    entering: Int64[Tensor, "E"]
    taken: Int64[Tensor, "E"]


def most_places(num_rows: int) -> int:
    """Return the most places that a storage of R rows can have: all rows in ways, all behind them, sets filled up."""
    return 4 * num_rows + 2 * NUM_WAYS


class Places:
    """Record of which rows have a place.

    Args:
        num_rows: R, of the storage.
        num_places: C, at most, in sets of 32; one set at least.

    Attributes:
        counts: of announced rows.
        num_needed: places that there have to be, the one of padding among them.
    """

    def __init__(self, num_rows: int, *, num_places: int) -> None:
        whole_sets = num_rows if num_places >= num_rows else max(1, num_places // NUM_WAYS) * NUM_WAYS
        self.ways = Ways(num_rows, share=min(1.0, whole_sets / max(num_rows, 1)), policy=CachePolicy.LRU)
        self.counts = DeviceCounts()
        self._batch = NEVER + 1  # number of the last one that was announced
        self._extra = torch.empty(0, dtype=torch.int64)  # the row of each place behind the cache, -1 where it is free
        self._extra_batch = torch.empty(0, dtype=torch.int64)  # the last batch that needed it

    @property
    def num_needed(self) -> int:
        """Places that there have to be."""
        return 1 + self.ways.num_places + len(self._extra)

    @property
    def num_bytes(self) -> int:
        """The bytes of the record of which rows are held."""
        return self.ways.num_bytes + self._extra.nbytes + self._extra_batch.nbytes

    def find(self, rows_N: Int64[Tensor, "N"]) -> Int64[Tensor, "N"]:
        """The place of each row, -1 where it has none."""
        places = self.ways.find(rows_N)
        places = torch.where(places >= 0, places + 1, -1)
        if len(self._extra):
            rows, order = self._extra.sort()
            at = torch.searchsorted(rows, rows_N).clamp_(max=len(rows) - 1)
            places = torch.where(rows[at] == rows_N, order[at] + 1 + self.ways.num_places, places)
        return places

    def held(self) -> tuple[Int64[Tensor, "H"], Int64[Tensor, "H"]]:
        """Rows that have a place, and their places."""
        rows = torch.cat([self.ways.held_rows, self._extra])
        places = (rows >= 0).nonzero().view(-1)
        return rows[places], places + 1

    def announce(self, rows_N: Int64[Tensor, "N"]) -> Exchange:
        """Find places for the rows of a coming batch.

        Args:
            rows_N: any number of times each.
        """
        before = self._batch
        self._batch = self._batch + 1
        stamps = self.ways.stamps_SW.view(-1)
        places_N = self.ways.find(rows_N)
        is_held = places_N >= 0
        stamps[places_N[is_held]] = self._batch
        hits = int((stamps == self._batch).sum())
        stamps[stamps == before] = self._batch  # the present step's rows stay
        missing = torch.unique(rows_N[~is_held])
        stays = torch.isin(self._extra, missing)
        self._extra_batch[stays] = self._batch
        missing = missing[~torch.isin(missing, self._extra[stays])]
        self.counts.rows += hits + int(stays.sum()) + len(missing)
        self.counts.hits += hits + int(stays.sum())
        out, left_extra = self._release(before)
        admission = self.ways.admit(missing, step=self._batch)
        without = admission.left == NO_WAY
        taken = torch.where(without, -1, admission.places + 1)
        taken[without] = self._behind(missing[without])
        gone = admission.left >= 0
        return Exchange(
            leaving=torch.cat([out, admission.left[gone]]),
            left=torch.cat([left_extra, taken[gone]]),
            entering=missing,
            taken=taken,
        )

    def _release(self, before: int) -> tuple[Tensor, Tensor]:
        """Free the places behind the cache that neither the present step nor the coming one needs: rows and places."""
        free = ((self._extra >= 0) & (self._extra_batch < before)).nonzero().view(-1)
        rows = self._extra[free]
        self._extra[free] = -1
        return rows, free + 1 + self.ways.num_places

    def _behind(self, rows: Int64[Tensor, "K"]) -> Int64[Tensor, "K"]:
        """Places behind the cache; more of them where there are too few, twice as many as before at least."""
        free = (self._extra < 0).nonzero().view(-1)
        if len(free) < len(rows):
            more = max(len(rows) - len(free), len(self._extra))
            self._extra = torch.cat([self._extra, self._extra.new_full((more,), -1)])
            self._extra_batch = torch.cat([self._extra_batch, self._extra_batch.new_zeros(more)])
            free = (self._extra < 0).nonzero().view(-1)
        mine = free[: len(rows)]
        self._extra[mine], self._extra_batch[mine] = rows, self._batch
        return mine + 1 + self.ways.num_places
