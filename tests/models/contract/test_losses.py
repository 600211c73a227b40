from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Task
from ziggurat.models.contract.losses import in_label_units, labelled_weight, loss_of, loss_sums, scores_from_logits

CLICK = InputSpec(labels=(LabelSpec(name="click"),))
CLICK_AND_BUY = InputSpec(labels=(LabelSpec(name="click"), LabelSpec(name="buy")))
MIXED = InputSpec(labels=(LabelSpec(name="click"), LabelSpec(name="stars", task=Task.REGRESSION)))


def looped_loss(logits, labels, weights, tasks) -> float:
    """The definition, sample by sample."""
    means = []
    for column, task in enumerate(tasks):
        total = weight = 0.0
        for row in range(len(logits)):
            z, y, w = float(logits[row, column]), float(labels[row, column]), float(weights[row])
            if math.isnan(y):
                continue
            p = 1 / (1 + math.exp(-z))
            loss = -y * math.log(p) - (1 - y) * math.log(1 - p) if task is Task.BINARY else (z - y) ** 2
            total, weight = total + w * loss, weight + w
        means.append(total / weight if weight else 0.0)
    return sum(means) / len(means)


def random_batch(size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, 2, generator=generator) * 3
    labels = (torch.rand(size, 2, generator=generator) < 0.4).float()
    labels[:, 1] = torch.randn(size, generator=generator)
    labels[torch.rand(size, 2, generator=generator) < 0.3] = torch.nan
    return logits, labels, torch.rand(size, generator=generator)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_definition(seed):
    logits, labels, weights = random_batch(20, seed)
    expected = looped_loss(logits, labels, weights, (Task.BINARY, Task.REGRESSION))
    assert float(loss_of(logits, labels, weights, inputs=MIXED)) == pytest.approx(expected, rel=1e-5)
    expected = looped_loss(logits, labels, torch.ones(20), (Task.BINARY, Task.REGRESSION))
    assert float(loss_of(logits, labels, inputs=MIXED)) == pytest.approx(expected, rel=1e-5)


def test_one_label_without_weights_is_torchs_own():
    logits, labels = torch.randn(50, 1), torch.randint(0, 2, (50, 1)).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(loss_of(logits, labels, inputs=CLICK), expected)


def test_a_positive_weight_is_a_sample_weight_of_positives():
    logits, labels, weights = random_batch(40, 7)
    labels[:, 1] = (labels[:, 1] > 0).float()  # NaN becomes 0 here, and stays in the first column
    labels[3, 1] = 0.25  # a soft label
    heavy = InputSpec(labels=(LabelSpec(name="click", positive_weight=5.0), LabelSpec(name="buy", positive_weight=0.5)))
    sums = loss_sums(logits, labels, weights, inputs=heavy)
    for column, factor in ((0, 5.0), (1, 0.5)):
        own = InputSpec(labels=(LabelSpec(name="click"),))
        y = labels[:, [column]]
        weighted = weights * torch.where(y[:, 0].isnan(), 1.0, 1 + (factor - 1) * y[:, 0])
        expected = loss_sums(logits[:, [column]], y, weighted, inputs=own)
        torch.testing.assert_close(sums.total[[column]], expected.total)
        torch.testing.assert_close(sums.weight[[column]], expected.weight)
    torch.testing.assert_close(labelled_weight(labels, weights, inputs=heavy), sums.weight)
    assert not torch.allclose(sums.weight, loss_sums(logits, labels, weights, inputs=CLICK_AND_BUY).weight)


def test_scores_are_corrected_for_negatives_that_were_left_out():
    logits = torch.linspace(-4, 4, 9)[:, None]
    p = logits.sigmoid()
    found = scores_from_logits(logits, inputs=InputSpec(labels=(LabelSpec(name="click", negative_rate=0.1),)))
    torch.testing.assert_close(found, p / (p + (1 - p) / 0.1))  # He et al. 2014, section 6.3
    assert torch.equal(scores_from_logits(logits, inputs=CLICK), p)


def test_missing_label_gets_no_gradient():
    logits = torch.randn(4, 2, requires_grad=True)
    labels = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [0.0, torch.nan], [1.0, 0.5]])
    loss_of(logits, labels, inputs=MIXED).backward()
    assert logits.grad is not None
    assert ((logits.grad == 0) == labels.isnan()).all()


def test_label_that_nobody_has_counts_as_zero():
    logits = torch.randn(3, 2, requires_grad=True)
    labels = torch.tensor([[1.0, torch.nan]] * 3)
    loss = loss_of(logits, labels, inputs=MIXED)
    assert loss.item() == pytest.approx(loss_of(logits[:, :1], labels[:, :1], inputs=CLICK).item() / 2)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_empty_batch_is_zero_with_zero_gradients():
    layer = torch.nn.Linear(3, 1)
    loss = loss_of(layer(torch.empty(0, 3)), torch.empty(0, 1), inputs=CLICK)
    loss.backward()
    assert loss.item() == 0.0
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 0).all()


def test_extreme_logits_stay_finite_and_nan_logits_show():
    labels = torch.tensor([[1.0], [0.0]])
    assert float(loss_of(torch.tensor([[-1e4], [1e4]]), labels, inputs=CLICK)) == pytest.approx(1e4)
    missing = torch.tensor([[torch.nan], [0.0]])
    assert loss_of(torch.tensor([[torch.nan], [0.0]]), missing, inputs=CLICK).isnan()


def test_huge_regression_values_do_not_reach_the_cross_entropy():
    logits = torch.zeros(2, 2, requires_grad=True)
    labels = torch.tensor([[1.0, 1e18], [0.0, -1e18]])
    loss_of(logits, labels, inputs=MIXED).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_computed_in_fp32():
    logits, labels = torch.randn(64, 1), torch.ones(64, 1)
    assert loss_of(logits.bfloat16(), labels, inputs=CLICK).dtype == torch.float32


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (1, 1, 6)])
def test_shares_of_uneven_ranks_add_up_to_one_big_batch(sizes):
    logits, labels, weights = random_batch(sum(sizes))
    layer = torch.nn.Linear(2, 2)
    whole = loss_of(layer(logits), labels, weights, inputs=MIXED)
    gradient = torch.autograd.grad(whole, layer.weight)[0]
    parts = zip(logits.split(sizes), labels.split(sizes), weights.split(sizes), strict=True)
    sums = [loss_sums(layer(z), y, w, inputs=MIXED) for z, y, w in parts]
    weight = torch.stack([part.weight for part in sums]).sum(dim=0)
    shares = [part.mean(weight) for part in sums]
    torch.testing.assert_close(torch.stack(shares).sum(), whole)
    torch.testing.assert_close(torch.autograd.grad(torch.stack(shares).sum(), layer.weight)[0], gradient)
    averaged = torch.stack([part.mean() for part in sums]).mean()
    assert not torch.allclose(averaged, whole)  # what averaging the ranks' means would give


def test_scores_are_probabilities_or_values():
    logits = torch.tensor([[0.0, 3.5], [2.0, -1.0]])
    scores = scores_from_logits(logits, inputs=MIXED)
    np.testing.assert_allclose(scores.numpy(), [[0.5, 3.5], [1 / (1 + math.exp(-2.0)), -1.0]], rtol=1e-6)


def test_a_number_is_predicted_and_judged_in_its_own_units():
    label = LabelSpec(name="dwell", task=Task.REGRESSION, offset=40_000.0, scale=12_000.0)
    inputs = InputSpec(labels=(LabelSpec(name="click"), label))
    computed, labels = torch.tensor([[0.3, 0.5], [-1.0, 0.0]]), torch.tensor([[1.0, 52_000.0], [0.0, 40_000.0]])
    logits = in_label_units(computed, inputs=inputs)
    assert logits.tolist() == [[pytest.approx(0.3), 46_000.0], [-1.0, 40_000.0]]
    assert torch.equal(scores_from_logits(logits, inputs=inputs)[:, 1], logits[:, 1])
    assert float(loss_sums(logits, labels, inputs=inputs).total[1]) == pytest.approx(0.25)
    assert in_label_units(computed, inputs=MIXED) is computed


def test_the_weight_of_a_label_multiplies_its_mean():
    logits, labels, weights = random_batch(20)
    plain = loss_sums(logits, labels, weights, inputs=MIXED)
    heavy = InputSpec(labels=(MIXED.labels[0], dataclasses.replace(MIXED.labels[1], weight=3.0)))
    found = loss_sums(logits, labels, weights, inputs=heavy)
    torch.testing.assert_close(found.mean(), (plain.total / plain.weight) @ torch.tensor([0.5, 1.5]))
