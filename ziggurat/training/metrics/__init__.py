"""Metrics of evaluations: what each is, exact computation, ranking of all items, intervals.

A metric of your own derives from `Metric` and is listed by `Metric.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.training.metrics import built_in as built_in  # lists the members
from ziggurat.training.metrics.metric import Judged, Metric

__all__ = ["Judged", "Metric"]
