"""The picture of what formats cost: how much worse a run scores, over the bytes that its tables keep."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ziggurat.runs.tables.quantisation import FormatCost, QuantisationReport, compared_metrics
from ziggurat.training.metrics.metric import higher_is_better
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = "os^Dv<>p"
_LEAST = 1e-7  # of what a logarithmic axis shows


def quantisation_figure(report: QuantisationReport, *, title: str) -> Figure:
    """Draw each format as a point: bytes of all tables against what it costs, for the first metric that there is.

    Args:
        report: with formats for all tables, and perhaps for one table at a time.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    known = {name.partition("/")[0] for name in report.run.metrics}
    shown = sorted(compared_metrics(), key=lambda metric: not metric.is_loss)
    names = [each.name_at(DEFAULT_RANKING_K) for each in shown if each.higher_is_better is not None]
    metric = next((name for name in names if name in known), "")
    formats = dict.fromkeys(cost.row_format for cost in report.tried)
    marks = dict(zip(formats, itertools.cycle(_MARKS)))
    for cost in report.tried:
        before = report.run.weight_bytes if not cost.table else report.table_bytes[cost.table]["run"]
        # Where one table is tried, the others keep the bytes of the run.
        share = (report.run.weight_bytes - before + cost.weight_bytes) / max(report.run.weight_bytes, 1)
        loss = _loss(cost, metric)
        name = cost.table or "all tables"
        colour = "C0" if not cost.table else "C7"
        axes.plot(100 * share, max(loss, _LEAST), marks[cost.row_format], color=colour)
        if loss > _LEAST or not cost.table:
            point = (100 * share, max(loss, _LEAST))
            # Names of points at the right edge stand on their left, where there is room.
            is_right = share > 0.8
            axes.annotate(
                f"{cost.row_format}, {name}",
                point,
                xytext=(-5 if is_right else 5, 3),
                textcoords="offset points",
                ha="right" if is_right else "left",
                fontsize="x-small",
            )
    axes.set_yscale("log")
    axes.set_xlabel("bytes of all tables, % of the run's")
    axes.set_ylabel(f"{metric}, worse by ({_LEAST:g}: not at all)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure


def _loss(cost: FormatCost, metric: str) -> float:
    """Return by how much a metric got worse: the most of all labels."""
    sign = -1.0 if metric and higher_is_better(metric) else 1.0
    found = [sign * value for name, value in cost.changes.items() if _name(name) == metric and math.isfinite(value)]
    return max(found, default=0.0)


def _name(metric: str) -> str:
    return metric.partition("/")[0]
