"""What the reference kernel computes where the host does not wait for the device, against what it does elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.lookup_problems import KINDS, Problem, make_layout, make_problem, problems
from ziggurat.errors import BoundsError, DataError
from ziggurat.ops.lookup import FieldKind, FieldSlot, LookupLayout, Lookups, Step, TableOptimizerKind, TorchKernel
from ziggurat.ops.lookup.gradient import are_finite_sums, every_sum_is_finite, prepare_gradient
from ziggurat.ops.lookup.kernel import GradientPart, UpdateRule
from ziggurat.ops.lookup.layout import RowLimits, check_rows, within_tables

KERNEL = TorchKernel()
FEW = settings(max_examples=25, deadline=None)


def checked(problem: Problem) -> Problem:
    """The same with rows that were found to be right on the device."""
    faults = torch.zeros((), dtype=torch.bool)
    found = []
    for lookups in problem.batches:
        limits = RowLimits.of([problem.layout], lookups)
        found.append(within_tables(lookups, limits=limits, faults=faults))
        for name in ("single", "values", "offsets"):
            assert torch.equal(getattr(found[-1], name), getattr(lookups, name))
    assert not faults
    return dataclasses.replace(problem, batches=tuple(found))


def begun(problem: Problem, kind: TableOptimizerKind) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and state as training leaves them: zero in every padding row."""
    padding = sorted({0, *(slot.first_row for slot in problem.layout.slots)})
    weight, state = problem.weight.clone(), problem.state(kind)
    for array in (weight, *state.values()):
        array[padding] = 0.0
    return weight, state


@FEW
@given(
    problem=problems(),
    kind=st.sampled_from(KINDS),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_a_step_that_the_device_judges_is_the_step(
    problem: Problem, kind: TableOptimizerKind, decay: float, scale: float
) -> None:
    rule = UpdateRule(kind=kind, weight_decay=decay)
    host = Step(rule=rule, learning_rate=0.1, scale=scale, number=3)
    expected, expected_state = begun(problem, kind)
    KERNEL.update(expected, state=expected_state, parts=problem.parts(), step=host)
    parts = checked(problem).parts()
    numbers = {"learning_rate": torch.tensor(0.1), "scale": torch.tensor(scale), "number": torch.tensor(3)}
    for applies in (True, False):
        weight, state = begun(problem, kind)
        step = dataclasses.replace(host, **numbers, applies=torch.tensor(applies))
        KERNEL.update(weight, state=state, parts=parts, step=step)
        wanted, wanted_state = (expected, expected_state) if applies else begun(problem, kind)
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(value, wanted_state[name], rtol=1e-5, atol=1e-6)
    weight, state = begun(problem, kind)
    broken = [dataclasses.replace(part, grad=part.grad * torch.nan) for part in parts]
    KERNEL.update(weight, state=state, parts=broken, step=step)
    assert torch.equal(weight, begun(problem, kind)[0])


@FEW
@given(problem=problems())
def test_lookup_of_checked_rows(problem: Problem) -> None:
    for plain, lookups in zip(problem.batches, checked(problem).batches, strict=True):
        found, expected = (torch.zeros(plain.batch_size, problem.layout.width) for _ in range(2))
        KERNEL.lookup(problem.weight, layout=problem.layout, lookups=plain, out=expected)
        KERNEL.lookup(problem.weight, layout=problem.layout, lookups=lookups, out=found)
        assert torch.equal(found, expected)


def test_lists_of_two_layouts() -> None:
    whole = make_layout(
        dim=4, table_rows=[9, 7, 5], fields=[(FieldKind.SINGLE, 0), (FieldKind.MEAN, 1), (FieldKind.SUM, 2)]
    )
    problem = make_problem(whole, sizes=(6,))
    for mine in ((0, 2), (1,)):
        slots = tuple(whole.slots[position] for position in mine)
        part = dataclasses.replace(problem, layout=LookupLayout(dim=4, width=whole.width, slots=slots))
        test_lookup_of_checked_rows.hypothesis.inner_test(part)  # type: ignore[attr-defined]
        one, other = (KERNEL.sum_gradients(each.parts()) for each in (part, checked(part)))
        dense = [torch.zeros(21, 4).index_add_(0, each.rows, each.sums) for each in (one, other)]
        torch.testing.assert_close(*dense)


SINGLE = FieldSlot(name="user", kind=FieldKind.SINGLE, index=0, table="user", first_row=0, num_rows=5, column=0)
LISTED = FieldSlot(name="tags", kind=FieldKind.SUM, index=0, table="tags", first_row=5, num_rows=3, column=2)
BOTH = LookupLayout(dim=2, width=4, slots=(SINGLE, LISTED))


@pytest.mark.parametrize(
    ("single", "values", "offsets", "error"),
    [
        ([[1, 5, 0]], [1, 2], [0, 1, 2, 2], BoundsError),
        ([[1, -1, 0]], [1, 2], [0, 1, 2, 2], BoundsError),
        ([[1, 4, 0]], [3, 2], [0, 1, 2, 2], BoundsError),
        ([[1, 4, 0]], [1, -7], [0, 1, 2, 2], BoundsError),
        ([[1, 4, 0]], [1, 2], [0, 1, 2, 3], DataError),
        ([[1, 4, 0]], [1, 2], [0, 2, 1, 2], DataError),
        ([[1, 4, 0]], [1, 2], [1, 1, 2, 2], DataError),
    ],
)
def test_rows_outside_of_tables_are_noticed_and_harmless(
    single: list[list[int]], values: list[int], offsets: list[int], error: type[Exception]
) -> None:
    lookups = Lookups(
        batch_size=3, single=torch.tensor(single), values=torch.tensor(values), offsets=torch.tensor(offsets)
    )
    with pytest.raises(error):
        check_rows(BOTH, lookups)
    faults = torch.zeros((), dtype=torch.bool)
    safe = within_tables(lookups, limits=RowLimits.of([BOTH], lookups), faults=faults)
    assert faults
    check_rows(BOTH, dataclasses.replace(safe, are_checked=False)) if error is BoundsError else None
    weight, out = torch.randn(8, 2), torch.zeros(3, 4)
    KERNEL.lookup(weight, layout=BOTH, lookups=safe, out=out)
    parts = [GradientPart(layout=BOTH, lookups=safe, grad=torch.ones(3, 4))]
    before = weight.clone()
    step = Step(
        rule=UpdateRule(kind=TableOptimizerKind.SGD), learning_rate=torch.tensor(1.0), applies=faults.logical_not()
    )
    KERNEL.update(weight, state={}, parts=parts, step=step)
    assert torch.equal(weight, before)


@FEW
@given(problem=problems(), bad=st.sampled_from([0.0, torch.nan, torch.inf, 3e38, -3e38]), at=st.integers(0, 2**20))
def test_the_device_finds_what_the_host_finds(problem: Problem, bad: float, at: int) -> None:
    grads = []
    for grad in problem.grads:
        grad = grad.clone()
        if grad.numel():
            grad.view(-1)[at % grad.numel()] += bad
        grads.append(grad)
    problem = dataclasses.replace(problem, grads=tuple(grads))
    exact = bool(torch.isfinite(KERNEL.sum_gradients(problem.parts()).sums).all())
    found = bool(are_finite_sums(checked(problem).parts()))
    assert found <= exact  # what is let through is finite
    verdict = every_sum_is_finite(problem.parts())
    if verdict is not None:
        assert found == verdict


def test_a_gradient_that_reaches_no_row_does_not_count() -> None:
    lookups = Lookups(
        batch_size=2, single=torch.tensor([[0, 1]]), values=torch.tensor([2]), offsets=torch.tensor([0, 0, 1])
    )
    grad = torch.ones(2, 4)
    grad[0] = torch.nan  # a padding row, and an empty list
    part = GradientPart(
        layout=BOTH,
        lookups=lookups,
        grad=prepare_gradient(grad, layouts=[BOTH], lookups=lookups, dtype=torch.float32),
    )
    assert are_finite_sums([part])
    grad[1, 3] = torch.nan
    assert not are_finite_sums([dataclasses.replace(part, grad=grad)])
