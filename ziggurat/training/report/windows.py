"""The part of a stream's report that shows its windows: a curve for each metric, and a table, beside a control if any.

A control is another stream over the same windows, such as one that was frozen after the history. Windows are matched by
their names, and the report says how many of them the stream wins.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ziggurat.data.streams.stability import ALARM
from ziggurat.training.metrics.metric import gain_over, shown_name
from ziggurat.training.records.windows import HistoryRows, TaughtRows, WindowRecord
from ziggurat.training.report.drift_notes import alarm_notes, shift_notes
from ziggurat.training.report.plots import BEST, INK, SECOND, axis_limits, plain_axes

_PLOTTED = ("auc", "ne", "log_loss", "calibration", "rmse", "mae", "r2")
# What a metric is measured in, and the value of a score that is right.
_UNITS = {"calibration": ("mean score / mean label", 1.0), "ne": ("NE, lower is better", 1.0)}
_MAX_SHIFTS = 6  # features whose stability is drawn: those that moved most
_MAX_NAMES = 8  # of windows, below a plot
_MAX_WAITING = 6  # windows whose labels may still come, that are named
_MAX_IN_PLOT = 3  # curves whose legend leaves room beside them
_COLOURS = (INK, SECOND, BEST, "#7b4fa3", "#b03a5b", "#8a7a1f", "#2b8c9e", "#5b6572")


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
        name = shown_name(metric)
        plain = metric.partition("/")[0]
        unit, right = _UNITS.get(plain, (shown_name(plain), None))
        title = f"{name} of each window, before it is trained"
        figures.append(_figure(names, curves, title=title, unit=unit, line=right))
    most_unknown = {
        name: max(record.unknown.get(name, 0.0) for record in scored) for record in scored for name in record.unknown
    }
    features = sorted(most_unknown, key=lambda name: -most_unknown[name])[:_MAX_SHIFTS]
    if features:
        unknown = {name: [100 * record.unknown.get(name, 0.0) for record in scored] for name in features}
        title = "Samples with an id without a row" + _of_most(features, most_unknown)
        figures.append(_figure(names, unknown, title=title, unit="% of samples"))
    for shifts, against in (
        ({record.name: record.shift for record in scored}, "the history"),
        ({record.name: record.shift_before for record in scored}, "the window before"),
    ):
        most = {name: max(each.get(name, 0.0) for each in shifts.values()) for each in shifts.values() for name in each}
        shown = sorted(most, key=lambda name: -most[name])[:_MAX_SHIFTS]
        if shown:
            curves = {name: [shifts[window].get(name, math.nan) for window in names] for name in shown}
            title = f"Shift of values since {against}" + _of_most(shown, most)
            figures.append(_figure(names, curves, title=title, unit="population stability index", line=ALARM))
    return figures + _taught_figures(records) + _history_figures(records)


def _of_most(shown: Sequence[str], found: Mapping[str, float]) -> str:
    return f", {len(shown)} largest" if len(shown) < len(found) else ""


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
        shares[teacher] = [100 * each.share for each in taught]
        ages[teacher] = [math.nan if each.age is None else each.age for each in taught]
    unit = 86_400.0 if is_calendar else 1.0
    ages = {teacher: [age / unit for age in values] for teacher, values in ages.items()}
    figures = [_figure(names, shares, title="Rows that a teacher has scored", unit="% of rows")]
    if any(math.isfinite(age) for values in ages.values() for age in values):
        title = "Age of a teacher's scores, median of rows"
        unit = "days" if is_calendar else "units of the time column"
        figures.append(_figure(names, ages, title=title, unit=unit))
    return figures


def _history_figures(records: Sequence[WindowRecord]) -> list[Figure]:
    """Plot which share of the rows of each window had a history of a teacher's vectors, and how long these were."""
    shares: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    for teacher in dict.fromkeys(name for record in records for name in record.histories):
        read = [record.histories.get(teacher, HistoryRows(share=0.0)) for record in records]
        shares[teacher] = [100 * each.share for each in read]
        lengths[teacher] = [each.length if each.share else math.nan for each in read]
    if not shares:
        return []
    names = [record.name for record in records]
    title = "Rows with a history of a teacher's vectors"
    figures = [_figure(names, shares, title=title, unit="% of rows")]
    if any(math.isfinite(length) for values in lengths.values() for length in values):
        title = "Vectors in a history, mean of rows that have one"
        figures.append(_figure(names, lengths, title=title, unit="vectors"))
    return figures


def history_notes(records: Sequence[WindowRecord]) -> list[str]:
    """Say of each teacher which share of the rows had a history of its vectors, how long, and how old.

    Args:
        records: of the windows.
    """
    notes: list[str] = []
    for teacher in dict.fromkeys(name for record in records for name in record.histories):
        there = [record for record in records if record.rows]
        read = [record.histories.get(teacher, HistoryRows(share=0.0)) for record in there]
        num_rows = sum(record.rows for record in there)
        num_known = sum(record.rows * each.share for record, each in zip(there, read, strict=True))
        num_vectors = sum(record.rows * each.share * each.length for record, each in zip(there, read, strict=True))
        without = sum(not each.share for each in read)
        text = f"{num_known / max(num_rows, 1):.1%} of {num_rows:,} rows had a history of vectors of teacher {teacher}"
        text += f", of {num_vectors / num_known:.1f} vectors as a mean" if num_known else ""
        text += f", and none in {without:,} of {len(read):,} windows" if without else ""
        known = [each for each in read if each.age is not None]
        if known:
            oldest = max(known, key=lambda each: each.age or 0.0)
            text += f". Its latest example was {oldest.age_text()} in the window where it was oldest (median of rows)"
        notes.append(f"{text}. Windows were scored by what was logged when they were opened.")
    return notes


def taught_notes(records: Sequence[WindowRecord]) -> list[str]:
    """Say of each teacher which share of the rows that were trained it had scored, and how old that was.

    Args:
        records: of the windows.
    """
    notes: list[str] = []
    for teacher in dict.fromkeys(name for record in records for name in record.teachers):
        trained = [record for record in records if record.is_trained and record.rows]
        taught = [record.teachers.get(teacher, TaughtRows(share=0.0)) for record in trained]
        num_rows = sum(record.rows for record in trained)
        num_taught = sum(record.rows * each.share for record, each in zip(trained, taught, strict=True))
        without = sum(not each.share for each in taught)
        versions = dict.fromkeys(version for each in taught for version in each.versions)
        text = f"Teacher {teacher} had scored {num_taught / max(num_rows, 1):.1%} of {num_rows:,} rows"
        text += f", by {len(versions):,} version{'s' if len(versions) != 1 else ''}" if versions else ""
        text += f", and none in {without:,} of {len(taught):,} windows" if without else ""
        known = [each for each in taught if each.age is not None]
        if known:
            oldest = max(known, key=lambda each: each.age or 0.0)
            newest = min(known, key=lambda each: each.age or 0.0)
            text += f". What it said was {newest.age_text()} in the window where it was newest"
            text += f", and {oldest.age_text()} where it was oldest (medians of rows)"
        notes.append(f"{text}. Rows without a score were learned from their labels alone.")
    return notes


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
    dropped = sum(record.dropped for record in records)
    rows = "".join(
        _row(record, metrics=metrics, beside=beside, has_dropped=bool(dropped)) + _taught_cell(record)
        for record in records
    )
    is_taught = any(record.teachers or record.histories for record in records)
    late = sum(record.late for record in records)
    bad = sum(record.bad for record in records)
    notes = (
        [f"{late:,} rows came late: they were scored and trained with the window that they came in."] if late else []
    )
    notes += (
        [f"{dropped:,} rows came late and were left out (--late drop): they were neither scored nor trained."]
        if dropped
        else []
    )
    notes += [f"{bad:,} rows were put aside as bad rows, below stream/ in the folder of the run."] if bad else []
    if not all(record.is_trained for record in records):
        notes.append("The control: the first window alone was trained, and all others were scored by that model.")
    notes += [*taught_notes(records), *history_notes(records)]
    if any(record.trained for record in records):
        states = {state: sum(record.trained.get(state, 0) for record in records) for state in records[0].trained}
        shown = ", ".join(f"{count:,} {state}" for state, count in states.items() if count) or "none"
        notes.append(f"Labels were known later than their rows. Rows trained, by what was known of the label: {shown}.")
        shares = [record.labelled for record in records if record.labelled is not None and record.rows]
        notes.append(
            f"At the end of a window {sum(shares) / max(len(shares), 1):.0%} of its labels were known, as a mean; "
            "metrics are of all labels as they turned out."
        )
    if waiting := [record for record in records if record.labels_until]:
        untils = ", ".join(f"{record.name} until {record.labels_until}" for record in waiting[:_MAX_WAITING])
        more = f", and {len(waiting) - _MAX_WAITING:,} more" if len(waiting) > _MAX_WAITING else ""
        notes.append(
            f"{len(waiting):,} windows were scored, and wait for labels: {untils}{more}. Their metrics will be those "
            "of the scores that they were given at their end."
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
        "NE: log loss over that of always saying the window's own share of positives; 1 is no better than that. "
        "Calibration: mean score over mean label; 1 is right. Population stability index: how far the shares of values "
        f"are from those before; above {ALARM:g} (dashed) values have shifted."
    )
    of_dropped = "<th class=n>late, left out" if dropped else ""
    table = (
        f"<div class=wide><table><tr><th>window<th class=n>rows<th class=n>late{of_dropped}{head}<th>ids without a row"
        f"{'<th>teachers' if is_taught else ''}{rows}"
        "</table></div>"
    )
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<h2>Windows</h2><p class=quiet>{about}</p><div class=plots>{''.join(figures)}</div>{said}{table}"


def _row(record: WindowRecord, *, metrics: Sequence[str], beside: dict[str, WindowRecord], has_dropped: bool) -> str:
    cells = [record.metrics.get(name) for name in metrics]
    if beside:
        control = beside.get(record.name)
        cells += [None if control is None else control.metrics.get(name) for name in metrics]
    shown = "".join(f"<td class=n>{'–' if cell is None else f'{cell:.5f}'}" for cell in cells)
    unknown = ", ".join(f"{name} {share:.1%}" for name, share in record.unknown.items() if share >= 0.001)
    return (
        f"<tr><td>{html.escape(record.name)}<td class=n>{record.rows:,}<td class=n>{record.late:,}"
        f"{f'<td class=n>{record.dropped:,}' if has_dropped else ''}{shown}"
        f"<td>{html.escape(unknown)}"
    )


def _taught_cell(record: WindowRecord) -> str:
    """Write what teachers said of a window; nothing where it has none, which no window of a stream has or all have."""
    if not record.teachers and not record.histories:
        return ""
    told = [
        f"{name} {each.share:.1%}" + (f", {each.age_text()}" if each.share else "")
        for name, each in record.teachers.items()
    ]
    told += [
        f"history of {name} {each.share:.1%}"
        + (f", {each.length:.1f} vectors, {each.age_text()}" if each.share else "")
        for name, each in record.histories.items()
    ]
    return f"<td>{html.escape('; '.join(told))}"


def _value(record: WindowRecord, metric: str) -> float:
    value = record.metrics.get(metric)
    return math.nan if value is None else value


def _figure(
    names: Sequence[str], curves: dict[str, list[float]], *, title: str, unit: str, line: float | None = None
) -> Figure:
    """Draw curves over windows.

    Args:
        names: of the windows.
        curves: a value for each window, by the name of the curve.
        title: of the plot.
        unit: of the values.
        line: a value that others are judged by, which is drawn where it is in sight.
    """
    figure, axes = plain_axes(title)
    places = range(len(names))
    for index, (label, values) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        marker = "o" if len(names) <= 40 else ""
        axes.plot(places, values, color=colour, lw=1.4, marker=marker, ms=3, label=label)
    finite = [value for values in curves.values() for value in values if math.isfinite(value)]
    limits = axis_limits(finite)
    if limits is not None:
        axes.set_ylim(*limits)
    step = max(1, -(-len(names) // _MAX_NAMES))
    axes.set_xticks(list(places)[::step], list(names)[::step], fontsize=8, rotation=20, ha="right")
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    axes.set_ylabel(unit, fontsize=8)
    axes.set_xlabel("window", fontsize=8)
    low, high = axes.get_ylim()
    if line is not None and low <= line <= high:
        axes.axhline(line, color="#9aa5b1", lw=1, ls="--", label=f"{line:g}" if len(curves) > 1 else None)
    if len(curves) > _MAX_IN_PLOT:
        # Beside the plot: it would lie over the curves.
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure
