from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import NumericsError
from ziggurat.training.metrics.calibration import calibration_curve, expected_calibration_error


def test_bins_by_hand():
    scores = np.array([0.1, 0.2, 0.6, 0.8])
    labels = np.array([0.0, 1.0, 1.0, 1.0])
    curve = calibration_curve(scores, labels, num_bins=2)
    np.testing.assert_allclose(curve.mean_score, [0.15, 0.7])
    np.testing.assert_allclose(curve.mean_label, [0.5, 1.0])
    np.testing.assert_allclose(curve.weight, [2, 2])
    # Beta(2, 2) has variance 1/20, Beta(3, 1) has 3/80.
    np.testing.assert_allclose(curve.standard_error, [math.sqrt(1 / 20), math.sqrt(3 / 80)])
    assert expected_calibration_error(scores, labels, num_bins=2) == pytest.approx((0.35 + 0.3) / 2)


def test_weights_by_hand():
    curve = calibration_curve(np.array([0.2, 0.4]), np.array([1.0, 0.0]), np.array([3.0, 1.0]), num_bins=1)
    assert curve.mean_score[0] == pytest.approx(0.25)
    assert curve.mean_label[0] == pytest.approx(0.75)
    effective = 16 / 10
    share = (0.75 * effective + 1) / (effective + 2)
    assert curve.standard_error[0] == pytest.approx(math.sqrt(share * (1 - share) / (effective + 3)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.integers(0, 3)), min_size=1, max_size=120),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_whatever_the_ties_order_does_not_matter_and_nothing_is_lost(samples, num_bins, random):
    def curve_of(rows):
        scores, labels, weights = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        return calibration_curve(scores / 12, labels, weights, num_bins=num_bins)

    curve = curve_of(samples)
    shuffled = list(samples)
    random.shuffle(shuffled)
    again = curve_of(shuffled)
    np.testing.assert_allclose(curve.mean_label, again.mean_label, atol=1e-12)
    weight = sum(row[2] for row in samples)
    assert curve.weight.sum() == pytest.approx(weight)
    assert len(curve.weight) <= num_bins
    assert (np.diff(curve.mean_score) > 0).all()  # a score is never on both sides of a border
    assert curve.weight @ curve.mean_label == pytest.approx(sum(row[1] * row[2] for row in samples))


def test_bins_hold_equally_many():
    rng = np.random.default_rng(0)
    scores = rng.random(10_000) ** 8  # crowded near zero
    curve = calibration_curve(scores, rng.random(10_000) < scores, num_bins=20)
    assert (curve.weight == 500).all()


def test_standard_errors_cover_the_truth():
    rng = np.random.default_rng(1)
    scores = rng.random(40_000) * 0.05
    curve = calibration_curve(scores, rng.random(40_000) < scores, num_bins=40)
    within = np.abs(curve.mean_label - curve.mean_score) < curve.standard_error
    assert 0.45 < within.mean() < 0.9  # 0.68 expected


def test_perfect_scores_have_little_error_and_shifted_ones_their_shift():
    rng = np.random.default_rng(2)
    truth = rng.random(200_000) * 0.5
    labels = rng.random(200_000) < truth
    assert expected_calibration_error(truth, labels) < 0.006
    assert expected_calibration_error(truth + 0.1, labels) == pytest.approx(0.1, abs=0.006)


def test_no_samples_no_bins():
    curve = calibration_curve(np.empty(0), np.empty(0))
    assert curve.to_json() == []
    assert math.isnan(expected_calibration_error(np.empty(0), np.empty(0)))


def test_json_has_one_dict_a_bin():
    points = calibration_curve(np.array([0.25, 0.75]), np.array([0.0, 1.0]), num_bins=2).to_json()
    assert [point["mean_score"] for point in points] == [0.25, 0.75]
    assert set(points[0]) == {"mean_score", "mean_label", "standard_error", "weight"}


def test_scores_outside_0_to_1_are_refused():
    with pytest.raises(NumericsError):
        calibration_curve(np.array([1.5]), np.array([1.0]))
