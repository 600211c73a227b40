"""LaneOrder: a shuffle in which every rank reads its own row groups, and the stream of rows is the same for all ranks.

Problem: where a window is one permutation of its rows, the slice of a rank holds rows of every row group, so every rank
decodes everything. Order and ranks must not depend on each other either: a run goes on with another number of ranks.

Idea: cut the window into 64 lanes of equal length (a lane is a piece of a row group), permute each, and deal the stream
round the lanes, in an order of its own. Any stretch of the stream then holds as many rows of one lane as of another, so
ranks can divide each global batch by lanes:

    window        ├ group 4 ──┼ group 1 ──┼ group 5 ──┼ group 0 ──┤      row groups permuted by hash(seed, epoch)
    lanes           0   1   2   3   4   5   6   7   8   9  10  11        each permuted by its own hash
    stream        lane 4, 9, 1, … 0, 4, 9, 1, … 0, 4, 9, …               rounds over all lanes
    global batch  ├── rows of all lanes, equally many of each ──┤
    rank 0          ^   ^   ^                                            sorted by lane, and cut into equal slices:
    rank 1                      ^   ^   ^                                rank r reads two or three of the row groups

A slice ends within a lane where ranks do not divide 64; then two ranks read that lane. Where a global batch crosses
windows, its part in each is divided. So each rank has exactly `batch_size` rows of every step (of a partial last one,
equally many but for one), the rows of a step are the same for any number of ranks, and every position can be computed.

Quality: a row stands anywhere in its window with equal chance, as in a permutation of the whole window, and batches
are closer to the window's mixture (stratified sampling: the variance of a batch's mean is at most that of drawing
without regard to lanes; Cochran, "Sampling techniques", 1977, chapter 5). What is coarser: the rows that *one of many
ranks* has in a batch come from its own row groups.

Sessions in place of rows (`shuffle = session_lanes`): a lane permutes its sessions, whose rows stay together in their
order; there are 32 lanes, because a batch takes a stretch of each, and cuts a session at its ends. Their lengths come
from the session column of the rank's own row groups.

The order is frozen: checkpoints of runs rely on it. A change of any number here needs another member of `Shuffle`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from ziggurat.data.encoded.epoch_stream import RankSlices, hashed_permutation, in_blocks
from ziggurat.data.encoded.orders import Part, RankWindow
from ziggurat.data.mixing import derive_seed

NUM_LANES = 64
NUM_SESSION_LANES = 32  # longer stretches of each lane in a batch, so fewer sessions are cut
MIN_LANE_ROWS = 64  # a small window has fewer lanes: a lane of a few rows is hardly permuted


Sessions = Callable[[int], np.ndarray]


class LaneOrder:
    """The rows of one rank in an epoch whose windows are cut into lanes.

    Args:
        group_sizes: rows of each row group.
        slices: of the rank.
        buffer_rows: a window has about this many rows.
        seed: of the run.
        epoch: number of the epoch.
        sessions: gives the lengths of the sessions of a row group, in their order: then they are permuted, not rows.
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        *,
        slices: RankSlices,
        buffer_rows: int,
        seed: int,
        epoch: int,
        sessions: Sessions | None = None,
    ) -> None:
        self._slices = slices
        self.num_steps = slices.num_steps
        seed = derive_seed(seed, epoch)
        sizes = np.asarray(group_sizes, dtype=np.int64)
        # Number 0 is the order of the row groups, windows count from 1: no two draws share a seed.
        groups = hashed_permutation(len(sizes), seed=derive_seed(seed, 0))
        self._lanes: list[_WindowLanes] = []
        start = 0
        for index, members in enumerate(_windows(sizes, groups, buffer_rows)):
            end = start + int(sizes[members].sum())
            # Windows before the first row are left out but counted: no seed may depend on where a run goes on.
            if end > slices.first_row:
                window_seed = derive_seed(seed, 1 + index)
                lanes = _WindowLanes(members, sizes[members], start=start, seed=window_seed, sessions=sessions)
                self._lanes.append(lanes)
            start = end
        self._ends = np.array([lanes.end for lanes in self._lanes], dtype=np.int64)
        self._stretches = functools.lru_cache(maxsize=2)(self._stretches_of)
        self._held = [self._lanes_held(number) for number in range(len(self._lanes))]
        self.windows = [lanes.rank_window(*held) for lanes, held in zip(self._lanes, self._held, strict=True)]

    def runs(self, step: int) -> Int64[np.ndarray, "K 3"]:
        """Return the runs of rows that the rank takes in a step."""
        found: list[np.ndarray] = []
        for stretch in self._stretches(step):
            lanes = self._lanes[stretch.window]
            number = stretch.window
            runs = lanes.runs(stretch)
            runs[:, 1] -= lanes.borders[self._held[number][0]]
            runs[:, 0] = number
            found.append(runs)
        return np.concatenate(found) if found else np.empty((0, 3), dtype=np.int64)

    def _stretches_of(self, step: int) -> list[_Stretch]:
        """The parts of a step's global batch in each window of which the rank takes rows."""
        slices = self._slices
        size = slices.batch_size * slices.world_size
        first = slices.first_row + step * size
        last = min(first + size, slices.num_rows)
        # Every rank takes the same share of the step, but for the rounding of a step that is not whole.
        quotas = even_cuts(last - first, np.arange(slices.world_size + 1))
        number = int(np.searchsorted(self._ends, first, side="right"))
        found: list[_Stretch] = []
        while first < last:
            end = min(last, self._lanes[number].end)
            cuts = even_cuts(end - first, quotas)
            low, high = cuts[slices.rank : slices.rank + 2].tolist()
            if low < high:
                found.append(_Stretch(number, first, end, low, high))
            # A rank takes from the next window what this one did not give it.
            quotas = quotas - cuts
            first = end
            number = number + 1
        return found

    def _lanes_held(self, number: int) -> tuple[int, int]:
        """The lanes of a window that the rank takes rows from, as a range."""
        slices = self._slices
        lanes = self._lanes[number]
        if slices.world_size == 1:
            return 0, lanes.num
        size = slices.batch_size * slices.world_size
        first = max(lanes.start - slices.first_row, 0) // size
        last = (lanes.end - 1 - slices.first_row) // size
        begins = slices.first_row + np.arange(first, last + 1) * size
        # Steps that lie within the window are divided alike and computed at once; the first and the last may cross it.
        begins = begins[(begins >= lanes.start) & (begins + size <= lanes.end)]
        begin = slices.rank * slices.batch_size
        ranges = lanes.held(begins, size, begin=begin, end=begin + slices.batch_size) if len(begins) else []
        for step in {first, last}:  # those that cross windows
            for each in self._stretches(step):
                if each.window == number:
                    here = np.array([each.first])
                    ranges += lanes.held(here, each.last - each.first, begin=each.begin, end=each.end)
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0, 0)


def even_cuts(rows: int, quotas: Int64[np.ndarray, " W+1"]) -> Int64[np.ndarray, " W+1"]:
    """Say where to cut rows for ranks, in proportion to what each still takes: quotas summed up, at most `rows` in all.

    Rounded down at each cut, so cuts rise, the last is `rows`, and no rank gets more than it takes.
    """
    return rows * quotas // max(int(quotas[-1]), 1)


def _windows(sizes: np.ndarray, order: np.ndarray, buffer_rows: int) -> list[np.ndarray]:
    """Row groups of each window: as many as come closest to `buffer_rows`, in numbers that ranks divide well."""
    order = order[sizes[order] > 0]
    if not len(order):
        return []
    largest = int(sizes.max())
    wanted = max(1, (2 * buffer_rows + largest) // (2 * largest))
    unit = 1 << max(0, wanted.bit_length() - 3)  # 3 significant bits: 15 row groups become 16, 45 become 48
    target = (2 * wanted + unit) // (2 * unit) * unit * largest
    ends = np.cumsum(sizes[order])
    cuts = [0]
    while cuts[-1] < len(order):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + target, side="right"))))
    if len(cuts) > 2 and 2 * (int(ends[-1]) - int(ends[cuts[-2] - 1])) < target:  # share out a short last window
        cuts[-2] = (cuts[-3] + cuts[-1] + 1) // 2
    return [order[begin:end] for begin, end in itertools.pairwise(cuts)]


class _Stretch(NamedTuple):
    """Rows `begin` to `end`, sorted by lane, of positions `first` to `last` of an epoch, all in one window."""

    window: int
    first: int
    last: int
    begin: int
    end: int


class _WindowLanes:
    """The lanes of one window: which rows of the stream are in which."""

    def __init__(
        self, groups: np.ndarray, sizes: np.ndarray, *, start: int, seed: int, sessions: Sessions | None = None
    ) -> None:
        self._groups = groups
        self._group_ends = np.cumsum(sizes)
        self._seed = seed
        self._sessions = sessions
        num_rows = int(sizes.sum())
        self.start = start
        self.end = start + num_rows
        most = NUM_LANES if sessions is None else NUM_SESSION_LANES
        self.num = min(most, max(num_rows // MIN_LANE_ROWS, 1))
        # Lanes draw with the seeds 0 to num − 1, so the order of dealing takes the next one.
        dealt = hashed_permutation(self.num, seed=derive_seed(seed, self.num))
        self._numbers = np.arange(self.num + 1)
        # Of the first m lanes of a round, how many are below lane v: (lanes, lanes + 1).
        self._in_round = np.zeros((self.num, self.num + 1), dtype=np.int64)
        self._in_round[1:] = np.cumsum(dealt[:-1, None] < self._numbers, axis=0)
        whole, longer = divmod(num_rows, self.num)
        self.borders = self._numbers * whole + self._in_round[longer]  # lanes that are dealt first may be longer by one

    def _rows_before(self, positions: np.ndarray) -> Int64[np.ndarray, "P L+1"]:
        """Count the rows of the window before each position of the epoch that are in lanes below each lane."""
        # Rows are dealt round by round, one to each lane: whole rounds are the same for all lanes.
        rounds, rest = np.divmod(positions[:, None] - self.start, self.num)
        return rounds * self._numbers + self._in_round[rest[:, 0]]

    def runs(self, stretch: _Stretch) -> Int64[np.ndarray, "K 3"]:
        """Rows of a stretch: anything, first row among the lanes, number of rows."""
        before, after = self._rows_before(np.array([stretch.first, stretch.last]))
        ends = after - before
        lows = np.maximum(ends[:-1], stretch.begin)
        highs = np.minimum(ends[1:], stretch.end)
        taken = np.flatnonzero(lows < highs)
        firsts = self.borders[taken] + np.diff(before)[taken] + lows[taken] - ends[taken]
        return np.stack([taken, firsts, highs[taken] - lows[taken]], axis=1)

    def held(self, firsts: np.ndarray, size: int, *, begin: int, end: int) -> list[tuple[int, int]]:
        """The range of lanes that rows `begin` to `end` of stretches of `size` rows from `firsts` on are in."""
        ends = self._rows_before(firsts + size) - self._rows_before(firsts)
        return [(int((ends[:, 1:] <= begin).sum(axis=1).min()), int((ends[:, :-1] < end).sum(axis=1).max()))]

    def rank_window(self, first_lane: int, last_lane: int) -> RankWindow:
        """Return what a rank that holds these lanes stores: the lanes one after the other, each permuted."""
        low, high = int(self.borders[first_lane]), int(self.borders[last_lane])
        parts: list[Part] = []
        firsts: list[int] = []
        for group, end, size in zip(
            self._groups.tolist(), self._group_ends.tolist(), np.diff(self._group_ends, prepend=0).tolist(), strict=True
        ):
            # A row group may lie in lanes of several ranks: each stores its own part of it.
            begin = max(low, end - size)
            if begin < min(high, end):
                parts.append(Part(group, begin - (end - size), min(high, end) - begin))
                firsts.append(begin)

        def places(part: int) -> np.ndarray:
            return self._places(firsts[part], firsts[part] + parts[part].num_rows) - np.int32(low)

        return RankWindow(start=self.start, end=self.end, num_rows=high - low, parts=tuple(parts), places=places)

    def _places(self, first: int, last: int) -> Int32[np.ndarray, " N"]:
        """Return where rows of the window, in the order of its row groups, are stored among its lanes."""
        found = np.empty(last - first, dtype=np.int32)
        lane = int(np.searchsorted(self.borders, first, side="right")) - 1
        while self.borders[lane] < last:
            begin = int(self.borders[lane])
            end = int(self.borders[lane + 1])
            # Each lane draws by itself, so that a rank computes the order of its own lanes alone.
            order = self._order(begin, end, seed=derive_seed(self._seed, lane))
            low = max(begin, first)
            high = min(end, last)
            found[low - first : high - first] = order[low - begin : high - begin] + begin
            lane += 1
            if lane == self.num:
                break
        return found

    def _order(self, begin: int, end: int, *, seed: int) -> np.ndarray:
        """Return where each row of a lane is stored in it; sessions in one piece, where sessions are permuted."""
        if self._sessions is None:
            return hashed_permutation(end - begin, seed=seed)
        lengths = self._lengths(begin, end)
        rows = in_blocks(lengths, hashed_permutation(len(lengths), seed=seed))
        places = np.empty(end - begin, dtype=np.int64)
        places[rows] = np.arange(end - begin)
        return places

    def _lengths(self, begin: int, end: int) -> np.ndarray:
        """Lengths of the sessions between two rows of the window; those that lie across a border are cut there."""
        assert self._sessions is not None
        borders = [np.array([begin])]
        firsts = self._group_ends - np.diff(self._group_ends, prepend=0)
        for group, first, last in zip(self._groups.tolist(), firsts.tolist(), self._group_ends.tolist(), strict=True):
            if first < end and begin < last:
                ends = first + np.cumsum(self._sessions(group))
                borders.append(ends[(ends > begin) & (ends < end)])
        return np.diff(np.concatenate([*borders, [end]]))
