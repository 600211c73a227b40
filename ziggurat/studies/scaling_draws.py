"""Bootstrap of a study of scaling: losses of all sizes as they could have been with other seeds and other test rows.

    a run's test rows ──► hashed into 64 blocks ──► sum of the losses of each block, number of rows of each
    a draw            =   64 of these blocks with replacement, the same ones for all runs of all models,
                          and as many seeds of each size as were run

Two things scatter a loss: which seed the run had, and which rows the test set happens to have. Rows are common to all
runs, so they are drawn once a draw for all of them: what they share cancels in a difference of two models. Blocks stand
in for rows, so that a study keeps 64 numbers a run and not one a row; rows are hashed into them, so blocks differ no
more than samples of rows do.

Three seeds say little about the scatter of one size. Their relative deviations are therefore put together over all
sizes of a model, each enlarged by √(n/(n−1)) because n deviations from their own mean are too small by that factor, and
the mean of n of them multiplies the loss of a size. Sizes are taken to scatter alike by that, in relative terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.mixing import splitmix64
from ziggurat.errors import DataError

NUM_BLOCKS = 64

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RunLosses:
    """The losses of one run's test rows.

    Args:
        sums: (blocks,) sum over the rows of each block.
        counts: (blocks,) rows of each block.
    """

    sums: _Floats
    counts: _Floats

    @property
    def mean(self) -> float:
        """Mean over all rows."""
        return float(self.sums.sum() / self.counts.sum())


def in_blocks(losses: _Floats, *, num_blocks: int = NUM_BLOCKS) -> RunLosses:
    """Sum the losses of rows by blocks, to which a hash of the row's number assigns them.

    Args:
        losses: (rows,) in the order of the test set.
        num_blocks: number of blocks.
    """
    block = (splitmix64(np.arange(losses.size, dtype=np.uint64)) % np.uint64(num_blocks)).astype(np.int64)
    sums = np.bincount(block, weights=losses, minlength=num_blocks).astype(np.float64)
    return RunLosses(sums=sums, counts=np.bincount(block, minlength=num_blocks).astype(np.float64))


def draw_blocks(num_blocks: int, *, draws: int, rng: np.random.Generator) -> _Floats:
    """Return (draws, blocks): how often each block is taken, out of as many as there are, with replacement."""
    return rng.multinomial(num_blocks, np.full(num_blocks, 1.0 / num_blocks), size=draws).astype(np.float64)


def draw_losses(sizes: Sequence[Sequence[RunLosses]], *, blocks: _Floats, rng: np.random.Generator) -> _Floats:
    """Return (draws, sizes): the mean loss of each size, with drawn rows and drawn seeds.

    Args:
        sizes: the runs of each size, one a seed.
        blocks: (draws, blocks) of `draw_blocks`, the same for all models of a study.
        rng: draws the seeds.

    Raises:
        DataError: a loss is not above 0, so that nothing of it is left to fall by a law.
    """
    levels = []
    deviations = []
    for runs in sizes:
        by_run = np.stack([(blocks @ run.sums) / np.maximum(blocks @ run.counts, 1.0) for run in runs])
        if not (by_run > 0).all() or not np.isfinite(by_run).all():
            raise DataError(
                expected="losses above 0 above the best that is reachable, all finite",
                found=f"{float(by_run.min()):g} … {float(by_run.max()):g}",
                where="bootstrap of a study of scaling",
                ways_out="leave out the size that diverged: fewer --points, or a lower learning rate",
            )
        logs = np.log(by_run)
        level = logs.mean(axis=0)
        levels.append(level)
        if len(runs) > 1:
            deviations.append((logs - level).mean(axis=1) * (len(runs) / (len(runs) - 1)) ** 0.5)
    drawn = np.stack(levels, axis=1)
    if deviations:
        pool = np.concatenate(deviations)
        for index, runs in enumerate(sizes):
            drawn[:, index] += rng.choice(pool, size=(len(blocks), len(runs))).mean(axis=1)
    return np.exp(drawn)


def mean_losses(sizes: Sequence[Sequence[RunLosses]]) -> _Floats:
    """Return (sizes,): the geometric mean over the seeds of each size, which is what draws scatter about."""
    return np.exp([np.mean(np.log([run.mean for run in runs])) for runs in sizes])
