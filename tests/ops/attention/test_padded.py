"""Padded attention gives the numbers of the reference, and asks a device for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.attention.jagged_problems import Problem, cut_problem, random_problem
from ziggurat.errors import DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.padded import jagged_attention_padded
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.pad_lists import pad_lists
from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.testing.pretend_queues import record_waits


def told(problem: Problem, *, more: int = 0) -> Problem:
    """The same problem with a layout that says how long sequences are at most."""
    layout = problem.layout
    lengths = torch.cat([layout.offsets.diff(), layout.of_queries.diff(), torch.zeros(1, dtype=torch.int64)])
    return replace(problem, layout=replace(layout, longest=int(lengths.max()) + more))


@pytest.mark.parametrize("seed", range(24))
def test_padded_sequences_give_the_numbers_of_the_reference(seed: int) -> None:
    problem = random_problem(seed)
    expected = problem.solve(jagged_attention_reference, dtype=torch.float64)
    found = told(problem, more=seed % 3).solve(jagged_attention_padded, dtype=torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_parts_of_sequences_give_the_numbers_of_the_reference() -> None:
    problem = next(each for each in map(random_problem, range(50)) if len(each.layout.offsets) > 5)
    q, k, v = (each.double() for each in problem.qkv)
    for rows, columns, layout in cut_problem(problem, 3):
        options = {"form": AttentionForm.SILU, "scale": 0.5, "divisor": 7.0}
        part = told(replace(problem, layout=layout)).layout
        expected = jagged_attention_reference(q[rows], k[columns], v[columns], layout=layout, **options)
        found = jagged_attention_padded(q[rows], k[columns], v[columns], layout=part, **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_gpu_is_asked_for_nothing() -> None:
    lengths = torch.tensor([3, 0, 5])
    with pretend_cuda() as cuda:
        q, k, v = (torch.randn(8, 2, 4, device=cuda).requires_grad_() for _ in range(3))
        w_pos, w_time = torch.randn(9, device=cuda).requires_grad_(), torch.randn(6, device=cuda).requires_grad_()
        times = torch.arange(8, device=cuda)
        bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=times, key_times=times)
        layout = JaggedLayout(offsets=offsets_of(lengths).to(cuda), longest=5)
        settings = {"layout": layout, "form": AttentionForm.SILU, "scale": 0.5, "divisor": 5.0, "bias": bias}
        jagged_attention(q, k, v, **settings)  # buckets' beginnings travel once
        with record_waits() as waits:
            out = jagged_attention(q, k, v, **settings)
            out.sum().backward()
        assert waits == []
        assert isinstance(out, PretendCuda)
        assert w_pos.grad is not None


def test_a_bias_that_is_too_short_is_refused() -> None:
    q = torch.zeros(4, 1, 2)
    layout = JaggedLayout(offsets=torch.tensor([0, 4]), longest=4)
    with pytest.raises(DataError, match="R = 3"):
        jagged_attention(
            q.double(),
            q.double(),
            q.double(),
            layout=layout,
            form=AttentionForm.SILU,
            scale=1.0,
            bias=AttentionBias(w_pos=torch.zeros(5)),
        )


@pytest.mark.parametrize("lengths", [[2, 0, 3], [0], [], [0, 0, 4]])
@pytest.mark.parametrize("longest", [None, 6])
def test_lists_are_padded(lengths: list[int], longest: int | None) -> None:
    vectors = torch.randn(sum(lengths), 3, requires_grad=True)
    padded, mask = pad_lists(vectors, offsets_of(torch.tensor(lengths, dtype=torch.int64)), longest=longest)
    length = longest or max(lengths, default=0)
    assert padded.shape == (len(lengths), length, 3)
    assert mask.tolist() == [[place < each for place in range(length)] for each in lengths]
    assert torch.equal(padded[mask], vectors)
    assert not padded[~mask].any()
    padded.square().sum().backward()
    torch.testing.assert_close(vectors.grad, 2 * vectors.detach())


def test_a_layout_without_a_bound_is_refused() -> None:
    q = torch.zeros(4, 1, 2)
    layout = JaggedLayout(offsets=torch.tensor([0, 4]))
    with pytest.raises(DataError, match=r"JaggedLayout\(…, longest=…\)"):
        jagged_attention_padded(q, q, q, layout=layout, form=AttentionForm.SILU, scale=1.0)
