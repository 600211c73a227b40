from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn
import torch
from sklearn.metrics import (
    accuracy_score,
    mean_absolute_error,
    mean_squared_error,
    roc_auc_score,
)
from sklearn.metrics import log_loss as sklearn_log_loss

from tests.training.metrics.labelled_samples import CLICK, FULL, full_samples
from ziggurat.errors import ConfigError, DataError, NumericsError
from ziggurat.training.metrics import functions
from ziggurat.training.metrics.accumulator import (
    MetricAccumulator,
    accuracy,
    auc,
    calibration,
    grouped_auc,
    log_loss,
    mae,
    normalised_entropy,
    rmse,
)
from ziggurat.training.metrics.metric import gain_over, higher_is_better
from ziggurat.training.metrics.scored_samples import scored_samples

NUM_CASES = 1000


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Scores with or without ties, labels that may be of one class, weights or none, groups."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 200))
    scores = rng.random(count)
    if seed % 3 == 0:
        scores = np.round(scores, 1)  # many ties, 0 and 1 included
    if seed % 50 == 1:
        scores[:] = 0.25  # nothing but ties
    labels = (rng.random(count) < rng.choice([0.02, 0.3, 0.9])).astype(np.float64)
    weights = None
    if seed % 2:
        weights = rng.random(count) * 3
        weights[rng.random(count) < 0.1] = 0.0
        weights[rng.integers(count)] = 1.0  # never all zero
    return scores, labels, weights, rng.integers(-3, rng.integers(-2, 30), count)


def same(ours: float, theirs: float) -> bool:
    return (math.isnan(ours) and math.isnan(theirs)) or abs(ours - theirs) <= 1e-9


def sklearn_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    # Samples without weight are nobody: scikit-learn would take them for a class.
    kept = np.ones(labels.size, bool) if weights is None else weights > 0
    if len(np.unique(labels[kept])) < 2:
        return math.nan
    return float(roc_auc_score(labels, scores, sample_weight=weights))


def looped_gauc(scores, labels, weights, groups, auc_of_group) -> float:
    """The definition, group by group."""
    total = weight = 0.0
    for group in np.unique(groups):
        mine = groups == group
        mine_weights = None if weights is None else weights[mine]
        value = auc_of_group(scores[mine], labels[mine], mine_weights)
        if not math.isnan(value):
            size = mine.sum() if mine_weights is None else mine_weights.sum()
            total, weight = total + size * value, weight + size
    return total / weight if weight else math.nan


def paired_auc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    """The definition, pair by pair."""
    weights = np.ones(labels.size) if weights is None else weights
    pairs = np.outer(weights * (labels == 1), weights * (labels == 0))
    won = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    return float((pairs * won).sum() / pairs.sum()) if pairs.sum() > 0 else math.nan


def test_equal_to_scikit_learn_on_random_cases():
    one_class = 0
    with sklearn.config_context(skip_parameter_validation=True, assume_finite=True):  # a third faster
        for seed in range(NUM_CASES):
            scores, labels, weights, _ = random_case(seed)
            expected_auc = sklearn_auc(scores, labels, weights)
            one_class += math.isnan(expected_auc)
            assert same(auc(scores, labels, weights), expected_auc), seed
            expected_loss = sklearn_log_loss(labels, scores, sample_weight=weights, labels=[0, 1])
            assert same(log_loss(scores, labels, weights), expected_loss), seed
            base = float(np.average(labels, weights=weights))
            if 0 < base < 1:
                entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
                assert same(normalised_entropy(scores, labels, weights), expected_loss / entropy), seed
            else:
                assert math.isnan(normalised_entropy(scores, labels, weights))
    assert 50 < one_class < 500  # the cases are what they are meant to be


def test_simple_metrics_equal_scikit_learn_on_random_cases():
    for seed in range(0, NUM_CASES, 7):
        scores, labels, weights, _ = random_case(seed)
        assert same(accuracy(scores, labels, weights), accuracy_score(labels, scores >= 0.5, sample_weight=weights))
        assert same(mae(scores, labels, weights), mean_absolute_error(labels, scores, sample_weight=weights))
        squared = mean_squared_error(labels, scores, sample_weight=weights)
        assert same(rmse(scores, labels, weights), math.sqrt(squared))
        positives = float(np.average(labels, weights=weights))
        expected = float(np.average(scores, weights=weights)) / positives if positives else math.nan
        assert same(calibration(scores, labels, weights), expected)


def test_gauc_equals_a_loop_over_groups_on_random_cases():
    undefined = 0
    for seed in range(NUM_CASES):
        scores, labels, weights, groups = random_case(seed)
        expected = looped_gauc(scores, labels, weights, groups, paired_auc)
        undefined += math.isnan(expected)
        assert same(grouped_auc(scores, labels, groups, weights), expected), seed
        if seed % 50 == 0:
            assert same(expected, looped_gauc(scores, labels, weights, groups, sklearn_auc)), seed
    assert undefined > 10


def test_auc_counts_won_pairs():
    scores, labels = np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 1.0, 0.0, 1.0])
    # (0.4, 0.1) won, (0.4, 0.4) tie, (0.8, 0.1) won, (0.8, 0.4) won
    assert auc(scores, labels) == 3.5 / 4


def test_order_of_rows_and_monotone_maps_change_nothing():
    rng = np.random.default_rng(5)
    scores, labels = rng.normal(size=5000), rng.integers(0, 2, 5000)
    groups = rng.integers(0, 300, 5000)
    order = rng.permutation(5000)
    assert auc(scores, labels) == auc(scores[order], labels[order]) == auc(np.exp(scores), labels)
    assert math.isclose(
        grouped_auc(scores, labels, groups),
        grouped_auc(scores[order], labels[order], groups[order]),
        rel_tol=1e-14,
    )


def test_weight_two_is_the_sample_twice():
    rng = np.random.default_rng(6)
    scores, labels, groups = rng.random(300), rng.integers(0, 2, 300), rng.integers(0, 20, 300)
    weights = rng.integers(0, 4, 300).astype(float)
    repeats = weights.astype(int)
    again = [np.repeat(values, repeats) for values in (scores, labels, groups)]
    assert math.isclose(auc(scores, labels, weights), auc(again[0], again[1]), rel_tol=1e-14)
    assert math.isclose(grouped_auc(scores, labels, groups, weights), grouped_auc(*again), rel_tol=1e-14)
    assert math.isclose(calibration(scores, labels, weights), calibration(again[0], again[1]), rel_tol=1e-14)


def test_far_apart_groups_do_not_disturb_each_other():
    rng = np.random.default_rng(7)
    scores, labels = rng.random(1000), rng.integers(0, 2, 1000)
    groups = np.where(np.arange(1000) < 500, np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    weights = np.where(np.arange(1000) < 500, 1e9, 1e-3)
    expected = looped_gauc(scores, labels, weights, groups, paired_auc)
    assert math.isclose(grouped_auc(scores, labels, groups, weights), expected, rel_tol=1e-9)


def test_float32_scores_clip_like_scikit_learn():
    scores = np.array([0.0, 1.0, 1.0, 0.25], dtype=np.float32)
    labels = np.array([1.0, 0.0, 1.0, 0.0])
    assert math.isclose(log_loss(scores, labels), sklearn_log_loss(labels, scores), rel_tol=1e-6)
    assert log_loss(scores.astype(np.float64), labels) > 1.5 * log_loss(scores, labels)


def test_tensors_are_taken_too():
    scores, labels = torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0.0, 1.0, 1.0])
    assert auc(scores, labels) == 1.0
    assert math.isclose(log_loss(scores.bfloat16(), labels), log_loss(scores.bfloat16().float(), labels))


@pytest.mark.parametrize("metric", [auc, log_loss, normalised_entropy, calibration, accuracy, rmse, mae])
def test_no_samples_is_nan(metric):
    assert math.isnan(metric(np.empty(0), np.empty(0)))
    assert math.isnan(metric(np.array([0.5, 0.5]), np.array([np.nan, np.nan])))
    assert math.isnan(metric(np.array([0.5]), np.array([1.0]), np.array([0.0])))


def test_undefined_is_nan():
    scores, positive = np.array([0.2, 0.7]), np.ones(2)
    assert math.isnan(auc(scores, positive))
    assert math.isnan(auc(scores, 1 - positive))
    assert math.isnan(normalised_entropy(scores, positive))
    assert math.isnan(calibration(scores, 1 - positive))
    assert math.isnan(grouped_auc(scores, np.array([0.0, 1.0]), np.array([1, 2])))
    assert log_loss(scores, positive) > 0  # defined with one class


def test_missing_labels_leave_their_sample_out():
    scores, labels = np.array([0.1, 0.9, 0.5, 0.6]), np.array([0.0, 1.0, np.nan, 0.0])
    groups, weights = np.array([4, 4, 4, 5]), np.array([1.0, 2.0, 3.0, 4.0])
    kept = ~np.isnan(labels)
    for metric in (auc, log_loss, normalised_entropy, calibration, accuracy, rmse, mae):
        assert metric(scores, labels, weights) == metric(scores[kept], labels[kept], weights[kept])
    assert grouped_auc(scores, labels, groups, weights) == 1.0


@pytest.mark.parametrize("metric", [auc, log_loss, rmse])
def test_nan_score_is_refused(metric):
    with pytest.raises(NumericsError, match="score 1"):
        metric(np.array([0.5, np.nan]), np.array([0.0, 1.0]))


def test_logits_where_probabilities_are_needed_are_refused():
    with pytest.raises(NumericsError, match="sigmoid"):
        log_loss(np.array([-2.0, 0.5]), np.array([0.0, 1.0]))
    assert auc(np.array([-2.0, 0.5]), np.array([0.0, 1.0])) == 1.0  # order is all it needs


def test_impossible_labels_weights_and_shapes_are_refused():
    with pytest.raises(DataError, match="label 1"):
        auc(np.array([0.5, 0.5]), np.array([0.0, 0.5]))
    with pytest.raises(DataError, match="weight 0"):
        log_loss(np.array([0.5]), np.array([0.0]), np.array([-1.0]))
    with pytest.raises(DataError, match="one and the same length"):
        log_loss(np.array([0.5]), np.array([0.0, 1.0]))
    with pytest.raises(DataError, match="one group"):
        grouped_auc(np.array([0.5]), np.array([0.0]), np.array([1, 2]))


def test_direction_of_metrics():
    assert higher_is_better("auc")
    assert higher_is_better("gauc/click")
    assert not higher_is_better("log_loss/auc")
    for name in ("calibration", "aucc", "like/auc"):
        with pytest.raises(ConfigError, match=name):
            higher_is_better(name)


def test_gain_over_is_above_0_for_what_is_better() -> None:
    assert gain_over("auc/click", 0.75, 0.5) == 0.25
    assert gain_over("rmse", 0.75, 0.5) == -0.25
    # Of calibration the distance from 1 counts, on both sides.
    assert gain_over("calibration", 1.25, 0.5) == 0.25
    assert gain_over("calibration", 0.5, 1.25) == -0.25


def test_gain_over_is_nan_where_nobody_can_say() -> None:
    assert math.isnan(gain_over("a_function_of_the_user", 0.75, 0.5))
    assert math.isnan(gain_over("auc", math.nan, 0.5))
    assert math.isnan(gain_over("calibration", 1.0, math.nan))


# ------------------------------------------------------------------------------------------------- the accumulator


def accumulate(columns: tuple[torch.Tensor, ...], *, batch_size: int) -> dict[str, float]:
    accumulator = MetricAccumulator(FULL)
    for pieces in zip(*(column.split(batch_size) for column in columns), strict=True):
        accumulator.update(*pieces)
    return accumulator.compute()


def test_names_carry_the_label_only_when_there_are_several():
    accumulator = MetricAccumulator(CLICK)
    accumulator.update(torch.tensor([[0.2], [0.7]]), torch.tensor([[0.0], [1.0]]))
    assert list(accumulator.compute()) == ["auc", "log_loss", "ne", "calibration", "ece", "accuracy"]
    names = accumulate(full_samples(10), batch_size=4)
    assert {"auc/click", "gauc/click", "auc/buy", "rmse/stars", "mae/stars"} <= set(names)
    assert "auc/stars" not in names


def test_accumulated_equals_the_functions_whatever_the_batches():
    columns = full_samples(500)
    scores, labels, weights, groups = columns
    found = accumulate(columns, batch_size=64)
    assert found == accumulate(columns, batch_size=1) == accumulate(columns, batch_size=500)
    assert found["auc/buy"] == auc(scores[:, 2], labels[:, 2], weights)
    assert found["gauc/buy"] == grouped_auc(scores[:, 2], labels[:, 2], groups, weights)
    assert found["ne/click"] == normalised_entropy(scores[:, 0], labels[:, 0], weights)
    assert found["rmse/stars"] == rmse(scores[:, 1], labels[:, 1], weights)


def test_nothing_accumulated_is_nan_everywhere():
    assert all(math.isnan(value) for value in MetricAccumulator(FULL).compute().values())
    accumulator = MetricAccumulator(CLICK)
    accumulator.update(torch.empty(0, 1), torch.empty(0, 1))
    assert all(math.isnan(value) for value in accumulator.compute().values())


def test_one_class_only_is_no_exception():
    accumulator = MetricAccumulator(CLICK)
    accumulator.update(torch.tensor([[0.2], [0.7]]), torch.ones(2, 1))
    found = accumulator.compute()
    assert math.isnan(found["auc"])
    assert math.isfinite(found["log_loss"])


def test_it_keeps_a_copy_and_goes_on_after_compute():
    accumulator = MetricAccumulator(CLICK)
    scores, labels = torch.tensor([[0.2], [0.7]]), torch.tensor([[0.0], [1.0]])
    accumulator.update(scores, labels)
    assert accumulator.compute()["auc"] == 1.0
    scores.fill_(0.5)  # a loader may reuse its buffers
    assert accumulator.compute()["auc"] == 1.0
    accumulator.update(torch.tensor([[0.1]]), torch.tensor([[1.0]]))
    assert accumulator.compute()["auc"] == 0.5
    kept_scores, kept_labels, weights = accumulator.values(0)
    assert kept_scores.tolist() == pytest.approx([0.2, 0.7, 0.1])
    assert kept_labels.tolist() == [0.0, 1.0, 1.0]
    assert weights is None


def test_bad_updates_are_refused():
    with pytest.raises(NumericsError, match="click"):
        MetricAccumulator(CLICK).update(torch.tensor([[torch.nan]]), torch.ones(1, 1))
    with pytest.raises(DataError, match="labels of shape"):
        MetricAccumulator(CLICK).update(torch.ones(1, 1), torch.ones(1, 2))
    with pytest.raises(DataError, match="groups of shape"):
        MetricAccumulator(FULL).update(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1))
    with pytest.raises(DataError, match="no weights"):
        MetricAccumulator(CLICK).update(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))


def test_normalised_entropy_of_one_class_is_nan_whatever_the_weights() -> None:
    """The weighted share of positives rounds to 0.9999999999999999 now and then."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(2, 50))
        for label in (0.0, 1.0):
            assert math.isnan(normalised_entropy(rng.random(size), np.full(size, label), rng.random(size)))


def test_weighted_gauc_of_many_groups_keeps_its_digits() -> None:
    """Groups of tiny weights stand behind groups of large ones: a running sum over all would swallow them."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(400), 6)
    scores, labels = rng.random(2400), np.tile([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], 400)
    weights = np.where(groups < 200, 1e12, 1e-6) * rng.random(2400)
    tiny = groups >= 200
    wins, positives, negatives = functions._group_wins(scored_samples(scores, labels, weights), groups=groups)
    alone = functions._group_wins(scored_samples(scores[tiny], labels[tiny], weights[tiny]), groups=groups[tiny])
    for together, each in zip((wins, positives, negatives), alone, strict=True):
        np.testing.assert_allclose(together[200:], each, rtol=1e-13)


@pytest.mark.parametrize("value", [3.3, 0.1, 5.0, 1e9 + 0.1])
def test_r2_of_labels_that_are_all_equal_is_undefined_however_their_mean_is_rounded(value: float) -> None:
    labels = np.full(10, value)
    assert math.isnan(functions.r2(labels + 0.5, labels))
    other = np.append(labels, value + 7.0)
    assert math.isnan(functions.r2(other, other, np.append(np.ones(10), 0.0)))  # without weight nobody differs
    assert functions.r2(other, other) == 1.0
