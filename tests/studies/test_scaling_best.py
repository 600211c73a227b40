"""What is reachable is that of the test rows, and what a row has lost agrees with a second computation of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ziggurat.data.preprocess.splits import SPLITS, Split, Splitter
from ziggurat.data.synthetic.rows import BLOCK_ROWS
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.errors import DataError
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.scaling_best import best_of_test, row_losses

ROWS = BLOCK_ROWS + 4000  # of two blocks


def _run() -> RunConfig:
    run = data_run(ComparedData.SYNTHETIC_300K)
    return dataclasses.replace(run, dataset=DatasetConfig(name="synthetic", rows=ROWS))


def _test_rows() -> tuple[np.ndarray, np.ndarray]:
    """True probabilities and labels of the test rows, from all rows at once."""
    run = _run()
    assert run.teacher is not None
    teacher = SyntheticTeacher(run.teacher)
    is_test = Splitter(config=run.data.split).assign_random(np.arange(ROWS)) == SPLITS.index(Split.TEST)
    return teacher.probabilities(ROWS)[0][is_test], teacher.frame(ROWS)["label"].to_numpy()[is_test]


def test_the_best_is_the_entropy_of_the_test_rows() -> None:
    p, labels = _test_rows()
    best = best_of_test(_run(), labels.astype(np.float32))
    assert best is not None
    np.testing.assert_array_equal(best.probabilities, p)
    entropy = math.fsum(-each * math.log(each) - (1 - each) * math.log1p(-each) for each in p.tolist()) / p.size
    assert best.log_loss == pytest.approx(entropy, rel=1e-13)
    # Of p itself nothing is left but what FP32 leaves.
    assert abs(row_losses(p.astype(np.float32), labels, best).mean()) < 1e-12


def test_rows_lose_what_their_log_loss_has_above_entropy_over_all_labels() -> None:
    p, labels = _test_rows()
    best = best_of_test(_run(), labels.astype(np.float32))
    assert best is not None
    scores = np.clip(p + np.random.default_rng(0).normal(0, 0.05, p.size), 0.01, 0.99).astype(np.float32)
    lost = row_losses(scores, labels, best)
    of_ones = row_losses(scores, np.ones_like(scores), None)
    of_zeros = row_losses(scores, np.zeros_like(scores), None)
    entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    np.testing.assert_allclose(lost, p * of_ones + (1 - p) * of_zeros - entropy, atol=1e-12)
    assert lost.min() > -1e-12


def test_other_labels_are_refused_and_data_without_a_teacher_has_no_best() -> None:
    _, labels = _test_rows()
    with pytest.raises(DataError, match="begin anew"):
        best_of_test(_run(), (1 - labels).astype(np.float32))
    with pytest.raises(DataError, match="begin anew"):
        best_of_test(_run(), labels[:-1].astype(np.float32))
    assert best_of_test(data_run(ComparedData.MOVIELENS), labels.astype(np.float32)) is None
