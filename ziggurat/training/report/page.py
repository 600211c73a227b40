"""report.html: one file that shows how a run went, with plots inside (SVG), readable offline.

Metrics of the final evaluation (beside those of logistic regression on the same rows, where that was trained), loss
and validation metrics over steps with the best step marked, learning rate, throughput, calibration, the start-up
report, and which settings differ from their defaults. Made again at any time with `ziggurat report RUN`.
"""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ziggurat.config import flattened
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.features.items import Repeats
from ziggurat.features.labels import linear_model_name
from ziggurat.features.tasks import USUAL, Task
from ziggurat.files import write_text
from ziggurat.models import MODEL_CONFIGS
from ziggurat.models.build import kind_of
from ziggurat.training import metrics
from ziggurat.training.checkpoint.retention import complete_steps
from ziggurat.training.computed_with import computed_with, difference_notes
from ziggurat.training.config import Better, EarlyStopConfig, TrainingConfig
from ziggurat.training.early_stop import best_of
from ziggurat.training.evaluation.evaluate import PairsGain, unknown_text, versus_baseline, versus_trees
from ziggurat.training.metrics.full_ranking import repeats_lines
from ziggurat.training.metrics.metric import gain_over
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.log import LogRecord, read_records
from ziggurat.training.records.run_folder import (
    CONFIG,
    PRODUCTS,
    STARTUP,
    TRAFFIC,
    TREES,
    VERSUS,
    Evaluated,
    RunFolder,
    read_evaluation,
)
from ziggurat.training.report.exchange import exchange_section
from ziggurat.training.report.plots import calibration_figure, training_figures
from ziggurat.training.report.stragglers import straggler_section
from ziggurat.training.report.windows import window_figures, windows_section

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1c2430}
h1{font-size:1.6rem;margin-bottom:.2rem}
h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid #dde3ea}
table{border-collapse:collapse;font-size:14px}
td,th{padding:.25rem .8rem;border-bottom:1px solid #e8edf2;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:1rem}
svg{width:100%;height:auto}
pre{background:#f5f7fa;padding:1rem;overflow:auto;font-size:13px}
.quiet{color:#67727f}
.wide{overflow-x:auto}
details{margin:.8rem 0}
summary{cursor:pointer;color:#2563a8}
td{overflow-wrap:anywhere}
td.n{overflow-wrap:normal;white-space:nowrap}
"""


class _ModelRecord(TypedDict, total=False):
    kind: str


class _DataRecord(TypedDict, total=False):
    train: list[str]


class _DatasetRecord(TypedDict, total=False):
    name: str


class _StopRecord(TypedDict, total=False):
    metric: str
    better: str
    min_delta: float


class _TrainingRecord(TypedDict, total=False):
    early_stop: _StopRecord


class _LabelRecord(TypedDict, total=False):
    task: str


class _ItemsRecord(TypedDict, total=False):
    repeats: str


class _SchemaRecord(TypedDict, total=False):
    labels: list[_LabelRecord]
    items: _ItemsRecord | None


class _PackedSource(TypedDict):
    run: str
    step: int


class _PackedRecord(TypedDict, total=False):
    format_of_weights: str
    source: _PackedSource


class RunRecord(TypedDict, total=False):
    """The part of `config.json` that a report reads; a run of an older release may lack any of it."""

    model: _ModelRecord
    data: _DataRecord
    dataset: _DatasetRecord
    training: _TrainingRecord
    table_schema: _SchemaRecord | None


class _TrafficLine(TypedDict):
    purpose: str
    link: str
    bytes: int
    messages: int
    bytes_per_step: int
    messages_per_step: float


class TrafficRecord(TypedDict):
    """Content of a file of `TRAFFIC`; see `ranks.traffic_report`."""

    steps: int
    ranks: int
    rows: list[_TrafficLine]


def write_report(folder: str | Path, *, damage: str = "", beside: str | Path | None = None) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Args:
        folder: of the run.
        damage: a sentence on what is wrong with its log (`records.written.damage_of_log`), shown at the top.
        beside: folder of another stream over the same windows, the control of this one.
    """
    run = RunFolder(Path(folder))
    records = read_records(run.metrics)
    evaluations = _evaluations(run.path)
    baseline = _evaluations(run.baseline)
    config: RunRecord = CONFIG.read(run.config) if run.config.exists() else {}
    startup = STARTUP.read(run.startup) if run.startup.exists() else {}
    traffic: TrafficRecord | None = TRAFFIC.read(run.traffic) if run.traffic.exists() else None
    title = title_of(run, config)
    best = best_step(records, config)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=quiet>{html.escape(str(run.path))} · {_head(run, records, best=best)}</p>",
        f"<p><b>{html.escape(damage)}</b></p>" if damage else "",
        _metrics_table(evaluations, baseline=baseline, linear=_linear_model(config), metric=_stop_metric(config)),
        _baseline_text(run, evaluations, baseline=baseline, config=config),
        _repeats_text(evaluations, config=config),
        _slices_section(evaluations),
        _windows_section(run, beside=None if beside is None else RunFolder(Path(beside))),
        _training_section(run, records, best=best),
        _calibration_section(evaluations),
        straggler_section(records),
        exchange_section(records),
        _traffic_section(traffic),
        _startup_section(startup),
        _config_section(config),
    ]
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    write_text(run.report, f"{page}<style>{STYLE}</style>{''.join(parts)}</html>\n")
    return run.report


def _head(run: RunFolder, records: list[LogRecord], *, best: int) -> str:
    """Say when a run was written and how far it was trained, or of which run its products were packed."""
    if not run.products.exists():
        return f"{_date(run)} · {_summary(records, best=best, steps=_steps(run, records))}"
    packed: _PackedRecord = PRODUCTS.read(run.products)
    source = packed.get("source", {})
    text = f"dense products packed in {packed.get('format_of_weights', 'few bits')}"
    if source:
        text += f", of run {source['run']} at step {source['step']:,}"
    return html.escape(f"{text}; packed for scoring, so no log")


def _training_section(run: RunFolder, records: list[LogRecord], *, best: int) -> str:
    """Draw the log of a training; "" of a run that was packed, whose log is that of the run it was made of."""
    if run.products.exists():
        return ""
    figures = "".join(figure_svg(figure) for figure in training_figures(records, best_step=best))
    return f"<h2>Training</h2><div class=plots>{figures}</div>"


def _windows_section(run: RunFolder, *, beside: RunFolder | None) -> str:
    """Show the windows of a stream, beside those of its control."""
    records = read_scored_windows(run)
    control = [] if beside is None else read_scored_windows(beside)
    figures = [figure_svg(figure) for figure in window_figures(records, control=control)]
    return windows_section(records, control=control, figures=figures)


def _evaluations(folder: Path) -> dict[str, Evaluated]:
    return {path.stem: read_evaluation(path) for path in sorted((folder / "evaluations").glob("*.json"))}


def loss_plot(folder: str | Path) -> str:
    """Return the plot of the loss of a run as SVG, as its report has it; "" of a run without a log."""
    run = RunFolder(Path(folder))
    if not run.metrics.exists():
        return ""
    records = read_records(run.metrics)
    config: RunRecord = CONFIG.read(run.config) if run.config.exists() else {}
    figures = training_figures(records, best_step=best_step(records, config))
    return figure_svg(figures[0]) if figures else ""


def figure_svg(figure: Figure) -> str:
    """Return a figure as a part of a page, the same bytes each time."""
    buffer = io.StringIO()
    # Without them each plot has new ids and a date, and two reports of one run would differ.
    with mpl.rc_context({"svg.hashsalt": "ziggurat", "svg.fonttype": "none"}):
        # `savefig` draws twice, once to find a bounding box that nobody asked for: a quarter of the time of a report.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    # Behind the declaration of XML, which has no place within a page.
    return f"<figure style='margin:0'>{text[text.index('<svg') :]}</figure>"


def title_of(run: RunFolder, config: RunRecord) -> str:
    """Say what was trained on what: "dcn_v2 on movielens-1m"; the folder's name where the config does not say."""
    model = config.get("model", {}).get("kind", "")
    files = config.get("data", {}).get("train") or []
    data = config.get("dataset", {}).get("name") or ", ".join(Path(file).name for file in files[:3])
    data += f" and {len(files) - 3} more files" if len(files) > 3 else ""
    return f"{model} on {data}" if model and data else run.path.name


def best_step(records: list[LogRecord], config: RunRecord) -> int:
    """The step of the best evaluation by the metric that training stops by; 0 without one."""
    stop = config.get("training", {}).get("early_stop", {})
    metric = _stop_metric(config)
    valid = [record for record in records if record["kind"] == "valid" and record.get(metric) is not None]
    # A run of an older release may not say it, and the default was in force then.
    least = stop.get("min_delta", EarlyStopConfig.min_delta)
    rule = EarlyStopConfig(metric=metric, better=Better(stop.get("better", Better.AUTO)), min_delta=least)
    return best_of(((record["step"], record[metric]) for record in valid), stop=rule) if valid else 0


def _stop_metric(config: RunRecord) -> str:
    return config.get("training", {}).get("early_stop", {}).get("metric", metrics.USUAL)


def _date(run: RunFolder) -> str:
    """Return the time of the last write to the log."""
    if not run.metrics.exists():
        return "no log"
    return datetime.fromtimestamp(run.metrics.stat().st_mtime, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _steps(run: RunFolder, records: list[LogRecord]) -> int:
    """Return the steps that were made: those of a stream stand in its checkpoint, as few of them are logged."""
    logged = max((record["step"] for record in records), default=0)
    if not run.is_stream():
        return logged
    return max([logged, *complete_steps(run.checkpoints)])


def _summary(records: list[LogRecord], *, best: int, steps: int) -> str:
    skipped = sum(record["kind"] == "skipped" for record in records)
    text = f"{steps:,} steps" + (f", best at step {best:,}" if best else "")
    text += f", {skipped} skipped because of NaN or infinity" if skipped else ""
    sent_back = [record for record in records if record["kind"] == "products"]
    return text + "".join(f"; dispatch, step {each['step']:,}: {each['sent_back']}" for each in sent_back)


def _repeats_text(evaluations: Mapping[str, Evaluated], *, config: RunRecord) -> str:
    """Say by which protocol items were ranked, and whether answers differ from it."""
    items = (config.get("table_schema") or {}).get("items") or {}
    repeats = Repeats(items.get("repeats", Repeats.LEAVE_OUT_BUT_TARGET))
    lines = [
        f"{split}: {line}"
        for split, found in evaluations.items()
        for line in repeats_lines(found["metrics"], repeats=repeats)
    ]
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _linear_model(config: RunRecord) -> str:
    """Return the name of the linear model that learns the labels of a run."""
    schema = config.get("table_schema") or {}
    listed = {task.name: task for task in Task}
    names = [label.get("task", USUAL.name) for label in schema.get("labels", ())]
    # A report is written again without the modules of the run; a task of theirs is then unknown.
    return linear_model_name(listed[name] for name in names) if listed.keys() >= set(names) else Task.linear_model


def _metrics_table(
    evaluations: Mapping[str, Evaluated], *, baseline: Mapping[str, Evaluated], linear: str, metric: str
) -> str:
    """Write one line a metric, one column a split: narrow, however many labels there are; the baseline beside it.

    Args:
        evaluations: of the run, by split.
        baseline: the same of the linear model beside it.
        linear: its name.
        metric: that decides which of the two is better.
    """
    if not evaluations:
        return ""
    shown = dict(evaluations)
    # Splits that the run itself has: the linear model may know others.
    shown |= {f"{linear}, {split}": value for split, value in baseline.items() if split in evaluations}
    names = list(dict.fromkeys(name for value in evaluations.values() for name in value["metrics"]))
    head = "".join(f"<th class=n>{html.escape(split)}" for split in shown)
    counts = "".join(f"<td class=n>{value['num_rows']:,}" for value in shown.values())
    rows = "".join(
        f"<tr><td>{html.escape(name)}"
        + "".join(
            f"<td class=n>{_shown(value['metrics'].get(name))}{_error_bar(value, name)}" for value in shown.values()
        )
        for name in names
    )
    note = "<p class=quiet>ne: log loss over that of always predicting the mean label; 1 is no better than that.</p>"
    has_ne = any(name.split("/")[0] == "ne" for name in names)
    table = f"<div class=wide><table><tr><th>metric{head}<tr><td>rows{counts}{rows}</table></div>"
    if any(value.get("half_widths") for value in shown.values()):
        table += "<p class=quiet>±: half of the 95 % interval, of the metric that chose the weights.</p>"
    unknown = "".join(
        f"<p>{html.escape(f'{split}: {text}')}</p>"
        for split, value in evaluations.items()
        if (text := unknown_text(value.get("unknown", {})))
    )
    pairs = ""
    for split, value in evaluations.items():
        if "pairs" not in value:
            continue
        gain = PairsGain(**value["pairs"])
        is_below = "no model" if gain.below_floor else ""
        # "no model" is the stronger sentence, and stays where it holds.
        if split in baseline and _is_worse(value, baseline[split], metric=metric):
            is_below = is_below or linear
        pairs += f"<p>{html.escape(f'{split}: {_pairs_text(gain, is_below=is_below)}')}</p>"
    return f"<h2>Final evaluation</h2>{table}{unknown}{pairs}{note if has_ne else ''}"


def _is_worse(ours: Evaluated, theirs: Evaluated, *, metric: str) -> bool:
    """Return whether a metric that both have is worse in the first."""
    first = ours["metrics"].get(metric)
    second = theirs["metrics"].get(metric)
    return first is not None and second is not None and gain_over(metric, first, second) < 0


def _error_bar(evaluation: Evaluated, name: str) -> str:
    """Half of the 95 % interval of a metric; "" where none was computed."""
    half_width = evaluation.get("half_widths", {}).get(name)
    return "" if half_width is None else f" ± {_shown(half_width)}"


def _pairs_text(gain: PairsGain, *, is_below: str) -> str:
    """Say what features add together, and what it means.

    Args:
        gain: of the run.
        is_below: what the run is worse than, so that it has no gain; "" for nothing.
    """
    if is_below:
        return f"worse than {is_below}, so what pairs of features add is not told"
    if gain.is_nothing and gain.fitted_too_long:
        return f"pairs of features add nothing to rows that are new ({gain.text()}), and training went on by heart"
    if gain.is_nothing:
        return f"still on the plateau of single features: pairs of them add nothing yet ({gain.text()})"
    return f"pairs of features add {gain.text()}"


def _baseline_text(
    run: RunFolder, evaluations: Mapping[str, Evaluated], *, baseline: Mapping[str, Evaluated], config: RunRecord
) -> str:
    """Say how the run compares with the linear model, and in what the two were computed differently."""
    split = next((name for name in ("test", "valid") if name in evaluations and name in baseline), "")
    if not split:
        return ""
    half_widths = VERSUS.read(run.versus).get(split) if run.versus.exists() else None
    text = versus_baseline(
        evaluations[split]["metrics"],
        baseline[split]["metrics"],
        metric=_stop_metric(config),
        name=_linear_model(config),
        half_widths=half_widths,
    )
    notes = difference_notes([computed_with(run), computed_with(RunFolder(run.baseline))])
    quiet = "".join(f"<p class=quiet>{html.escape(note)}</p>" for note in notes)
    link = '<a href="baseline/report.html">its report</a>'
    trees = html.escape(f"{split}: {trees_text(run, evaluations[split]['metrics'], split=split)}")
    return f"<p>{html.escape(f'{split}: {text}; ' if text else '')}{link}</p><p>{trees}</p>{quiet}"


def trees_text(run: RunFolder, metrics: Mapping[str, float], *, split: str, why_not: str = "") -> str:
    """Say how a run compares with gradient-boosted trees, if they were grown beside it.

    Args:
        run: its folder.
        metrics: of the run.
        split: that they are of.
        why_not: there may be no trees; "" where nobody knows.
    """
    if run.trees.exists():
        found = TREES.read(run.trees)
        trees = math.nan if found[split] is None else found[split]
        text = versus_trees(
            metrics,
            trees,
            metric=found["metric"],
            library=found["library"],
            half_width=found.get("half_widths", {}).get(split, math.nan),
        )
        if text:
            return text
    return f"gradient-boosted trees were not tried{f': {why_not}' if why_not else ', and may be better'}"


def _slices_section(evaluations: Mapping[str, Evaluated]) -> str:
    """The metrics by slice of evaluations that have them."""
    parts = []
    for split, value in evaluations.items():
        slices = value.get("slices", [])
        if not slices:
            continue
        head = "".join(f"<th class=n>{html.escape(name)}" for name in value["metrics"])
        rows = "".join(
            f"<tr><td>{html.escape(each['column'])}<td>{html.escape(each['value'])}<td class=n>{each['num_rows']:,}"
            + "".join(f"<td class=n>{_shown(each['metrics'].get(name))}" for name in value["metrics"])
            for each in slices
        )
        table = f"<div class=wide><table><tr><th>slice<th>value<th class=n>rows{head}{rows}</table></div>"
        parts.append(f"<h2>Slices, {html.escape(split)}</h2>{table}")
    return "".join(parts)


def changed_settings(config: RunRecord) -> list[tuple[str, str, str]]:
    """(setting, value, default) of data, model and training where they differ from the defaults of their classes."""
    kinds = {kind_of(each): each for each in MODEL_CONFIGS}
    kind = kinds.get(config.get("model", {}).get("kind", ""))
    groups = {"data": DataConfig, "training": TrainingConfig} | ({"model": kind} if kind is not None else {})
    found = []
    for group, cls in groups.items():
        defaults = flattened(cls())
        values = flattened(config.get(group, {}))
        found += [
            (f"{group}.{name}", value.strip('"'), defaults.get(name, "none").strip('"'))
            for name, value in values.items()
            if value != defaults.get(name)
        ]
    return found


def _config_section(config: RunRecord) -> str:
    if not config:
        return ""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in ("--" + name, value, default))
        for name, value, default in changed_settings(config)
    )
    table = f"<div class=wide><table><tr><th>setting<th>value<th>default{rows}</table></div>"
    whole = html.escape(json.dumps(config, indent=2, ensure_ascii=False))
    about = "<p class=quiet>What differs from the defaults of the model, the data and the training.</p>"
    return f"<h2>Configuration</h2>{about}{table}<details><summary>all of it</summary><pre>{whole}</pre></details>"


def dated(text: str) -> str:
    """Text with dates in place of seconds since 1970."""
    # Nine digits at least: other numbers behind "from" are no dates.
    return re.sub(
        r"(?<=from )(\d{9,10})\b",
        lambda found: datetime.fromtimestamp(int(found[1]), tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        text,
    )


def _shown(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.5f}"


def _calibration_section(evaluations: Mapping[str, Evaluated]) -> str:
    figures = [
        figure_svg(calibration_figure(value["curves"], title=f"Calibration, {split}"))
        for split, value in evaluations.items()
        if value["curves"]
    ]
    return f"<h2>Calibration</h2><div class=plots>{''.join(figures)}</div>" if figures else ""


def _traffic_section(traffic: TrafficRecord | None) -> str:
    """Show what all ranks have sent per training step, by purpose and link; nothing for a run on one device."""
    if not traffic:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(row['purpose'])}<td>{html.escape(row['link'].replace('_', ' '))}"
        f"<td class=n>{row['bytes_per_step']:,}<td class=n>{row['messages_per_step']:,}<td class=n>{row['bytes']:,}"
        for row in traffic["rows"]
    )
    head = "<tr><th>what<th>link<th class=n>bytes a step<th class=n>messages a step<th class=n>bytes in all"
    about = f"Counted on {traffic['ranks']} ranks over {traffic['steps']:,} steps, not estimated; all ranks together."
    return f"<h2>Traffic</h2><p class=quiet>{about}</p><div class=wide><table>{head}{rows}</table></div>"


def _startup_section(startup: dict[str, dict[str, str]]) -> str:
    rows = "".join(
        f"<tr><th colspan=2>{html.escape(title)}"
        + "".join(f"<tr><td>{html.escape(name)}<td>{html.escape(dated(str(value)))}" for name, value in lines.items())
        for title, lines in startup.items()
    )
    return f"<h2>Start-up report</h2><table>{rows}</table>" if rows else ""
