from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ziggurat.errors import DataError
from ziggurat.studies.compare_statistics import delong, holm, paired_difference, placements, wilcoxon_p


@pytest.mark.parametrize(
    "differences", [[1.0, 1.0, -1.0, 2.0, 2.0, -3.0], [0.0, 0.5, 0.5, -0.5, 1.0], [0.2] * 14, [0.0, 0.7]]
)
def test_wilcoxon_counts_signs_also_with_ties_and_zeros(differences: list[float]) -> None:
    values = np.asarray([each for each in differences if each])
    ranks = np.asarray(
        [(np.abs(values) < abs(each)).sum() + (np.abs(values) == abs(each)).sum() / 2 for each in values]
    )
    signs = np.asarray(list(itertools.product((-1.0, 1.0), repeat=values.size)))
    observed = abs(float((np.sign(values) * (ranks + 0.5)).sum()))
    assert wilcoxon_p(differences) == pytest.approx((np.abs(signs @ (ranks + 0.5)) >= observed - 1e-9).mean())


@pytest.mark.parametrize("size", [2, 5, 8])
def test_paired_tests_are_those_of_both_samples(size: int) -> None:
    rng = np.random.default_rng(size)
    first, second = rng.normal(0.4, 1.0, size), rng.normal(0.0, 1.0, size)
    found = paired_difference(first.tolist(), second.tolist())
    assert found.mean == pytest.approx((first - second).mean())
    assert found.t_p == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-6)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(first, second, method="exact").pvalue)


def test_one_pair_has_no_p() -> None:
    found = paired_difference([0.9], [0.8])
    assert math.isnan(found.t_p)
    assert math.isnan(found.wilcoxon_p)


def test_five_equal_signs_give_one_sixteenth() -> None:
    assert wilcoxon_p([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(2 / 32)


def test_values_must_be_paired() -> None:
    with pytest.raises(DataError, match="paired by seed"):
        paired_difference([1.0, 2.0], [1.0])


def test_delong_is_the_textbook_covariance() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(np.float64)
    first = labels + rng.normal(0, 1.0, 300)
    second = np.round(first + rng.normal(0, 0.7, 300), 1)  # ties
    psi = [_pairs(scores, labels) for scores in (first, second)]
    rows = np.stack([each.mean(axis=1) for each in psi])
    columns = np.stack([each.mean(axis=0) for each in psi])
    covariance = np.cov(rows) / rows.shape[1] + np.cov(columns) / columns.shape[1]
    expected = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    difference, error, p = delong(placements([first], labels), placements([second], labels))
    assert difference == pytest.approx(psi[0].mean() - psi[1].mean())
    assert error == pytest.approx(expected)
    assert p == pytest.approx(2 * stats.norm.sf(abs(difference) / error))


def _pairs(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    gaps = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return (gaps > 0) + 0.5 * (gaps == 0)


def test_delong_over_seeds_is_the_mean_auc() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random(200) < 0.5).astype(np.float64)
    runs = [labels + rng.normal(0, 2.0, 200) for _ in range(3)]
    assert placements(runs, labels).auc == pytest.approx(np.mean([_pairs(run, labels).mean() for run in runs]))
    assert delong(placements(runs, labels), placements(runs, labels))[2] == 1.0


def test_holm_corrects_by_the_number_of_tests_that_are_left() -> None:
    # 4 · 0.005 = 0.02, 3 · 0.01 = 0.03, 2 · 0.03 = 0.06, and 1 · 0.04 is raised to the one before.
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_rejects_what_its_steps_reject() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        found = rng.uniform(0.0, 0.1, 6).tolist()
        rejected = set[int]()
        for step, index in enumerate(sorted(range(6), key=found.__getitem__)):
            if found[index] > 0.05 / (6 - step):
                break
            rejected.add(index)
        assert {index for index, p in enumerate(holm(found)) if p <= 0.05} == rejected
