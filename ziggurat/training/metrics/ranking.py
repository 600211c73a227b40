"""Ranking metrics by group: of the samples of one user (or request), do the positives come first?

With the samples of a group in the order of falling scores, y the labels 0 or 1 and P the group's positives:

    ndcg@k     Σ_{i≤k} y_i / log₂(i+1)  /  Σ_{i≤min(P,k)} 1 / log₂(i+1)         (Järvelin and Kekäläinen, 2002)
    recall@k   Σ_{i≤k} y_i / P
    mrr        1 / rank of the first positive

each averaged over the groups that have a positive, all groups alike; NaN without one. Sample weights do not count,
except that an evaluation leaves out samples of weight 0. It also leaves out rows whose group is missing, as GAUC does:
they belong to nobody, and are not one user with a long list.

Ties take no side: samples of one score share the places they fill, so each counts with the average of their discounts
(as in scikit-learn's `ndcg_score`), and the rank of the first positive among n tied samples with p positives is its
expected one, places before + (n+1)/(p+1).

Cost: one sort.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ziggurat.errors import ConfigError, DataError
from ziggurat.training.metrics.scored_samples import ScoreScale, check_labels, check_scores

DEFAULT_RANKING_K = 10


def check_places(k: int) -> None:
    """Refuse fewer than one place.

    Raises:
        ConfigError: k is not positive.
    """
    if k < 1:
        raise ConfigError(expected="at least one place", found=str(k), where="ranking metrics, k", ways_out="k = 10")


def ranking_metrics(
    scores: ArrayLike, labels: ArrayLike, groups: ArrayLike, *, k: int = DEFAULT_RANKING_K
) -> dict[str, float]:
    """`ndcg@k`, `recall@k` and `mrr`; see the module.

    Args:
        scores: (n,) finite numbers, higher for positives.
        labels: (n,) 0, 1, or NaN where it is missing.
        groups: (n,) integers.
        k: places that count.

    Raises:
        DataError: shapes differ, or a label is neither 0 nor 1.
        NumericsError: a score is NaN or infinite.
        ConfigError: k is not positive.
    """
    s = np.asarray(scores, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    g = np.asarray(groups)
    if not s.shape == y.shape == g.shape == (s.size,):
        raise DataError(
            expected="a score, a label and a group for each sample",
            found=f"shapes {s.shape}, {y.shape} and {g.shape}",
            where="ranking metrics",
            ways_out="pass arrays of one length",
        )
    check_scores(s, scale=ScoreScale.ANY, where="ranking metrics")
    check_labels(y, where="ranking metrics")
    check_places(k)
    names = (f"ndcg@{k}", f"recall@{k}", "mrr")
    is_known = ~np.isnan(y)
    s = s[is_known]
    y = y[is_known]
    g = g[is_known]
    if not s.size:
        return dict.fromkeys(names, math.nan)
    order = np.lexsort((-s, g))
    s = s[order]
    y = y[order]
    g = g[order]
    group_starts = np.flatnonzero(np.r_[True, g[1:] != g[:-1]])
    run_starts = np.flatnonzero(np.r_[True, (g[1:] != g[:-1]) | (s[1:] != s[:-1])])
    group_of_run = np.searchsorted(group_starts, run_starts, side="right") - 1
    length = np.diff(np.r_[run_starts, s.size])
    first = run_starts - group_starts[group_of_run]  # places before the run in its group
    positives = np.add.reduceat(y, run_starts)
    discounts = np.r_[0.0, np.cumsum(1.0 / np.log2(np.arange(2, k + 2)))]
    begin = np.minimum(first, k)
    end = np.minimum(first + length, k)
    share = positives / length
    num_groups = group_starts.size
    gain = _sums(share * (discounts[end] - discounts[begin]), group_of_run, num_groups)
    hits = _sums(share * (end - begin), group_of_run, num_groups)
    total = _sums(positives, group_of_run, num_groups)
    has = total > 0
    if not has.any():
        return dict.fromkeys(names, math.nan)
    best = discounts[np.minimum(total[has], k).astype(int)]
    runs = np.flatnonzero(positives > 0)
    runs = runs[np.r_[True, np.diff(group_of_run[runs]) != 0]]  # the first with a positive of each group
    ranks = first[runs] + (length[runs] + 1.0) / (positives[runs] + 1.0)
    values = (gain[has] / best, hits[has] / total[has], 1.0 / ranks)
    return {name: float(each.mean()) for name, each in zip(names, values, strict=True)}


def _sums(values: NDArray[np.float64], groups: NDArray[np.int64], num_groups: int) -> NDArray[np.float64]:
    return np.bincount(groups, weights=values, minlength=num_groups).astype(np.float64)
