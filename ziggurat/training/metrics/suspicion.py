"""Results that are rather a mistake than a success.

AUC above 0.99, R² above 0.99      hardly any real task allows that
AUC below 0.5                      worse than a coin
R² below 0                         worse than always saying the mean of these rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ziggurat.training.metrics.metric import metric_of

_TOO_GOOD = 0.99


def floor_of(metric: str) -> float:
    """Return what a metric has without a model; −∞ where nobody knows."""
    known = metric_of(metric)
    return -math.inf if known is None or known.floor is None else known.floor


def suspicious(metrics: Mapping[str, float], *, split: str, reasons: Mapping[str, str] | None = None) -> list[str]:
    """Sentences on the AUCs and R² of an evaluation that need a second look; NaN (undefined) is none of them.

    Args:
        metrics: name to value, as `Evaluation.metrics`.
        split: whose rows they were, for the sentence.
        reasons: by metric, why it is below its floor; where one is absent or "", the usual questions are asked.
    """
    lines: list[str] = []
    for name, value in metrics.items():
        metric = metric_of(name)
        if metric is None or metric.floor is None:
            continue
        if value > _TOO_GOOD:
            why = "hardly any real task allows that: does a feature tell the label, or is a row in both splits?"
            lines.append(f"{split} {name} is {value:.5f}: {why}")
        elif value < metric.floor:
            reason = (reasons or {}).get(name) or metric.question
            lines.append(f"{split} {name} is {value:.5f}, {metric.below}: {reason}")
    return lines
