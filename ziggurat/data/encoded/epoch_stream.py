"""EpochStream: the order of all rows in one epoch, as arithmetic: `buffer` and `sessions`, read whole by every rank.

A checkpoint must be able to say "epoch 3, step 1,207" and a new process, perhaps with another number of ranks, must
go on with exactly the rows that come next. So the order is no state that evolves; it is a pure function of
(row-group sizes, seed, epoch), and any position in it can be computed:

    row groups      0    1    2    3    4    5        sizes from the manifest
    permuted        4    1 │  5    0 │  3    2        by hash(seed, epoch); cut into windows of about buffer_rows
    rows in window   ≈≈≈≈≈ │  ≈≈≈≈≈≈ │  ≈≈≈≈≈         permuted by hash(seed, epoch, window)
    stream          0 ──────────────────────────► num_rows − 1
    global batches  |  W·B  |  W·B  |  W·B  | …       rank r takes rows r·B … (r+1)·B − 1 of each

The permutation sorts splitmix64 hashes of the positions. splitmix64 is a bijection and its definition never changes,
while numpy promises no fixed stream for `Generator.permutation`: an upgrade between two halves of an epoch would
train some rows twice and others never. Cost: about 25 ns a row, once a window.

`shuffle = sessions` permutes sessions in place of rows: neighbours of one session stay together, in their order, so
that a batch sees them side by side and what repeats in them is handled once. Their lengths are read before the rows are
(one column, which compresses to nothing where data is clustered by session), so the order stays a pure function of the
data. A session ends where a row group does. Rows of a session that lie apart in the files stay apart.

The shuffle of rows is as good as a full one if rows are in no order within the file, and otherwise mixes over
`buffer_rows` rows taken from row groups all over the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ziggurat.data.mixing import derive_seed, splitmix64


class Shuffle(StrEnum):
    """The order in which an epoch visits the rows."""

    AUTO = "auto"  # lanes, or buffer where a loss couples samples; a run that goes on keeps the order it began with
    LANES = "lanes"  # row groups permuted, rows permuted in lanes of a window; a rank reads its own row groups
    BUFFER = "buffer"  # row groups permuted, rows permuted in a window; every rank reads every row group
    SESSIONS = "sessions"  # the same with sessions in place of rows: rows of a session that are adjacent stay so
    SESSION_LANES = "session_lanes"  # lanes of sessions: adjacent rows of one stay so, but where a batch cuts a lane
    NONE = "none"  # as stored


@dataclass(frozen=True, slots=True)
class Window:
    """A run of the stream that is in memory as a whole.

    Args:
        index: number of the window in the epoch.
        groups: row groups it holds, in order.
        start: position in the stream of its first row.
        num_rows: rows it holds.
    """

    index: int
    groups: tuple[int, ...]
    start: int
    num_rows: int

    @property
    def end(self) -> int:
        """Position in the stream after its last row."""
        return self.start + self.num_rows


class EpochStream:
    """The order of one epoch.

    Args:
        group_sizes: rows of each row group, in the order of the data set.
        shuffle: `buffer` or `sessions`.
        buffer_rows: a window has about this many rows, at most one row group more.
        seed: of the run.
        epoch: number of the epoch.
        sessions: gives the lengths of the sessions of a row group, in their order; for `sessions`.
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        *,
        shuffle: Shuffle,
        buffer_rows: int,
        seed: int,
        epoch: int,
        sessions: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self._shuffle = shuffle
        self._sessions = sessions
        self._seed = derive_seed(seed, epoch)
        sizes = np.asarray(group_sizes, dtype=np.int64)
        order = hashed_permutation(len(sizes), seed=derive_seed(self._seed, 0))
        self.num_rows = int(sizes.sum())
        self.windows = _windows(sizes, order, buffer_rows)

    def order(self, window: Window) -> np.ndarray:
        """Return which row of the window (in file order of its groups) stands at each position in it: (n,) int64."""
        seed = derive_seed(self._seed, 1 + window.index)
        if self._shuffle is Shuffle.BUFFER:
            return hashed_permutation(window.num_rows, seed=seed)
        assert self._sessions is not None, "the loader gives them"
        lengths = np.concatenate([self._sessions(group) for group in window.groups])
        return in_blocks(lengths, hashed_permutation(len(lengths), seed=seed))


def _windows(sizes: np.ndarray, order: np.ndarray, buffer_rows: int) -> list[Window]:
    """Cut the row groups into windows of nearly equal size; a group belongs to the window that its middle falls in."""
    ends = np.cumsum(sizes[order])
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return []
    num_windows = -(-total // buffer_rows)
    middles = 2 * ends - sizes[order]  # twice the middle, in whole numbers
    belongs = np.minimum(middles * num_windows // (2 * total), num_windows - 1)
    windows: list[Window] = []
    start = 0
    for members in np.split(order, np.flatnonzero(np.diff(belongs)) + 1):
        num_rows = int(sizes[members].sum())
        if num_rows:
            windows.append(Window(len(windows), tuple(members.tolist()), start, num_rows))
        start += num_rows
    return windows


def in_blocks(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The rows of blocks of these lengths, the blocks in this order."""
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[order]
    ends = np.cumsum(lengths)
    return np.repeat(starts[order] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))


def hashed_permutation(count: int, *, seed: int) -> np.ndarray:
    """A permutation of 0 … count−1 that depends on (count, seed) alone, on every machine and numpy: (count,) int64.

    Sorts hashes of the positions. The low bits of each hash are replaced by its position, so one sort of plain
    numbers does it, and no two are equal.
    """
    positions = np.arange(count, dtype=np.uint64)
    low_bits = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    keys = splitmix64(positions + np.uint64(seed))  # different inputs modulo 2^64, and a bijection: no lost randomness
    keys &= ~low_bits
    keys |= positions
    keys.sort()
    keys &= low_bits
    return keys.view(np.int64)


@dataclass(frozen=True, slots=True)
class RankSlices:
    """Rows of a stream that one rank takes: from `first_row` on, every global batch is cut into `world_size` slices.

    Args:
        batch_size: rows a rank and step.
        rank: 0 … world_size−1.
        world_size: number of ranks.
        first_row: position in the stream at which the grid of global batches starts.
        num_rows: rows in the stream.
    """

    batch_size: int
    rank: int
    world_size: int
    first_row: int
    num_rows: int

    @property
    def num_steps(self) -> int:
        """Global batches from `first_row` to the end; the last may be partial."""
        return -(-max(self.num_rows - self.first_row, 0) // (self.batch_size * self.world_size))

    def batch_rows(self, step: int) -> int:
        """Rows of this rank in global batch `step` (0 is the one at `first_row`); may be 0 in the last."""
        left = self.num_rows - self.first_row - (step * self.world_size + self.rank) * self.batch_size
        return min(max(left, 0), self.batch_size)

    def rows_before(self, position: int) -> int:
        """Count the rows of this rank that stand before `position` in the stream."""
        global_batch = self.batch_size * self.world_size
        whole, rest = divmod(max(position - self.first_row, 0), global_batch)
        return whole * self.batch_size + min(max(rest - self.rank * self.batch_size, 0), self.batch_size)

    def positions(self, window: Window) -> np.ndarray | None:
        """This rank's positions within a window, rising; None if it takes all of them."""
        skipped = max(self.first_row - window.start, 0)
        if self.world_size == 1 and skipped == 0:
            return None
        inside = np.arange(skipped, window.num_rows)
        if self.world_size == 1:
            return inside
        # The grid of batches begins at first_row, wherever the window begins.
        owner = (inside + (window.start - self.first_row)) // self.batch_size % self.world_size
        return inside[owner == self.rank]
