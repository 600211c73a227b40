"""Code from outside the package that rounds operands, and answers wrongly only when a run is on its way."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.converted import check_arithmetic
from ziggurat.precision import Linear, RoundedArithmetic
from ziggurat.testing.ranks import run_ranks

GOOD = 20  # operands that are rounded well: more than a trial rounds


class LateArithmetic(RoundedArithmetic):
    """Rounds nothing, and after `GOOD` operands does something else."""

    name = "late"

    def __init__(self, late: Callable[[Tensor], object]) -> None:
        self.late = late
        self.calls = itertools.count()

    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        return operand * 1.0 if next(self.calls) < GOOD else self.late(operand)  # type: ignore[return-value]


def fails(operand: Tensor) -> Tensor:
    raise ValueError("late")


LATE = {
    "shape": (lambda operand: operand[..., :1], r"\(4, 1\) torch.float32"),
    "dtype": (lambda operand: operand.double(), "torch.float64"),
    "none": (lambda operand: None, "NoneType"),
    "error": (fails, "ValueError: late"),
    "in place": (lambda operand: operand.detach().mul_(0.5), "changed in place"),
}


def train(late: Callable[[Tensor], object]) -> None:
    arithmetic = LateArithmetic(late)
    check_arithmetic(arithmetic)
    layer = Linear(4, 4)
    layer.arithmetic = arithmetic
    inputs = nn.Parameter(torch.ones(4, 4))
    for _ in range(GOOD):
        layer(inputs).square().sum().backward()


@pytest.mark.parametrize("how", LATE)
def test_an_arithmetic_that_answers_wrongly_late_is_named(how: str) -> None:
    late, found = LATE[how]
    with pytest.raises(ConfigError, match=found) as caught:
        train(late)
    assert "LateArithmetic.rounded" in caught.value.where
    assert "arithmetic 'late'" in caught.value.where
    assert "(4, 4) torch.float32" in caught.value.expected


def test_backward_names_it_too() -> None:
    arithmetic = LateArithmetic(fails)
    layer = Linear(4, 4)
    layer.arithmetic = arithmetic
    product = layer(torch.ones(4, 4))
    arithmetic.calls = itertools.count(GOOD)
    with pytest.raises(ConfigError, match="arithmetic 'late'"):
        product.sum().backward()


def _on_a_rank(rank: int) -> str:
    try:
        train(LATE["dtype"][0])
    except ConfigError as error:
        return error.where
    return ""


def test_ranks_name_it_too() -> None:
    for where in run_ranks(_on_a_rank, 2):
        assert "arithmetic 'late'" in where
