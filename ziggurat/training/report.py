"""report.html: one file that shows how a run went, with plots inside (SVG), readable offline.

Loss and validation metric over steps, learning rate, throughput, calibration of the final evaluation, the start-up
report and the configuration. Made again at any time with `ziggurat report RUN`.
"""

from __future__ import annotations

import html
import io
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ziggurat.files import write_text
from ziggurat.training.records import read_records
from ziggurat.training.run_folder import CONFIG, EVALUATION, STARTUP, TRAFFIC, RunFolder

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1c2430}
h1{font-size:1.6rem;margin-bottom:.2rem}
h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid #dde3ea}
table{border-collapse:collapse;font-size:14px}
td,th{padding:.25rem .8rem;border-bottom:1px solid #e8edf2;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1rem}
svg{width:100%;height:auto}
pre{background:#f5f7fa;padding:1rem;overflow:auto;font-size:13px}
.quiet{color:#67727f}
"""
INK, SECOND = "#2563a8", "#c2571a"


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run's folder and return its path."""
    run = RunFolder(Path(folder))
    records = read_records(run.metrics)
    evaluations = {path.stem: EVALUATION.read(path) for path in sorted((run.path / "evaluations").glob("*.json"))}
    config = CONFIG.read(run.config) if run.config.exists() else {}
    startup = STARTUP.read(run.startup) if run.startup.exists() else {}
    traffic = TRAFFIC.read(run.traffic) if run.traffic.exists() else {}
    parts = [
        f"<h1>{html.escape(run.path.name)}</h1>",
        f"<p class=quiet>{_summary(records)}</p>",
        _metrics_table(evaluations),
        "<h2>Training</h2><div class=plots>",
        *(_svg(figure) for figure in training_figures(records)),
        "</div>",
        _calibration_section(evaluations),
        _traffic_section(traffic),
        _startup_section(startup),
        f"<h2>Configuration</h2><pre>{html.escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre>",
    ]
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(run.path.name)}</title>"
    write_text(run.report, f"{page}<style>{STYLE}</style>{''.join(parts)}</html>\n")
    return run.report


def training_figures(records: list[dict[str, Any]]) -> list[Figure]:
    """Loss, validation metrics, learning rate and throughput over steps; those that have data."""
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    steps = [record["step"] for record in train]
    figures: list[Figure] = []
    if train:
        figures.append(_line(steps, [record["loss"] for record in train], title="Training loss", unit="loss"))
    metrics = [
        name for name in (valid[0] if valid else {}) if name.split("/")[0] in ("auc", "gauc", "log_loss", "rmse")
    ]
    for name in metrics:
        points = [(record["step"], record[name]) for record in valid if name in record]
        figures.append(
            _line(
                [step for step, _ in points],
                [value for _, value in points],
                title=f"Validation {name}",
                unit=name,
                marker="o",
            )
        )
    if train:
        figures.append(_line(steps, [record["lr"] for record in train], title="Learning rate (dense)", unit="rate"))
        rates = [record.get("timing", {}).get("samples_per_s", math.nan) for record in train]
        figures.append(_line(steps, rates, title="Throughput", unit="samples/s"))
    return figures


def calibration_figure(curves: dict[str, list[dict[str, float]]], *, title: str) -> Figure:
    """Mean label against mean score in bins of equal count, with standard errors; the diagonal is perfect."""
    figure, axes = _axes(title)
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


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _line(steps: list[int], values: list[float], *, title: str, unit: str, marker: str = "") -> Figure:
    figure, axes = _axes(title)
    axes.plot(steps, values, color=INK, lw=1.4, marker=marker, ms=4)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.ticklabel_format(axis="y", useOffset=False)
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "ziggurat", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return f"<figure style='margin:0'>{text[text.index('<svg') :]}</figure>"


def _summary(records: list[dict[str, Any]]) -> str:
    steps = max((record["step"] for record in records), default=0)
    skipped = sum(record["kind"] == "skipped" for record in records)
    return f"{steps:,} steps" + (f", {skipped} skipped because of NaN or infinity" if skipped else "")


def _metrics_table(evaluations: dict[str, Any]) -> str:
    if not evaluations:
        return ""
    names = list(dict.fromkeys(name for value in evaluations.values() for name in value["metrics"]))
    head = "".join(f"<th class=n>{html.escape(name)}" for name in names)
    rows = "".join(
        f"<tr><td>{html.escape(split)}<td class=n>{value['num_rows']:,}"
        + "".join(f"<td class=n>{_shown(value['metrics'].get(name))}" for name in names)
        for split, value in evaluations.items()
    )
    return f"<h2>Final evaluation</h2><table><tr><th>split<th class=n>rows{head}{rows}</table>"


def _shown(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.5f}"


def _calibration_section(evaluations: dict[str, Any]) -> str:
    figures = [
        _svg(calibration_figure(value["curves"], title=f"Calibration, {split}"))
        for split, value in evaluations.items()
        if value["curves"]
    ]
    return f"<h2>Calibration</h2><div class=plots>{''.join(figures)}</div>" if figures else ""


def _traffic_section(traffic: dict[str, Any]) -> str:
    """What all ranks have sent a training step, by purpose and link; nothing for a run on one device."""
    if not traffic:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(row['purpose'])}<td>{html.escape(row['link'].replace('_', ' '))}"
        f"<td class=n>{row['bytes_a_step']:,}<td class=n>{row['messages_a_step']:,}<td class=n>{row['bytes']:,}"
        for row in traffic["rows"]
    )
    head = "<tr><th>what<th>link<th class=n>bytes a step<th class=n>messages a step<th class=n>bytes in all"
    about = f"Counted on {traffic['ranks']} ranks over {traffic['steps']:,} steps, not estimated; all ranks together."
    return f"<h2>Traffic</h2><p class=quiet>{about}</p><table>{head}{rows}</table>"


def _startup_section(startup: dict[str, dict[str, str]]) -> str:
    rows = "".join(
        f"<tr><th colspan=2>{html.escape(title)}"
        + "".join(f"<tr><td>{html.escape(name)}<td>{html.escape(str(value))}" for name, value in lines.items())
        for title, lines in startup.items()
    )
    return f"<h2>Start-up report</h2><table>{rows}</table>" if rows else ""
