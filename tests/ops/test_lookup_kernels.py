"""Every lookup kernel against a dense float64 computation, and its promises: exactness, bits, padding, bounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.lookup_problems import (
    KERNELS,
    KINDS,
    Problem,
    dense_update,
    kernel_or_skip,
    make_layout,
    make_problem,
    problems,
)
from ziggurat.errors import BoundsError, DataError
from ziggurat.ops.lookup import (
    FieldKind,
    KernelChoice,
    LookupKernel,
    Step,
    SummedGradient,
    TableOptimizerKind,
    UpdateRule,
)

EPSILON = torch.finfo(torch.float32).eps
ADAGRAD = Step(rule=UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD), learning_rate=0.1)
EVERYDAY = settings(
    max_examples=30,
    deadline=None,
    # FBGEMM refuses many settings (odd widths, weight decay): what is left is what it must get right.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
CRITEO = make_layout(dim=16, table_rows=[1000] * 6, fields=[(FieldKind.SINGLE, table) for table in range(6)])
HUGE_LIST = make_layout(dim=8, table_rows=[50], fields=[(FieldKind.MEAN, 0)])


@pytest.fixture(scope="module")
def kernels() -> dict[KernelChoice, LookupKernel]:
    return {}


def get(kernels: dict[KernelChoice, LookupKernel], choice: KernelChoice) -> LookupKernel:
    if choice not in kernels:
        kernels[choice] = kernel_or_skip(choice)
    return kernels[choice]


def updated(
    kernel: LookupKernel, problem: Problem, step: Step, *, fused: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    weight, state = problem.weight.clone(), problem.state(step.rule.kind)
    if fused:
        kernel.update(weight, state=state, parts=problem.parts(), step=step)
    else:
        kernel.apply(weight, state=state, gradient=kernel.sum_gradients(problem.parts()), step=step)
    return weight, state


@KERNELS
@EVERYDAY
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example(problem=make_problem(HUGE_LIST, sizes=(2,), longest=5000), dtype=torch.float32)
def test_lookup(choice: KernelChoice, kernels: dict, problem: Problem, dtype: torch.dtype) -> None:
    kernel = get(kernels, choice)
    assume(not kernel.why_not(problem.setting(ADAGRAD.rule)))
    for lookups in problem.batches:
        out = torch.full((lookups.batch_size, problem.layout.width), 7.0, dtype=dtype)
        kernel.lookup(problem.weight, layout=problem.layout, lookups=lookups, out=out)
        expected = problem.expected_output(lookups)
        written = torch.zeros(problem.layout.width, dtype=torch.bool)
        for slot in problem.layout.slots:
            written[slot.column : slot.column + problem.layout.dim] = True
        tolerance = (0.01, 0.02) if dtype is torch.bfloat16 else (1e-5, 1e-4)
        torch.testing.assert_close(out[:, written].double(), expected[:, written], rtol=tolerance[0], atol=tolerance[1])
        assert bool((out[:, ~written] == 7.0).all()), "columns of other layouts were written"


@KERNELS
@EVERYDAY
@given(problem=problems())
@example(problem=make_problem(HUGE_LIST, sizes=(2,), longest=5000))
def test_sum_gradients(choice: KernelChoice, kernels: dict, problem: Problem) -> None:
    kernel = get(kernels, choice)
    summed = kernel.sum_gradients(problem.parts())
    expected, size, count = problem.expected_gradient()
    assert summed.rows.tolist() == sorted(set(summed.rows.tolist())) or choice is KernelChoice.CPP
    assert set(summed.rows.tolist()) == set(count.nonzero().flatten().tolist()), "the touched rows, without padding"
    assert len(summed.rows) == len(set(summed.rows.tolist())), "each row once"
    found = torch.zeros_like(expected)
    found[summed.rows] = summed.sums.double()
    allowed = EPSILON * (1 + count.unsqueeze(1)) * size
    assert bool(((found - expected).abs() <= allowed).all())


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
@EVERYDAY
@given(
    problem=problems(),
    weight_decay=st.sampled_from([0.0, 0.0, 0.1]),
    scale=st.sampled_from([1.0, 0.25]),
    number=st.sampled_from([1, 7]),
)
def test_update_is_exact(
    choice: KernelChoice,
    kind: TableOptimizerKind,
    kernels: dict,
    problem: Problem,
    weight_decay: float,
    scale: float,
    number: int,
) -> None:
    kernel = get(kernels, choice)
    rule = UpdateRule(kind=kind, weight_decay=weight_decay, eps=1e-4)
    if choice is KernelChoice.FBGEMM and kind is TableOptimizerKind.SPARSE_ADAM:
        pytest.skip("FBGEMM has none on the CPU; test_fbgemm_traps.py")
    assume(not kernel.why_not(problem.setting(rule)))
    step = Step(rule=rule, learning_rate=0.1, scale=scale, number=number)
    weight, state = problem.weight.double(), {name: value.double() for name, value in problem.state(kind).items()}
    gradient, _, count = problem.expected_gradient()
    dense_update(weight, state, gradient, count, step)
    for fused in (True, False):
        my_weight, my_state = updated(kernel, problem, step, fused=fused)
        torch.testing.assert_close(my_weight.double(), weight, rtol=2e-5, atol=2e-5)
        for name, value in state.items():
            torch.testing.assert_close(my_state[name].double(), value, rtol=2e-5, atol=2e-5)
        untouched = count == 0
        assert torch.equal(my_weight[untouched], problem.weight[untouched]), "rows that were not read, padding too"


def test_duplicates_are_summed_before_the_rule() -> None:
    """The trap of sparse updates: applying Adagrad once for each occurrence gives other weights."""
    layout = make_layout(dim=4, table_rows=[4], fields=[(FieldKind.SINGLE, 0)])
    problem = make_problem(layout, sizes=(64,), skew=True)
    gradient, _, count = problem.expected_gradient()
    assert int(count.max()) > 10
    exact, per_occurrence = problem.weight.double(), problem.weight.double()
    state = {name: value.double() for name, value in problem.state(TableOptimizerKind.ROWWISE_ADAGRAD).items()}
    dense_update(exact, dict(state), gradient, count, ADAGRAD)
    dense_update(per_occurrence, dict(state), gradient / count.clamp(min=1).unsqueeze(1), count, ADAGRAD)
    assert float((exact - per_occurrence).abs().max()) > 0.01
    torch.testing.assert_close(updated(kernel_or_skip(KernelChoice.CPP), problem, ADAGRAD)[0].double(), exact)


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooled", [False, True])
def test_bits_do_not_depend_on_threads_or_repeats(choice: KernelChoice, kind: TableOptimizerKind, pooled: bool) -> None:
    kernel = kernel_or_skip(choice)
    fields = [(FieldKind.MEAN if pooled else FieldKind.SINGLE, table) for table in range(3)]
    layout = make_layout(dim=16, table_rows=[1000, 3, 40_000], fields=fields)
    problem = make_problem(layout, sizes=(700, 300), longest=80 if pooled else 1)
    step = Step(rule=UpdateRule(kind=kind), learning_rate=0.1, scale=0.5, number=3)
    if kernel.why_not(problem.setting(step.rule)):
        pytest.skip(kernel.why_not(problem.setting(step.rule)))
    threads = torch.get_num_threads()
    results, sums = [], []
    try:
        for num_threads in (1, 2, 2, 3):
            torch.set_num_threads(num_threads)
            weight, state = updated(kernel, problem, step)
            results.append([weight, *state.values()])
            sums.append(kernel.sum_gradients(problem.parts()))
    finally:
        torch.set_num_threads(threads)
    for other, other_sums in zip(results[1:], sums[1:], strict=True):
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))
        assert torch.equal(sums[0].rows, other_sums.rows)
        assert torch.equal(sums[0].sums, other_sums.sums)


@pytest.mark.parametrize("choice", [KernelChoice.TORCH, KernelChoice.CPP])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_and_two_step_updates_have_the_same_bits(choice: KernelChoice, kind: TableOptimizerKind) -> None:
    """So that asking for the gradient norm does not change a run."""
    kernel = kernel_or_skip(choice)
    step = Step(rule=UpdateRule(kind=kind, weight_decay=0.01), learning_rate=0.1, scale=0.5)
    problem = make_problem(CRITEO, sizes=(500,))
    fused, separate = updated(kernel, problem, step), updated(kernel, problem, step, fused=False)
    assert torch.equal(fused[0], separate[0])
    assert all(torch.equal(fused[1][name], separate[1][name]) for name in fused[1])


def test_a_table_split_into_several_tasks() -> None:
    """The C++ kernel splits tables with many lookups; the parts together are the whole."""
    kernel = kernel_or_skip(KernelChoice.CPP)
    layout = make_layout(dim=8, table_rows=[5000], fields=[(FieldKind.SUM, 0), (FieldKind.SINGLE, 0)])
    problem = make_problem(layout, sizes=(3000, 2000), longest=100)
    assert problem.batches[0].values.numel() > 100_000
    reference = kernel_or_skip(KernelChoice.TORCH).sum_gradients(problem.parts())
    summed = kernel.sum_gradients(problem.parts())
    order = summed.rows.argsort()
    assert torch.equal(summed.rows[order], reference.rows)
    torch.testing.assert_close(summed.sums[order], reference.sums, rtol=1e-4, atol=1e-4)
    fast, slow = updated(kernel, problem, ADAGRAD), updated(kernel_or_skip(KernelChoice.TORCH), problem, ADAGRAD)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-4, atol=1e-5)


@KERNELS
@pytest.mark.parametrize("row", [-1, 5, 2**40])
def test_rows_outside_their_table_are_named(choice: KernelChoice, row: int) -> None:
    kernel = kernel_or_skip(choice)
    layout = make_layout(dim=4, table_rows=[5, 9], fields=[(FieldKind.SINGLE, 0), (FieldKind.SUM, 1)])
    for field, where in (("single", "'field0', sample 2"), ("values", "'field1', sample")):
        problem = make_problem(layout, sizes=(4,), longest=5, seed=3)
        rows = getattr(problem.batches[0], field).clone()
        rows.view(-1)[2] = row if row != 5 or field == "single" else 9
        lookups = dataclasses.replace(problem.batches[0], **{field: rows})
        with pytest.raises(BoundsError, match=where):
            kernel.lookup(problem.weight, layout=layout, lookups=lookups, out=torch.empty(4, layout.width))


def test_cpp_does_not_trust_rows_in_the_update() -> None:
    """Nothing is read or written outside the tables even if rows changed after the lookup."""
    kernel = kernel_or_skip(KernelChoice.CPP)
    layout = make_layout(dim=8, table_rows=[5, 9], fields=[(FieldKind.SINGLE, 0), (FieldKind.SUM, 1)])
    for field in ("single", "values"):
        problem = make_problem(layout, sizes=(4,), longest=5, seed=3)
        getattr(problem.batches[0], field).view(-1)[2] = 2**33
        with pytest.raises(BoundsError):
            kernel.sum_gradients(problem.parts())
        with pytest.raises(BoundsError):
            updated(kernel, problem, ADAGRAD)


@pytest.mark.parametrize(
    "change",
    [
        {"single": torch.zeros(0, 4, dtype=torch.int64)},
        {"single": torch.zeros(1, 3, dtype=torch.int64)},
        {"single": torch.zeros(1, 4, dtype=torch.int32)},
        {"offsets": torch.zeros(4, dtype=torch.int64)},
    ],
)
def test_cpp_refuses_tensors_of_other_shapes(change: dict[str, Tensor]) -> None:
    layout = make_layout(dim=8, table_rows=[5, 9], fields=[(FieldKind.SINGLE, 0), (FieldKind.SUM, 1)])
    problem = make_problem(layout, sizes=(4,))
    lookups = dataclasses.replace(problem.batches[0], **change)
    with pytest.raises(DataError, match="int64 rows of shape"):
        kernel_or_skip(KernelChoice.CPP).lookup(problem.weight, layout=layout, lookups=lookups, out=torch.empty(4, 16))


@EVERYDAY
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cpp_prepares_gradients_as_the_reference_does(
    kernels: dict[KernelChoice, LookupKernel], problem: Problem, dtype: torch.dtype
) -> None:
    assume(problem.layout.width == len(problem.layout.slots) * problem.layout.dim)
    for lookups, grad in zip(problem.batches, problem.grads, strict=True):
        given_grad = grad.to(dtype)
        before = given_grad.clone()
        results = [
            get(kernels, choice).prepare(given_grad, layouts=[problem.layout], lookups=lookups, dtype=torch.float32)
            for choice in (KernelChoice.CPP, KernelChoice.TORCH)
        ]
        torch.testing.assert_close(results[0], results[1])
        assert results[0].is_contiguous()
        assert torch.equal(given_grad, before), "autograd's tensor is not ours to change"


@KERNELS
@pytest.mark.parametrize("offsets", [[0, 3, 1, 4], [0, 1, 2, 9], [0, -1, 2, 4]])
def test_broken_offsets_are_refused(choice: KernelChoice, offsets: list[int]) -> None:
    kernel = kernel_or_skip(choice)
    problem = make_problem(HUGE_LIST, sizes=(3,))
    lookups = dataclasses.replace(problem.batches[0], values=torch.tensor([1, 2, 3, 4]), offsets=torch.tensor(offsets))
    with pytest.raises(DataError, match="offsets"):
        kernel.lookup(problem.weight, layout=problem.layout, lookups=lookups, out=torch.empty(3, 8))


def test_cpp_rounds_to_bfloat16_as_torch_does() -> None:
    kernel = kernel_or_skip(KernelChoice.CPP)
    layout = make_layout(dim=16, table_rows=[300], fields=[(FieldKind.SINGLE, 0)])
    problem = make_problem(layout, sizes=(200,))
    problem.weight[3:6, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.3895e38])
    problem.weight[7] = torch.arange(16).float() * 2**-8 + 1  # ties
    problem.batches[0].single[0, :20] = torch.arange(20)
    out = torch.empty(200, 16, dtype=torch.bfloat16)
    kernel.lookup(problem.weight, layout=layout, lookups=problem.batches[0], out=out)
    expected = problem.weight[problem.batches[0].single[0]].bfloat16()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(1.0), expected.nan_to_num(1.0))


def test_a_table_of_five_million_rows() -> None:
    """Row numbers of 23 bits take three passes of the radix sort."""
    kernel = kernel_or_skip(KernelChoice.CPP)
    layout = make_layout(dim=1, table_rows=[5_000_000], fields=[(FieldKind.SINGLE, 0)])
    problem = make_problem(layout, sizes=(3000,))
    summed = kernel.sum_gradients(problem.parts())
    reference = kernel_or_skip(KernelChoice.TORCH).sum_gradients(problem.parts())
    assert torch.equal(summed.rows, reference.rows)
    assert torch.equal(summed.sums, reference.sums)


def test_apply_takes_rows_in_any_order() -> None:
    kernel = kernel_or_skip(KernelChoice.CPP)
    problem = make_problem(CRITEO, sizes=(100,))
    summed = kernel.sum_gradients(problem.parts())
    order = torch.randperm(len(summed.rows), generator=torch.Generator().manual_seed(0))
    shuffled = SummedGradient(rows=summed.rows[order], sums=summed.sums[order].contiguous())
    weights = []
    for gradient in (summed, shuffled):
        weights.append(problem.weight.clone())
        kernel.apply(weights[-1], state=problem.state(ADAGRAD.rule.kind), gradient=gradient, step=ADAGRAD)
    assert torch.equal(weights[0], weights[1])
