"""The likely reason why a model does worse on a split than chance, found in the rows rather than guessed.

    few rows       the AUC is within two standard errors of 0.5: se² = (P + N + 1) / (12·P·N)      Mann and Whitney 1947
    not learned    the model is below the floor on training rows as well
    label turned   about as far below 0.5 here as above it on training rows
    unknown ids    three in ten rows or more have an id that training never saw
    order          a number of these rows lies outside the range of the training rows, or the share of positives is
                   another by half: the split follows something that rows are sorted by

They are asked in this order, and the first that holds is named; what none explains keeps the two usual questions. Only
a result below its floor pays for it: at most 65,536 rows of training and of the split are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.data.encoded.dataset import EncodedDataset, MemoryDataset
from ziggurat.data.encoded.records import encoded_schema, label_column
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import AT_RANDOM, BY_FILES
from ziggurat.features.inputs import LabelSpec
from ziggurat.training.evaluation.evaluate import Evaluation, unknown_text
from ziggurat.training.metrics.suspicion import floor_of, suspicious

_ROWS = 65_536
_UNKNOWN_SHARE = 0.3
_STANDARD_ERRORS = 2.0
_TURNED = 0.7  # of the distance from 0.5 that training rows have
_OUTSIDE = 0.9  # share of the rows whose number no training row reaches
_POSITIVES = 1.5


@dataclass(frozen=True, kw_only=True)
class BelowChance:
    """Explains metrics of a split that are below their floor.

    Args:
        split: its name.
        evaluation: of its rows.
        prepared: holds the rows.
        evaluate: gives the metrics of the model on other rows.
    """

    split: str
    evaluation: Evaluation
    prepared: PreparedData
    evaluate: Callable[[MemoryDataset], Mapping[str, float]]

    def lines(self) -> list[str]:
        """Return a warning for each metric that needs a second look, with its reason where the rows show one."""
        metrics = self.evaluation.metrics
        low = [name for name, value in metrics.items() if value < floor_of(name)]
        if not low:
            return suspicious(metrics, split=self.split)
        here = some_rows(getattr(self.prepared, self.split))
        before = some_rows(self.prepared.train)
        trained = self.evaluate(MemoryDataset(before, self.prepared.inputs))
        reasons: dict[str, str] = {}
        for name in low:
            label = self._label(name)
            of_training = trained.get(name, math.nan)
            reason = self._few_rows(metrics[name], label) if label.task.has_positives else ""
            reason = reason or _not_learned(of_training, metric=name)
            if label.task.has_positives:
                reason = reason or _turned(metrics[name], trained=of_training)
            reasons[name] = reason or self._unknown() or self._order(here, before, label)
        return suspicious(metrics, split=self.split, reasons=reasons)

    def _label(self, metric: str) -> LabelSpec:
        labels = self.prepared.inputs.labels
        name = metric.partition("/")[2]
        return next((label for label in labels if label.name == name), labels[0])

    def _few_rows(self, value: float, label: LabelSpec) -> str:
        """Say that so few positives or negatives prove nothing."""
        rows = getattr(self.prepared, self.split)
        column = label_column(label.name)
        groups = [rows.read_group(index)[column].to_numpy() for index in range(len(rows.group_sizes))]
        labels = np.concatenate(groups)
        num_positive = int((labels > 0.5).sum())
        num_negative = int((labels <= 0.5).sum())
        if not num_positive or not num_negative:
            return ""
        error = math.sqrt((num_positive + num_negative + 1) / (12.0 * num_positive * num_negative))
        if 0.5 - value > _STANDARD_ERRORS * error:
            return ""
        return (
            f"too few rows to tell it from chance: {num_positive:,} positives and {num_negative:,} negatives give "
            f"0.5 ± {_STANDARD_ERRORS * error:.3f}; judge by more rows: "
            + (
                f"more of them in the files of the {self.split} data"
                if self.prepared.summary.split == BY_FILES
                else f"--data.split.{self.split}-fraction 0.3, or more files"
            )
        )

    def _unknown(self) -> str:
        """Name features whose ids are mostly new in this split."""
        many = {name: share for name, share in self.evaluation.unknown.items() if share >= _UNKNOWN_SHARE}
        if not many:
            return ""
        most = max(many, key=lambda name: many[name])
        columns = f"add columns that describe {most}"
        leave_out = f"leave {most} out of the schema"
        if self._is_random:
            # Most ids of these rows are new although chance alone chose them: they are in few rows each.
            ways = f"train on more rows of each {most}, {columns}, or {leave_out}"
        else:
            ways = f"{columns}, {leave_out}, or judge known ones with --data.split.by random"
        return f"{unknown_text(many)} (split: {self.prepared.summary.split}), and a model knows nothing of them; {ways}"

    @property
    def _is_random(self) -> bool:
        """Whether chance alone chose the rows of the split."""
        return self.prepared.summary.split.startswith(AT_RANDOM)

    def _order(self, here: pa.Table, before: pa.Table, label: LabelSpec) -> str:
        """Name a number that tells the order of rows, or say that the split has another share of positives."""
        for name in self.prepared.inputs.dense:
            values = here[name].to_numpy()
            known = before[name].to_numpy()
            outside = np.mean((values < known.min()) | (values > known.max())) if len(known) else 0.0
            if outside >= _OUTSIDE:
                return (
                    f"{name} lies outside the range of the training rows in {outside:.1%} of these: it tells the order "
                    f"of the rows, as a time or a counter does; leave {name} out of the schema"
                )
        if not label.task.has_positives or self._is_random:
            return ""
        shares = [_positives(rows[label_column(label.name)].to_numpy()) for rows in (here, before)]
        if min(shares) * _POSITIVES < max(shares):
            return (
                f"{shares[0]:.1%} of these rows are positive and {shares[1]:.1%} of the training rows: they may be "
                "sorted by the label, or by what decides it; if so, split with --data.split.by random"
            )
        return ""


def some_rows(dataset: EncodedDataset | MemoryDataset) -> pa.Table:
    """Return whole row groups from all over a data set, 65,536 rows or the first group; none of an empty one."""
    if not dataset.group_sizes:
        return encoded_schema(dataset.inputs).empty_table()
    count = max(1, min(len(dataset.group_sizes), _ROWS // max(1, max(dataset.group_sizes))))
    chosen = np.unique(np.linspace(0, len(dataset.group_sizes) - 1, count).astype(int))
    return pa.concat_tables([dataset.read_group(int(index)) for index in chosen]).slice(0, _ROWS)


def _not_learned(trained: float, *, metric: str) -> str:
    """Say that the model is no better on the rows that it was trained on, so that these rows are not the reason."""
    if not trained < floor_of(metric):
        return ""
    return (
        f"training rows have {trained:.5f}, so the model has not learned them yet, and these rows are not the reason; "
        "train longer, with --training.epochs, or let a few models be tried: ziggurat train auto"
    )


def _turned(value: float, *, trained: float) -> str:
    """Say that the label of these rows means the opposite."""
    # A model that does no better than that on training rows cannot say that the label is turned.
    if not math.isfinite(trained) or trained < 0.6 or 0.5 - value < _TURNED * (trained - 0.5):
        return ""
    return (
        f"training rows have {trained:.5f}, so these are wrong as surely as those are right: the label is probably "
        "turned round here (0 for 1); compare how the files were made"
    )


def _positives(labels: NDArray[np.floating]) -> float:
    known = labels[~np.isnan(labels)]
    return float((known > 0.5).mean()) if len(known) else 0.0
