"""The plots of a run's report: loss, validation metrics, learning rate, throughput, calibration, importance.

The best step is marked in every plot over steps. A single point is drawn as one. A curve that does not change is shown
on a scale of its own size, not zoomed until its last digits look like a mountain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ziggurat.training.metrics.metric import metric_of, shown_name
from ziggurat.training.records.log import LogRecord

INK, SECOND, BEST = "#2563a8", "#c2571a", "#3a7d44"


def training_figures(records: Sequence[LogRecord], *, best_step: int = 0) -> list[Figure]:
    """Training loss beside that of validation, validation metrics, learning rate and throughput; those that have data.

    Args:
        records: of metrics.jsonl.
        best_step: the step that is marked; 0: none.
    """
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    names = list(dict.fromkeys(name for record in valid for name in record))
    losses = [name for name in names if (metric := metric_of(name)) and metric.is_loss and not metric.is_plotted]
    figures: list[Figure] = []
    loss_curves = {"training": _points(train, "loss")} if train else {}
    loss_curves |= {_label(name, losses, "validation"): _points(valid, name) for name in losses}
    if loss_curves:
        figures.append(_curves(loss_curves, title="Loss", unit="log loss" if losses else "loss", best_step=best_step))
    for name in names:
        metric = metric_of(name)
        if metric is not None and metric.is_plotted:
            points = {"validation": _points(valid, name)}
            unit = shown_name(name.partition("/")[0])
            figures.append(_curves(points, title=f"Validation {shown_name(name)}", unit=unit, best_step=best_step))
    if train:
        rates = {"learning rate": _points(train, "lr")}
        figures.append(_curves(rates, title="Learning rate of the dense network", unit="rate", best_step=best_step))
        speed = [(record["step"], record.get("timing", {}).get("samples_per_s", math.nan)) for record in train]
        measured = {"throughput": [(step, value) for step, value in speed if value > 0]}
        figures.append(_curves(measured, title="Throughput", unit="samples/s", best_step=best_step))
    return figures


def calibration_figure(curves: dict[str, list[dict[str, float]]], *, title: str) -> Figure:
    """Mean label against mean score in bins of equal count, with standard errors; the diagonal is perfect."""
    figure, axes = plain_axes(title)
    top = 0.0
    for index, (label, points) in enumerate(curves.items()):
        scores = [point["mean_score"] for point in points]
        labels = [point["mean_label"] for point in points]
        errors = [point["standard_error"] for point in points]
        top = max([top, *scores, *labels])
        colour = (INK, SECOND)[index % 2]
        axes.errorbar(scores, labels, yerr=errors, fmt="o-", ms=4, lw=1, color=colour, label=label, capsize=2)
    axes.plot([0, top], [0, top], color="#9aa5b1", lw=1, ls="--", label="perfect")
    axes.set_xlabel("mean predicted probability")
    axes.set_ylabel("share of positives")
    axes.legend(frameon=False)
    return figure


def importance_figure(bars: Sequence[tuple[str, float, float]], *, title: str, unit: str) -> Figure:
    """A horizontal bar with its deviation for each (name, value, deviation), the first one on top."""
    figure, axes = plain_axes(title, height=max(1.6, 0.26 * len(bars) + 0.9))
    places = range(len(bars))
    values = [bar[1] for bar in bars]
    deviations = [bar[2] for bar in bars]
    colours = [INK if value >= 0 else SECOND for value in values]
    axes.barh(places, values, xerr=deviations, color=colours, height=0.65, error_kw={"lw": 1, "capsize": 2})
    axes.set_yticks(places, [bar[0] for bar in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.axvline(0, color="#9aa5b1", lw=1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    return figure


def axis_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Limits of the y axis where values hardly differ: half a percent around them. None: matplotlib's own.

    Args:
        values: finite ones.
    """
    if not values:
        return None
    low = min(values)
    high = max(values)
    middle = (low + high) / 2
    least = max(0.005 * abs(middle), 1e-12)
    return None if high - low >= least else (middle - least, middle + least)


def _points(records: Sequence[LogRecord], name: str) -> list[tuple[int, float]]:
    known = [record for record in records if record.get(name) is not None]
    return [(record["step"], record[name]) for record in known if math.isfinite(record[name])]


def _label(name: str, all_names: Sequence[str], split: str) -> str:
    return split if len(all_names) == 1 else f"{split}, {name.partition('/')[2] or name}"


def _curves(curves: dict[str, list[tuple[int, float]]], *, title: str, unit: str, best_step: int) -> Figure:
    figure, axes = plain_axes(title)
    for index, (label, points) in enumerate(curves.items()):
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        marker = "o" if len(points) <= 30 else ""
        own_label = label if len(curves) > 1 else None
        axes.plot(
            steps,
            values,
            color=(INK, SECOND, BEST)[index % 3],
            lw=1.4,
            marker=marker,
            ms=4,
            label=own_label,
        )
    values = [value for points in curves.values() for _, value in points]
    limits = axis_limits(values)
    if limits is not None:
        axes.set_ylim(*limits)
    if best_step:
        axes.axvline(best_step, color=BEST, lw=1, ls=":", label=f"best: step {best_step:,}")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.ticklabel_format(axis="y", useOffset=False, style="sci" if max(values, default=1.0) < 1e-3 else "plain")
    axes.set_xlim(left=0)
    if unit == "samples/s":
        axes.set_ylim(bottom=0)
    if len(curves) > 1 or best_step:
        axes.legend(frameon=False, fontsize=8)
    return figure


def plain_axes(title: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    """Return a figure with empty axes, in the style of all plots of a report."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes
