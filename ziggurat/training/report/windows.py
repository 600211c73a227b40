"""The part of a stream's report that shows its windows: a curve for each metric, and a table, beside a control if any.

A control is another stream over the same windows, such as one that was frozen after the history. Windows are matched by
their names, and the report says how many of them the stream wins.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from ziggurat.training.metrics.metric import gain_over, shown_name
from ziggurat.training.records.windows import TaughtRows, WindowRecord
from ziggurat.training.report.drift_notes import alarm_notes, shift_notes
from ziggurat.training.report.plots import INK, SECOND, axis_limits, plain_axes

_PLOTTED = ("auc", "ne", "log_loss", "calibration", "rmse", "mae", "r2")
_MAX_SHIFTS = 6  # features whose stability is drawn: those that moved most
_MAX_NAMES = 8  # of windows, below a plot


def plotted_metrics(records: Sequence[WindowRecord]) -> list[str]:
    """Return the names of those metrics of windows that are shown, in the order of the evaluation."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    return [name for name in names if name.partition("/")[0] in _PLOTTED]


def window_figures(records: Sequence[WindowRecord], *, control: Sequence[WindowRecord] = ()) -> list[Figure]:
    """Plot over windows: metrics, the share of samples with an id that has no row, shifts of features, teachers.

    Args:
        records: of the stream.
        control: of another stream over the same windows.
    """
    scored = [record for record in records if record.metrics]
    if not scored:
        return []
    names = [record.name for record in scored]
    beside = {record.name: record for record in control}
    figures: list[Figure] = []
    for metric in plotted_metrics(scored):
        curves = {"streamed": [_value(record, metric) for record in scored]}
        if beside:
            curves["control"] = [_value(beside[name], metric) if name in beside else math.nan for name in names]
        if any(record.averaged for record in scored):
            averaged = [record.averaged.get(metric) for record in scored]
            curves["average of weights"] = [math.nan if value is None else value for value in averaged]
        figures.append(_figure(names, curves, title=f"{shown_name(metric)} of each window, before it is trained"))
    features = dict.fromkeys(name for record in scored for name in record.unknown)
    if features:
        unknown = {name: [record.unknown.get(name, 0.0) for record in scored] for name in features}
        figures.append(_figure(names, unknown, title="Share of samples whose id has no row"))
    for shifts, against in (
        ({record.name: record.shift for record in scored}, "the history"),
        ({record.name: record.shift_before for record in scored}, "the window before"),
    ):
        most = {name: max(each.get(name, 0.0) for each in shifts.values()) for each in shifts.values() for name in each}
        shown = sorted(most, key=lambda name: -most[name])[:_MAX_SHIFTS]
        if shown:
            curves = {name: [shifts[window].get(name, math.nan) for window in names] for name in shown}
            figures.append(_figure(names, curves, title=f"Population stability against {against}"))
    return figures + _taught_figures(records)


def _taught_figures(records: Sequence[WindowRecord]) -> list[Figure]:
    """Plot which share of the rows of each window teachers had scored, and how old that was."""
    teachers = dict.fromkeys(name for record in records for name in record.teachers)
    if not teachers:
        return []
    names = [record.name for record in records]
    shares: dict[str, list[float]] = {}
    ages: dict[str, list[float]] = {}
    is_calendar = True
    for teacher in teachers:
        taught = [record.teachers.get(teacher, TaughtRows(share=0.0)) for record in records]
        is_calendar = is_calendar and all(each.is_calendar for each in taught)
        shares[teacher] = [each.share for each in taught]
        ages[teacher] = [math.nan if each.age is None else each.age for each in taught]
    unit = 86_400.0 if is_calendar else 1.0
    ages = {teacher: [age / unit for age in values] for teacher, values in ages.items()}
    what = "in days" if is_calendar else "in units of the time column"
    return [
        _figure(names, shares, title="Share of rows that a teacher has scored"),
        _figure(names, ages, title=f"Age of what a teacher said, median of rows, {what}"),
    ]


def wins(records: Sequence[WindowRecord], *, control: Sequence[WindowRecord], metric: str) -> tuple[int, int]:
    """Return in how many windows a stream is better than its control by a metric, and how many both have."""
    beside = {record.name: record for record in control}
    pairs = [
        (_value(record, metric), _value(beside[record.name], metric)) for record in records if record.name in beside
    ]
    both = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
    return sum(gain_over(metric, ours, theirs) > 0 for ours, theirs in both), len(both)


def windows_section(records: Sequence[WindowRecord], *, control: Sequence[WindowRecord], figures: Sequence[str]) -> str:
    """Write the section of the page.

    Args:
        records: of the stream.
        control: of another stream over the same windows.
        figures: `window_figures` as SVG.
    """
    if not records:
        return ""
    metrics = plotted_metrics(records)
    beside = {record.name: record for record in control}
    head = "".join(f"<th class=n>{html.escape(shown_name(name))}" for name in metrics)
    head += "".join(f"<th class=n>{html.escape(shown_name(name))}, control" for name in metrics if beside)
    rows = "".join(_row(record, metrics=metrics, beside=beside) + _taught_cell(record) for record in records)
    is_taught = any(record.teachers for record in records)
    late = sum(record.late for record in records)
    notes = [f"{late:,} rows came late: they were scored and trained with the window that they came in"] if late else []
    if any(record.trained for record in records):
        states = {state: sum(record.trained.get(state, 0) for record in records) for state in records[0].trained}
        shown = ", ".join(f"{count:,} {state}" for state, count in states.items() if count) or "none"
        notes.append(f"Labels were known later than their rows. Rows trained, by what was known of the label: {shown}.")
        shares = [record.labelled for record in records if record.labelled is not None and record.rows]
        notes.append(
            f"At the end of a window {sum(shares) / max(len(shares), 1):.0%} of its labels were known, as a mean; "
            "metrics are of all labels as they turned out."
        )
    if ahead := sum(record.labels_ahead for record in records):
        windows = ", ".join(record.name for record in records if record.labels_ahead)
        notes.append(
            f"{ahead:,} labels have a time of more than a day after their window was read ({windows}). Their rows wait "
            "until that time: look at the clock, and at the unit, of the column of label times."
        )
    for name in metrics if beside else ():
        won, both = wins(records, control=control, metric=name)
        notes.append(f"{shown_name(name)}: better than the control in {won:,} of {both:,} windows")
    notes += [*shift_notes(records), *alarm_notes(records)]
    about = (
        "Every window was scored by the weights as they stood, before a row of it was trained. "
        "NE: log loss over that of always saying the window's own share of positives; 1 is no better than that."
    )
    table = (
        f"<div class=wide><table><tr><th>window<th class=n>rows<th class=n>late{head}<th>ids without a row"
        f"{'<th>teachers' if is_taught else ''}{rows}"
        "</table></div>"
    )
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<h2>Windows</h2><p class=quiet>{about}</p><div class=plots>{''.join(figures)}</div>{said}{table}"


def _row(record: WindowRecord, *, metrics: Sequence[str], beside: dict[str, WindowRecord]) -> str:
    cells = [record.metrics.get(name) for name in metrics]
    if beside:
        control = beside.get(record.name)
        cells += [None if control is None else control.metrics.get(name) for name in metrics]
    shown = "".join(f"<td class=n>{'–' if cell is None else f'{cell:.5f}'}" for cell in cells)
    unknown = ", ".join(f"{name} {share:.1%}" for name, share in record.unknown.items() if share >= 0.001)
    return (
        f"<tr><td>{html.escape(record.name)}<td class=n>{record.rows:,}<td class=n>{record.late:,}{shown}"
        f"<td>{html.escape(unknown)}"
    )


def _taught_cell(record: WindowRecord) -> str:
    """Write what teachers said of a window; nothing where it has none, which no window of a stream has or all have."""
    if not record.teachers:
        return ""
    told = [f"{name} {each.share:.1%} {each.age_text()}".strip() for name, each in record.teachers.items()]
    return f"<td>{html.escape(', '.join(told))}"


def _value(record: WindowRecord, metric: str) -> float:
    value = record.metrics.get(metric)
    return math.nan if value is None else value


def _figure(names: Sequence[str], curves: dict[str, list[float]], *, title: str) -> Figure:
    figure, axes = plain_axes(title)
    places = range(len(names))
    for index, (label, values) in enumerate(curves.items()):
        colour = (INK, SECOND)[index] if index < 2 else None
        marker = "o" if len(names) <= 40 else ""
        axes.plot(places, values, color=colour, lw=1.4, marker=marker, ms=3, label=label)
    finite = [value for values in curves.values() for value in values if math.isfinite(value)]
    limits = axis_limits(finite)
    if limits is not None:
        axes.set_ylim(*limits)
    step = max(1, -(-len(names) // _MAX_NAMES))
    axes.set_xticks(list(places)[::step], list(names)[::step], fontsize=8, rotation=20, ha="right")
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure
