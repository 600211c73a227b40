"""Calibration: does an event that is given 3 % happen 3 % of the time?

    calibration       Σ w p / Σ w y            1 is right on average; 1.1 promises 10 % too many (He et al., ADKDD 2014)
    curve             mean score against share of positives, in bins of equally many samples
    expected error    Σ_b (W_b / W) · |mean score_b − mean label_b|            (Naeini et al., AAAI 2015; ECE)

Bins hold equally many samples, because click probabilities crowd near zero where bins of equal width would put all of
them into one. Samples with equal scores are never torn apart (the result does not depend on the order of rows), so bins
can be fewer and uneven where scores repeat.

Each point has a standard error: the standard deviation of Beta(k + 1, n − k + 1), what k positives among n samples
leave unknown about the true share. Unlike sqrt(p(1−p)/n) it is not zero in a bin without positives. With weights, n
is Kish's effective number (Σw)² / Σw².

Cost: one sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ziggurat.training.metrics.scored_samples import FloatArray, ScoredSamples, scored_samples

NUM_BINS = 20


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve:
    """Bins by rising score.

    Args:
        mean_score: (bins,) weighted mean score.
        mean_label: (bins,) weighted share of positives.
        standard_error: (bins,) of the share of positives.
        weight: (bins,) sum of weights.
    """

    mean_score: FloatArray
    mean_label: FloatArray
    standard_error: FloatArray
    weight: FloatArray

    def to_json(self) -> list[dict[str, float]]:
        """One dict a bin, for logs and plots."""
        columns = ("mean_score", "mean_label", "standard_error", "weight")
        values = [getattr(self, name).tolist() for name in columns]
        return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def calibration_curve(
    scores: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    weights: Tensor | ArrayLike | None = None,
    *,
    num_bins: int = NUM_BINS,
) -> CalibrationCurve:
    """Mean label against mean score, in at most `num_bins` bins of equally many samples.

    Args:
        scores: (n,) probabilities.
        labels: (n,) 0 or 1; NaN leaves the sample out.
        weights: (n,) or None.
        num_bins: at most so many.

    Returns:
        The curve; without samples one without bins.

    Raises:
        NumericsError: a score is not a probability.
        DataError: a label or weight is impossible.
    """
    return curve_of(scored_samples(scores, labels, weights), num_bins=num_bins)


def expected_calibration_error(
    scores: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    weights: Tensor | ArrayLike | None = None,
    *,
    num_bins: int = NUM_BINS,
) -> float:
    """Σ_b (W_b / W) · |mean score_b − mean label_b|; NaN without samples. Arguments as in `calibration_curve`."""
    return error_of(calibration_curve(scores, labels, weights, num_bins=num_bins))


def error_of(curve: CalibrationCurve) -> float:
    """Expected calibration error of a curve; NaN if it has no bins."""
    if not curve.weight.size:
        return float("nan")
    return float(np.average(np.abs(curve.mean_score - curve.mean_label), weights=curve.weight))


def curve_of(samples: ScoredSamples, *, num_bins: int = NUM_BINS) -> CalibrationCurve:
    """The calibration curve of checked samples."""
    order = samples.by_score
    # A bin of samples without weight would divide 0 by 0.
    order = order[samples.weights[order] > 0.0]
    scores, labels, weights = (column[order] for column in (samples.scores, samples.labels, samples.weights))
    starts = _bin_starts(scores, num_bins=num_bins)
    if not starts.size:
        empty = np.empty(0)
        return CalibrationCurve(mean_score=empty, mean_label=empty, standard_error=empty, weight=empty)
    weight = np.add.reduceat(weights, starts)
    mean_score = np.add.reduceat(weights * scores, starts) / weight
    mean_label = np.add.reduceat(weights * labels, starts) / weight
    effective = weight**2 / np.add.reduceat(weights**2, starts)
    # The mean of Beta(k + 1, n - k + 1); its variance is m (1 - m) / (n + 3).
    posterior = (mean_label * effective + 1.0) / (effective + 2.0)
    return CalibrationCurve(
        mean_score=mean_score,
        mean_label=mean_label,
        standard_error=np.sqrt(posterior * (1.0 - posterior) / (effective + 3.0)),
        weight=weight,
    )


def _bin_starts(sorted_scores: FloatArray, *, num_bins: int) -> np.ndarray:
    """First sample of each bin: the quantiles, moved to the next place where the score changes."""
    count = sorted_scores.size
    if count == 0:
        return np.empty(0, dtype=np.int64)
    run_starts = np.flatnonzero(np.concatenate(([True], np.diff(sorted_scores) != 0.0)))
    quantiles = np.arange(num_bins) * count // num_bins
    # The run at a quantile or the next: equal scores stay in one bin.
    places = np.searchsorted(run_starts, quantiles)
    return np.unique(run_starts[places[places < run_starts.size]])
