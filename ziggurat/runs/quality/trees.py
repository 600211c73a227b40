"""Gradient-boosted trees on encoded rows: what the user's other choice reaches on the same splits.

    numbers    as they are encoded
    ids        categories: the 252 most frequent ones, all others as one (rows of a table are in order of frequency)
    lists      for each of their 16 most frequent values, how often it is there
    vectors    their numbers

LightGBM where it is installed, else scikit-learn's histogram trees; both with their defaults, 200 trees at most, and an
early stop on the validation rows that judge the other candidates. Nothing is searched: a tuned booster may be better.

Trees are compared and never kept: ziggurat exports and serves its own models.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ziggurat.config import JSON
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.encoded.records import label_column, table_to_batch
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.runs.quality.paired import ScoredRows, paired_differences
from ziggurat.training.metrics.accumulator import MetricAccumulator, has_metrics

NAME = "gradient_boosted_trees"
MAX_ROWS = 1_000_000
_CATEGORIES = 255  # of a feature, the reserved rows among them: what scikit-learn's trees take
_LIST_VALUES = 16
_TREES, _PATIENCE = 200, 10


@dataclass(frozen=True, kw_only=True)
class TreesResult:
    """Metrics that gradient-boosted trees reach on the rows of a run.

    Args:
        library: that grew them, with its version.
        valid: the metric that decides, on validation rows.
        test: on test rows; NaN without them.
        trees: that were kept.
        seconds: of growing.
        half_widths: by split, half of the 95 % interval of the difference between a model and them.
    """

    library: str
    valid: float
    test: float
    trees: int
    seconds: float
    half_widths: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, *, metric: str) -> dict[str, JSON]:
        """Return the content of a file of `TREES`; what there is not, is null.

        Args:
            metric: that decides.
        """
        return {
            "metric": metric,
            "library": self.library,
            "valid": self.valid if math.isfinite(self.valid) else None,
            "test": self.test if math.isfinite(self.test) else None,
            "trees": self.trees,
            "seconds": self.seconds,
            "half_widths": {name: value for name, value in self.half_widths.items() if math.isfinite(value)},
        }


def trees_library() -> str:
    """Return the library that would grow trees: lightgbm, sklearn, or "" where neither is installed."""
    return next((name for name in ("lightgbm", "sklearn") if importlib.util.find_spec(name) is not None), "")


def boosted_trees(
    prepared: PreparedData,
    *,
    metric: str,
    threads: int,
    seed: int,
    scored: Mapping[str, ScoredRows] | None = None,
) -> TreesResult | None:
    """Grow trees on the training rows; None without a library, or for a metric that trees have no part in.

    Args:
        prepared: with validation rows.
        metric: that decides, perhaps of one of several labels.
        threads: of the CPU; 0: the library's own choice.
        seed: of the library.
        scored: by split, the scores of the model to compare with, of all rows in their order.
    """
    library, (kind, _, of_label) = trees_library(), metric.partition("/")
    inputs = prepared.inputs
    names = [label.name for label in inputs.labels if has_metrics(label)]
    is_readable = not inputs.sequences and not inputs.moments and not inputs.numbered
    if not library or not names or not is_readable or prepared.valid is None:
        return None
    column = [label.name for label in inputs.labels].index(of_label or names[0])
    one_label = replace(inputs, labels=(inputs.labels[column],), has_groups=False)
    if kind not in MetricAccumulator(one_label).compute():
        return None
    begin = time.perf_counter()
    train = _columns(prepared.train, inputs, column=column)
    valid = _columns(prepared.valid, inputs, column=column)
    grow = _by_lightgbm if library == "lightgbm" else _by_scikit_learn
    grown = grow(train, valid, is_class=one_label.labels[0].task.has_positives, threads=threads, seed=seed)
    rows = {"valid": valid}
    if prepared.test is not None:
        rows["test"] = _columns(prepared.test, inputs, column=column)
    judged = {split: _judged(grown.scores(each.values), each, inputs=one_label) for split, each in rows.items()}
    half_widths: dict[str, float] = {}
    for split, ours in (scored or {}).items():
        # Of several labels the names of metrics differ, and of rows that trees left out there is no pair.
        if len(inputs.labels) == 1 and split in rows and len(rows[split].labels) == len(ours.units):
            half_widths[split] = paired_differences(ours.metrics, judged[split], units=ours.units)[kind].half_width
    return TreesResult(
        library=grown.library,
        valid=judged["valid"].compute()[kind],
        test=judged["test"].compute()[kind] if "test" in judged else float("nan"),
        trees=grown.trees,
        seconds=time.perf_counter() - begin,
        half_widths=half_widths,
    )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Rows as trees read them."""

    values: NDArray[np.float32]  # (n, columns)
    is_category: NDArray[np.bool_]  # (columns,)
    labels: NDArray[np.float32]  # (n,)
    weights: NDArray[np.float32] | None


@dataclass(frozen=True, kw_only=True)
class _Grown:
    """A trained booster."""

    library: str
    scores: Callable[[NDArray[np.float32]], NDArray[np.float64]]  # probabilities of a class, values of a number
    trees: int


def _columns(dataset: EncodedDataset, inputs: InputSpec, *, column: int) -> _Columns:
    """The rows of a data set whose label is known, up to a million."""
    parts: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.float32]] = []
    weights: list[NDArray[np.float32]] = []
    num_rows = 0
    for index in range(len(dataset.group_sizes)):
        table = dataset.read_group(index)
        known = ~np.isnan(table[label_column(inputs.labels[column].name)].to_numpy())
        batch = table_to_batch(table.combine_chunks(), inputs)
        parts.append(_values(batch, inputs)[known])
        labels.append(batch.labels[:, column].numpy()[known])
        if batch.weights is not None:
            weights.append(batch.weights.numpy()[known])
        num_rows += int(known.sum())
        if num_rows >= MAX_ROWS:
            break
    num_ids = len(inputs.single)
    values = np.concatenate(parts)[:MAX_ROWS]
    return _Columns(
        values=values,
        is_category=np.arange(values.shape[1]) < num_ids,
        labels=np.concatenate(labels)[:MAX_ROWS],
        weights=np.concatenate(weights)[:MAX_ROWS] if weights else None,
    )


def _values(batch: Batch, inputs: InputSpec) -> NDArray[np.float32]:
    columns = [np.minimum(ids, _CATEGORIES - 1).astype(np.float32) for ids in batch.single.numpy()]
    columns += list(batch.dense.numpy().T)
    for position in range(len(inputs.jagged)):
        lists = batch.lists(position)[0]
        rows = lists.values.numpy()
        offsets = lists.offsets.numpy()
        samples = np.repeat(np.arange(batch.batch_size), np.diff(offsets))
        for value in range(NUM_RESERVED_ROWS, NUM_RESERVED_ROWS + _LIST_VALUES):
            counts = np.bincount(samples[rows == value], minlength=batch.batch_size)
            columns.append(counts.astype(np.float32))
    for vector in batch.vectors.values():
        columns += list(vector.numpy().T)
    return np.stack(columns, axis=1) if columns else np.zeros((batch.batch_size, 0), np.float32)


def _by_scikit_learn(train: _Columns, valid: _Columns, *, is_class: bool, threads: int, seed: int) -> _Grown:
    import sklearn
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
    )

    kind: Any = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    model = kind(
        max_iter=_TREES,
        early_stopping=True,
        n_iter_no_change=_PATIENCE,
        categorical_features=train.is_category,
        random_state=seed,
    )
    del threads  # OpenMP's own: torch.set_num_threads has no part in it
    model.fit(
        train.values,
        train.labels,
        sample_weight=train.weights,
        X_val=valid.values,
        y_val=valid.labels,
        sample_weight_val=valid.weights,
    )
    return _Grown(
        library=f"scikit-learn {sklearn.__version__}",
        scores=partial(_scores, model, is_class=is_class),
        trees=int(model.n_iter_),
    )


def _by_lightgbm(train: _Columns, valid: _Columns, *, is_class: bool, threads: int, seed: int) -> _Grown:
    import lightgbm  # pyright: ignore[reportMissingImports]

    kind = lightgbm.LGBMClassifier if is_class else lightgbm.LGBMRegressor
    model = kind(n_estimators=_TREES, n_jobs=threads or -1, verbose=-1, random_state=seed)
    settings: dict[str, object] = {
        "sample_weight": train.weights,
        "categorical_feature": np.flatnonzero(train.is_category).tolist(),
        "callbacks": [lightgbm.early_stopping(_PATIENCE, verbose=False)],
    }
    if "eval_X" in inspect.signature(model.fit).parameters:  # `eval_set` warns since LightGBM 4.7
        model.fit(train.values, train.labels, eval_X=valid.values, eval_y=valid.labels, **settings)
    else:
        model.fit(train.values, train.labels, eval_set=[(valid.values, valid.labels)], **settings)
    trees = int(model.best_iteration_ or _TREES)
    return _Grown(
        library=f"LightGBM {lightgbm.__version__}", scores=partial(_scores, model, is_class=is_class), trees=trees
    )


class _Booster(Protocol):
    """A model of scikit-learn's interface; classifiers have `predict_proba` as well."""

    def predict(self, values: NDArray[np.float32], /) -> NDArray[np.float64]:
        """Give classes, or numbers."""
        ...


@runtime_checkable
class _Classifier(_Booster, Protocol):
    """A model that gives probabilities."""

    def predict_proba(self, values: NDArray[np.float32], /) -> NDArray[np.float64]:
        """Give a column a class."""
        ...


def _scores(model: _Booster, values: NDArray[np.float32], *, is_class: bool) -> NDArray[np.float64]:
    """Probabilities of a class, values of a number."""
    if is_class and isinstance(model, _Classifier):
        return model.predict_proba(values)[:, 1]
    return model.predict(values)


def _judged(scores: NDArray[np.float64], rows: _Columns, *, inputs: InputSpec) -> MetricAccumulator:
    accumulator = MetricAccumulator(inputs)
    weights = None if rows.weights is None else torch.from_numpy(rows.weights)
    accumulator.update(
        torch.from_numpy(np.asarray(scores, np.float64)).unsqueeze(1),
        torch.from_numpy(rows.labels).unsqueeze(1),
        weights,
    )
    return accumulator
