"""What `ziggurat scale` shows: a table of sizes, the fitted laws, and loss against compute with bands of confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.files import Format, write_figure, write_text
from ziggurat.studies.compare_report import short
from ziggurat.studies.scaling_runs import ScaleConfig, ScaledModel
from ziggurat.training.metrics.metric import shown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAW_COLUMNS = ("model", "law, x = compute over the smallest", "90 % of the exponent", "falls at every step", "why not")


def point_columns(config: ScaleConfig) -> tuple[str, ...]:
    """Headings of the table of sizes."""
    return (
        "model",
        "compute",
        "FLOPs a sample",
        "dense parameters",
        "seeds",
        *(f"test {shown_name(m)}" for m in config.metrics),
    )


def point_rows(scaled: Sequence[ScaledModel], config: ScaleConfig) -> list[tuple[str, ...]]:
    """The cells of the table of sizes."""
    metrics = config.metrics
    return [
        (
            model.name,
            f"{point.factor:g}x",
            short(point.flops),
            short(point.runs[0].cost.dense_parameters),
            str(len(point.runs)),
            *(f"{point.mean(metric):.5f}" for metric in metrics),
        )
        for model in scaled
        for point in model.points
    ]


def law_rows(scaled: Sequence[ScaledModel]) -> list[tuple[str, ...]]:
    """The cells of the table of laws."""
    rows = []
    for model in scaled:
        law, (low, high) = model.fitted.law, model.fitted.exponents
        text = f"{law.a:.4f} + {law.b:.4f} · x^(−{law.c:.3f})"
        shown_law = ("not fitted", "") if model.doubt else (text, f"{low:.3f} … {high:.3f}")
        rows.append((model.name, *shown_law, "yes" if model.falls else "no", model.doubt))
    return rows


def markdown(scaled: Sequence[ScaledModel], config: ScaleConfig) -> str:
    """Both tables, with what was scaled above them."""
    lines = [
        f"{config.data_name}, protocol `scale` (one pass), {config.seeds} seed{'s' if config.seeds > 1 else ''} a "
        "point; FLOPs are of a forward pass.",
        "",
        *_table(point_columns(config), point_rows(scaled, config)),
        "",
        *_table(LAW_COLUMNS, law_rows(scaled)),
    ]
    return "\n".join(lines) + "\n"


SCALING = Format(name="ziggurat.scaling", what="the result of a study of scaling")


def write_scaling(scaled: Sequence[ScaledModel], config: ScaleConfig, stem: str | Path) -> list[Path]:
    """Write STEM.json, STEM.md, STEM.png and STEM.svg; returns the paths."""
    stem = Path(stem)
    paths = [stem.with_name(stem.name + ending) for ending in (".json", ".md", ".png", ".svg")]
    data = {"data": config.data_name, "seeds": config.seeds, "models": [model.to_json() for model in scaled]}
    SCALING.write(paths[0], data)
    write_text(paths[1], markdown(scaled, config))
    figure = plot(scaled, config)
    write_figure(figure, paths[2])
    write_figure(figure, paths[3])
    return paths


def plot(scaled: Sequence[ScaledModel], config: ScaleConfig) -> Figure:
    """Test log loss against FLOPs of a forward pass; points are runs, lines the laws, bands 90 % of the bootstrap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, model in enumerate(scaled):
        color = f"C{index}"
        smallest = model.points[0].flops
        for point in model.points:
            losses = [run.test[config.metrics[0]] for run in point.runs]
            axes.plot([point.flops] * len(losses), losses, "o", color=color, markersize=5)
        if model.doubt:
            means = [point.mean(config.metrics[0]) for point in model.points]
            axes.plot([point.flops for point in model.points], means, ":", color=color, label=f"{model.name}, no law")
            continue
        grid = [smallest * x for x in model.fitted.grid]
        axes.plot(grid, model.fitted.law(model.fitted.grid), color=color, label=model.name)
        axes.fill_between(grid, model.fitted.low, model.fitted.high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.set_xlabel("FLOPs of a sample, forward")
    axes.set_ylabel(f"test {shown_name(config.metrics[0])}")
    axes.set_title(f"{config.data_name}, one pass: loss against compute, with the fitted law")
    axes.legend()
    return figure


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    head = "| " + " | ".join(columns) + " |"
    return [head, "|---" * len(columns) + "|", *("| " + " | ".join(row) + " |" for row in rows)]
