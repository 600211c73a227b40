"""The best metrics that any model can reach, computed from the true probabilities of a synthetic teacher.

Let every label be drawn as y_i ~ Bernoulli(p_i), independently. Then

- no score ranks better than p itself: by the Neyman–Pearson lemma a ranking by the likelihood ratio p/(1−p) has the
  highest ROC curve at every point. The expected number of (positive, negative) pairs that p orders correctly, over
  the expected number of such pairs, is

      AUC* = Σ_{i≠j} p_i (1−p_j) · ( [p_i > p_j] + ½ [p_i = p_j] )  /  Σ_{i≠j} p_i (1−p_j)

  After sorting by p this is one cumulative sum: with q = 1−p, Q_< the sum of q over smaller p and Q_= over equal p,

      numerator = Σ_i p_i · ( Q_<(i) + ½ (Q_=(i) − q_i) ),   denominator = Σp · Σq − Σ p·q

- the log loss is proper, so p minimises it: LL* = mean of the entropies −p ln p − q ln q (nats);
- normalised entropy divides by the entropy of the mean: NE* = LL* / H(mean p);
- calibration (mean prediction over mean label) is 1 for p.

These are expectations over the labels. A finite sample of labels scatters around them; `sample_auc` and
`sample_log_loss` are what p scores against the labels really drawn: compare a model with those on the same rows, the
noise of the labels is then common to both.

Cost: one sort, O(N log N) time, 6 arrays of N doubles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True)
class BestMetrics:
    """Scores of the true probabilities; see the module. Log losses are in nats."""

    num_rows: int
    positive_rate: float
    auc: float
    log_loss: float
    normalised_entropy: float
    calibration: float
    sample_positive_rate: float
    sample_auc: float
    sample_log_loss: float


def best_metrics(probabilities: ArrayLike, labels: ArrayLike) -> BestMetrics:
    """The best reachable metrics for labels drawn with these probabilities.

    Args:
        probabilities: (N,) true probabilities in (0, 1), N >= 2.
        labels: (N,) the 0/1 labels that were drawn with them; used for the `sample_` metrics alone.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    assert p.shape == y.shape == (p.size,)
    assert p.size >= 2
    loss = _entropy(p).mean()
    rate = float(p.mean())
    return BestMetrics(
        num_rows=p.size,
        positive_rate=rate,
        auc=pair_share(p, p, 1.0 - p),
        log_loss=float(loss),
        normalised_entropy=float(loss / _entropy(np.array([rate]))[0]),
        calibration=1.0,
        sample_positive_rate=float(y.mean()),
        sample_auc=pair_share(p, y, 1.0 - y),
        sample_log_loss=float(-(y * np.log(p) + (1.0 - y) * np.log1p(-p)).mean()),
    )


def pair_share(score: NDArray[np.float64], p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Share of (positive i, negative j) pairs with score_i > score_j, ties half, weighted by p_i·q_j; i = j left out.

    NaN where there is no pair.
    """
    order = np.argsort(score, kind="stable")
    score = score[order]
    p = p[order]
    q = q[order]
    start = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    sums = np.add.reduceat(q, start)
    below = np.r_[0.0, np.cumsum(sums)[:-1]]
    run = np.repeat(np.arange(start.size), np.diff(np.r_[start, score.size]))
    pairs = p.sum() * q.sum() - (p * q).sum()
    # A row is no pair with itself, so its own q leaves its run of ties.
    ordered = (p * (below[run] + 0.5 * (sums[run] - q))).sum()
    return float(ordered / pairs) if pairs > 0 else float("nan")


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return -(p * np.log(p) + (1.0 - p) * np.log1p(-p))
