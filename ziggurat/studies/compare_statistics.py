"""Is one model better than another? Differences over seeds, and over test rows.

Two things vary when a model is trained again: the seed, and which rows happened to be test rows. Both are asked:

**Over seeds.** Runs of two models with the same seed see the same order of rows, so their test AUCs are paired. With
differences d_1 … d_n, mean m and sample deviation s, Student's paired test takes t = m / (s/√n) with n−1 degrees of
freedom. Wilcoxon's signed ranks need no normal distribution, but five seeds can give no p below 2/2⁵ = 0.0625.

**Over rows** (DeLong, DeLong and Clarke-Pearson, Biometrics 1988). An AUC is a mean over pairs of a positive i and a
negative j of ψ(x_i, y_j) = 1, ½ or 0. With V_i the mean of ψ over all negatives and W_j over all positives, the
variance of an AUC is var(V)/m + var(W)/n, and of a difference that of the differences of V and of W. A mean of AUCs
over seeds is still such a mean of pairs, so V and W are averaged over seeds first. Cost: one sort a run.

The first says whether another seed would come out the same way, the second whether other test rows would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ziggurat.errors import DataError
from ziggurat.training.metrics.metric import OverRows, metric_of

# 16,384 ways to set the signs can all be tried; each further pair doubles them.
MAX_EXACT = 14


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """First minus second model, over paired runs.

    Args:
        mean: mean difference.
        sd: sample standard deviation of the differences; NaN for one pair.
        num_pairs: n.
        t_p: two-sided p of Student's paired test; NaN for one pair.
        wilcoxon_p: two-sided p of Wilcoxon's signed ranks, exact up to 14 pairs; NaN where it is not computed.
        rows_p: two-sided p of DeLong's test over test rows; NaN without scores.
        rows_error: standard error of the difference over test rows; NaN without scores.
    """

    mean: float
    sd: float
    num_pairs: int
    t_p: float
    wilcoxon_p: float
    rows_p: float = math.nan
    rows_error: float = math.nan


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Test the difference of two models over seeds; the i-th values belong together.

    Raises:
        DataError: different numbers of values, or none.
    """
    if len(first) != len(second) or not first:
        raise DataError(
            expected="as many values of one model as of the other, paired by seed",
            found=f"{len(first)} and {len(second)}",
            where="paired_difference",
            ways_out="compare the seeds that both models have",
        )
    # FP64: differences of two AUCs are small against either.
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    mean = float(differences.mean())
    sd = float(differences.std(ddof=1)) if differences.size > 1 else math.nan
    if sd > 0:
        # A named tuple of statistic and p, whose names scipy's own hints leave out.
        t_p = float(np.asarray(stats.ttest_1samp(differences, 0.0))[1])
    else:
        # Without spread there is no t: differences that are all alike, and not 0, are not taken for chance.
        t_p = 1.0 if mean == 0.0 else (0.0 if sd == 0.0 else math.nan)
    return PairedDifference(
        mean=mean, sd=sd, num_pairs=differences.size, t_p=t_p, wilcoxon_p=wilcoxon_p(differences.tolist())
    )


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed ranks over all 2ⁿ signs; zeros are left out. NaN for more than 14 pairs.

    scipy's table of exact p holds where no two differences are equal in size; over all signs it holds with ties, too.
    """
    values = np.asarray([value for value in differences if value != 0.0])
    if values.size > MAX_EXACT or len(differences) < 2:
        return math.nan
    if values.size < 2:  # one difference alone: both of its signs are as far from zero
        return 1.0
    all_signs: Any = stats.PermutationMethod(n_resamples=2**MAX_EXACT)  # scipy's own hints know text alone
    found: Any = stats.wilcoxon(values, method=all_signs)
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values of several tests, corrected so that all of them together err with the chance that one has.

    The smallest of m is multiplied by m, the next one by m − 1 and so on, and none is below one that was smaller.

    Args:
        p_values: of one family of tests, in any order.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for num_smaller, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - num_smaller) * p_values[index]))
        corrected[index] = largest
    return corrected


@dataclass(frozen=True, kw_only=True)
class Placements:
    """DeLong's structural components of one model, averaged over its runs.

    Args:
        positives: (m,) V: for each positive the share of negatives below it.
        negatives: (n,) W: for each negative the share of positives above it.
    """

    positives: NDArray[np.float64]
    negatives: NDArray[np.float64]

    @property
    def auc(self) -> float:
        """The mean AUC of the runs."""
        return float(self.positives.mean())


def placements(scores: Sequence[NDArray[np.floating]], labels: NDArray[np.floating]) -> Placements:
    """Components of one model's runs on the same test rows.

    Args:
        scores: (rows,) of each run.
        labels: (rows,) 0 or 1.

    Raises:
        DataError: lengths differ, or only one class is there.
    """
    positive = np.asarray(labels) > 0.5
    num_positives = int(positive.sum())
    num_negatives = int((~positive).sum())
    if any(len(each) != positive.size for each in scores) or not scores or not num_positives or not num_negatives:
        raise DataError(
            expected="scores of every run for the same rows, of both classes",
            found=f"{[len(each) for each in scores]} scores, {num_positives} positives, {num_negatives} negatives",
            where="placements",
            ways_out="evaluate all runs on the same test data",
        )
    above = np.zeros(num_positives)
    below = np.zeros(num_negatives)
    for each in scores:
        # The rank among all rows less the rank within the class counts the other class below, ties as a half.
        ranks = stats.rankdata(np.asarray(each))
        above += (ranks[positive] - stats.rankdata(np.asarray(each)[positive])) / num_negatives
        below += 1.0 - (ranks[~positive] - stats.rankdata(np.asarray(each)[~positive])) / num_positives
    return Placements(positives=above / len(scores), negatives=below / len(scores))


def squared_errors(scores: Sequence[NDArray[np.floating]], labels: NDArray[np.floating]) -> NDArray[np.float64]:
    """(rows,) squared errors of one model's runs on the same test rows, averaged over the runs."""
    return np.mean([(np.asarray(each, dtype=np.float64) - labels) ** 2 for each in scores], axis=0)


def mean_difference(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, float, float]:
    """Difference of two means over the same rows, its standard error, and the two-sided p of the normal test."""
    differences = first - second
    difference = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(differences.size) if differences.size > 1 else math.nan
    if not error > 0.0:
        return difference, error, 1.0 if difference == 0.0 else (0.0 if error == 0.0 else math.nan)
    return difference, error, math.erfc(abs(difference) / error / math.sqrt(2.0))


def delong(first: Placements, second: Placements) -> tuple[float, float, float]:
    """Difference of two mean AUCs on the same rows, its standard error, and the two-sided p."""
    over_positives = first.positives - second.positives
    over_negatives = first.negatives - second.negatives
    difference = float(over_positives.mean())
    variance = over_positives.var(ddof=1) / over_positives.size + over_negatives.var(ddof=1) / over_negatives.size
    error = math.sqrt(float(variance))
    if error == 0.0:
        return difference, error, 1.0 if difference == 0.0 else 0.0
    return difference, error, math.erfc(abs(difference) / error / math.sqrt(2.0))


@dataclass(frozen=True, kw_only=True)
class RowTest:
    """A test of two models on the same rows.

    Args:
        title: heading of its p.
        parts: what it takes of one model: scores of each run, and labels.
        compare: difference of two models, its standard error, and the two-sided p.
    """

    title: str
    parts: Callable[[Sequence[NDArray[np.floating]], NDArray[np.floating]], Any]
    compare: Callable[[Any, Any], tuple[float, float, float]]


_ROW_TESTS = {
    OverRows.PLACEMENTS: RowTest(title="DeLong over rows, p", parts=placements, compare=delong),
    OverRows.SQUARED_ERRORS: RowTest(
        title="squared errors over rows, p", parts=squared_errors, compare=mean_difference
    ),
}


def row_test_of(name: str) -> RowTest | None:
    """Return the test over rows of a metric; None where there is none, so that it is compared over seeds alone.

    Args:
        name: as an evaluation has it, with or without `/label`.
    """
    metric = metric_of(name)
    return None if metric is None else _ROW_TESTS.get(metric.over_rows)
