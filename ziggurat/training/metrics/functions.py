"""Metrics of one label as functions of scores and labels. What each means: see accumulator.py."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.features.tasks import OF_NUMBERS
from ziggurat.training.metrics.scored_samples import FloatArray, ScoredSamples, ScoreScale, scored_samples

Values = Tensor | ArrayLike


def auc(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Area under the ROC curve.

    Args:
        scores: (n,) finite numbers, higher for positives.
        labels: (n,) 0 or 1; NaN leaves the sample out.
        weights: (n,) or None.

    Returns:
        0 … 1; NaN unless both classes have weight.

    Raises:
        NumericsError: a score is NaN or infinite.
        DataError: a label or weight is impossible.
    """
    return auc_of(scored_samples(scores, labels, weights, scale=ScoreScale.ANY))


def grouped_auc(scores: Values, labels: Values, groups: Values, weights: Values | None = None) -> float:
    """Compute GAUC: the AUC within each group, averaged with the groups' weights.

    Args:
        scores: (n,) finite numbers.
        labels: (n,) 0 or 1; NaN leaves the sample out.
        groups: (n,) integers.
        weights: (n,) or None.

    Returns:
        0 … 1; NaN if no group has both classes.

    Raises:
        NumericsError: a score is NaN or infinite.
        DataError: a label or weight is impossible, or groups have another length.
    """
    group_array = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    label_array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels, dtype=np.float64)
    if group_array.shape != label_array.shape:
        raise DataError(
            expected=f"one group for each of {label_array.size} labels",
            found=f"shape {group_array.shape}",
            where="grouped_auc",
            ways_out="pass groups of the same length",
        )
    samples = scored_samples(scores, labels, weights, scale=ScoreScale.ANY)
    return grouped_auc_of(samples, groups=group_array[~np.isnan(label_array)])


def log_loss(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Mean negative log-likelihood in nats; NaN without samples. Scores are probabilities."""
    return log_loss_of(scored_samples(scores, labels, weights))


def normalised_entropy(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Log loss relative to predicting the share of positives; NaN with one class only. Below 1 is better than that."""
    return normalised_entropy_of(scored_samples(scores, labels, weights))


def calibration(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Expected over observed positives, Σ w p / Σ w y; NaN without positives."""
    return calibration_of(scored_samples(scores, labels, weights))


def accuracy(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Share of samples where (p ≥ 0.5) = y; NaN without samples."""
    return accuracy_of(scored_samples(scores, labels, weights))


def rmse(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Root of the mean squared error; NaN without samples."""
    return rmse_of(scored_samples(scores, labels, weights, task=OF_NUMBERS, scale=ScoreScale.ANY))


def mae(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Compute the mean absolute error; NaN without samples."""
    return mae_of(scored_samples(scores, labels, weights, task=OF_NUMBERS, scale=ScoreScale.ANY))


def r2(scores: Values, labels: Values, weights: Values | None = None) -> float:
    """Compute the share of the labels' variance that is explained; NaN where they are all equal."""
    return r2_of(scored_samples(scores, labels, weights, task=OF_NUMBERS, scale=ScoreScale.ANY))


def auc_of(samples: ScoredSamples) -> float:
    """AUC of checked samples."""
    wins, positives, negatives = _group_wins(samples, groups=None)
    return float(wins[0] / (positives[0] * negatives[0])) if wins.size and positives[0] * negatives[0] > 0 else math.nan


def grouped_auc_of(samples: ScoredSamples, *, groups: NDArray[np.integer]) -> float:
    """GAUC of checked samples; `groups` has their length."""
    wins, positives, negatives = _group_wins(samples, groups=groups)
    both = (positives > 0) & (negatives > 0)
    if not both.any():
        return math.nan
    auc_g = wins[both] / (positives[both] * negatives[both])
    return float(np.average(auc_g, weights=(positives + negatives)[both]))


def log_loss_of(samples: ScoredSamples) -> float:
    """Log loss of checked samples."""
    return _mean(samples, sample_losses(samples.scores, samples.labels, epsilon=samples.epsilon))


def sample_losses(scores: FloatArray, labels: FloatArray, *, epsilon: float) -> FloatArray:
    """Log loss of each sample in nats; scores are at least `epsilon` away from 0 and 1."""
    clipped = np.clip(scores, epsilon, 1.0 - epsilon)
    return -np.log(np.where(labels == 1.0, clipped, 1.0 - clipped))


def normalised_entropy_of(samples: ScoredSamples) -> float:
    """Normalised entropy of checked samples."""
    positives = float(samples.weights @ samples.labels)
    negatives = float(samples.weights @ (1.0 - samples.labels))
    if not (positives > 0.0 and negatives > 0.0):  # of these two, not of their share: that is rounded
        return math.nan
    weight = positives + negatives
    shares = (positives / weight, negatives / weight)
    return log_loss_of(samples) / -sum(share * math.log(share) for share in shares)


def calibration_of(samples: ScoredSamples) -> float:
    """Calibration of checked samples."""
    observed = float(samples.weights @ samples.labels)
    return float(samples.weights @ samples.scores) / observed if observed > 0.0 else math.nan


def accuracy_of(samples: ScoredSamples) -> float:
    """Accuracy of checked samples."""
    return _mean(samples, (samples.scores >= 0.5) == (samples.labels == 1.0))


def rmse_of(samples: ScoredSamples) -> float:
    """Root mean squared error of checked samples."""
    return math.sqrt(_mean(samples, (samples.scores - samples.labels) ** 2))


def mae_of(samples: ScoredSamples) -> float:
    """Mean absolute error of checked samples."""
    return _mean(samples, np.abs(samples.scores - samples.labels))


def r2_of(samples: ScoredSamples) -> float:
    """R² of checked samples; the mean is that of these samples, so a model may be worse than it."""
    labels = samples.labels[samples.weights > 0.0]
    if not labels.size or labels.min() == labels.max():  # of the labels, not of their variance: their mean is rounded
        return math.nan
    variance = _mean(samples, (samples.labels - _mean(samples, samples.labels)) ** 2)
    return 1.0 - _mean(samples, (samples.scores - samples.labels) ** 2) / variance if variance > 0.0 else math.nan


def _mean(samples: ScoredSamples, values: NDArray) -> float:
    weight = samples.weight
    return float(samples.weights @ values) / weight if weight > 0.0 else math.nan


def _group_wins(
    samples: ScoredSamples, *, groups: NDArray[np.integer] | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Won pairs, weight of positives and weight of negatives of each group (one group if `groups` is None).

    A pair of a positive and a negative of the same group is won by the higher score and halved by a tie. Sorted by
    group and score, samples fall into runs of equal group and score; positives of a run win against all negatives of
    earlier runs of their group and halve those of their own:

        wins_g = Σ_runs p_run · (negatives of the group before the run + n_run / 2)

    Without weights every number is a multiple of ½ below 2⁵², so the sums are exact in float64 up to 10⁸ samples. With
    weights, each group is summed for itself: a difference of two sums over all groups would keep their rounding.
    """
    if not samples.scores.size:
        return np.empty(0), np.empty(0), np.empty(0)
    order = samples.by_score
    new_group = np.zeros(order.size - 1, dtype=bool)
    if groups is not None:
        # Stable, so that the samples of a group stay in the order of their scores.
        order = order[np.argsort(groups[order], kind="stable")]
        new_group = np.diff(groups[order]) != 0
    scores = samples.scores[order]
    labels = samples.labels[order]
    weights = samples.weights[order]
    run_ends = np.append(np.flatnonzero(new_group | (np.diff(scores) != 0.0)), order.size - 1)
    group_ends = np.append(np.flatnonzero(new_group[run_ends[:-1]]), run_ends.size - 1)  # of runs, not samples
    run_starts = np.append(0, run_ends[:-1] + 1)
    group_starts = np.append(0, group_ends[:-1] + 1)
    positives = np.add.reduceat(weights * labels, run_starts)
    negatives = np.add.reduceat(weights * (1.0 - labels), run_starts)
    before = _sums_before(negatives, group_starts)
    return (
        np.add.reduceat(positives * (before + negatives / 2.0), group_starts),
        np.add.reduceat(positives, group_starts),
        np.add.reduceat(negatives, group_starts),
    )


def _sums_before(values: FloatArray, starts: NDArray[np.integer]) -> FloatArray:
    """Sum what stands before each value in its group; values are not negative, groups begin at `starts`.

    One running sum goes over all groups, and its value where a group begins is taken off. So that nothing is lost,
    values are taken in parts: first the multiples of a step, whose sums are exact, then the same of what is left, which
    is smaller than a step. Whole numbers are done after one part, weights of 32 bits after two or three.
    """
    sizes = np.diff(starts, append=len(values))
    found = np.zeros_like(values)
    left = values
    while (total := float(left.sum())) > 0.0:
        # Fewer than 2**51 steps in all, so a double holds every sum of them; 2**-1074 is the least double.
        step = math.ldexp(1.0, max(math.frexp(total)[1] - 51, -1074))
        part = np.floor(left / step) * step
        sums = np.cumsum(part) - part
        found += sums - np.repeat(sums[starts], sizes)
        left = left - part
    return found
