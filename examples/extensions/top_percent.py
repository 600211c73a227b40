"""Add a metric: how many times as many positives the top percent has as the whole.

An advertiser who shows a thing to one in a hundred wants to know how much better these are chosen than by lot. With
samples in the order of falling scores, and t those that fill the first percent of the weight:

    lift = (Σ_{i∈t} w_i y_i / Σ_{i∈t} w_i)  /  (Σ_i w_i y_i / Σ_i w_i)         1: as by lot; 100 at most

The sample at the border counts with the part of it that lies inside. Equal scores share their places: each counts with
the mean label of them all, so the order of the file does not matter.

    import top_percent                          # lists it; every evaluation then has top_percent, and
                                                # --training.early-stop.metric top_percent stops by it
"""

from __future__ import annotations

import math

import numpy as np

from ziggurat.training.metrics import Judged, Metric

_SHARE = 0.01


class TopPercent(Metric):
    """The share of positives in the best scored percent, against that of all samples."""

    name = "top_percent"
    shown = "lift of the top percent"
    is_plotted = True
    beside = "auc"

    def compute(self, judged: Judged) -> float:
        """Return the lift; NaN without positives."""
        samples = judged.samples
        base = float(samples.weights @ samples.labels)
        if not base > 0.0:
            return math.nan
        scores, place = np.unique(-samples.scores, return_inverse=True)
        weights = np.bincount(place, samples.weights, minlength=scores.size)
        positives = np.bincount(place, samples.weights * samples.labels, minlength=scores.size)
        left = np.clip(_SHARE * weights.sum() - (np.cumsum(weights) - weights), 0.0, weights)
        found = float((positives * np.divide(left, weights, out=np.zeros_like(left), where=weights > 0)).sum())
        return found / _SHARE / base


TOP_PERCENT = Metric.add(TopPercent())
