"""Error bars of metrics: as wide as formulas and repetitions say, wider where samples of a user resemble each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.labels import Task
from ziggurat.training.metrics import accumulator as module
from ziggurat.training.metrics.accumulator import MetricAccumulator
from ziggurat.training.metrics.full_ranking import FullRankingSums
from ziggurat.training.metrics.jackknife import BLOCKS, blocks_for


def filled(
    labels: np.ndarray, scores: np.ndarray, *, groups: np.ndarray | None = None, task: Task = Task.BINARY
) -> MetricAccumulator:
    spec = InputSpec(labels=(LabelSpec(name="y", task=task),), has_groups=groups is not None)
    found = MetricAccumulator(spec, metrics={"own": lambda scores, labels, weights: 1.0})
    found.update(
        torch.from_numpy(scores.astype(np.float32))[:, None],
        torch.from_numpy(labels.astype(np.float32))[:, None],
        None,
        None if groups is None else torch.from_numpy(groups),
    )
    return found


def binary(num_rows: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=num_rows)
    return draw.random(num_rows) < 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(-logits))


def test_auc_and_log_loss_have_the_error_that_formulas_give() -> None:
    labels, scores = binary(4000, seed=1)
    found = filled(labels, scores)
    auc = found.compute()["auc"]
    positives = labels.sum()
    negatives = (~labels).sum()
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)  # Hanley and McNeil, 1982
    variance = auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2)
    assert found.half_width("auc") == pytest.approx(1.96 * math.sqrt(variance / (positives * negatives)), rel=0.35)
    losses = -np.log(np.where(labels, scores, 1 - scores))
    assert found.half_width("log_loss") == pytest.approx(1.96 * losses.std() / math.sqrt(4000), rel=0.35)


def test_the_interval_holds_the_true_value_about_as_often_as_it_says() -> None:
    truth = filled(*binary(400_000, seed=99)).compute()["auc"]
    held = 0
    for seed in range(100):
        found = filled(*binary(600, seed=seed))
        held += abs(found.compute()["auc"] - truth) <= found.half_width("auc")
    assert 88 <= held <= 99


def test_the_order_of_the_samples_which_ranks_change_makes_no_difference() -> None:
    labels, scores = binary(2000, seed=5)
    scores = scores.round(2)  # with ties
    order = np.random.default_rng(6).permutation(2000)
    for groups in (None, np.arange(2000) % 4):  # 0 is nobody's
        first = filled(labels, scores, groups=groups)
        second = filled(labels[order], scores[order], groups=None if groups is None else groups[order])
        for name in ("auc", "log_loss", "calibration"):
            assert first.half_width(name) == pytest.approx(second.half_width(name), rel=1e-9)


def test_an_error_bar_of_many_samples_is_hardly_a_matter_of_chance() -> None:
    widths = [filled(*binary(2000, seed=seed)).half_width("auc") for seed in range(25)]
    assert np.std(widths) < 0.11 * np.mean(widths), "twenty blocks alone are off by 16 %"
    few = np.repeat(np.arange(1, 41), 50)
    assert blocks_for(few) == BLOCKS, "forty users are no hundred blocks"
    assert blocks_for(np.arange(5000)) == 100
    assert blocks_for(np.arange(400_000)) == BLOCKS


def test_rows_of_a_group_are_left_out_together() -> None:
    draw = np.random.default_rng(3)
    groups = np.repeat(np.arange(1, 101), 40)
    taste = np.repeat(draw.normal(size=100), 40)
    values = taste + 0.1 * draw.normal(size=4000)
    alone = filled(values, np.zeros(4000), task=Task.REGRESSION).half_width("mae")
    together = filled(values, np.zeros(4000), groups=groups, task=Task.REGRESSION).half_width("mae")
    assert together > 3 * alone
    gauc = filled(values > 0.0, 1 / (1 + np.exp(-values)), groups=groups).half_width("gauc")
    assert math.isnan(gauc) or 0.0 <= gauc < 0.5


def test_what_has_no_error_bar_is_nan() -> None:
    labels, scores = binary(50, seed=4)
    found = filled(labels, scores)
    assert math.isnan(found.half_width("own"))
    assert math.isnan(found.half_width("gauc"))
    empty = filled(np.zeros(0), np.zeros(0))
    assert math.isnan(empty.half_width("auc"))


def test_a_part_of_very_many_samples_gives_about_the_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, scores = binary(60_000, seed=5)
    whole = filled(labels, scores).half_width("auc")
    monkeypatch.setattr(module, "_MAX_FOR_ERROR", 10_000)
    assert filled(labels, scores).half_width("auc") == pytest.approx(whole, rel=0.5)


def test_full_ranking_has_the_error_of_a_mean() -> None:
    draw = np.random.default_rng(6)
    ranks = torch.from_numpy(draw.integers(1, 40, size=2000))
    sums = FullRankingSums([LabelSpec(name="a")], num_items=40, ks=(10,))
    for part in torch.arange(2000).split(700):
        sums.add(
            ranks[part],
            torch.zeros(len(part), 10, dtype=torch.int64),
            torch.ones(len(part), 1),
            is_repeated_Q=torch.zeros(len(part), dtype=torch.bool),
            units_Q=part.numpy(),
        )
    share = (ranks <= 10).double()
    expected = 1.96 * float(share.std()) / math.sqrt(2000)
    assert sums.compute()["full_recall@10"] == pytest.approx(float(share.mean()))
    assert sums.half_widths()["full_recall@10"] == pytest.approx(expected, rel=0.35)
    assert math.isnan(FullRankingSums([LabelSpec(name="a")], num_items=4).half_widths()["full_mrr"])
