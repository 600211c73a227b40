"""What parts of the keys add to attention makes up the whole, forward and backward, in both implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention.jagged_problems import Problem, cut_problem, random_problem
from ziggurat.errors import DataError
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.partial import AttentionSettings, Gathered, gather_part, merge, part_gradients
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, Spans, attended_pairs
from ziggurat.ops.attention.reference import jagged_attention_reference


def _in_parts(problem: Problem, seed: int, *, dtype: torch.dtype) -> list[Tensor]:
    """As `Problem.solve`, from parts."""
    q, k, v = (each.to(dtype) for each in problem.qkv)
    biases = [None if each is None else each.to(dtype) for each in (problem.w_pos, problem.w_time)]
    settings = AttentionSettings(form=problem.form, scale=q.shape[2] ** -0.5, divisor=problem.divisor)
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype) if problem.form is AttentionForm.SOFTMAX else None
    whole, parts = Gathered(out, lse), cut_problem(problem, seed)

    def options(rows: Tensor, keys: Tensor, layout: JaggedLayout) -> dict[str, Any]:
        times = problem.times or (None, None)
        given = [None if each is None else each[at] for each, at in zip(times, (rows, keys), strict=True)]
        bias = AttentionBias(w_pos=biases[0], w_time=biases[1], query_times=given[0], key_times=given[1])
        return {"layout": layout, "settings": settings, "bias": bias}

    for rows, keys, layout in parts:
        merge(whole, gather_part(q[rows], k[keys], v[keys], **options(rows, keys, layout)), rows=rows)
    sums = [torch.zeros_like(each) for each in (q, k, v, *(each for each in biases if each is not None))]
    grad = problem.grad.to(dtype)
    for rows, keys, layout in parts:
        of_rows = Gathered(out[rows], None if lse is None else lse[rows])
        found = part_gradients(grad[rows], of_rows, (q[rows], k[keys], v[keys]), **options(rows, keys, layout))
        for total, at, each in zip(sums, (rows, keys, keys), found[:3], strict=False):
            total.index_add_(0, at, each)
        for total, each in zip(sums[3:], (each for each in found[3:] if each is not None), strict=True):
            total += each
    return [each.double() for each in (out, *sums)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_make_up_the_whole(dtype: torch.dtype) -> None:
    for seed in range(20):
        problem = random_problem(seed)
        exact = problem.solve(jagged_attention_reference, dtype=torch.float64)
        found = _in_parts(problem, seed, dtype=dtype)
        for name, one, other in zip(("out", "dq", "dk", "dv", "bias", "bias"), found, exact, strict=False):
            tolerance = 1e-9 if dtype is torch.float64 else 3e-4
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_parts_have_the_pairs_of_the_whole_among_them() -> None:
    for seed in range(15):
        problem = random_problem(seed)
        parts = sum(attended_pairs(layout) for _, _, layout in cut_problem(problem, seed))
        assert parts == attended_pairs(problem.layout), seed


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = (torch.randn(2, 1, 4, requires_grad=True) for _ in range(3))
    numbers = {"query_starts": [0], "key_starts": [3], "lengths": [5]}
    spans = Spans(**{name: torch.tensor(value) for name, value in numbers.items()})
    offsets = torch.tensor([0, 2])
    layout = JaggedLayout(offsets=offsets, query_offsets=offsets, spans=spans)
    for function in (jagged_attention, jagged_attention_reference):
        found = function(q, k, v, layout=layout, form=AttentionForm.SOFTMAX, scale=1.0)
        assert not found.any()
        assert not any(each.any() for each in torch.autograd.grad(found.sum(), (q, k, v)))


def test_parts_outside_their_sequence_are_refused() -> None:
    q = k = v = torch.randn(2, 1, 4)
    numbers = {"query_starts": [0], "key_starts": [4], "lengths": [5]}
    spans = Spans(**{name: torch.tensor(value) for name, value in numbers.items()})
    layout = JaggedLayout(offsets=torch.tensor([0, 2]), query_offsets=torch.tensor([0, 2]), spans=spans)
    with pytest.raises(DataError, match="positions 4 to 6 of 5"):
        jagged_attention(q, k, v, layout=layout, form=AttentionForm.SOFTMAX, scale=1.0)
