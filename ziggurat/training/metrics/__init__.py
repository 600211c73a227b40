"""Metrics of evaluations: what each is, exact computation, ranking of all items, intervals.

A metric of your own derives from `Metric` and is listed by `Metric.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.features import tasks
from ziggurat.training.metrics import built_in as built_in  # lists the members
from ziggurat.training.metrics.metric import Judged, Metric, deciding, loss_metric, ranking_metric
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K

# Names in results, for recipes and studies of data sets whose labels are of the usual task, or whose items are ranked.
USUAL = deciding(tasks.USUAL).name
USUAL_LOSS = loss_metric(tasks.USUAL).name
OF_RANKING = ranking_metric().name_at(DEFAULT_RANKING_K)

__all__ = ["OF_RANKING", "USUAL", "USUAL_LOSS", "Judged", "Metric"]
