"""What a comparison shows: a table of models, a table of differences, and AUC against FLOPs as a picture.
With several precisions, the picture has these on its axis, and a line for each model.

Rates are of the machine and moment; means, deviations and tests are of the runs. Published numbers stand beside ours
where the data set has them; they are other people's runs, on other hardware, and for Frappe with other negatives in the
training data (`data/datasets/frappe.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.files import Format, write_figure, write_text
from ziggurat.recipes.model_settings import FRAPPE
from ziggurat.recipes.protocols import Protocol
from ziggurat.studies.compare import ComparedModel, Comparison
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData
from ziggurat.studies.compare_statistics import row_test_of
from ziggurat.training import metrics
from ziggurat.training.metrics.metric import higher_is_better, metric_of, shown_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ENTROPY = "ne"


def model_columns(comparison: Comparison) -> tuple[str, ...]:
    """Headings of the table of models."""
    metric = comparison.config.metric
    other = _second_metric(comparison)
    name = shown_name(metric)
    second = f"test {shown_name(other)}" if other else ""
    rest = ("parameters", "FLOPs a sample", "samples/s", "epochs")
    entropy = f"test {shown_name(_ENTROPY)}" if _shows_entropy(comparison) else ""
    others = tuple(f"test {shown_name(each)}" for each in _of_other_labels(comparison))
    own = (f"test {name}", second, *others, entropy, _gauc_heading(comparison), f"valid {name}", f"published {name}")
    return ("model", *own, *rest)


def difference_columns(comparison: Comparison) -> tuple[str, ...]:
    """Headings of the table of differences."""
    row_test = row_test_of(comparison.config.metric)
    over_rows = "over rows, p" if row_test is None else row_test.title
    return (
        "pair",
        f"difference of test {shown_name(comparison.config.metric)}",
        "paired t, p",
        "Wilcoxon, p",
        over_rows,
    )


def _shows_entropy(comparison: Comparison) -> bool:
    """Return whether a table has normalised entropy: of precisions, whose log loss moves where AUC does not."""
    shown = (comparison.config.metric, _second_metric(comparison))
    known = all(_ENTROPY in run.test for model in comparison.models for run in model.runs)
    return len(comparison.config.precisions) > 1 and known and _ENTROPY not in shown


def _of_other_labels(comparison: Comparison) -> tuple[str, ...]:
    """Name the metric that decides for the other labels of the data: a model of several is judged by all of them."""
    base, _, label = comparison.config.metric.partition("/")
    if not label:
        return ()
    first = comparison.models[0].runs[0].test
    return tuple(name for name in first if name.startswith(f"{base}/") and name != comparison.config.metric)


def model_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table of models, best mean first."""
    published = _published(comparison)
    metric, other = comparison.config.metric, _second_metric(comparison)
    of_other_labels = _of_other_labels(comparison)
    sign = -1.0 if higher_is_better(metric) else 1.0
    rows = []
    for model in sorted(comparison.models, key=lambda each: sign * each.mean_sd(metric)[0]):
        cost = model.runs[0].cost
        rows.append(
            (
                model.name + _chosen(model),
                _mean_sd(*model.mean_sd(metric)),
                _mean_sd(*model.mean_sd(other), digits=4) if other else "",
                *(_mean_sd(*model.mean_sd(each)) for each in of_other_labels),
                _mean_sd(*model.mean_sd(_ENTROPY), digits=4) if _shows_entropy(comparison) else "",
                _mean_sd(*model.mean_sd(_within_groups(metric))) if _gauc_heading(comparison) else "",
                _mean_sd(*model.mean_sd(metric, split="valid")),
                published.get(model.model, "") if model.precision.is_plain else "",
                short(cost.table_parameters + cost.dense_parameters),
                short(cost.forward_flops),
                f"{sum(run.samples_per_s for run in model.runs) / len(model.runs):,.0f}",
                f"{sum(run.epochs for run in model.runs) / len(model.runs):.1f}",
            )
        )
    return rows


def difference_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table of differences."""
    rows = []
    for (first, second), found in comparison.differences.items():
        rows.append(
            (
                f"{first} − {second}",
                f"{found.mean:+.5f}" + ("" if math.isnan(found.sd) else f" ± {found.sd:.5f}"),
                p_text(found.t_p),
                p_text(found.wilcoxon_p),
                p_text(found.rows_p),
            )
        )
    return rows


def markdown(comparison: Comparison) -> str:
    """The tables of each question, with what was compared above them."""
    config = comparison.config
    lines = [
        f"{config.data_name}, protocol `{config.protocol.value}`, {config.seeds} seeds, {config.trials} trial"
        f"{'s' if config.trials > 1 else ''} a model by validation data; test data read once a run. "
        f"{_precisions_text(comparison)}"
        "Mean ± sample standard deviation over seeds; FLOPs are of a forward pass.",
    ]
    for table in comparison.tables:
        lines += ["", f"**{table.question}**"] if table.question else []
        lines += ["", *_table(model_columns(table), model_rows(table))]
        if table.differences:
            lines += ["", *_table(difference_columns(table), difference_rows(table))]
    lines += [f"\n{note}." for note in notes_of(comparison)]
    return "\n".join(lines) + "\n"


def _precisions_text(comparison: Comparison) -> str:
    """Say which precisions models were trained in, where they were asked for."""
    asked = comparison.config.precisions
    if len(asked) < 2:
        return f"Trained in {asked[0]}. " if asked else ""
    return f"Each model was trained in {', '.join(map(str, asked))}, and is set beside itself in {asked[0]}. "


def notes_of(comparison: Comparison) -> tuple[str, ...]:
    """The notes of all tables, each once."""
    return tuple(dict.fromkeys(note for table in comparison.tables for note in table.notes))


COMPARISON = Format(name="ziggurat.comparison", what="the result of a comparison")


def write_comparison(comparison: Comparison, stem: str | Path) -> list[Path]:
    """Write STEM.json, STEM.md, STEM.png and STEM.svg; returns the paths."""
    stem = Path(stem)
    paths = [stem.with_name(stem.name + ending) for ending in (".json", ".md", ".png", ".svg")]
    COMPARISON.write(paths[0], comparison.to_json())
    write_text(paths[1], markdown(comparison))
    figure = plot(comparison)
    write_figure(figure, paths[2])
    write_figure(figure, paths[3])
    return paths


def plot(comparison: Comparison) -> Figure:
    """Draw the test metric, mean and standard deviation over seeds, against FLOPs or precisions; a panel a question."""
    from matplotlib.figure import Figure

    tables = comparison.tables
    figure = Figure(figsize=(7.5 * len(tables), 4.5), layout="constrained")
    for table, axes in zip(tables, figure.subplots(1, len(tables), squeeze=False)[0], strict=True):
        _plot_one(axes, table)
    return figure


def _plot_one(axes: Axes, comparison: Comparison) -> None:
    if len(comparison.config.precisions) > 1:
        _plot_precisions(axes, comparison)
    else:
        _plot_flops(axes, comparison)
    axes.grid(alpha=0.3)
    config = comparison.config
    axes.set_ylabel(f"test {shown_name(config.metric)} (mean ± sd over seeds)")
    axes.ticklabel_format(axis="y", useOffset=False)
    only = f", {config.precisions[0]}" if len(config.precisions) == 1 else ""
    axes.set_title(f"{config.data_name}, protocol {config.protocol.value}, {config.seeds} seeds{only}")


def _plot_precisions(axes: Axes, comparison: Comparison) -> None:
    names = [str(each) for each in comparison.config.precisions]
    models = list(dict.fromkeys(each.model for each in comparison.models))
    for index, name in enumerate(models):
        entries = [each for each in comparison.models if each.model == name]
        found = [each.mean_sd(comparison.config.metric) for each in entries]
        places = [names.index(str(each.precision)) + 0.1 * (index - (len(models) - 1) / 2) for each in entries]
        deviations = [0.0 if math.isnan(deviation) else deviation for _, deviation in found]
        means = [mean for mean, _ in found]
        axes.errorbar(places, means, yerr=deviations, fmt="o-", linewidth=0.8, capsize=4, markersize=6, label=name)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.legend()


def _plot_flops(axes: Axes, comparison: Comparison) -> None:
    for model in comparison.models:
        mean, deviation = model.mean_sd(comparison.config.metric)
        flops = model.runs[0].cost.forward_flops
        error = None if math.isnan(deviation) else deviation
        axes.errorbar([flops], [mean], yerr=error, fmt="o", capsize=4, markersize=7)
        axes.annotate(model.name, (flops, mean), textcoords="offset points", xytext=(8, 4))
    # Models without a matrix product have 0 FLOPs, for which a logarithmic axis has no place.
    if all(model.runs[0].cost.forward_flops for model in comparison.models):
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=1e3)
    axes.margins(x=0.2)
    axes.set_xlabel("FLOPs of a sample, forward")


def short(number: float) -> str:
    """A count with a unit: 12.3 k, 4.56 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _chosen(model: ComparedModel) -> str:
    """Say how a model's settings were chosen, where they are not those given."""
    if model.tries:
        return f" (tuned, {model.tries} tries)"
    return f" (variant {model.variant})" if model.variant else ""


def _published(comparison: Comparison) -> dict[str, str]:
    config = comparison.config
    if config.data is ComparedData.FRAPPE and config.protocol is not Protocol.SCALE:
        return {each.model.kind: each.published for each in FRAPPE if each.published}
    return {}


def _second_metric(comparison: Comparison) -> str:
    """A second metric of the same label: log loss beside AUC, MAE beside RMSE, NDCG beside hits; "" without one."""
    name, slash, label = comparison.config.metric.partition("/")
    metric = metric_of(name)
    beside = metric_of(metrics.USUAL_LOSS if metric is None else metric.beside)
    if beside is None:
        return ""
    places = "".join(name.partition("@")[1:]) if beside.has_places else ""
    other = beside.name + places + slash + label
    return other if all(other in run.test for model in comparison.models for run in model.runs) else ""


def _gauc_heading(comparison: Comparison) -> str:
    """Name the AUC inside users of a log's rankers judged by AUC, where test data has users with both answers."""
    config = comparison.config
    gauc = _within_groups(config.metric)
    values = [run.test.get(gauc, math.nan) for model in comparison.models for run in model.runs]
    of_log = isinstance(config.data, OwnData) and config.data.run.table_schema.events is not None
    return f"test {shown_name(gauc)}" if of_log and gauc and not any(map(math.isnan, values)) else ""


def _within_groups(name: str) -> str:
    """Return the name of the same metric inside each group, "" where there is none."""
    metric = metric_of(name)
    within = "" if metric is None else metric.within_groups
    return within and within + "".join(name.partition("/")[1:])


def _mean_sd(mean: float, deviation: float, *, digits: int = 5) -> str:
    return f"{mean:.{digits}f}" + ("" if math.isnan(deviation) else f" ± {deviation:.{digits}f}")


def p_text(value: float) -> str:
    """A p value for people; "–" where no test was done."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    used = [index for index in range(len(columns)) if columns[index] and any(row[index] for row in rows)]
    columns = tuple(columns[i] for i in used)
    rows = [tuple(row[i] for i in used) for row in rows]
    head = "| " + " | ".join(columns) + " |"
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return [head, rule, *("| " + " | ".join(row) + " |" for row in rows)]
