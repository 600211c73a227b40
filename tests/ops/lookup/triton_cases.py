"""What the Triton kernel of embedding tables has to fulfil, on whatever device: `python -m … <device> [case …]`.

On the CPU it runs under Triton's interpreter (`TRITON_INTERPRET=1`), so problems are small; long runs are made short.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.lookup_problems import KINDS, Problem, make_layout, make_lookups, make_problem
from ziggurat.embeddings.storage.low_precision import LowPrecision
from ziggurat.errors import BoundsError, DataError
from ziggurat.ops.lookup import FieldKind, GradientPart, KernelChoice, LookupKernel, Step, TorchKernel, UpdateRule
from ziggurat.ops.lookup.cut_rows import in_order, num_lookups, rows_of_tables, spans_of
from ziggurat.ops.lookup.gradient import are_finite_sums
from ziggurat.ops.lookup.layout import LookupLayout, Lookups
from ziggurat.ops.lookup.sorted_reads import sorted_before
from ziggurat.ops.lookup.triton import TritonKernel, finite_without_waiting, runs
from ziggurat.ops.row_formats import RowFormat, RowNoise, RowOrigin

DEVICE = torch.device("cpu")
DIMS = (1, 3, 16, 64, 96, 128, 256)
SINGLE, SUM, MEAN = FieldKind.SINGLE, FieldKind.SUM, FieldKind.MEAN
TABLES, FIELDS = [7, 30, 3], [(SINGLE, 0), (SINGLE, 2), (SUM, 1), (MEAN, 2)]


def moved(problem: Problem) -> Problem:
    batches = tuple(_on_device(each) for each in problem.batches)
    grads = tuple(each.to(DEVICE) for each in problem.grads)
    return dataclasses.replace(problem, weight=problem.weight.to(DEVICE), batches=batches, grads=grads)


def _on_device(lookups: Lookups) -> Lookups:
    tensors = {name: getattr(lookups, name).to(DEVICE) for name in ("single", "values", "offsets")}
    return dataclasses.replace(lookups, **tensors)


def state(problem: Problem, step: Step) -> dict[str, Tensor]:
    return {name: each.to(DEVICE) for name, each in problem.state(step.rule.kind).items()}


def looked_up(kernel: LookupKernel, problem: Problem, lookups: Lookups, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(lookups.batch_size, problem.layout.width, dtype=dtype, device=DEVICE)
    kernel.lookup(problem.weight, layout=problem.layout, lookups=lookups, out=out)
    return out


def updated(kernel: LookupKernel, problem: Problem, step: Step, *, fused: bool = True) -> tuple[Tensor, ...]:
    weight, numbers = problem.weight.clone(), state(problem, step)
    if fused:
        kernel.update(weight, state=numbers, parts=problem.parts(), step=step)
    else:
        kernel.apply(weight, state=numbers, gradient=kernel.sum_gradients(problem.parts()), step=step)
    return weight, *numbers.values()


def steps() -> Iterator[Step]:
    for kind in KINDS:
        yield Step(rule=UpdateRule(kind=kind, weight_decay=0.01), learning_rate=0.1, scale=0.5, number=3)


def equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def agrees_with_the_reference(problem: Problem) -> None:
    """Lookups in both dtypes, sums, and each rule, fused or not."""
    kernel, reference = TritonKernel(), TorchKernel()
    for lookups in problem.batches:
        out = looked_up(kernel, problem, lookups)
        torch.testing.assert_close(out, looked_up(reference, problem, lookups), rtol=1e-6, atol=1e-6)
        half = looked_up(kernel, problem, lookups, torch.bfloat16)
        rtol = 2.0**-7 if DEVICE.type == "cpu" else 0.0  # the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(half, out.bfloat16(), rtol=rtol, atol=0.0)
    found, expected = kernel.sum_gradients(problem.parts()), reference.sum_gradients(problem.parts())
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-5, atol=1e-5)
    fixed, num = kernel.sums_of_fixed_size(problem.parts()), len(found.rows)
    equal((fixed.rows[:num], fixed.sums[:num]), (found.rows, found.sums))
    assert not fixed.rows[num:].any()
    assert not fixed.sums[num:].any()
    for step in steps():
        results = updated(kernel, problem, step)
        for a, b in zip(results, updated(reference, problem, step), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
        equal(updated(kernel, problem, step, fused=False), results)
        equal(updated(kernel, problem, step), results)
        if not num:  # row 0, which is padding and zero in tables, is all that there is
            continue
        weight, numbers = problem.weight.clone(), state(problem, step)
        kernel.apply(weight, state=numbers, gradient=fixed, step=step)
        equal((weight, *numbers.values()), results)


def case_dims() -> None:
    """Every dim, several batches, random and skewed rows, columns of others between."""
    for dim in DIMS:
        for gap, skew in ((0, False), (dim, True)):
            layout = make_layout(dim=dim, table_rows=TABLES, fields=FIELDS, gap=gap)
            agrees_with_the_reference(moved(make_problem(layout, sizes=(9, 4), skew=skew, seed=dim)))


def case_shapes() -> None:
    """Empty batches and lists, one list of everything, all rows equal, padding alone, single fields alone."""
    layout = make_layout(dim=16, table_rows=TABLES, fields=FIELDS)
    for sizes, longest in (((0,), 3), ((5,), 0), ((1,), 90), ((0, 6), 2)):
        agrees_with_the_reference(moved(make_problem(layout, sizes=sizes, longest=longest)))
    flat = make_layout(dim=16, table_rows=[50], fields=[(SINGLE, 0)])
    for row in (0, 7):
        problem = make_problem(flat, sizes=(200,))
        problem.batches[0].single[:] = row
        agrees_with_the_reference(moved(problem))


def case_sorted_ahead() -> None:
    """Rows that were sorted before the gradients came: the same bits, and nothing is sorted in the update."""
    for sizes, fields in (((9, 4), FIELDS), ((0, 5), FIELDS), ((300,), [(SINGLE, 0), (SINGLE, 2)])):
        problem = moved(make_problem(make_layout(dim=16, table_rows=TABLES, fields=fields), sizes=sizes, skew=True))
        ahead = problem.sorted_ahead(TritonKernel())
        parts = ahead.parts()
        assert (found := sorted_before(parts, by=KernelChoice.TRITON)) is not None
        assert TritonKernel()._runs(parts, torch.zeros(1, dtype=torch.int32, device=DEVICE))[0] is found.made
        for step in steps():
            equal(updated(TritonKernel(), ahead, step), updated(TritonKernel(), problem, step))
        sums = [TritonKernel().sums_of_fixed_size(each.parts()).sums for each in (problem, ahead)]
        assert torch.equal(*sums)
    shared = [dataclasses.replace(part, grad=parts[0].grad) for part in (parts[0], parts[0])]
    assert sorted_before(shared, by=KernelChoice.TRITON) is None


def case_room_behind_lists() -> None:
    """Values behind the last list change nothing: what a graph's buffers have room for, and fill with padding."""
    for dim, sizes in ((3, (9,)), (16, (9, 4)), (16, (300,))):
        problem = moved(make_problem(make_layout(dim=dim, table_rows=TABLES, fields=FIELDS), sizes=sizes, skew=True))
        with_room = dataclasses.replace(problem, batches=tuple(_with_room(each) for each in problem.batches))
        assert problem.batches[0].values.numel()
        for one, other in zip(problem.batches, with_room.batches, strict=True):
            equal((looked_up(TritonKernel(), problem, one),), (looked_up(TritonKernel(), with_room, other),))
        for step in steps():
            equal(updated(TritonKernel(), with_room, step), updated(TritonKernel(), problem, step))
        assert TritonKernel().are_finite_sums(with_room.parts())


def _with_room(lookups: Lookups) -> Lookups:
    """The same rows as they lie in buffers that have room for more, checked."""
    values = torch.cat([lookups.values, lookups.values.new_zeros(37)])
    filled = torch.tensor(lookups.values.numel(), device=DEVICE)
    return dataclasses.replace(lookups, values=values, filled=filled, are_checked=True)


def case_finite_sums() -> None:
    """The verdict of the reference: NaN, infinity, numbers too large to sum, and what no row would take."""
    verdicts = set[bool]()
    for dim, gap in ((3, 0), (16, 16)):
        layout = make_layout(dim=dim, table_rows=TABLES, fields=FIELDS, gap=gap)
        for fields in (layout, dataclasses.replace(layout, slots=layout.slots[:2])):
            problem = make_problem(fields, sizes=(5, 0), seed=dim, longest=2)
            problem.batches[0].single[:, ::3] = 0
            parts = moved(problem).parts()
            kernel, numbers = TritonKernel(), parts[0].grad.numel()
            for number, bad in enumerate((0.0, torch.nan, torch.inf, -torch.inf, 3e38, -3e38) * 2):
                grad = parts[0].grad.clone()
                grad.view(-1)[(7 * number * dim) % numbers] += bad
                dtype = torch.float32 if number % 3 else torch.bfloat16
                changed = [dataclasses.replace(parts[0], grad=grad.to(dtype)), *parts[1:]]
                expected = bool(are_finite_sums(changed))
                assert bool(finite_without_waiting(kernel, changed)) == expected, (dim, bad, number)
                verdicts.add(expected)
    assert verdicts == {True, False}


def case_rows_that_nobody_counts() -> None:
    """Rows of tables without a count of the distinct ones: those that were counted, and an update of the same bits."""
    kernel, step = TritonKernel(), Step(rule=UpdateRule(kind=KINDS[0]), learning_rate=0.1)
    tables = [(0, TABLES[0]), (TABLES[0], TABLES[1]), (TABLES[0] + TABLES[1], TABLES[2])]
    for sizes in ((9, 4), (0, 5), (60,)):
        problem = moved(make_problem(make_layout(dim=16, table_rows=TABLES, fields=FIELDS), sizes=sizes, skew=True))
        counted = in_order(kernel.sum_gradients(problem.parts()))
        names = list(dict.fromkeys(slot.table for slot in problem.layout.slots))
        most = [num_lookups(problem.parts(), name) for name in names]
        places = [next((s.first_row, s.num_rows) for s in problem.layout.slots if s.table == name) for name in names]
        assert sorted(places) == tables
        found = rows_of_tables(kernel.sums_of_fixed_size(problem.parts()), places, most=most)
        weights = [problem.weight.clone() for _ in range(2)]
        kernel.apply(weights[0], state={}, gradient=counted, step=step)
        for mine, span, (first, _) in zip(found, spans_of(counted, places), places, strict=True):
            number = span.stop - span.start
            assert torch.equal(mine.rows[:number], counted.rows[span])
            assert torch.equal(mine.sums[:number], counted.sums[span])
            assert (mine.rows[number:] == first).all()
            kernel.apply(weights[1], state={}, gradient=mine, step=step)
        assert torch.equal(*weights)


def case_long_runs() -> None:
    """Runs of one, two and many chunks of the true size."""
    layout = make_layout(dim=64, table_rows=[4], fields=[(SINGLE, 0)])
    problem = make_problem(layout, sizes=(1400,))
    problem.batches[0].single[0] = torch.arange(1400).gt(256).long() + torch.arange(1400).gt(513) + 1
    agrees_with_the_reference(moved(problem))


def case_row_by_itself() -> None:
    """The bits of a row's sum do not depend on what else is in the batch."""
    wide = make_layout(dim=16, table_rows=[40, 5], fields=[(SINGLE, 0), (SINGLE, 1)])
    problem = moved(make_problem(wide, sizes=(60,)))
    narrow = dataclasses.replace(wide, slots=wide.slots[1:])
    parts = [dataclasses.replace(part, layout=narrow) for part in problem.parts()]
    alone, whole = (TritonKernel().sum_gradients(each) for each in (parts, problem.parts()))
    assert torch.equal(whole.rows[whole.rows >= 40], alone.rows)
    assert torch.equal(whole.sums[whole.rows >= 40], alone.sums)


def case_small_ids() -> None:
    """int32 rows, and lists of which other storages read some."""
    layout = make_layout(dim=16, table_rows=TABLES, fields=[*FIELDS, (SUM, 0)])
    problem = moved(make_problem(layout, sizes=(9,)))
    some = LookupLayout(dim=16, width=layout.width, slots=(layout.slots[1], layout.slots[3]))
    mine = dataclasses.replace(problem, layout=some)
    agrees_with_the_reference(mine)
    small = _typed(problem.batches[0], torch.int32)
    equal(
        (looked_up(TritonKernel(), mine, small),),
        (looked_up(TritonKernel(), mine, problem.batches[0]),),
    )
    for step in steps():
        other = dataclasses.replace(mine, batches=(small,))
        equal(updated(TritonKernel(), other, step), updated(TritonKernel(), mine, step))


def _typed(lookups: Lookups, dtype: torch.dtype) -> Lookups:
    rows = {name: getattr(lookups, name).to(dtype) for name in ("single", "values", "offsets")}
    return dataclasses.replace(lookups, **rows)


def case_gradients() -> None:
    """Means are divided out as the reference does; BF16 is read as it comes."""
    layout = make_layout(dim=16, table_rows=TABLES, fields=FIELDS)
    flat = make_layout(dim=16, table_rows=TABLES, fields=FIELDS[:3])
    for each in (layout, flat):
        problem = moved(make_problem(each, sizes=(9,)))
        lookups, grad = problem.batches[0], problem.grads[0].bfloat16()
        options = {"layouts": [each], "lookups": lookups, "dtype": torch.float32}
        found, expected = (kernel.prepare(grad, **options) for kernel in (TritonKernel(), TorchKernel()))
        torch.testing.assert_close(found.float(), expected)
        assert found.dtype == (torch.bfloat16 if each is flat else torch.float32)
        sums = [
            TritonKernel().sum_gradients([GradientPart(layout=each, lookups=lookups, grad=prepared)]).sums
            for prepared in (found, expected)
        ]
        assert torch.equal(*sums)


def case_numbers_on_the_device() -> None:
    """Learning rate, scale and step number as tensors; a step that does not apply changes nothing."""
    problem = moved(make_problem(make_layout(dim=16, table_rows=TABLES, fields=FIELDS), sizes=(9,)))
    for step in steps():
        there = dataclasses.replace(
            step,
            learning_rate=torch.tensor(step.learning_rate, device=DEVICE),
            scale=torch.tensor(step.scale, device=DEVICE),
            number=torch.tensor(step.number, device=DEVICE),
            applies=torch.tensor(True, device=DEVICE),
        )
        for a, b in zip(updated(TritonKernel(), problem, there), updated(TritonKernel(), problem, step), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        stopped = dataclasses.replace(there, applies=torch.tensor(False, device=DEVICE))
        equal(updated(TritonKernel(), problem, stopped), (problem.weight, *state(problem, step).values()))


def case_bfloat16_rows() -> None:
    """Upper halves are read as they are, and rounded to the bits of the reference after the FP32 rule."""
    layout = make_layout(dim=24, table_rows=TABLES, fields=FIELDS)
    problem = moved(make_problem(layout, sizes=(30,)))
    halves = RowFormat.BF16.encode(problem.weight.cpu()).to(DEVICE)
    origins = [
        RowOrigin(table="a", first_row=0, num_rows=7, table_row=3, table_column=24),
        RowOrigin(table="b", first_row=7, num_rows=33),
    ]
    wide = dataclasses.replace(problem, weight=RowFormat.BF16.decode(halves, dim=24))
    equal(
        (looked_up(TritonKernel(), dataclasses.replace(problem, weight=halves), problem.batches[0]),),
        (looked_up(TritonKernel(), wide, problem.batches[0]),),
    )
    noise = RowNoise(origins, seed=5)
    for step in steps():
        exact, *numbers = updated(TritonKernel(), wide, step)
        rows = torch.unique(TritonKernel().sum_gradients(problem.parts()).rows)
        for each in (noise, None):
            kept, kept_state = halves.clone(), state(problem, step)
            TritonKernel().update(kept, state=kept_state, parts=problem.parts(), step=step, noise=each)
            words = None if each is None else each.words(rows.cpu(), step=int(step.number))
            expected = halves.clone()
            expected[rows] = RowFormat.BF16.encode(exact[rows].cpu(), words_N=words).to(DEVICE)
            equal((kept, *kept_state.values()), (expected, *numbers))


def case_rows_of_codes() -> None:
    """INT8 and INT4 are pooled to the bits of the numbers that they stand for, single rows and lists."""
    for dim in (2, 3, 16, 64, 96, 128):
        for row_format in (RowFormat.INT8, RowFormat.INT4):
            for fields in (FIELDS, FIELDS[:2]):
                problem = moved(make_problem(make_layout(dim=dim, table_rows=TABLES, fields=fields), sizes=(17,)))
                problem.weight[5] = problem.weight[5, 0]  # one value: no step
                problem.weight[8, 0] = torch.nan
                rows = row_format.encode(problem.weight)
                exact = dataclasses.replace(problem, weight=row_format.decode(rows, dim=dim))
                lookups, out = problem.batches[0], torch.zeros(17, problem.layout.width, device=DEVICE)
                kernel = TritonKernel()
                kernel.lookup(rows, layout=problem.layout, lookups=lookups, out=out, row_format=row_format)
                expected = looked_up(kernel, exact, lookups)
                assert torch.equal(out.isnan(), expected.isnan())
                assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def case_storage() -> None:
    """Storages of BF16 rows hand their halves to the kernel; split ones are read so, and decoded to be updated."""
    layout = make_layout(dim=24, table_rows=TABLES, fields=FIELDS)
    problem = moved(make_problem(layout, sizes=(30,)))
    step = next(steps())
    for row_format in (RowFormat.BF16, RowFormat.SPLIT_BF16, RowFormat.INT8, RowFormat.INT4):
        results = []
        for kernel in (TritonKernel(), TorchKernel()):
            storage = LowPrecision(row_format=row_format)(40, 24)
            storage.move(lambda tensor: tensor.to(DEVICE))
            storage.name_rows([RowOrigin(table="a", first_row=0, num_rows=40)])
            storage.write(0, problem.weight)
            storage.update(kernel, parts=problem.parts(), step=step)
            out = torch.zeros(30, layout.width, device=DEVICE)
            storage.lookup(kernel, layout=layout, lookups=problem.batches[0], out=out)
            storage.apply(kernel, gradient=kernel.sum_gradients(problem.parts()), step=step)
            results.append((out, storage.read(0, 40)))
        for a, b in zip(*results, strict=True):
            bound = 0.2 if row_format is RowFormat.INT4 else 1e-2  # a row that is rounded the other way: one step
            torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def case_not_finite() -> None:
    """NaN and infinity in BF16 rows stay what they are."""
    layout = make_layout(dim=4, table_rows=[4], fields=[(SINGLE, 0)])
    problem = make_problem(layout, sizes=(1,))
    problem.batches[0].single[:] = 2
    problem.weight[2] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    problem.grads[0].zero_()
    problem = moved(problem)
    halves = RowFormat.BF16.encode(problem.weight.cpu()).to(DEVICE)
    noise = RowNoise([RowOrigin(table="a", first_row=0, num_rows=4)], seed=1)
    found, step = halves.clone(), Step(rule=UpdateRule(kind=KINDS[0]), learning_rate=0.1)
    TritonKernel().update(found, state={}, parts=problem.parts(), step=step, noise=noise)
    assert RowFormat.BF16.decode(found, dim=4)[2, 0].isnan()
    assert torch.equal(found[2, 1:3], halves[2, 1:3])


def case_bad_rows() -> None:
    """Rows outside their tables and broken offsets are named as the reference names them, and never read."""
    layout = make_layout(dim=4, table_rows=[5, 9], fields=[(SINGLE, 0), (SUM, 1)])
    for field, where in (("single", "'field0', sample 2"), ("values", "'field1', sample")):
        for row in (-1, 9, 2**40):
            problem = make_problem(layout, sizes=(4,), longest=5, seed=3)
            getattr(problem.batches[0], field).view(-1)[2] = row
            problem = moved(problem)
            with pytest.raises(BoundsError, match=where):
                looked_up(TritonKernel(), problem, problem.batches[0])
            with pytest.raises(BoundsError):
                TritonKernel().sum_gradients(problem.parts())
            updated(TritonKernel(), problem, next(steps()))
    for offsets in ([0, 3, 1, 4], [0, 1, 2, 9], [0, -1, 2, 4], [1, 1, 2, 4], [0, 1, 2, 3]):
        flat = make_layout(dim=8, table_rows=[9], fields=[(SUM, 0)])
        lookups = make_lookups(flat, size=3, longest=1, generator=torch.Generator())
        broken = dataclasses.replace(lookups, values=torch.tensor([1, 2, 3, 4]), offsets=torch.tensor(offsets))
        problem = moved(make_problem(flat, sizes=(3,)))
        with pytest.raises(DataError, match="offsets"):
            looked_up(TritonKernel(), problem, _on_device(broken))
    with pytest.raises(DataError, match="int32 or int64 rows"):
        looked_up(TritonKernel(), problem, dataclasses.replace(problem.batches[0], values=torch.zeros(1).to(DEVICE)))


def main(device: str, *names: str) -> None:
    """Run all cases, or some."""
    global DEVICE
    DEVICE = torch.device(device)
    if device == "cpu":
        runs.CHUNK = 16
        runs.LONG_RUN = 20
    for name, case in list(globals().items()):
        if name.startswith("case_") and (not names or name in names):
            if name == "case_long_runs":
                runs.CHUNK = runs.LONG_RUN = 256
            case()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
