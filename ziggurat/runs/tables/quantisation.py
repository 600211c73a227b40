"""What a finished run costs in few bits: its metrics, its largest change of a score and its bytes, format by format.

    checkpoint ─► rows as the run keeps them ──► scores of the validation samples ─┐
               └► rows rounded to a format ────► scores of the same samples ───────┴─► AUC, log loss, calibration, …

Each format is tried on all tables, and on request on one table at a time, while the others stay as they are: some
tables take INT4 without a trace, and one may cost more than all others together. The model is not trained again, and
rows are rounded to the nearest: what an export in that format does (`ziggurat export --tables`).

The error of a change of log loss is that of the mean over samples of the difference, sample by sample: both score the
same ones, so it is far smaller than the error of either. Rows go from the checkpoint into the format in pieces, and one
model is in memory at a time. Cost: the run is loaded and scored once for each line, and once more.

Reference: post-training row-wise quantisation of embedding tables, Guan et al., arXiv 1911.02079, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from ziggurat.config import to_json
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import LabelSpec
from ziggurat.files import Format
from ziggurat.models.build import ModelConfig
from ziggurat.ops.machine.memory import size_text
from ziggurat.ops.row_formats import RowFormat
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.export.parity import is_kept
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.tables.table_report import table_sizes
from ziggurat.training.evaluation.evaluate import Evaluation
from ziggurat.training.metrics.accumulator import MetricFunction, has_metrics
from ziggurat.training.metrics.functions import sample_losses
from ziggurat.training.metrics.metric import Metric, metric_of
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import checked

QUANTISATION = Format(name="ziggurat.quantisation", what="a report on a run in few bits")
_LARGEST = "largest_change"
_ERROR = "log_loss_error"
_Scores = Float[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True)
@checked
class QuantisationConfig:
    """Settings of what is tried, and on which samples.

    Args:
        formats: bf16, int8, int4.
        by_table: also one table at a time.
        split: the run's own rows: train, valid or test.
        data: files to score in place of them.
        step: of the checkpoint; None: the best one by validation.
    """

    formats: tuple[RowFormat, ...] = field(default_factory=lambda: _rounded())
    by_table: bool = False
    split: str = "valid"
    data: tuple[str, ...] = ()
    step: int | None = None

    def __post_init__(self) -> None:
        wrong = [each.name for each in self.formats if not each.rounds]
        if wrong or not self.formats:
            raise ConfigError(
                expected=f"formats of fewer bits: {', '.join(map(str, _rounded()))}",
                found=", ".join(wrong) or "none",
                where="formats",
                ways_out="--formats int8,int4",
            )


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """A format for all tables or for one, and how the run scores with it.

    Args:
        row_format: of the tables that are tried; "" for the run as it is.
        table: the one that is tried; "" for all.
        weight_bytes: of the rows of these tables.
        metrics: by name, those of an evaluation; with several labels the names end in `/label`.
        changes: of each metric against the run.
        largest_change: of a score, by label.
        log_loss_error: standard error of the change of log loss, by label; NaN where a label has none.
    """

    row_format: str
    table: str
    weight_bytes: int
    metrics: dict[str, float]
    changes: dict[str, float] = field(default_factory=dict)
    largest_change: dict[str, float] = field(default_factory=dict)
    log_loss_error: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class QuantisationReport:
    """The run as it is, and what each format makes of it.

    Args:
        run: as it is.
        tried: formats, all tables first.
        labels: of the run.
        table_bytes: by table and format, the run's own named "run": bytes of the rows.
        shapes: rows and columns by table.
        num_rows: samples that were scored.
        step: of the checkpoint.
        rows: which samples, in words.
    """

    run: FormatCost
    tried: tuple[FormatCost, ...]
    labels: tuple[str, ...]
    table_bytes: dict[str, dict[str, int]]
    shapes: dict[str, tuple[int, int]]
    num_rows: int
    step: int
    rows: str

    @property
    def summary(self) -> str:
        """The samples and the weights of the report, in one line."""
        return f"{self.num_rows:,} samples ({self.rows}), checkpoint of step {self.step:,}"

    @property
    def within(self) -> str:
        """The smallest format for all tables that an export takes; "" for none, or where no metric is held to that."""
        fits = [
            cost
            for cost in self.tried
            if not cost.table and _has_held(cost.metrics) and _is_within(cost.changes, run=self.run.metrics)
        ]
        return min(fits, key=lambda cost: cost.weight_bytes).row_format if fits else ""

    def columns(self) -> tuple[str, ...]:
        """Headings of the lines that `cells` gives."""
        headings = ["format", "table", "weights", "times smaller", "label"]
        for metric in compared_metrics():
            heading = _heading(metric)
            headings += [heading] if metric.higher_is_better is None else [heading, f"change of {heading}"]
        return (*headings, "largest change of a score")

    def cells(self) -> list[tuple[str, ...]]:
        """The lines of the table, as `columns` names them."""
        return [self._cells(cost, label) for cost in (self.run, *self.tried) for label in self.labels]

    def byte_columns(self) -> tuple[str, ...]:
        """Headings of the lines that `byte_cells` gives."""
        return ("table", "rows × columns", "the run", *(each.row_format for each in self.tried if not each.table))

    def byte_cells(self) -> list[tuple[str, ...]]:
        """Bytes of each table by format, the largest first."""
        order = sorted(self.table_bytes, key=lambda name: -self.table_bytes[name]["run"])
        return [
            (
                name,
                "{:,} × {}".format(*self.shapes[name]),
                *(size_text(each) for each in self.table_bytes[name].values()),
            )
            for name in order
        ]

    def to_json(self) -> dict[str, object]:
        """Everything as plain data."""
        return to_json(self)

    def _cells(self, cost: FormatCost, label: str) -> tuple[str, ...]:
        metrics = self._of(cost.metrics, label)
        changes = self._of(cost.changes, label)
        error = cost.log_loss_error.get(label, math.nan)
        largest = cost.largest_change.get(label, math.nan)
        spread = f" ± {error:.5f}" if math.isfinite(error) and changes else ""
        of_metrics: list[str] = []
        for metric in compared_metrics():
            name = metric.name_at(DEFAULT_RANKING_K)
            of_metrics.append(_shown(metrics, name))
            if metric.higher_is_better is not None:
                of_metrics.append(_shown(changes, name, sign="+") + (spread if metric.is_loss else ""))
        before = self.run.weight_bytes if not cost.table else self.table_bytes[cost.table]["run"]
        return (
            cost.row_format or "the run",
            (cost.table or "all") if cost.row_format else "",
            size_text(cost.weight_bytes),
            f"{before / max(cost.weight_bytes, 1):.2f}" if cost.row_format else "",
            label if len(self.labels) > 1 else "",
            *of_metrics,
            f"{largest:.2g}" if math.isfinite(largest) else "",
        )

    def _of(self, metrics: dict[str, float], label: str) -> dict[str, float]:
        """Metrics of a label by their own names."""
        if len(self.labels) == 1:
            return metrics
        return {name.partition("/")[0]: value for name, value in metrics.items() if name.endswith(f"/{label}")}


class _ScoresOfRun:
    """The scores of the run, label by label, and metrics of an evaluation that compare others with them."""

    def __init__(self) -> None:
        self._kept: list[_Scores] = []

    def keeping(self) -> dict[str, MetricFunction]:
        """Return metrics for the evaluation of the run that keep its scores."""

        def keep(scores: _Scores, labels: _Scores, weights: _Scores) -> float:
            del labels, weights
            # A copy, since the evaluation may use its arrays again.
            self._kept.append(scores.copy())
            # A metric has to be a number; this one is taken out of the report.
            return 0.0

        return {_LARGEST: keep}

    def comparing(self, labels: Sequence[LabelSpec]) -> dict[str, MetricFunction]:
        """Return metrics for evaluations of the same samples: an evaluation asks for each label once, in order.

        A label that is always 1 (what came next) has NaN: its items are judged by their ranks, and no score says more.
        """
        # Both metrics go through all labels, each at its own pace.
        kept = iter(self._kept)
        again = iter(self._kept)
        asked = iter(labels)
        kinds = iter(labels)

        def largest(scores: _Scores, labels: _Scores, weights: _Scores) -> float:
            del labels, weights
            found = float(np.abs(scores - next(kept)).max(initial=0.0))
            return found if has_metrics(next(asked)) else math.nan

        def error(scores: _Scores, labels: _Scores, weights: _Scores) -> float:
            of_run = next(again)
            label = next(kinds)
            if not has_metrics(label) or not label.task.has_positives or not weights.sum():
                return math.nan
            epsilon = float(np.finfo(np.float32).eps)  # scores are FP32
            difference = sample_losses(scores, labels, epsilon=epsilon) - sample_losses(of_run, labels, epsilon=epsilon)
            # The difference of each sample, so that what both get wrong alike takes no part.
            mean = np.average(difference, weights=weights)
            # The standard error of a weighted mean.
            return float(np.sqrt(np.sum((weights * (difference - mean)) ** 2)) / weights.sum())

        return {_LARGEST: largest, _ERROR: error}


def quantisation_report(
    folder: str | Path,
    *,
    config: QuantisationConfig | None = None,
    models: Sequence[type[ModelConfig]] = (),
    progress: Progress | None = None,
) -> QuantisationReport:
    """Score a run with its tables in formats of fewer bits, and compare.

    Args:
        folder: of the run.
        config: which formats, and which samples.
        models: config classes of your own that the run may name.
        progress: shows what is tried.

    Raises:
        MissingFileError, CheckpointError, ConfigError, DataError: as loading a run and reading its data.
    """
    config = config or QuantisationConfig()
    progress = progress or NoProgress()
    run = load_run(folder, step=config.step, models=models)
    scores = _ScoresOfRun()
    settings = run.config
    inputs = run.preprocessing.inputs
    step = run.step
    # Before the model is scored, since it is gone when others are compared with it.
    table_bytes = _table_bytes(settings, run, formats=config.formats)
    sizes = table_sizes(settings, inputs)
    labels = tuple(label.name for label in inputs.labels)
    progress.begin("the run", total=None)
    found = _evaluated(run, config, scores.keeping(), progress)
    progress.end()
    as_it_is = FormatCost(
        row_format="",
        table="",
        weight_bytes=sum(each["run"] for each in table_bytes.values()),
        metrics=_without_own(found.metrics),
    )
    del run  # before another one takes memory
    tried = []
    for row_format, table in _choices(config, table_bytes):
        progress.begin(f"{row_format.value}, {table or 'all tables'}", total=None)
        rounded = load_run(folder, step=step, models=models, tables=rounded_tables(settings, row_format, table=table))
        metrics = scores.comparing(inputs.labels)
        other = _evaluated(rounded, config, metrics, NoProgress())
        del rounded
        progress.end()
        weight_bytes = sum(table_bytes[name][row_format.value] for name in ([table] if table else table_bytes))
        cost = FormatCost(row_format=row_format.value, table=table, weight_bytes=weight_bytes, metrics={})
        tried.append(_compared(cost, other, run=as_it_is, labels=labels))
    return QuantisationReport(
        run=as_it_is,
        tried=tuple(tried),
        labels=labels,
        table_bytes=table_bytes,
        shapes={name: (sizes[name].num_rows, sizes[name].dim) for name in table_bytes},
        num_rows=found.num_rows,
        step=step,
        rows=", ".join(config.data) or f"the run's {config.split} rows",
    )


def rounded_tables(config: RunConfig, row_format: RowFormat, *, table: str) -> TablesConfig:
    """The tables of a run in another format.

    Args:
        config: of the run.
        row_format: to round to.
        table: the one that is rounded; "" for all. Others stay as they are: in FP32 if the run has a cache, whose rows
            are FP32 numbers.
    """
    if not table:
        return TablesConfig(weights=row_format)
    if config.tables.cache:
        return TablesConfig(by_table={table: row_format})
    # The format is chosen, and a limit would choose another.
    return replace(config.tables, by_table={**config.tables.by_table, table: row_format}, memory_limit="")


def _rounded() -> tuple[RowFormat, ...]:
    """Return the formats whose updates lose something, which is what a run that is read in them may lose, too."""
    return tuple(each for each in RowFormat if each.rounds)


def _choices(config: QuantisationConfig, tables: dict[str, dict[str, int]]) -> Iterator[tuple[RowFormat, str]]:
    """Formats for all tables, then table by table, the largest first, where a format changes its bytes."""
    yield from ((row_format, "") for row_format in config.formats)
    for name in sorted(tables, key=lambda name: -tables[name]["run"]) if config.by_table else ():
        for row_format in config.formats:
            # A table that the run keeps in this format already would be compared with itself.
            if tables[name][row_format.value] != tables[name]["run"]:
                yield row_format, name


def _evaluated(
    run: Run, config: QuantisationConfig, metrics: dict[str, MetricFunction], progress: Progress
) -> Evaluation:
    if config.data:
        return run.evaluate(list(config.data), metrics=metrics, progress=progress)
    return run.evaluate_split(config.split, metrics=metrics, progress=progress)


def _table_bytes(config: RunConfig, run: Run, *, formats: Sequence[RowFormat]) -> dict[str, dict[str, int]]:
    inputs = run.preprocessing.inputs
    used = {spec.table for spec in inputs.lookups}
    found = dict[str, dict[str, int]]()
    for name, size in table_sizes(config, inputs).items():
        if name in used:
            bytes_of = {each.value: size.num_rows * each.for_columns(size.dim).row_bytes(size.dim) for each in formats}
            found[name] = {"run": size.num_rows * size.row_format.row_bytes(size.dim), **bytes_of}
    return found


def _compared(empty: FormatCost, found: Evaluation, *, run: FormatCost, labels: Sequence[str]) -> FormatCost:
    metrics = _without_own(found.metrics)
    return replace(
        empty,
        metrics=metrics,
        changes={name: value - run.metrics[name] for name, value in metrics.items()},
        largest_change=_by_label(found.metrics, _LARGEST, labels=labels),
        log_loss_error=_by_label(found.metrics, _ERROR, labels=labels),
    )


def _by_label(metrics: dict[str, float], own: str, *, labels: Sequence[str]) -> dict[str, float]:
    """One of the metrics here, by label."""
    return {label: metrics[f"{own}/{label}" if len(labels) > 1 else own] for label in labels}


def compared_metrics() -> list[Metric]:
    """Return the metrics that the table has a column for."""
    return [metric for metric in Metric if metric.in_few_bits]


def _heading(metric: Metric) -> str:
    """Return what people call a metric, and of how many places among what."""
    places = metric.name_at(DEFAULT_RANKING_K).removeprefix(metric.name)
    return (metric.shown or metric.name) + places + (" of all items" if metric.ranks_all else "")


def _has_held(metrics: dict[str, float]) -> bool:
    """Return whether there is a metric that an export is held to."""
    known = {name: metric_of(name) for name, value in metrics.items() if math.isfinite(value)}
    return any(metric is not None and metric.is_held for metric in known.values())


def _is_within(changes: dict[str, float], *, run: dict[str, float]) -> bool:
    """Return whether no metric gets worse than an export takes; what is NaN is left out."""
    defined = [name for name in changes if math.isfinite(changes[name])]
    return all(is_kept(name, run=run[name], change=changes[name]) for name in defined)


def _without_own(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.partition("/")[0] not in (_LARGEST, _ERROR)}


def _shown(values: dict[str, float], name: str, *, sign: str = "") -> str:
    value = values.get(name, math.nan)
    return f"{value:{sign}.5f}" if math.isfinite(value) else ""
