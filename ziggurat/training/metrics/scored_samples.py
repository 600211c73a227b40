"""ScoredSamples: the scores and labels that every metric is computed from, checked once.

Labels that are missing (NaN) take their sample out; weights default to 1. Everything becomes float64 here, so that a
sum over 10⁸ samples still has nine digits; the clipping of the log loss remembers the scores' own precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ziggurat.errors import DataError, NumericsError
from ziggurat.features.tasks import USUAL, Task

FloatArray = NDArray[np.float64]


class ScoreScale(StrEnum):
    """The range of values that a score may have."""

    PROBABILITY = "probability"  # 0 … 1
    ANY = "any"  # any finite number: values, logits, ranks


def scale_of(task: Task) -> ScoreScale:
    """Return the range of the scores of a task."""
    return ScoreScale.PROBABILITY if task.gives_probabilities else ScoreScale.ANY


@dataclass(frozen=True, kw_only=True)
class ScoredSamples:
    """Samples of one label, all labelled.

    Args:
        scores: (n,) probabilities (binary) or values (regression).
        labels: (n,) 0 or 1 (binary) or values (regression).
        weights: (n,) zero or more.
        epsilon: smallest step of the scores' own precision near 1; the log loss clips with it.
    """

    scores: FloatArray
    labels: FloatArray
    weights: FloatArray
    epsilon: float

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return float(self.weights.sum())

    def at(self, kept: NDArray[np.bool_]) -> ScoredSamples:
        """Return the samples where `kept` is true."""
        if kept.all():
            return self
        return replace(self, scores=self.scores[kept], labels=self.labels[kept], weights=self.weights[kept])

    @cached_property
    def by_score(self) -> NDArray[np.intp]:
        """Samples by rising score; sorted once for all metrics that need it."""
        exact_in_float32 = self.epsilon >= np.finfo(np.float32).eps  # sorts twice as fast, and loses nothing
        return np.argsort(self.scores.astype(np.float32) if exact_in_float32 else self.scores)


def scored_samples(
    scores: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    weights: Tensor | ArrayLike | None = None,
    *,
    task: Task = USUAL,
    scale: ScoreScale = ScoreScale.PROBABILITY,
    where: str = "metrics",
) -> ScoredSamples:
    """Check scores, labels and weights of one label, and leave out samples without a label.

    Raises:
        NumericsError: a score is NaN or infinite, or outside the scale.
        DataError: different lengths, a binary label that is not 0, 1 or NaN, an infinite label, a bad weight.
    """
    score_array = as_array(scores)
    label_array = as_array(labels).astype(np.float64)
    weight_array = np.ones(label_array.shape) if weights is None else as_array(weights).astype(np.float64)
    if not (score_array.ndim == 1 and score_array.shape == label_array.shape == weight_array.shape):
        raise DataError(
            expected="scores, labels and weights of one and the same length",
            found=f"shapes {score_array.shape}, {label_array.shape} and {weight_array.shape}",
            where=where,
            ways_out="pass one column of scores and labels at a time",
        )
    check_scores(score_array, scale=scale, where=where)
    check_labels(label_array, task=task, where=where)
    check_weights(weight_array, where=where)
    epsilon = float(np.finfo(score_array.dtype).eps)
    present = ~np.isnan(label_array)
    if not present.all():
        score_array = score_array[present]
        label_array = label_array[present]
        weight_array = weight_array[present]
    return ScoredSamples(
        scores=score_array.astype(np.float64), labels=label_array, weights=weight_array, epsilon=epsilon
    )


def as_array(values: Tensor | ArrayLike) -> NDArray[np.floating]:
    """A NumPy array of float32 or float64 from a tensor on any device, or anything array-like."""
    if isinstance(values, Tensor):
        detached = values.detach().cpu()
        return (detached if detached.dtype.itemsize >= 4 else detached.float()).numpy()
    array = np.asarray(values)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def check_scores(scores: NDArray[np.floating], *, scale: ScoreScale, where: str) -> None:
    """Raise NumericsError for a score that is not finite or outside the scale."""
    bad = ~np.isfinite(scores)
    if not bad.any() and scale is ScoreScale.PROBABILITY:
        bad = (scores < 0.0) | (scores > 1.0)
    if bad.any():
        first = int(bad.argmax())
        raise NumericsError(
            expected="probabilities, 0 … 1" if scale is ScoreScale.PROBABILITY else "finite scores",
            found=f"{scores[first]} ({int(bad.sum())} bad of {bad.size})",
            where=f"{where}, score {first}",
            ways_out=(
                "if it is NaN, the weights are: go back to a checkpoint before, lower the learning rate or clip",
                "if these are logits, apply the sigmoid first (ziggurat.models.contract.losses.scores_from_logits)",
            ),
        )


def check_labels(labels: NDArray[np.floating], *, task: Task = USUAL, where: str) -> None:
    """Raise DataError for a label that is neither missing (NaN) nor possible for the task."""
    bad = ~(task.possible(labels) | np.isnan(labels))
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            expected=f"{task.expected}, or NaN (missing)",
            found=f"{labels[first]} ({int(bad.sum())} bad of {bad.size})",
            where=f"{where}, label {first}",
            ways_out=task.ways_out_in_batch,
        )


def check_weights(weights: NDArray[np.floating], *, where: str) -> None:
    """Raise DataError for a weight that is negative or not finite."""
    bad = ~(np.isfinite(weights) & (weights >= 0.0))
    if bad.any():
        first = int(bad.argmax())
        raise DataError(
            expected="weights of 0 or more",
            found=f"{weights[first]} ({int(bad.sum())} bad of {bad.size})",
            where=f"{where}, weight {first}",
            ways_out="clean the weight column, or remove `weight` from the schema",
        )
