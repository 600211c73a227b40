"""Ranking metrics equal their definitions, group by group; ties equal the mean over all orders of the tied samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from ziggurat.errors import ConfigError, DataError, NumericsError
from ziggurat.features.batch import NO_GROUP
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.training.metrics.accumulator import MetricAccumulator, metric_names
from ziggurat.training.metrics.metric import higher_is_better
from ziggurat.training.metrics.ranking import ranking_metrics


def by_definition(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, k: int) -> dict[str, float]:
    """Loops over groups without ties."""
    found = []
    for group in np.unique(groups):
        y = labels[groups == group][np.argsort(-scores[groups == group])]
        if y.sum():
            dcg = sum(label / math.log2(place + 2) for place, label in enumerate(y[:k]))
            best = sum(1 / math.log2(place + 2) for place in range(min(int(y.sum()), k)))
            found.append((dcg / best, y[:k].sum() / y.sum(), 1 / (1 + int(np.flatnonzero(y)[0]))))
    return dict(zip((f"ndcg@{k}", f"recall@{k}", "mrr"), np.mean(found, axis=0).tolist(), strict=True))


@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_without_ties(k: int):
    rng = np.random.default_rng(k)
    scores, labels = rng.permutation(500) / 7, (rng.random(500) < 0.2).astype(float)
    groups = rng.integers(-3, 30, 500) * 10**12  # as large as hashes
    assert ranking_metrics(scores, labels, groups, k=k) == pytest.approx(by_definition(scores, labels, groups, k))


def test_ties_are_the_mean_over_all_orders():
    scores, labels = np.array([3.0, 2, 2, 2, 1]), np.array([0.0, 1, 0, 1, 1])
    orders = [np.array([5.0, *places, 1.0]) for places in itertools.permutations([2.0, 3.0, 4.0])]
    one = np.zeros(5, dtype=int)
    for k in (2, 3):
        expected = [by_definition(order, labels, one, k) for order in orders]
        found = ranking_metrics(scores, labels, one, k=k)
        for name in (f"ndcg@{k}", f"recall@{k}"):
            assert found[name] == pytest.approx(np.mean([each[name] for each in expected]))
        assert found["mrr"] == pytest.approx(1 / np.mean([1 / each["mrr"] for each in expected]))  # the expected rank


def test_constant_scores_know_nothing_and_no_positive_is_undefined():
    labels, groups = np.array([1.0, 0, 0, 0]), np.array([1, 1, 1, 1])
    assert ranking_metrics(np.zeros(4), labels, groups, k=2)["recall@2"] == pytest.approx(0.5)
    for empty in (ranking_metrics([], [], []), ranking_metrics([1.0], [0.0], [3])):
        assert list(empty) == ["ndcg@10", "recall@10", "mrr"]
        assert all(math.isnan(value) for value in empty.values())
    with pytest.raises(DataError, match="one length"):
        ranking_metrics([1.0, 2.0], [1.0], [0])


def test_an_evaluation_ranks_labelled_samples_that_have_weight():
    rng = np.random.default_rng(4)
    scores, labels = rng.permutation(60)[:, None] / 60, (rng.random((60, 1)) < 0.3).astype(float)
    weights, groups = rng.integers(0, 3, 60).astype(np.float32), rng.integers(1, 7, 60)
    labels[rng.random((60, 1)) < 0.2] = math.nan
    inputs = InputSpec(labels=(LabelSpec(name="click"),), has_weights=True, has_groups=True)
    accumulator = MetricAccumulator(inputs, ranking_k=3)
    accumulator.update(*(torch.from_numpy(column) for column in (scores, labels, weights, groups)))
    kept = ~np.isnan(labels[:, 0]) & (weights > 0)
    found, expected = accumulator.compute(), by_definition(scores[kept, 0], labels[kept, 0], groups[kept], 3)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert higher_is_better("ndcg@3")
    assert higher_is_better("recall@10/click")
    assert metric_names(inputs.labels, has_groups=True)[-3:] == ["ndcg@10", "recall@10", "mrr"]
    with pytest.raises(ConfigError, match="one place"):
        ranking_metrics([1.0], [1.0], [0], k=0)


def test_rows_without_a_group_are_nobody_and_not_one_user() -> None:
    """The rows without a user are in an order that one user would never have."""
    rng = np.random.default_rng(0)
    groups = np.where(rng.random(600) < 0.5, rng.integers(1, 40, 600), NO_GROUP)
    labels = rng.integers(0, 2, 600).astype(np.float32)
    scores = np.where(groups == NO_GROUP, 1 - labels, np.clip(labels + rng.normal(size=600), 0, 1)).astype(np.float32)
    inputs = InputSpec(labels=(LabelSpec(name="like"),), has_groups=True)
    known = groups != NO_GROUP
    found = []
    for kept in (np.full(600, True), known):
        accumulator = MetricAccumulator(inputs)
        columns = (torch.from_numpy(each[kept]) for each in (scores[:, None], labels[:, None], groups))
        score, label, group = columns
        accumulator.update(score, label, None, group)
        found.append(accumulator.compute())
    for name in ("gauc", "ndcg@10", "recall@10", "mrr"):
        assert found[0][name] == found[1][name], name
    assert found[0]["auc"] != found[1]["auc"]


def test_scores_and_labels_that_are_none_are_refused() -> None:
    with pytest.raises(NumericsError, match="nan"):
        ranking_metrics([0.5, math.nan], [1.0, 0.0], [1, 1])
    with pytest.raises(DataError, match="0 or 1, or NaN"):
        ranking_metrics([0.5, 0.2], [2.0, 0.0], [1, 1])
    assert ranking_metrics([0.5, 0.9, 0.2], [1.0, math.nan, 0.0], [1, 1, 1])["mrr"] == 1.0
