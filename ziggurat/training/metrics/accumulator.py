"""Metrics, exact: nothing is binned, sampled or averaged over batches.

    auc            P(score of a positive > score of a negative), ties count half (Mann–Whitney U / (P·N))
    gauc           Σ_g n_g·AUC_g / Σ_g n_g over groups g (users) that have both classes (Zhu et al., KDD 2017)
    log_loss       mean of −ln p(y), p clipped to [ε, 1−ε] with ε of the scores' own precision, like scikit-learn
    ne             log_loss / log loss of always saying the average (normalised entropy; He et al., ADKDD 2014)
    calibration    Σ p / Σ y                                              (see calibration.py)
    ece            expected calibration error                             (see calibration.py)
    accuracy       share of samples with (p ≥ 0.5) = y
    ndcg@10, recall@10, mrr    ranking within groups                      (see ranking.py)
    rmse, mae      for regression labels
    r2             1 − rmse² / variance of the labels: 0 for always saying their mean, below it for worse

All but the ranking metrics take sample weights; n_g is then a group's weight. A threshold AUC of 200 steps, as several
libraries have it, is 0.001 too low at a click rate of 3.5 %: more than most models differ by. The exact one costs a
sort: all scores are kept (8 bytes a sample and label), over ranks they are gathered on the first.

Functions of the user's own stand beside these (`MetricFunction`), on the same samples.

Undefined is NaN, never an exception: AUC and NE with one class only, GAUC without a group that has both, calibration
without positives, R² of labels that are all equal, everything without samples. A NaN *score* is another matter: it
raises `NumericsError`, because sorting would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.errors import ConfigError, DataError, comes_of_signal
from ziggurat.features.batch import NO_GROUP
from ziggurat.features.hashing import mix
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.labels import Label, Outcomes
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.training.metrics.functions import accuracy as accuracy
from ziggurat.training.metrics.functions import auc as auc
from ziggurat.training.metrics.functions import calibration as calibration
from ziggurat.training.metrics.functions import grouped_auc as grouped_auc
from ziggurat.training.metrics.functions import log_loss as log_loss
from ziggurat.training.metrics.functions import mae as mae
from ziggurat.training.metrics.functions import normalised_entropy as normalised_entropy
from ziggurat.training.metrics.functions import r2 as r2
from ziggurat.training.metrics.functions import rmse as rmse
from ziggurat.training.metrics.jackknife import blocks_for, blocks_of, half_width
from ziggurat.training.metrics.metric import (
    Judged,
    Metric,
    NotANumberError,
    checked_value,
    judging,
    metric_of,
)
from ziggurat.training.metrics.ranking import DEFAULT_RANKING_K, check_places
from ziggurat.training.metrics.scored_samples import (
    ScoredSamples,
    as_array,
    check_labels,
    check_scores,
    check_weights,
    scale_of,
    scored_samples,
)

_MAX_FOR_ERROR = 1_000_000  # samples that an error bar is computed of

MetricFunction = Callable[[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]], float]
"""A metric of the user's own: scores, labels and weights of all samples of one label, each (n,), to a number."""


def has_metrics(label: Label | LabelSpec) -> bool:
    """Return True if a label has metrics beside those of full ranking: a label that is always 1 has none."""
    return label.outcomes is not Outcomes.POSITIVE_ONLY


def metric_names(
    labels: Sequence[Label | LabelSpec],
    *,
    has_groups: bool,
    ranking_k: int = DEFAULT_RANKING_K,
    own: Iterable[str] = (),
) -> list[str]:
    """The names of the metrics of an evaluation, label by label; they end in `/label` where there are several.

    A label that is always 1 (what came next) has none but the user's own: full ranking judges it.

    Args:
        labels: of the data.
        has_groups: whether the samples have groups.
        ranking_k: places that count in ndcg@k and recall@k.
        own: names of the user's own metrics, which come after all others.
    """
    check_places(ranking_k)
    names: list[str] = []
    for label in labels:
        if not has_metrics(label):
            continue
        built_in = [metric.name_at(ranking_k) for metric in judging(label.task, has_groups=has_groups)]
        # One label alone needs no name behind a metric.
        names += [f"{metric}/{label.name}" for metric in built_in] if len(labels) > 1 else built_in
    return names + [f"{metric}/{label.name}" if len(labels) > 1 else metric for label in labels for metric in own]


def check_own_metrics(metrics: Mapping[str, MetricFunction]) -> None:
    """Refuse names that a built-in metric has, or that say a label.

    Raises:
        ConfigError: there is one.
    """
    known = {metric.name for metric in Metric if not metric.has_places}
    taken = [name for name in metrics if name in known or "/" in name or not name]
    if taken:
        raise ConfigError(
            expected="names of their own for metrics, without a slash",
            found=", ".join(map(repr, taken)),
            where="metrics",
            ways_out="rename them",
        )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Samples as they came. Weights have no rows without `has_weights`, groups none without `has_groups`."""

    scores: NDArray[np.floating]  # (n, L)
    labels: NDArray[np.floating]  # (n, L)
    weights: NDArray[np.floating]  # (n,) or (0,)
    groups: NDArray[np.int64]  # (n,) or (0,)

    def where(self, keep: NDArray[np.bool_]) -> _Columns:
        """Return some of the samples."""
        return _Columns(
            scores=self.scores[keep],
            labels=self.labels[keep],
            weights=self.weights[keep] if self.weights.size else self.weights,
            groups=self.groups[keep] if self.groups.size else self.groups,
        )

    def places(self) -> NDArray[np.int64]:
        """Return the place of each sample in an order of their numbers: the same on any number of ranks.

        Samples that are alike in all numbers may take each other's place.
        """
        keys = [*self.labels.T, *self.scores.T]
        keys += [column for column in (self.weights, self.groups) if column.size]
        places = np.empty(len(self.scores), dtype=np.int64)
        # The inverse of the sort: the rank of each sample.
        places[np.lexsort(keys)] = np.arange(len(places))
        return places


class MetricAccumulator:
    """Collects scores batch by batch and computes every metric of every label at the end.

        rank 0   update  update  update ─┐
        rank 1   update  update ─────────┼─► gathered on the first rank ─► metrics ─► the numbers, to every rank
        rank 2   update  update  update ─┘       (ranks may hold any number of samples, also none)

    Every rank gets the same numbers, bit for bit.

    Args:
        inputs: labels and their tasks, and whether there are weights and groups.
        process_group: the ranks whose samples belong together, or None for this process alone.
        device: where tensors for the exchange must lie: cpu for gloo, this rank's device for NCCL.
        ranking_k: places that count in ndcg@k and recall@k.
        metrics: functions of the user's own by name, computed beside the others.
    """

    def __init__(
        self,
        inputs: InputSpec,
        *,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        ranking_k: int = DEFAULT_RANKING_K,
        metrics: Mapping[str, MetricFunction] | None = None,
    ) -> None:
        self.inputs = inputs
        self.ranking_k = ranking_k
        self._own = dict(metrics or {})
        # Before the first batch, not after an evaluation of hours.
        check_own_metrics(self._own)
        self._process_group = process_group
        self._device = torch.device(device)
        self._pieces: list[_Columns] = []
        self._gathered: _Columns | None = None

    def update(
        self, scores_BL: Tensor, labels_BL: Tensor, weights_B: Tensor | None = None, groups_B: Tensor | None = None
    ) -> None:
        """Add a batch (copied to the host).

        Args:
            scores_BL: probabilities of binary labels, values of regression labels.
            labels_BL: NaN where missing.
            weights_B: needed if, and only if, the inputs have weights.
            groups_B: needed if, and only if, the inputs have groups.

        Raises:
            NumericsError: a score is NaN or infinite, or not a probability.
            DataError: shapes disagree, a column is missing or unexpected, a label or weight is impossible.
        """
        num_rows = labels_BL.shape[0]
        num_labels = len(self.inputs.labels)
        _expect("scores", tuple(scores_BL.shape), (num_rows, num_labels))
        _expect("labels", tuple(labels_BL.shape), (num_rows, num_labels))
        _expect("weights", _shape(weights_B), (num_rows,) if self.inputs.has_weights else None)
        _expect("groups", _shape(groups_B), (num_rows,) if self.inputs.has_groups else None)
        piece = _Columns(
            scores=as_array(scores_BL).copy(),  # copies: a view would keep the whole chunk of the loader alive
            labels=as_array(labels_BL).copy(),
            weights=np.empty(0, np.float32) if weights_B is None else as_array(weights_B).copy(),
            groups=np.empty(0, np.int64) if groups_B is None else groups_B.detach().cpu().numpy().copy(),
        )
        for column, label in enumerate(self.inputs.labels):
            where = f"evaluation, label {label.name!r}"
            check_scores(piece.scores[:, column], scale=scale_of(label.task), where=where)
            check_labels(piece.labels[:, column], task=label.task, where=where)
        check_weights(piece.weights, where="evaluation")
        # What was gathered lacks this batch.
        self._pieces.append(piece)
        self._gathered = None

    def compute(self) -> dict[str, float]:
        """Every metric by name; the names end in `/label` where there are several labels. NaN where undefined.

        With a process group all its ranks must call this together.
        """
        return self._named(self._gather())

    def gather(self, rows: NDArray) -> NDArray:
        """Something of each sample beside its scores, in the order of the samples: of all ranks on the first."""
        group = self._process_group
        return rows if group is None else gather_rows(rows, group=group, device=self._device)

    def compute_where(self, keep: NDArray[np.bool_]) -> dict[str, float]:
        """`compute` for some of the samples alone.

        Args:
            keep: (n,) which samples; on the first rank one for each sample of all ranks, on the others none.
        """
        return self._named(self._gather().where(keep))

    def half_width(self, name: str) -> float:
        """Return half of the 95 % interval of a metric; NaN for a function of the user's own, or no samples.

        On many ranks it is known on the first alone, after `compute`. Of very many samples those of some groups are
        taken, and the error is scaled to all.

        Args:
            name: of a metric of `compute`.
        """
        columns = self._gather()
        names = metric_names(self.inputs.labels, has_groups=self.inputs.has_groups, ranking_k=self.ranking_k)
        num_rows = len(columns.scores)
        # Other ranks have no samples, and a function of the user's no known error.
        if not num_rows or name not in names:
            return math.nan
        # Groups vary together, so they are left out together where an error is estimated.
        unit_N = columns.groups
        if not columns.groups.size or (columns.groups == NO_GROUP).any():
            unit_N = columns.places()
            if columns.groups.size:
                # A sample without a group stands for itself.
                unit_N = np.where(columns.groups == NO_GROUP, unit_N, columns.groups)
        share = 1.0
        if num_rows > _MAX_FOR_ERROR:
            # By a hash of the group, so that whole groups stay, and the same ones on every call.
            kept = mix(~unit_N.astype(np.uint64)) % np.uint64(-(-num_rows // _MAX_FOR_ERROR)) == 0
            share = float(kept.mean())
            columns = columns.where(kept)
            unit_N = unit_N[kept]
        num_blocks = blocks_for(unit_N)
        block_N = blocks_of(unit_N, num=num_blocks)
        # The jackknife: the metric without each block in turn.
        without_B = np.array([self._one(columns.where(block_N != block), name) for block in range(num_blocks)])
        # The variance falls with the number of samples, and only a share of them was used.
        return half_width(without_B) * math.sqrt(share)

    def _one(self, columns: _Columns, name: str) -> float:
        """Compute one built-in metric by its full name."""
        label_name = name.partition("/")[2]
        index = [label.name for label in self.inputs.labels].index(label_name) if label_name else 0
        metric = metric_of(name)
        return math.nan if metric is None else metric.checked(self._judged(columns, index))

    def _named(self, columns: _Columns) -> dict[str, float]:
        """Compute every metric by name: on the first rank, for all."""
        names = metric_names(
            self.inputs.labels, has_groups=self.inputs.has_groups, ranking_k=self.ranking_k, own=self._own
        )
        values = [math.nan] * len(names)
        failed: Exception | SystemExit | None = None
        # The other ranks have no samples, and wait for the numbers below.
        if self._process_group is None or dist.get_rank(self._process_group) == 0:
            try:
                values = self._values(columns, names)
            except (Exception, SystemExit) as error:  # told once the other ranks know: they wait for the numbers
                if isinstance(error, SystemExit) and comes_of_signal(error):
                    raise
                failed = error
        if self._process_group is not None:
            # One number more says whether the first rank failed, so that all ranks raise together.
            shared = torch.tensor([*values, failed is not None], dtype=torch.float64, device=self._device)
            with communicating("metrics of an evaluation"):
                dist.broadcast(shared, group=self._process_group, group_src=0)
            *values, failed_there = shared.tolist()
            if failed is None and failed_there:
                raise ConfigError(
                    expected="a number from every metric",
                    found="an error on the first rank",
                    where="evaluation, one of " + ", ".join(names),
                    ways_out="see what the first rank says",
                )
        if failed is not None:
            raise failed
        return dict(zip(names, values, strict=True))

    def _values(self, columns: _Columns, names: list[str]) -> list[float]:
        """Compute the metrics of `metric_names`, in its order."""
        values: list[float] = []
        for index in range(len(self.inputs.labels)):
            values += self._metrics(columns, index)
        for index in range(len(self.inputs.labels)):
            samples = self._samples(columns, index)
            for function in self._own.values():
                name = names[len(values)]
                try:
                    values.append(checked_value(function(samples.scores, samples.labels, samples.weights)))
                except Exception as error:  # code of a user's may fail in any way
                    raise _failed_metric(name, error) from error
        return values

    def answers(self) -> tuple[NDArray[np.floating], NDArray[np.floating], NDArray | None, NDArray[np.int64] | None]:
        """Return scores and labels (n, L), weights and groups (n,) or None of all samples.

        With a process group all its ranks must call this together; the first gets the samples of all ranks, the
        others get none.
        """
        columns = self._gather()
        weights = columns.weights if self.inputs.has_weights else None
        groups = columns.groups if self.inputs.has_groups else None
        return columns.scores, columns.labels, weights, groups

    def values(self, index: int) -> tuple[NDArray, NDArray, NDArray | None]:
        """Scores, labels and weights of label number `index`, for curves and plots.

        With a process group all its ranks must call this together; the first gets the samples of all ranks, the
        others get none.
        """
        columns = self._gather()
        weights = columns.weights if self.inputs.has_weights else None
        return columns.scores[:, index], columns.labels[:, index], weights

    def _samples(self, columns: _Columns, index: int) -> ScoredSamples:
        task = self.inputs.labels[index].task
        weights = columns.weights if self.inputs.has_weights else None
        return scored_samples(
            columns.scores[:, index], columns.labels[:, index], weights, task=task, scale=scale_of(task)
        )

    def _metrics(self, columns: _Columns, index: int) -> list[float]:
        if not has_metrics(self.inputs.labels[index]):
            return []
        judged = self._judged(columns, index)
        metrics = judging(self.inputs.labels[index].task, has_groups=self.inputs.has_groups)
        return [metric.checked(judged) for metric in metrics]

    def _judged(self, columns: _Columns, index: int) -> Judged:
        # A row whose label is unknown judges nothing, and its group must fall out with it.
        known = ~np.isnan(columns.labels[:, index])
        groups = columns.groups[known] if self.inputs.has_groups else None
        return Judged(self._samples(columns, index), groups, self.ranking_k)

    def _gather(self) -> _Columns:
        """All samples so far: of this process, or on the group's first rank those of all (on the others none)."""
        if self._gathered is None:
            local = _joined(self._pieces, num_labels=len(self.inputs.labels))
            group = self._process_group
            # Joined once: the next call finds one piece, and copies nothing.
            self._pieces = [local]
            self._gathered = local if group is None else _gathered(local, group=group, device=self._device)
        return self._gathered


def _joined(pieces: list[_Columns], *, num_labels: int) -> _Columns:
    if len(pieces) == 1:
        return pieces[0]
    empty = np.empty((0, num_labels), np.float32)
    nothing = _Columns(scores=empty, labels=empty, weights=np.empty(0, np.float32), groups=np.empty(0, np.int64))
    # Without a batch there is still the shape that a metric expects.
    pieces = pieces or [nothing]
    return _Columns(
        scores=np.concatenate([piece.scores for piece in pieces]),
        labels=np.concatenate([piece.labels for piece in pieces]),
        weights=np.concatenate([piece.weights for piece in pieces]),
        groups=np.concatenate([piece.groups for piece in pieces]),
    )


def _gathered(local: _Columns, *, group: dist.ProcessGroup, device: torch.device) -> _Columns:
    return _Columns(
        scores=gather_rows(local.scores, group=group, device=device),
        labels=gather_rows(local.labels, group=group, device=device),
        weights=gather_rows(local.weights, group=group, device=device),
        groups=gather_rows(local.groups, group=group, device=device),
    )


def gather_rows(rows: NDArray, *, group: dist.ProcessGroup, device: torch.device) -> NDArray:
    """Rows of all ranks, in rank order, on the group's first rank; no rows on the others.

    Collectives need equal shapes: ranks agree on the longest, pad to it, and the first cuts the padding off. They also
    agree on float64 if any rank has it (a rank without samples cannot know).
    """
    sizes = torch.tensor([rows.shape[0], int(rows.dtype == np.float64)], device=device)
    all_sizes = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    with communicating("scores of an evaluation"):
        dist.all_gather(all_sizes, sizes, group=group)
    counts = [int(size[0]) for size in all_sizes]
    if any(bool(size[1]) for size in all_sizes):
        rows = rows.astype(np.float64)
    # Known on all ranks alike, so that all of them leave out the collective below.
    if max(counts) == 0:
        return rows
    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=torch.from_numpy(rows).dtype, device=device)
    padded[: rows.shape[0]] = torch.from_numpy(rows)
    first = dist.get_rank(group) == 0
    parts = [torch.empty_like(padded) for _ in counts] if first else None
    with communicating("scores of an evaluation"):
        dist.gather(padded, parts, group=group, group_dst=0)
    # Only the first rank receives.
    if parts is None:
        return rows[:0]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).cpu().numpy()


def _failed_metric(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        expected="a number from a metric, which is NaN where it is undefined: fn(scores, labels, weights) -> float",
        found=str(error) if isinstance(error, NotANumberError) else f"{type(error).__name__}: {error}",
        where=f"metric {name!r}",
        ways_out="correct the function; scores, labels and weights are arrays of one length, perhaps of no sample",
    )


def _shape(values: Tensor | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values.shape)


def _expect(name: str, found: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> None:
    if found != expected:
        raise DataError(
            expected=f"no {name}: the inputs have none" if expected is None else f"{name} of shape {expected}",
            found=f"no {name}" if found is None else f"shape {found}",
            where="MetricAccumulator.update",
            ways_out="pass the columns of a Batch that belongs to the same InputSpec",
        )
