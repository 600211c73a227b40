"""What FBGEMM's CPU kernel silently gets wrong is refused or handled; a wrong installation gives its reason."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.ops.lookup_problems import dense_update, kernel_or_skip, make_layout, make_problem
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.lookup import FieldKind, KernelChoice, KernelSetting, Step, TableOptimizerKind, UpdateRule
from ziggurat.ops.lookup.fbgemm import FbgemmKernel

PLAIN = make_layout(dim=8, table_rows=[20, 30], fields=[(FieldKind.SINGLE, 0), (FieldKind.MEAN, 1)])
SHARED = make_layout(dim=8, table_rows=[20], fields=[(FieldKind.SINGLE, 0), (FieldKind.MEAN, 0)])
ODD = make_layout(dim=3, table_rows=[20], fields=[(FieldKind.SINGLE, 0)])
ADAGRAD = UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD)
DECAYED = UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD, weight_decay=0.1)


@pytest.mark.parametrize(
    ("layout", "rule", "dtype", "device", "reason"),
    [
        (PLAIN, ADAGRAD, torch.float32, "cpu", ""),
        (PLAIN, UpdateRule(kind=TableOptimizerKind.SGD), torch.float32, "cpu", ""),
        (PLAIN, DECAYED, torch.float32, "cpu", "ignores weight_decay"),
        (PLAIN, UpdateRule(kind=TableOptimizerKind.SPARSE_ADAM), torch.float32, "cpu", "no exact 'sparse_adam'"),
        (PLAIN, ADAGRAD, torch.float64, "cpu", "float64"),
        (PLAIN, ADAGRAD, torch.float16, "cpu", "float16"),
        (PLAIN, ADAGRAD, torch.float32, "meta", "'meta'"),
        (SHARED, ADAGRAD, torch.float32, "cpu", "table 'table0' serves several features"),
        (ODD, ADAGRAD, torch.float32, "cpu", "dim 3 is not a multiple of 4"),
    ],
)
def test_traps_are_not_eligible(layout, rule, dtype, device, reason) -> None:
    kernel = kernel_or_skip(KernelChoice.FBGEMM)
    setting = KernelSetting(layouts=(layout,), rule=rule, dtype=dtype, device=torch.device(device))
    found = kernel.why_not(setting)
    assert reason in found
    assert bool(reason) == bool(found)


def test_weight_decay_is_still_ignored_by_fbgemm() -> None:
    """The reason for refusing it. If this fails, FBGEMM has learned weight decay and the refusal can go."""
    kernel = kernel_or_skip(KernelChoice.FBGEMM)
    problem = make_problem(PLAIN, sizes=(9,))
    weights = []
    for rule in (ADAGRAD, DECAYED):
        weights.append(problem.weight.clone())
        step = Step(rule=rule, learning_rate=0.1)
        kernel.update(weights[-1], state=problem.state(rule.kind), parts=problem.parts(), step=step)
    assert torch.equal(weights[0], weights[1])


def test_accumulation_is_one_exact_update() -> None:
    """Two backward passes before a step: not two updates."""
    kernel = kernel_or_skip(KernelChoice.FBGEMM)
    problem = make_problem(PLAIN, sizes=(9, 7))
    step = Step(rule=ADAGRAD, learning_rate=0.1)
    weight, state = problem.weight.clone(), problem.state(ADAGRAD.kind)
    kernel.update(weight, state=state, parts=problem.parts(), step=step)
    exact, exact_state = problem.weight.double(), {"sum": problem.state(ADAGRAD.kind)["sum"].double()}
    gradient, _, count = problem.expected_gradient()
    dense_update(exact, exact_state, gradient, count, step)
    torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["sum"].double(), exact_state["sum"], rtol=1e-5, atol=1e-5)


def test_a_broken_installation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(MissingDependencyError, match="fbgemm_gpu"):
        FbgemmKernel()
