"""Rows that were sorted before there was a gradient: an update takes them where they fit, to the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.lookup.test_without_waits import begun, checked
from tests.ops.lookup_problems import KINDS, Problem, make_layout, make_problem, problems
from ziggurat.ops.lookup import FieldKind, KernelChoice, Step, TableOptimizerKind, TorchKernel, UpdateRule
from ziggurat.ops.lookup.sorted_reads import SortedReads, sorted_before

KERNEL = TorchKernel()
LAYOUT = make_layout(dim=4, table_rows=[9, 7], fields=[(FieldKind.SINGLE, 0), (FieldKind.SUM, 1)])


@settings(max_examples=25, deadline=None)
@given(problem=problems(), kind=st.sampled_from(KINDS), is_checked=st.booleans())
def test_an_update_of_sorted_rows_has_the_bits_of_one_that_sorts(
    problem: Problem, kind: TableOptimizerKind, is_checked: bool
) -> None:
    problem = checked(problem) if is_checked else problem
    ahead, found = problem.sorted_ahead(KERNEL), []
    assert sorted_before(ahead.parts(), by=KernelChoice.TORCH) or not len(KERNEL.sum_gradients(problem.parts()).rows)
    for each in (problem, ahead):
        weight, state = begun(problem, kind)
        KERNEL.update(weight, state=state, parts=each.parts(), step=Step(rule=UpdateRule(kind=kind), learning_rate=0.1))
        found.append((weight, *state.values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_update_takes_what_was_sorted_and_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(LAYOUT, sizes=(6, 5)).sorted_ahead(KERNEL)
    expected = KERNEL.sum_gradients(problem.parts()).sums

    def refused(*given: Any, **options: Any) -> None:
        raise AssertionError("sorted once more")

    monkeypatch.setattr(torch, "sort", refused)
    assert torch.equal(KERNEL.sum_gradients(problem.parts()).sums, expected)


def test_what_was_sorted_fits_the_same_reads_in_the_same_order_alone() -> None:
    problem = make_problem(LAYOUT, sizes=(6, 5)).sorted_ahead(KERNEL)
    first, second = problem.parts()

    def fits(*parts: Any, by: KernelChoice = KernelChoice.TORCH) -> SortedReads | None:
        return sorted_before(parts, by=by)

    assert fits(first, second) is not None
    changed = dataclasses.replace(first.lookups, single=first.lookups.single.clone())
    judged = dataclasses.replace(first.lookups, are_checked=True)
    other = dataclasses.replace(LAYOUT, width=LAYOUT.width)
    for parts in (
        (second, first),
        (first,),
        (first, second, first),
        (dataclasses.replace(first, lookups=changed), second),
        (dataclasses.replace(first, lookups=judged), second),
        (dataclasses.replace(first, layout=other), second),
    ):
        assert fits(*parts) is None
    assert fits(first, second, by=KernelChoice.TRITON) is None
    assert fits() is None
