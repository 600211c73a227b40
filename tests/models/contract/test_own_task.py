"""Code from outside the package that computes losses, and answers wrongly only on the batches of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ziggurat as zg
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.tasks import OF_NUMBERS, Task
from ziggurat.models import build_model
from ziggurat.models.contract.losses import loss_sums, take_bad_loss
from ziggurat.testing.batches import random_batch
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep

SIZE = 100  # more samples than a trial has


class LateTask(Task):
    """Absolute errors; something else of a whole batch."""

    name = "late"
    judged_like = OF_NUMBERS

    def __init__(self, late: Callable[[Tensor], object]) -> None:
        self.late = late

    def loss(self, logits_B: Tensor, labels_B: Tensor, *, mean: float, deviation: float) -> Tensor:
        losses_B = ((logits_B - labels_B) / deviation).abs().float()
        return losses_B if len(losses_B) < SIZE else self.late(losses_B)  # type: ignore[return-value]


def fails(losses_B: Tensor) -> Tensor:
    raise ValueError("late")


LATE = {
    "sum": (lambda losses_B: losses_B.sum(), r"\(\) torch.float32"),
    "short": (lambda losses_B: losses_B[1:], r"\(99,\) torch.float32"),
    "dtype": (lambda losses_B: losses_B.double(), "torch.float64"),
    "none": (lambda losses_B: None, "NoneType"),
    "error": (fails, "ValueError: late"),
}


def inputs_of(late: Callable[[Tensor], object]) -> InputSpec:
    task = LateTask(late)
    task.try_out()
    return InputSpec(dense=("age",), labels=(LabelSpec(name="visits", task=task),))


@pytest.mark.parametrize("how", LATE)
def test_a_task_whose_loss_answers_wrongly_late_is_named(how: str) -> None:
    late, found = LATE[how]
    logits = torch.zeros(SIZE, 1, dtype=torch.float64)
    with pytest.raises(ConfigError, match=found) as caught:
        loss_sums(logits, logits + 1, inputs=inputs_of(late))
    assert "label 'visits', task late, " in caught.value.where
    assert "LateTask.loss" in caught.value.where
    assert caught.value.expected == "a loss for each of 100 samples, in FP32"


def test_a_step_names_the_task_whose_loss_is_no_number() -> None:
    inputs = inputs_of(lambda losses_B: losses_B * math.nan)
    model = build_model(zg.LogisticRegressionConfig(), inputs, seed=0)
    step = TrainStep(model, TrainingConfig())
    result = step(random_batch(inputs, SIZE, seed=1))
    assert not result.finite
    assert result.first_bad.startswith("loss nan of logit ")
    assert "task late, " in result.first_bad
    assert step(random_batch(inputs, SIZE - 1, seed=1)).finite
    assert take_bad_loss(inputs) == ""


def test_losses_of_logits_that_are_no_numbers_are_not_the_task_s_fault() -> None:
    inputs = inputs_of(lambda losses_B: losses_B)
    logits = torch.full((SIZE, 1), math.nan)
    assert math.isnan(float(loss_sums(logits, torch.zeros(SIZE, 1), inputs=inputs).mean()))
    assert take_bad_loss(inputs) == ""
