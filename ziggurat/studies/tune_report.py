"""The report of `ziggurat tune`: the best of each model, what each has spent, how tries came there, what mattered.

OUT/report.html    one file, readable offline; written anew about once a minute while the study goes on
OUT/tuning.json    the same as plain data, every try with it
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.files import Format, write_text
from ziggurat.models.contract.search_space import Value
from ziggurat.studies.compare_report import short
from ziggurat.studies.tune_space import TuningSpace
from ziggurat.studies.tune_study import Ended, Try
from ziggurat.training.metrics.metric import higher_is_better, shown_name
from ziggurat.training.report import page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ziggurat.studies.tune import TuneConfig, TunedModel, Tuning

TUNING = Format(name="ziggurat.tuning_report", what="the result of a study that tunes", max_bytes=1 << 30)
SPACE_COLUMNS = ("model", "setting", "values", "scale", "as given", "only where")
_SHOWN_IMPORTANCES = 8


def columns_of(tuning: Tuning) -> tuple[str, ...]:
    """Headings of the table of models."""
    name = shown_name(tuning.config.decides)
    return (
        "model",
        f"valid {name}, best",
        "as given",
        "try",
        "tries",
        "pruned",
        "no value",
        "CPU s",
        "FLOPs",
        "rows",
        "FLOPs a sample",
        "parameters",
    )


def rows_of(tuning: Tuning) -> list[tuple[str, ...]]:
    """The cells of the table of models, best first."""
    sign = -1.0 if higher_is_better(tuning.config.decides) else 1.0

    def order(model: TunedModel) -> float:
        best = model.best_try
        return math.inf if best is None or best.value is None else sign * best.value

    rows = []
    for model in sorted(tuning.models, key=order):
        best = model.best_try
        given = next((each for each in model.tries if each.number == 0), None)
        spent = model.spent
        cost = model.cost
        rows.append(
            (
                model.name,
                "" if best is None else f"{best.value:.5f}",
                "" if given is None or given.value is None else f"{given.value:.5f}",
                "" if best is None else str(best.number),
                str(len(model.tries)),
                str(sum(each.ended is Ended.PRUNED and not each.why for each in model.tries)),
                str(sum(bool(each.why) for each in model.tries)),
                f"{spent.cpu_s:,.1f}",
                short(int(spent.flops)),
                short(spent.rows),
                "" if cost is None else short(cost.forward_flops),
                "" if cost is None else short(cost.table_parameters + cost.dense_parameters),
            )
        )
    return rows


def space_rows(spaces: dict[str, TuningSpace]) -> list[tuple[str, ...]]:
    """The cells of the table of search spaces."""
    rows = []
    for name, space in spaces.items():
        for each in space.dimensions:
            log = getattr(each, "log", None)
            only = "" if each.only is None else f"{each.only[0]} {' or '.join(map(str, each.only[1]))}"
            given = space.given(each.name)
            scale = {True: "log", False: "linear", None: "choices"}[log]
            rows.append((name, each.name, each.text(), scale, "" if given is None else _shown(given), only))
    return rows


def summary(tuning: Tuning) -> list[str]:
    """Sentences about budgets and what they were spent on."""
    config = tuning.config
    asked = [
        *([f"{config.budget} tries of each model"] if config.budget else []),
        *([f"{short(int(config.flops))} FLOPs of each model"] if config.flops else []),
        *([f"{config.hours:g} hours, divided equally"] if config.hours else []),
    ]
    lines = [
        f"{config.data_name}, protocol {config.protocol.value}; chosen by validation {shown_name(config.decides)}; "
        "test rows were not opened.",
        f"Budget: {'; '.join(asked)}. Sampler {config.sampler.value}, pruner {config.pruner.value}, seed {config.seed}"
        + (f" and {config.try_seeds - 1} more of each try." if config.try_seeds > 1 else "."),
    ]
    lines += limit_lines(config, numbers=tuning.limits)
    total = tuning.inside_s + tuning.outside_s
    if total and tuning.inside_s:
        lines.append(
            f"{'One call' if tuning.calls == 1 else f'{tuning.calls} calls'}: {tuning.inside_s:,.1f} CPU seconds in "
            f"tries, {tuning.outside_s:,.1f} beside them ({100 * tuning.outside_s / total:.1f} % of all)."
        )
    return lines


def limit_lines(config: TuneConfig, *, numbers: Mapping[str, Mapping[str, float]] | None = None) -> list[str]:
    """Sentences about the limits of what a model that is tried may cost; none where there are none.

    Args:
        config: of the study.
        numbers: the limits of each model, by what they count; None before data is read.
    """
    words = {"max_flops_per_sample": "FLOPs a sample", "max_parameters": "parameters"}
    lines = []
    for name, limit in config.limits.items():
        what = words[name]
        most = f"{limit} those of the settings as given" if limit.is_multiple else short(limit.number)
        each = {model: found[what] for model, found in (numbers or {}).items()}
        shown = ", ".join(f"{model} {short(number)}" for model, number in each.items()) if limit.is_multiple else ""
        lines.append(f"Limit of {what}: {most}{f' ({shown})' if shown else ''}; draws beyond it are drawn again.")
    return lines


def write_tuning(tuning: Tuning, folder: Path, *, is_live: bool) -> list[Path]:
    """Write report.html and tuning.json into the folder of a study; return their paths.

    Args:
        tuning: what was found so far.
        folder: of the study.
        is_live: whether tries go on, so that the page loads itself anew.
    """
    paths = [folder / "report.html", folder / "tuning.json"]
    title = f"Tuning {', '.join(model.name for model in tuning.models)} on {tuning.config.data_name}"
    again = "<meta http-equiv=refresh content=30>" if is_live else ""
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in summary(tuning)),
        _table(columns_of(tuning), rows_of(tuning)),
        *(f"<p class=quiet>{html.escape(note)}</p>" for note in tuning.notes),
        f"<h2>Tries</h2>{page.figure_svg(tries_figure(tuning))}",
        _importances(tuning),
        *(_best_settings(model, tuning.spaces[model.name]) for model in tuning.models),
        f"<h2>Search spaces</h2>{_table(SPACE_COLUMNS, space_rows(dict(tuning.spaces)))}",
        *(_all_tries(model) for model in tuning.models),
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8>{again}<title>{html.escape(title)}</title>"
    write_text(paths[0], f"{head}<style>{page.STYLE}</style>{''.join(parts)}</html>\n")
    TUNING.write(paths[1], to_json(tuning))
    return paths


def to_json(tuning: Tuning) -> dict[str, object]:
    """Return everything as plain data."""
    config = tuning.config
    return {
        "data": config.data_name,
        "metric": config.decides,
        "protocol": config.protocol.value,
        "budget": {"tries": config.budget, "flops": config.flops, "hours": config.hours},
        "max_epochs": config.max_epochs,
        "limits": {name: str(limit) for name, limit in config.limits.items()},
        "sampler": config.sampler.value,
        "pruner": config.pruner.value,
        "seed": config.seed,
        "try_seeds": config.try_seeds,
        "inside_s": tuning.inside_s,
        "outside_s": tuning.outside_s,
        "calls": tuning.calls,
        "notes": list(tuning.notes),
        "models": [
            {
                "name": model.name,
                "best": model.best,
                "importances": dict(model.importances),
                "spent": dataclasses.asdict(model.spent),
                "limits": dict(tuning.limits.get(model.name, {})),
                "space": tuning.spaces[model.name].to_json(),
                "tries": [_try_json(each) for each in model.tries],
            }
            for model in tuning.models
        ],
    }


def best_so_far(tries: Sequence[Try], *, higher: bool) -> list[tuple[int, float]]:
    """Return number and value of each complete try that was better than all before it."""
    found: list[tuple[int, float]] = []
    for each in tries:
        if each.value is None:
            continue
        if not found or (each.value > found[-1][1] if higher else each.value < found[-1][1]):
            found.append((each.number, each.value))
    return found


def tries_figure(tuning: Tuning) -> Figure:
    """Draw every complete try and the best so far, against tries and against compute."""
    from matplotlib.figure import Figure

    higher = higher_is_better(tuning.config.decides)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_tries, by_compute = figure.subplots(1, 2, sharey=True)
    floor: list[float] = []
    for index, model in enumerate(tuning.models):
        color = f"C{index}"
        complete = [each for each in model.tries if each.value is not None]
        # Tries of workers that went on side by side are counted in the order of asking.
        flops: dict[int, float] = {}
        total = 0.0
        for each in model.tries:
            total += each.spent.flops
            flops[each.number] = total
        values = [each.value for each in complete]
        floor += [value for value in values if value is not None]
        by_tries.plot([each.number for each in complete], values, "o", color=color, alpha=0.35, markersize=4)
        steps = best_so_far(model.tries, higher=higher)
        if not steps:
            continue
        last = model.tries[-1].number
        numbers = [*(number for number, _ in steps), last]
        reached = [*(value for _, value in steps), steps[-1][1]]
        by_tries.step(numbers, reached, where="post", color=color, label=model.name)
        by_compute.step([flops[number] for number in numbers], reached, where="post", color=color, label=model.name)
    _show_the_upper_part(by_tries, floor, higher=higher)
    by_tries.set_xlabel("try")
    by_compute.set_xlabel("FLOPs spent")
    by_tries.set_ylabel(f"valid {shown_name(tuning.config.decides)}")
    for axes in (by_tries, by_compute):
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="y", useOffset=False)
        if floor:
            axes.legend()
    return figure


def _show_the_upper_part(axes: Axes, values: Sequence[float], *, higher: bool) -> None:
    """Let the better half of the tries fill the plot: a diverged one would flatten all others."""
    if len(values) < 4:
        return
    ordered = sorted(values, reverse=higher)
    best = ordered[0]
    middle = ordered[len(ordered) // 2]
    room = max(abs(best - middle), 1e-9)
    ends = (middle - room, best + 0.3 * room) if higher else (best - 0.3 * room, middle + room)
    axes.set_ylim(*ends)


def _importances(tuning: Tuning) -> str:
    rows = [
        (model.name, name, f"{100 * share:.0f} %")
        for model in tuning.models
        for name, share in list(model.importances.items())[:_SHOWN_IMPORTANCES]
    ]
    if not rows:
        return ""
    about = "Share of each setting in what tells good tries from the others (PED-ANOVA); of few tries it is a hint."
    return f"<h2>Importance of settings</h2><p class=quiet>{about}</p>{_table(('model', 'setting', 'share'), rows)}"


def _best_settings(model: TunedModel, space: TuningSpace) -> str:
    best = model.best_try
    if best is None:
        return ""
    rows = [(name, _shown(value), _shown(space.given(name))) for name, value in best.values.items()]
    head = f"<h2>{html.escape(model.name)}: best settings, of try {best.number}</h2>"
    return f"{head}{_table(('setting', 'best', 'as given'), rows)}"


def _all_tries(model: TunedModel) -> str:
    rows = []
    for each in model.tries:
        reached = max(each.reached, default=0)
        rows.append(
            (
                str(each.number),
                each.ended.value,
                "" if each.value is None else f"{each.value:.5f}",
                f"{each.reached[reached]:.5f} at {reached}" if each.reached else each.why,
                f"{each.spent.cpu_s:,.1f}",
                ", ".join(f"{name.rpartition('.')[2]} {_shown(value)}" for name, value in each.values.items()),
            )
        )
    head = ("try", "ended", "value", "last evaluation", "CPU s", "settings")
    name = html.escape(model.name)
    return f"<details><summary>All tries of {name}</summary><div class=wide>{_table(head, rows)}</div></details>"


def _try_json(each: Try) -> dict[str, object]:
    data = dataclasses.asdict(each)
    reached = {str(step): value for step, value in each.reached.items()}
    return {**data, "ended": each.ended.value, "reached": reached}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_number_class(cell)}>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _number_class(cell: str) -> str:
    bare = cell.translate(str.maketrans("", "", ",.+-%kMGT e"))
    return " class=n" if bare.isdigit() else ""


def _shown(value: Value | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
