"""How runs and their results show themselves: a few lines in a terminal, a small table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.training.evaluation.evaluate import Evaluation, metrics_line
from ziggurat.training.records.run_folder import RunFolder, read_evaluation
from ziggurat.training.report.page import loss_plot

if TYPE_CHECKING:
    from ziggurat.runs.load import Run


def stored_metrics(run: Run) -> dict[str, dict[str, float]]:
    """Metrics of the run's final evaluations, by split."""
    paths = {split: RunFolder(run.folder).evaluation(split) for split in ("valid", "test")}
    return {split: read_evaluation(path)["metrics"] for split, path in paths.items() if path.exists()}


def text_of(run: Run) -> str:
    """Model, data, step and metrics, one line each."""
    lines = [f"Run({str(run.folder)!r}, {run.config.summary()}, step {run.step:,}"]
    lines += [f"    {split}: {metrics_line(metrics)}" for split, metrics in stored_metrics(run).items()]
    return "\n".join(lines) + ")"


def html_of(run: Run) -> str:
    """The same as a table, one column a split, and the plot of the loss."""
    title = f"{run.folder}: {run.config.summary()}, step {run.step:,}"
    return metrics_html(stored_metrics(run), title=title) + plot_html(run.folder)


def plot_html(folder: Path) -> str:
    """The plot of the loss, no wider than a page of text; "" where there is none."""
    plot = loss_plot(folder)
    return f'<div style="max-width:32em">{plot}</div>' if plot else ""


def result_text(folder: Path, *, end: str, evaluations: Mapping[str, Evaluation]) -> str:
    """Format the results of a finished training, one line each."""
    lines = [f"RunResult({str(folder)!r}, {end}"]
    lines += [f"    {split}: {evaluation.line()}" for split, evaluation in evaluations.items()]
    return "\n".join(lines) + ")"


def metrics_html(found: Mapping[str, Mapping[str, float]], *, title: str) -> str:
    """Metrics by split as a table, one column a split."""
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    head = "".join(f"<th>{escape(split)}</th>" for split in found)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{metrics[name]:.5f}</td>" if name in metrics else "<td></td>" for metrics in found.values())
        + "</tr>"
        for name in names
    )
    return f"<p>{escape(title)}</p><table><tr><th>metric</th>{head}</tr>{rows}</table>"
