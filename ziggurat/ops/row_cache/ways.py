"""Ways: which rows a set-associative cache holds, and which leave it for others.

    row ──► set = row mod S ──► 32 ways        S = ⌈share · R / 32⌉ sets hold C = 32·S rows

Rows of consecutive numbers lie in different sets, and every set has the same number of rows to hold: with a share of
one each row has a way of its own. Lookups only `find` rows. The update of a step calls `admit` with its distinct rows:

    a row that is held        its way is stamped with the step
    one that is not           takes a free way of its set; else the way of the row that goes:
                              LRU   the smallest (stamp, row)
                              LFU   the smallest (count, row), if its count is not larger than that of the new row
    a way stamped this step   never goes; a row that finds no way is a *conflict*: it is trained behind the cache

Counts are the steps that have touched a row, whether it was held or not: one 32-bit number for every row, as far as
2^24 - 1. New rows of a set are served in the order of their numbers (LRU), or the largest count first (LFU). So what
happens does not depend on the order in which a step names its rows, nor on threads.

The torch code here defines what `csrc/lookup/row_cache.cpp` does. Policies: Yang et al., "Mixed-precision embedding
using a cache", arXiv 2010.11305, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from ziggurat.ops.row_cache import cpp
from ziggurat.ops.row_cache.admission import HIT, NO_WAY, Admission

NUM_WAYS = 32
NEVER = 0  # stamp of rows that no step has touched; a row with stamp s that a load may replace has ~s, below zero
_MAX_COUNT = (1 << 24) - 1  # also of stamps: FP32 of checkpoints holds one more
_LAST = torch.iinfo(torch.int64).max
_NO_STEP = torch.iinfo(torch.int32).max  # the number of a step that is only asked about


class CachePolicy(StrEnum):
    """Rules for which row leaves a set for another."""

    LRU = "lru"  # the one that was touched longest ago
    LFU = "lfu"  # the one that was touched in the fewest steps; takes four bytes for every row of a table


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Number of rows that a cache holds, and its policy.

    Args:
        share: of the rows of a width, in (0, 1]; 0: there is no cache.
        policy: which row leaves for another.
    """

    share: float = 0.0
    policy: CachePolicy = CachePolicy.LRU

    def bytes_for(self, num_rows: int, *, row_bytes: int) -> int:
        """Return the bytes for so many rows of a table: rows in FP32 with their state, tags and stamps, and counts.

        Args:
            num_rows: of the table.
            row_bytes: of a row in FP32 with its optimizer state.
        """
        if not self.share:
            return 0
        is_lfu = self.policy is CachePolicy.LFU
        # 4 bytes for the tag and 4 for the stamp of a place, with LFU 4 more for its count; and 4 for each row's
        # count.
        return int(num_rows * self.share) * (row_bytes + (12 if is_lfu else 8)) + (4 * num_rows if is_lfu else 0)


NO_CACHE = CacheSize()


def num_sets(num_rows: int, *, share: float) -> int:
    """Sets S of a cache, one at least: it holds 32·S rows.

    Args:
        num_rows: R, of the storage behind it.
        share: of the rows that it has ways for.
    """
    return max(1, -(-int(num_rows * share + 0.5) // NUM_WAYS))


class Ways:
    """Contents of a cache.

    Args:
        num_rows: R, of the storage behind it.
        share: of the rows that it has ways for, in (0, 1].
        policy: which row leaves.

    Attributes:
        num_sets: S.
        tags_SW: (S, 32) row / S of each way, -1 where it is free.
        stamps_SW: (S, 32) the step that touched it last.
        counts_R: (R,) steps that touched each row; None for LRU.
        measures_SW: (S, 32) the counts of rows that are held, side by side; None for LRU.
    """

    def __init__(self, num_rows: int, *, share: float, policy: CachePolicy) -> None:
        self.num_rows = num_rows
        self.policy = policy
        self.num_sets = num_sets(num_rows, share=share)
        self.tags_SW = torch.full((self.num_sets, NUM_WAYS), -1, dtype=torch.int32)
        self.stamps_SW = torch.zeros(self.num_sets, NUM_WAYS, dtype=torch.int32)
        self.counts_R = torch.zeros(num_rows, dtype=torch.int32) if policy is CachePolicy.LFU else None
        self.measures_SW = None if self.counts_R is None else torch.zeros_like(self.stamps_SW)
        self._has_stale = False
        self._compiled = cpp.is_available()

    @property
    def num_places(self) -> int:
        """C, rows that it can hold."""
        return self.num_sets * NUM_WAYS

    @property
    def num_bytes(self) -> int:
        """The bytes of tags, stamps and counts; the counts of held rows are stored twice."""
        tensors = [self.tags_SW, self.stamps_SW, self.counts_R, self.measures_SW]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def held_rows(self) -> Int64[Tensor, "C"]:
        """The row of each place, -1 where it is free."""
        sets = torch.arange(self.num_sets).unsqueeze(1)
        return torch.where(self.tags_SW < 0, -1, self.tags_SW.to(torch.int64) * self.num_sets + sets).view(-1)

    @property
    def kept_stamps(self) -> Int32[Tensor, "C"]:
        """The stamp of each place as FP32 can hold it in a checkpoint: the step, or from step 2^24 on its rank.

        Only the order of stamps matters, and that steps to come are later than all of them.
        """
        stamps = stamp_of(self.stamps_SW.view(-1))
        if int(stamps.max()) <= _MAX_COUNT:
            return stamps
        # Among them, so that ranks begin behind it and no step gets its number.
        never = stamps.new_full((1,), NEVER)
        return torch.unique(torch.cat([never, stamps]), return_inverse=True)[1][1:].to(torch.int32)

    def find(self, rows_N: Int64[Tensor, "N"]) -> Int64[Tensor, "N"]:
        """The place of each row, -1 where it is not held."""
        if self._compiled:
            return cpp.find_rows(self, rows_N)
        sets = rows_N % self.num_sets
        tags = rows_N // self.num_sets
        matches_NW = self.tags_SW[sets] == tags.unsqueeze(1)
        # A row is in one way of its set at most.
        found, ways = matches_NW.max(dim=1)
        return torch.where(found, sets * NUM_WAYS + ways, -1)

    def admit(self, rows_U: Int64[Tensor, "U"], *, step: int) -> Admission:
        """Stamp rows that are held and find ways for the others.

        Args:
            rows_U: distinct.
            step: its number, which no earlier step had; a step may be admitted in parts.
        """
        self._end_load()
        if self._compiled:
            return Admission(*cpp.admit_rows(self, rows_U, step=step))
        places = self.find(rows_U)
        # Counted before ways are given: a new row is compared with its count of this step.
        if self.counts_R is not None:
            self.counts_R[rows_U] = (self.counts_R[rows_U] + 1).clamp(max=_MAX_COUNT)
        held = places >= 0
        # First of all: rows of this step must not displace each other.
        self.stamps_SW.view(-1)[places[held]] = step
        self._measure(places[held], rows_U[held])
        left = torch.where(held, HIT, NO_WAY)
        missing = (~held).nonzero().view(-1)
        if len(missing):
            self._replace(rows_U, missing, step=step, places=places, left=left)
        return Admission.counted(places, left)

    def leaving(self, rows_U: Int64[Tensor, "U"]) -> Int64[Tensor, "N"]:
        """Return the rows that would leave if a step admitted these; nothing changes.

        Args:
            rows_U: distinct. A step that admits fewer displaces none but some of these, or of `rows_U` themselves.
        """
        self._end_load()  # before copies are made: what is written back below must not be stale again
        # Rows of other sets cannot be touched by what follows.
        sets = torch.unique(rows_U % self.num_sets)
        of_sets = [each for each in (self.tags_SW, self.stamps_SW, self.measures_SW) if each is not None]
        kept = [each[sets] for each in of_sets]
        counts = None if self.counts_R is None else self.counts_R[rows_U]
        admission = self.admit(rows_U, step=_NO_STEP)
        for each, before in zip(of_sets, kept, strict=True):
            each[sets] = before
        if self.counts_R is not None and counts is not None:
            self.counts_R[rows_U] = counts
        return admission.left[admission.left >= 0]

    @property
    def has_room(self) -> bool:
        """True if there are ways that are free or stale."""
        return bool(((self.tags_SW < 0) | (self.stamps_SW < NEVER)).any())

    def put(self, rows_N: Int64[Tensor, "N"]) -> Admission:
        """Give rows that are not held free ways, or those of stale rows.

        Args:
            rows_N: distinct rows that are not held. Their stamp is `NEVER`.
        """
        free = self.tags_SW < 0
        stale = self.stamps_SW < NEVER
        order = torch.arange(NUM_WAYS)
        # Free ways first, in order, below every key; then stale ones; `_LAST`: not to be had.
        keys_SW = torch.where(free, order - NUM_WAYS, torch.where(stale, order, _LAST))
        return self._take(rows_N, rows_N.sort().indices, keys_SW=keys_SW, stamp=NEVER)

    def refresh(self, places_N: Int64[Tensor, "N"]) -> None:
        """Make rows that are held and stale stay."""
        stamps = self.stamps_SW.view(-1)
        stamps[places_N] = stamp_of(stamps[places_N])

    def remember(self, rows_N: Int64[Tensor, "N"], counts_N: Int64[Tensor, "N"]) -> None:
        """Set the counts of rows, which LFU goes by; LRU counts nothing."""
        if self.counts_R is None:
            return
        self.counts_R[rows_N] = counts_N.to(torch.int32)
        places = self.find(rows_N)
        self._measure(places[places >= 0], rows_N[places >= 0])

    def age(self) -> None:
        """Make every row that is held stale: it goes for rows that are loaded; steps see no difference."""
        self.stamps_SW = torch.where(self.stamps_SW < NEVER, self.stamps_SW, ~self.stamps_SW)
        self._has_stale = True

    def _end_load(self) -> None:
        """Give rows that a load left stale their stamps back: steps order them as if there had been none."""
        if self._has_stale:
            self.stamps_SW = stamp_of(self.stamps_SW)
            self._has_stale = False

    def free(self, places_N: Int64[Tensor, "N"]) -> None:
        """Hold nothing in some places."""
        self.tags_SW.view(-1)[places_N] = -1
        self.stamps_SW.view(-1)[places_N] = NEVER

    def _replace(self, rows_U: Tensor, missing: Tensor, *, step: int, places: Tensor, left: Tensor) -> None:
        """Give the rows at some positions the ways of others, and write where they go and what left."""
        rows = rows_U[missing]
        # By number first: the order in which a step names its rows has no say.
        order = rows.sort().indices
        if self.counts_R is not None:
            order = order[self.counts_R[rows[order]].sort(stable=True, descending=True).indices]
        measures_SW = self.stamps_SW if self.measures_SW is None else self.measures_SW
        # (Stamp or count, row) as one number: rows of a set rise with their tags. + 1: above the keys of free ways.
        keys_SW = (measures_SW.to(torch.int64) + 1 << 32) + self.tags_SW
        keys_SW = torch.where(self.stamps_SW == step, _LAST, keys_SW)
        keys_SW = torch.where(self.tags_SW < 0, torch.arange(NUM_WAYS) - NUM_WAYS, keys_SW)
        taken = self._take(rows, order, keys_SW=keys_SW, stamp=step)
        places[missing], left[missing] = taken.places, taken.left

    def _take(self, rows: Tensor, order: Tensor, *, keys_SW: Tensor, stamp: int) -> Admission:
        """The i-th row of a set, in some order, takes the way with the i-th smallest key; none where it is `_LAST`."""
        # Stable: inside of a set the order stays.
        order = order[(rows[order] % self.num_sets).sort(stable=True).indices]
        sets = rows[order] % self.num_sets
        touched, counts = torch.unique_consecutive(sets, return_counts=True)
        index = torch.arange(len(touched)).repeat_interleave(counts)
        # Place of a row among those of its set that want a way.
        rank = torch.arange(len(sets)) - (counts.cumsum(0) - counts)[index]
        keys, ways = keys_SW[touched].sort(dim=1)
        # A rank beyond the ways has no key: it reads the last one, and `can` leaves it out.
        inside = rank.clamp(max=NUM_WAYS - 1)
        can = (rank < NUM_WAYS) & (keys[index, inside] != _LAST)
        chosen = sets * NUM_WAYS + ways[index, inside]
        # Read before tags are written below.
        gone = self.held_rows[chosen]
        if self.counts_R is not None and stamp > NEVER:
            # No row goes for one that was used less often; a load (`NEVER`) takes any stale one.
            can &= (gone < 0) | (self.counts_R[gone.clamp(min=0)] <= self.counts_R[rows[order]])
        places = torch.full_like(rows, -1)
        left = torch.full_like(rows, NO_WAY)
        places[order[can]], left[order[can]] = chosen[can], gone[can]
        self.tags_SW.view(-1)[chosen[can]] = (rows[order[can]] // self.num_sets).to(torch.int32)
        self.stamps_SW.view(-1)[chosen[can]] = stamp
        self._measure(chosen[can], rows[order[can]])
        return Admission.counted(places, left)

    def _measure(self, places: Tensor, rows: Tensor) -> None:
        """Write the counts of rows beside the places where they are held."""
        if self.counts_R is not None and self.measures_SW is not None:
            self.measures_SW.view(-1)[places] = self.counts_R[rows]


def stamp_of(stamps: Int32[Tensor, "*N"]) -> Int32[Tensor, "*N"]:
    """The steps that touched rows last, of those that are stale, too."""
    return torch.where(stamps < NEVER, ~stamps, stamps)
