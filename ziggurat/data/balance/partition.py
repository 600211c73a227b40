"""Partition: which rank trains which sample of a global batch, from what each one costs.

A step is as slow as its slowest rank. Histories differ a hundredfold in length, so ranks that take samples as they come
wait for each other a quarter of the time and more. Time order forbids to sort the data by length, but within one
global batch any rank may have any sample: the step is the same. Three ways to deal (Feng et al., "FreeScale", arXiv
2604.24073, Algorithm 1):

    zigzag           largest first, there and back: rank i gets places i, 2R−1−i, 2R+i, …   equal numbers of samples
    variable         stream order, cut into R pieces of nearly equal cost                  any numbers of samples
    karmarkar_karp   by differencing (`ops/karmarkar_karp.py`)                             equal numbers of samples

                     cost of samples 9 1 1 1 | 5 5 1 1, two ranks        loads
    as they come     [9 1 1 1] [5 5 1 1]                                 12 12
    zigzag           9 5 5 1 1 1 1 1  →  [9 1 1 1] [5 5 1 1]             12 12

All are pure functions of the costs, so every rank finds the same plan and nobody needs to be told. Numbers of samples
differ by one at most in the first and last; `variable` needs a loss that is divided by the global weight, as ours is.

`variable` cuts so that the largest piece is as small as a cut in stream order allows. Its shares say how much of the
work each rank is to have: `corrected_shares` moves them from what ranks took to what all took on average, so that a
rank that computes slowly gets less (the paper's AutoTune). They are given, never measured on the way: a run that is
resumed must deal as before.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from ziggurat.errors import DataError
from ziggurat.ops.karmarkar_karp import karmarkar_karp

_HALVINGS = 40


class Balance(StrEnum):
    """Ways to deal the samples of a step to ranks."""

    NONE = "none"  # as they come: equal numbers of samples
    ZIGZAG = "zigzag"  # largest first, there and back; equal numbers
    VARIABLE = "variable"  # pieces of the stream of equal cost; any numbers
    KARMARKAR_KARP = "karmarkar_karp"  # by differencing; equal numbers, nearest to equal cost


def partition(
    costs: np.ndarray, *, balance: Balance, num_ranks: int, shares: Sequence[float] | None = None
) -> np.ndarray:
    """The rank of each sample of a global batch; pure and deterministic.

    Args:
        costs: (n,) of the samples in stream order, in any unit.
        balance: how to deal; NONE cuts into pieces of equal numbers.
        num_ranks: R.
        shares: how much of the cost each rank is to have, in any unit; for `variable`. None: all the same.

    Returns:
        (n,) int32.

    Raises:
        DataError: a cost is negative or not finite.
    """
    costs = np.asarray(costs, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        raise DataError(
            expected="costs of samples that are finite and not negative",
            found=f"{costs[bad[0]]} for sample {bad[0]}",
            where="balance",
            ways_out="check the lengths, and the coefficients of the cost of a sample",
        )
    match balance:
        case Balance.NONE:
            return _pieces(len(costs), [len(costs) * (rank + 1) // num_ranks for rank in range(num_ranks)])
        case Balance.ZIGZAG:
            return zigzag(costs, num_ranks=num_ranks)
        case Balance.VARIABLE:
            return variable(costs, num_ranks=num_ranks, shares=shares)
        case Balance.KARMARKAR_KARP:
            return karmarkar_karp(costs, num_parts=num_ranks)


def zigzag(costs: np.ndarray, *, num_ranks: int) -> np.ndarray:
    """Largest first, to ranks 0 … R−1, then R−1 … 0, and so on."""
    # Stable, so that every rank orders samples of equal cost alike.
    order = np.argsort(-costs, kind="stable")
    turn, place = np.divmod(np.arange(len(costs)), num_ranks)
    ranks = np.empty(len(costs), dtype=np.int32)
    ranks[order] = np.where(turn % 2 == 0, place, num_ranks - 1 - place)
    return ranks


def variable(costs: np.ndarray, *, num_ranks: int, shares: Sequence[float] | None = None) -> np.ndarray:
    """Pieces of the stream, the dearest (for its share) as cheap as can be."""
    wanted = np.full(num_ranks, 1.0 / num_ranks) if shares is None else np.asarray(shares, dtype=np.float64)
    wanted = (wanted / wanted.sum()).tolist()
    ends = np.cumsum(costs).tolist()
    if not ends or not ends[-1]:  # nothing costs anything
        return partition(costs, balance=Balance.NONE, num_ranks=num_ranks)
    # `high` always fits, with room for rounding: a rank takes all that is left
    low = 0.0
    high = ends[-1] / max(min(wanted), 1e-9) * (1 + 1e-9)
    best = _cuts(ends, high, wanted)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        cuts = _cuts(ends, middle, wanted)
        if cuts[-1] == len(ends):
            best = cuts
            high = middle
        else:
            low = middle
    return _pieces(len(ends), best)


def corrected_shares(shares: Sequence[float], *, seconds: Sequence[float], rate: float = 0.5) -> tuple[float, ...]:
    """Shares that bring the time of each rank nearer to that of all.

    Args:
        shares: as dealt.
        seconds: what each rank computed for, with these shares.
        rate: 1 corrects at once what was measured, smaller values believe less of it.

    Returns:
        share · (mean seconds / seconds of the rank)^rate, adding up to 1. A rank without time keeps its share.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    factors = np.where(measured > 0, measured.mean() / np.maximum(measured, 1e-12), 1.0) ** rate
    corrected = np.asarray(shares, dtype=np.float64) * factors
    return tuple((corrected / corrected.sum()).tolist())


def straggler_share(loads: np.ndarray) -> float:
    """Share of the ranks' time that is spent waiting for the slowest: 1 − mean / max.

    Args:
        loads: (R,) what each rank has to do in a step; or (steps, R), whose steps are added up.
    """
    loads = np.atleast_2d(loads)
    slowest = float(loads.max(axis=1).sum()) if loads.size else 0.0
    return 1.0 - float(loads.mean(axis=1).sum()) / slowest if slowest > 0 else 0.0


def loads_of(costs: np.ndarray, ranks: np.ndarray, *, num_ranks: int) -> np.ndarray:
    """(R,) the cost that each rank got."""
    return np.bincount(ranks, weights=costs, minlength=num_ranks)


def _cuts(ends: list[float], bound: float, shares: list[float]) -> list[int]:
    """Return where each rank ends, if each takes whole samples up to its share of the bound."""
    cuts = []
    done = 0
    cost = 0.0
    for share in shares:
        done = bisect.bisect_right(ends, cost + bound * share, lo=done)
        cost = ends[done - 1] if done else 0.0
        cuts.append(done)
    return cuts


def _pieces(num_samples: int, ends: Sequence[int]) -> np.ndarray:
    ranks = np.empty(num_samples, dtype=np.int32)
    for rank, (first, last) in enumerate(itertools.pairwise([0, *ends])):
        ranks[first:last] = rank
    return ranks
