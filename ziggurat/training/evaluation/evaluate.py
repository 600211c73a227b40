"""Evaluate and predict: one pass over a data set without gradients, in file order.

Scores are probabilities for binary labels (sigmoid of the logit) and plain values for regression. Metrics are exact:
all scores are kept (8 bytes a sample and label), none are binned. On many ranks each scores its rows; the scores of all
come together on rank 0, and every rank gets the same metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ziggurat.data.encoded.loader import Dataset, Loader, LoaderConfig, Shuffle
from ziggurat.errors import refusing_exits
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import UNKNOWN_ROW
from ziggurat.models import Model
from ziggurat.models.contract.losses import scores_from_logits
from ziggurat.models.contract.model import device_of
from ziggurat.models.contract.outputs_check import check_logits
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.precision.choice import whole_products
from ziggurat.training.evaluation.full_ranking_pass import FullRankingPass
from ziggurat.training.metrics.accumulator import MetricAccumulator, MetricFunction, gather_rows, has_metrics
from ziggurat.training.metrics.calibration import calibration_curve
from ziggurat.training.metrics.full_ranking import answered_instead
from ziggurat.training.metrics.metric import from_one, gain_over, higher_is_better, is_best_at_one, metric_of
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K
from ziggurat.training.report.progress import NoProgress, Progress

_NOTABLE_SHARE = 0.005  # of samples with an unknown id: below, it moves no metric
_SHOWN_FEATURES = 6
_WORTH = 0.005  # of AUC or R²


class SliceSource(Protocol):
    """Divides the samples of an evaluation; complete when all its batches were read."""

    def numbers(self) -> NDArray[np.int64]:
        """(samples of this rank, columns) the number of each sample's value."""
        ...

    def slices(self) -> Iterable[tuple[str, str, int, int, list[int]]]:
        """(column, value, samples of all ranks, column of `numbers`, numbers that belong)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The metrics of some of the samples: those whose `column` has this `value`."""

    column: str
    value: str
    num_rows: int
    metrics: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """The slice as plain data."""
        metrics = _without_nan(self.metrics)
        return {"column": self.column, "value": self.value, "num_rows": self.num_rows, "metrics": metrics}


@dataclass(frozen=True, kw_only=True)
class PairsGain:
    """The gain of a model from features together, beyond what each of them says alone.

    Args:
        metric: that was compared.
        value: of the model minus that of its own sum of single features; above 0: better.
        half_width: half of the 95 % interval.
        num_rows: samples.
        fitted_too_long: whether the loss of training fell far below what it was at the best step: the weights are off
            the plateau of single features since, by what holds for the training rows alone.
        below_floor: whether the model is worse than no model on these rows: what is less wrong than something worse
            is no gain.
    """

    metric: str
    value: float
    half_width: float
    num_rows: int
    fitted_too_long: bool = False
    below_floor: bool = False

    @property
    def is_nothing(self) -> bool:
        """True if the rows show that the gain is less than anybody trains a network for."""
        return self.value + self.half_width <= _WORTH

    def text(self) -> str:
        """The gain in words, with its interval."""
        return f"{self.metric} {self.value:+.4f} ± {self.half_width:.4f} over what each says alone"

    def to_json(self) -> dict[str, object]:
        """The gain as plain data."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one evaluation.

    Args:
        num_rows: samples evaluated.
        metrics: name to value; with several labels the names end in `/label`.
        curves: for each binary label, points of the calibration curve.
        slices: metrics of parts of the samples, if any were asked for.
        unknown: by name of a feature with one id a sample, the share of samples whose id the training rows do not have;
            features without such samples are left out.
        half_widths: by metric, half of its 95 % interval; of the metric that was asked for, on the first rank.
        pairs: what features add together, where that was measured.
    """

    num_rows: int
    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    slices: tuple[Slice, ...] = ()
    unknown: Mapping[str, float] = field(default_factory=dict)
    half_widths: dict[str, float] = field(default_factory=dict)
    pairs: PairsGain | None = None

    def __repr__(self) -> str:
        return f"Evaluation({self.num_rows:,} rows: {self.line()})"

    def line(self) -> str:
        """Write all metrics in one line, with the errors that are known."""
        return metrics_line(self.metrics, half_widths=self.half_widths)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{value:.5f}</td></tr>" for name, value in self.metrics.items())
        return f"<table><tr><th>metric</th><th>{self.num_rows:,} rows</th></tr>{rows}</table>"

    def to_json(self) -> dict[str, object]:
        """The evaluation as plain data; `run_folder.read_evaluation` reads it."""
        curves = {label: [_without_nan(point) for point in points] for label, points in self.curves.items()}
        data: dict[str, object] = {"num_rows": self.num_rows, "metrics": _without_nan(self.metrics), "curves": curves}
        if self.slices:
            data["slices"] = [each.to_json() for each in self.slices]
        if self.unknown:
            data["unknown"] = dict(self.unknown)
        if self.half_widths:
            data["half_widths"] = self.half_widths
        if self.pairs is not None:
            data["pairs"] = self.pairs.to_json()
        return data


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON has them: null for a metric that is undefined, since JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


_MAX_SHOWN = 4
_MAX_LABELS = 8


def metrics_line(
    metrics: Mapping[str, float],
    *,
    half_widths: Mapping[str, float] | None = None,
    names: Sequence[str] | None = None,
) -> str:
    """Write metrics in one line, for people; – where one is undefined.

    A recall that spares targets from what answers leave out has the recall of the answers in brackets behind it.

    Args:
        metrics: by name, in the order that is shown.
        half_widths: by metric, half of its 95 % interval, of those that have one.
        names: those that are shown; None: all of them.
    """
    known = half_widths or {}
    parts: list[str] = []
    for name in metrics if names is None else names:
        value = metrics[name]
        shown = f"{value:.5f}" if math.isfinite(value) else "–"
        answered = answered_instead(name, metrics)
        of_answers = "" if answered is None else f" (of answers, without what a user had: {answered:.5f})"
        parts.append(f"{name} {shown}" + (f" ± {known[name]:.5f}" if name in known else "") + of_answers)
    return "  ".join(parts)


def _is_first_look(name: str) -> bool:
    metric = metric_of(name)
    plain = name.partition("/")[0]
    return metric is not None and metric.is_first_look and plain == metric.name_at(DEFAULT_RANKING_K)


def unknown_text(unknown: Mapping[str, float]) -> str:
    """Say in which features an evaluation met ids that training had not seen, most of them first; "" for hardly any.

    Args:
        unknown: shares by feature, as `Evaluation.unknown`.
    """
    notable = sorted((item for item in unknown.items() if item[1] >= _NOTABLE_SHARE), key=lambda item: -item[1])
    if not notable:
        return ""
    shown = ", ".join(f"{name} {share:.1%}" for name, share in notable[:_SHOWN_FEATURES])
    more = len(notable) - _SHOWN_FEATURES
    return f"ids that training had not seen: {shown}" + (f", and {more} features more" if more > 0 else "")


def result_line(evaluation: Evaluation, *, metric: str) -> str:
    """Say in one line how good a run is: the metric that decided with its error, one of each label, a few others.

    Args:
        evaluation: of a split.
        metric: that decided which weights are kept; shown first.
    """
    metrics = evaluation.metrics
    others = [name for name in metrics if name != metric and _is_first_look(name)]
    names = [metric] if metric in metrics else []
    of_label: dict[str, str] = {}
    for name in [*names, *others]:
        of_label.setdefault(name.partition("/")[2], name)
    # Each label has a word before the first of them has four.
    names = list(dict.fromkeys([*names, *of_label.values()]))[:_MAX_LABELS]
    names += [name for name in others if name not in names][: max(0, _MAX_SHOWN - len(names))]
    return metrics_line(metrics, half_widths=evaluation.half_widths, names=names or None)


def versus_baseline(
    metrics: Mapping[str, float],
    baseline: Mapping[str, float],
    *,
    metric: str,
    name: str,
    half_widths: Mapping[str, float] | None = None,
) -> str:
    """Compare a model with a linear one on the same rows, in one line; "" where one has no such metric.

    Args:
        metrics: of the model.
        baseline: of the linear model.
        metric: to compare by.
        name: of the linear model, by `linear_model_name`.
        half_widths: by metric, half of the 95 % interval of the difference, and of the differences of distances from 1
            (`from_one`); what is smaller is no difference. With it the line also names the other metrics that are
            better and worse.
    """
    known = half_widths or {}
    ours = metrics.get(metric, math.nan)
    theirs = baseline.get(metric, math.nan)
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return ""
    half_width = known.get(metric, 0.0)
    gain = ours - theirs if higher_is_better(metric) else theirs - ours
    if (math.isfinite(half_width) and abs(gain) <= half_width) or gain == 0.0:
        verdict = "no difference that these rows can show, so no sign that it has learned more than a sum of weights"
    else:
        verdict = "better" if gain > 0 else "worse than a sum of weights"
    bar = f" ± {half_width:.5f}" if metric in known and math.isfinite(half_width) else ""
    # No sign before a verdict: of an error, +17.3 reads as a gain.
    difference = f"{ours - theirs:+.5f}{bar}," if verdict.startswith("no difference") else f"{abs(gain):.5f}{bar}"
    line = f"{metric} {ours:.5f}, {name} {theirs:.5f} ({difference} {verdict})"
    better: list[str] = []
    worse: list[str] = []
    for other in known:
        half = known.get(from_one(other), math.nan) if is_best_at_one(other) else known[other]
        gain = gain_over(other, metrics.get(other, math.nan), baseline.get(other, math.nan))
        # Written as a negation, because a gain or an error that is NaN is no difference.
        if other == metric or not abs(gain) > half:
            continue
        if gain > 0:
            better.append(other)
        elif is_best_at_one(other):
            worse.append(f"{other} {metrics[other]:.5f} instead of {baseline[other]:.5f}")
        else:
            worse.append(f"{other} {abs(gain):.5f} ± {half:.5f}")
    # Only beside the same verdict: "better" behind "worse" would read as a contradiction.
    line += f"; better by {', '.join(better)} too" if better and verdict == "better" else ""
    return line + (f"; worse by {', '.join(worse)}" if worse else "")


def versus_trees(
    metrics: Mapping[str, float], trees: float, *, metric: str, library: str, half_width: float = math.nan
) -> str:
    """Compare a model with gradient-boosted trees on the same rows, in a few words; "" where one has no such metric.

    Args:
        metrics: of the model.
        trees: the metric that they reach.
        metric: to compare by.
        library: that grew them.
        half_width: half of the 95 % interval of the difference; NaN where nobody knows it.
    """
    ours = metrics.get(metric, math.nan)
    if not (math.isfinite(ours) and math.isfinite(trees)):
        return ""
    gain = ours - trees if higher_is_better(metric) else trees - ours
    bar = f" ± {half_width:.5f}" if math.isfinite(half_width) else ""
    if abs(gain) <= half_width:
        verdict = f"{ours - trees:+.5f}{bar}, no difference that these rows can show"
    elif gain == 0.0:
        verdict = "equal to trees"
    else:
        verdict = f"{abs(gain):.5f}{bar} {'better' if gain > 0 else 'worse'} than trees"
    return f"{metric} {ours:.5f}, trees {trees:.5f} ({verdict}; {library}, its defaults)"


def ordered_batches(dataset: Dataset, *, batch_size: int, rank: int = 0, world_size: int = 1) -> Loader:
    """A loader that reads a data set once, in file order; on many ranks each its rows of every global batch."""
    config = LoaderConfig(batch_size=batch_size, shuffle=Shuffle.NONE)
    return Loader(dataset, config=config, rank=rank, world_size=world_size)


def gathered_scores_of(
    model: Model,
    batches: Iterable[Batch],
    *,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.floating]]]:
    """`(row_ids, scores)` of each batch: int64 (B,) and (B, L), as `scores_of` gives them.

    On many ranks those of all ranks' batches, in rank order, on the first rank, and none on the others. All ranks must
    have the same number of batches.
    """
    for batch, scores in scores_of(model, batches, progress=progress):
        rows = batch.row_ids.cpu().numpy()
        if process_group is not None:
            # NCCL moves tensors of a GPU alone.
            device = torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
            rows = gather_rows(rows, group=process_group, device=device)
            scores = gather_rows(scores, group=process_group, device=device)
        yield rows, scores


def scores_of(
    model: Model, batches: Iterable[Batch], *, progress: Progress | None = None
) -> Iterator[tuple[Batch, NDArray[np.floating]]]:
    """Yield each `(batch, scores)` with scores an array (B, L): float32, or float64 where a label is a number."""
    device = device_of(model)
    was_training = model.training
    model.eval()
    done = 0
    try:
        for batch in batches:
            with torch.no_grad(), whole_products():
                # Of a user's module: an exit there would leave other ranks waiting.
                with refusing_exits():
                    logits_BL = model(batch.to(device))
                check_logits(logits_BL, model=model, num_samples=batch.batch_size)
                scores = scores_from_logits(logits_BL, inputs=model.inputs)
            done += batch.batch_size
            if progress is not None:
                progress.update(done)
            yield batch, scores.cpu().numpy()
    finally:
        # Also where an error ended it: training may go on.
        model.train(was_training)


def evaluate_batches(
    model: Model,
    batches: Iterable[Batch],
    *,
    inputs: InputSpec,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
    ranking_k: int = DEFAULT_RANKING_K,
    metrics: Mapping[str, MetricFunction] | None = None,
    slices: SliceSource | None = None,
    full_ranking: FullRankingPass | None = None,
    error_bar_of: str = "",
) -> Evaluation:
    """Exact metrics and calibration of a model over batches.

    Args:
        model: parallel, if there is a process group.
        batches: of this rank.
        inputs: of the model.
        progress: shows rows of this rank.
        process_group: the ranks that evaluate together; calibration curves are on the first alone.
        ranking_k: places that count in ndcg@k and recall@k.
        metrics: functions of the user's own by name.
        slices: parts of the samples to compute the metrics of as well.
        full_ranking: of a model that finds items; its metrics come after the others.
        error_bar_of: the metric whose error is wanted, if any.
    """
    device = device_of(model)
    accumulator = MetricAccumulator(
        inputs, process_group=process_group, device=device, ranking_k=ranking_k, metrics=metrics
    )
    num_rows, unknown = _filled(
        accumulator, model, batches, progress=progress, process_group=process_group, full_ranking=full_ranking
    )
    found = accumulator.compute()
    curves = _curves(accumulator, inputs)
    half_widths = {error_bar_of: accumulator.half_width(error_bar_of)} if error_bar_of else {}
    if full_ranking is not None:
        found |= full_ranking.compute(process_group=process_group)
        if error_bar_of:
            half_widths |= full_ranking.half_widths(process_group=process_group)
    # Of a full ranking the same metric may have its own error, and others were not asked for.
    half_widths = {name: width for name, width in half_widths.items() if name == error_bar_of and math.isfinite(width)}
    parts = () if slices is None else tuple(_slices(accumulator, slices))
    return Evaluation(
        num_rows=num_rows,
        metrics=found,
        curves=curves,
        slices=parts,
        unknown=unknown,
        half_widths=half_widths,
    )


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Scores of samples, kept until their labels are known. On many ranks the first has those of all, others none.

    Args:
        rows: (n,) row ids.
        scores: (n, L), as `scores_of` gives them.
        labels: (n, L), as far as they are known.
        weights: (n,) or None.
        groups: (n,) or None.
        num_rows: samples, of all ranks.
        unknown: as `Evaluation.unknown`.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.floating]
    labels: NDArray[np.floating]
    weights: NDArray | None = None
    groups: NDArray[np.int64] | None = None
    num_rows: int
    unknown: Mapping[str, float] = field(default_factory=dict)

    def metrics(self, inputs: InputSpec, *, own: Mapping[str, MetricFunction] | None = None) -> dict[str, float]:
        """Return the metrics of the scores by the labels: those of an evaluation of the same rows, bit for bit.

        Args:
            inputs: of the model.
            own: functions of the user's own by name.
        """
        accumulator = MetricAccumulator(inputs, metrics=own)
        accumulator.update(
            torch.from_numpy(self.scores),
            torch.from_numpy(self.labels),
            None if self.weights is None else torch.from_numpy(self.weights),
            None if self.groups is None else torch.from_numpy(self.groups),
        )
        return accumulator.compute()


def answer_batches(
    model: Model,
    batches: Iterable[Batch],
    *,
    inputs: InputSpec,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Answers:
    """Return what a model says of batches, without judging it.

    Args:
        model: parallel, if there is a process group.
        batches: of this rank.
        inputs: of the model.
        progress: shows rows of this rank.
        process_group: the ranks that score together.
    """
    accumulator = MetricAccumulator(inputs, process_group=process_group, device=device_of(model))
    rows = [np.empty(0, np.int64)]
    num_rows, unknown = _filled(accumulator, model, batches, progress=progress, process_group=process_group, rows=rows)
    scores, labels, weights, groups = accumulator.answers()
    return Answers(
        rows=accumulator.gather(np.concatenate(rows)),
        scores=scores,
        labels=labels,
        weights=weights,
        groups=groups,
        num_rows=num_rows,
        unknown=unknown,
    )


def _filled(
    accumulator: MetricAccumulator,
    model: Model,
    batches: Iterable[Batch],
    *,
    progress: Progress | None,
    process_group: dist.ProcessGroup | None,
    rows: list[NDArray[np.int64]] | None = None,
    full_ranking: FullRankingPass | None = None,
) -> tuple[int, dict[str, float]]:
    """Score batches into an accumulator; return the number of samples, and the shares of those with an unknown id.

    Args:
        accumulator: takes scores and labels.
        model: that scores.
        batches: of this rank.
        progress: shows rows of this rank.
        process_group: the ranks that score together.
        rows: takes the row ids of each batch, if they are wanted.
        full_ranking: takes the batches, of a model that finds items.
    """
    inputs = accumulator.inputs
    device = device_of(model)
    # Samples, and of each feature with one id those whose id is unknown.
    counts = torch.zeros(1 + len(inputs.single), dtype=torch.int64, device=device)
    for batch, scores in scores_of(model, batches, progress=progress or NoProgress()):
        # Counted on the device, so that nothing waits for it before the end.
        counts[0] += batch.batch_size
        if inputs.single:
            counts[1:] += (batch.single == UNKNOWN_ROW).sum(dim=1).to(device)
        accumulator.update(torch.from_numpy(scores), batch.labels, batch.weights, batch.groups)
        if rows is not None:
            rows.append(batch.row_ids.cpu().numpy())
        if full_ranking is not None:
            full_ranking.update(batch)
    if process_group is not None:
        with communicating("number of samples of an evaluation"):
            dist.all_reduce(counts, group=process_group)
    num_rows, *num_unknown = counts.tolist()
    # A feature without unknown ids is left out, so no share is taken of no rows.
    unknown = {spec.name: count / num_rows for spec, count in zip(inputs.single, num_unknown, strict=True) if count}
    return num_rows, unknown


def _slices(accumulator: MetricAccumulator, source: SliceSource) -> Iterator[Slice]:
    # Collective, so it is called by all ranks before the first looks at its slices.
    numbers = accumulator.gather(source.numbers())
    for column, value, num_rows, index, own in source.slices():
        metrics = accumulator.compute_where(np.isin(numbers[:, index], own))
        yield Slice(column=column, value=value, num_rows=num_rows, metrics=metrics)


def _curves(accumulator: MetricAccumulator, inputs: InputSpec) -> dict[str, list[dict[str, float]]]:
    curves: dict[str, list[dict[str, float]]] = {}
    for index, label in enumerate(inputs.labels):
        if label.task.gives_probabilities and has_metrics(label):
            scores, labels, weights = accumulator.values(index)
            if np.size(labels):
                curves[label.name] = calibration_curve(scores, labels, weights).to_json()
    return curves
