"""The report of `ziggurat scale`: a table of sizes, which law each model follows, exponents compared, and a plot.

STEM.html   one file, readable offline
STEM.json   the same as plain data: every run, with the block sums of its test rows that bands are drawn from
STEM.md, STEM.png, STEM.svg
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.files import Format, write_figure, write_text
from ziggurat.studies.compare_report import short
from ziggurat.studies.compare_statistics import holm
from ziggurat.studies.scaling_law import Interval, Law
from ziggurat.studies.scaling_runs import ScaledModel, ScaleStudy
from ziggurat.training.metrics.metric import shown_name
from ziggurat.training.report import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALING = Format(name="ziggurat.scaling", what="the result of a study of scaling")
LAW_COLUMNS = (
    "model",
    "finding",
    "law, x = compute over the smallest",
    "exponent of the power law, 90 %",
    "± of the exponent",
    "floor, 90 %",
    "off by, standard errors",
)
PREDICTED_COLUMNS = (
    "model",
    "law",
    "error of a size left out",
    "in standard errors",
    "best in draws",
)
DIFFERENCE_COLUMNS = ("exponents", "difference, 90 %", "p")
RATIO_COLUMNS = ("losses at the largest size", "FLOPs a sample", "ratio, 90 %", "p, Welch", "p of all pairs, Holm")


def loss_name(study: ScaleStudy) -> str:
    """Name what falls by a law."""
    metric = shown_name(study.config.metrics[0])
    return metric if study.best_log_loss is None else f"{metric} above the best reachable"


def point_columns(study: ScaleStudy) -> tuple[str, ...]:
    """Headings of the table of sizes."""
    return (
        "model",
        "longest history" if study.config.lengths else "compute",
        "FLOPs a sample",
        "dense parameters",
        "learning rate",
        *(() if study.best_log_loss is None else ("above the best", "smallest … largest of seeds")),
        *(f"test {shown_name(metric)}" for metric in study.config.metrics),
        "CPU s of a run",
    )


def point_rows(study: ScaleStudy) -> list[tuple[str, ...]]:
    """The cells of the table of sizes."""
    rows = []
    for model in study.models:
        for point in model.points:
            each = [run.losses.mean for run in point.runs]
            above = (f"{point.above_best:.5f}", f"{min(each):.5f} … {max(each):.5f}")
            seconds = sum(run.cpu_s for run in point.runs) / len(point.runs)
            rows.append(
                (
                    model.name,
                    study.config.size_label(point.factor),
                    short(point.flops),
                    short(point.runs[0].record.cost.dense_parameters),
                    f"{point.learning_rate:g}",
                    *(() if study.best_log_loss is None else above),
                    *(f"{point.mean(metric):.5f}" for metric in study.config.metrics),
                    f"{seconds:.0f}",
                )
            )
    return rows


def law_rows(study: ScaleStudy) -> list[tuple[str, ...]]:
    """The cells of the table of laws."""
    rows = []
    for model in study.models:
        start = (model.name, model.says)
        laws = model.laws
        if laws is None:
            rows.append((*start, *("",) * (len(LAW_COLUMNS) - len(start))))
            continue
        rows.append(
            (
                *start,
                _law_text(model),
                _interval(laws.exponent),
                f"{100 * laws.exponent.half_width:.0f} %",
                _interval(laws.floor, digits=5),
                f"{laws.off_by:.1f}",
            )
        )
    return rows


def _law_text(model: ScaledModel) -> str:
    laws = model.laws
    assert laws is not None
    texts = {
        Law.NO_GAIN: "",
        Law.POWER: f"{laws.scale:.4g} · x^(−{laws.exponent.value:.3f})",
        Law.SATURATING: (
            f"{laws.floor.value:.4g} + {laws.saturating_scale:.4g} · x^(−{laws.saturating_exponent.value:.3f})"
        ),
    }
    return " or ".join(texts[law] for law in laws.supported) if laws.is_described else ""


def _interval(interval: Interval, *, digits: int = 3) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} … {interval.high:.{digits}f})"


def predicted_rows(study: ScaleStudy) -> list[tuple[str, ...]]:
    """The cells of the table of sizes left out."""
    return [
        (
            model.name,
            law.value,
            f"{100 * found.error:.1f} %",
            f"{found.in_standard_errors:.1f}",
            f"{100 * found.best_share:.0f} %",
        )
        for model in study.models
        if model.laws is not None
        for law, found in model.laws.predicted.items()
    ]


def difference_rows(study: ScaleStudy) -> list[tuple[str, ...]]:
    """The cells of the table of exponents that are compared."""
    return [(f"{each.first} − {each.second}", _interval(each.exponent), f"{each.p:.3g}") for each in study.differences]


def ratio_rows(study: ScaleStudy) -> list[tuple[str, ...]]:
    """The cells of the table of losses at the largest sizes."""
    corrected = holm([each.p for each in study.ratios])
    return [
        (
            f"{each.first} / {each.second}",
            " / ".join(short(flops) for flops in each.flops),
            _interval(each.ratio),
            f"{each.p:.3g}",
            f"{p:.3g}",
        )
        for each, p in zip(study.ratios, corrected, strict=True)
    ]


def summary(study: ScaleStudy) -> list[str]:
    """Say what was scaled, what is reachable, and what else should be known."""
    config = study.config
    cpu_s = sum(run.cpu_s for model in study.models for point in model.points for run in point.runs)
    cpu_s += sum(each.cpu_s for model in study.models for point in model.points for each in point.tried)
    lines = [
        f"{config.data_name}: one pass over {study.num_train:,} rows (protocol `scale`), {study.num_test:,} test rows, "
        f"{config.seeds} {'seeds' if config.seeds > 1 else 'seed'} of each size, {cpu_s / 60:.1f} CPU minutes in all. "
        "Compute is the FLOPs of a forward pass of a sample."
    ]
    if study.best_log_loss is not None:
        lines.append(
            f"The best reachable log loss of these test rows is {study.best_log_loss:.5f}: the mean entropy of their "
            "true probabilities. What a model has above it is the mean of KL(p* ‖ p), without the luck of labels."
        )
    tried = []
    for model in study.models:
        for point in model.points:
            if point.tried:
                losses = ", ".join(
                    f"{each.rate:g}: {'diverged' if each.has_diverged else f'{each.valid:.5f}'}" for each in point.tried
                )
                tried.append(f"{model.name} at {config.size_label(point.factor)} {losses}")
    if tried:
        lines.append(f"Learning rates tried, with their validation loss: {'; '.join(tried)}.")
    return [*lines, *study.notes]


def tables(study: ScaleStudy) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """All tables of a study: headings and cells."""
    found = [(point_columns(study), point_rows(study)), (LAW_COLUMNS, law_rows(study))]
    if any(model.laws is not None for model in study.models):
        found.append((PREDICTED_COLUMNS, predicted_rows(study)))
    if study.differences:
        found.append((DIFFERENCE_COLUMNS, difference_rows(study)))
    if study.ratios:
        found.append((RATIO_COLUMNS, ratio_rows(study)))
    return found


def markdown(study: ScaleStudy) -> str:
    """All tables, with what was scaled above them."""
    lines = []
    for line in summary(study):
        lines += [line, ""]
    for columns, rows in tables(study):
        lines += [*_table(columns, rows), ""]
    return "\n".join(lines)


def write_scaling(study: ScaleStudy, stem: str | Path) -> list[Path]:
    """Write STEM.html, STEM.json, STEM.md, STEM.png and STEM.svg; return the paths."""
    stem = Path(stem)
    endings = (".html", ".json", ".md", ".png", ".svg")
    web, plain, text, *figures = (stem.with_name(stem.name + ending) for ending in endings)
    figure = plot(study)
    title = f"Scaling of {', '.join(model.name for model in study.models)} on {study.config.data_name}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in summary(study)),
        page.figure_svg(figure),
        *(_html_table(columns, rows) for columns, rows in tables(study)),
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    write_text(web, f"{head}<style>{page.STYLE}</style>{''.join(parts)}</html>\n")
    SCALING.write(plain, study.to_json())
    write_text(text, markdown(study))
    for path in figures:
        write_figure(figure, path)
    return [web, plain, text, *figures]


def plot(study: ScaleStudy) -> Figure:
    """Loss above the best reachable against FLOPs, both by factors; points are runs, bands 90 % of the bootstrap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, model in enumerate(study.models):
        color = f"C{index}"
        smallest = model.points[0].flops
        for point in model.points:
            losses = [run.losses.mean for run in point.runs]
            axes.plot([point.flops] * len(losses), losses, "o", color=color, markersize=4)
        laws = model.laws
        if laws is None or not laws.is_described:
            means = [point.above_best for point in model.points]
            axes.plot([point.flops for point in model.points], means, ":", color=color, label=f"{model.name}: no law")
            continue
        grid = [smallest * x for x in laws.grid]
        axes.plot(grid, laws.curve, color=color, label=f"{model.name}: {model.says}")
        axes.fill_between(grid, laws.low, laws.high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("FLOPs of a sample, forward")
    axes.set_ylabel(f"test {loss_name(study)}")
    axes.set_title(f"{study.config.data_name}, one pass: loss against compute")
    axes.legend(fontsize="small")
    return figure


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}" for each in columns)
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}' for each in row)}" for row in rows)
    return f"<div class=wide><table><tr>{head}{cells}</table></div>"
