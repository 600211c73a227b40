"""Pointwise attention by Triton against the reference, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.ops.triton_runs import run_python
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.attention.problem import JaggedLayout
from ziggurat.ops.attention.triton import jagged_attention_triton, why_not_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHECK = """
from dataclasses import replace
import torch
from tests.ops.attention.jagged_problems import random_problem
from ziggurat.ops.attention.problem import AttentionForm
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import jagged_attention_triton

tried = 0
for seed in range(40):
    problem = replace(random_problem(seed), form=AttentionForm.SILU, divisor=10.0)
    if len(problem.qkv[1]) > 150 or problem.qkv[1].shape[1] > 2:
        continue
    solve = lambda *qkv, form, **options: jagged_attention_triton(*qkv, **options)
    found = problem.solve(solve, dtype=torch.float32)
    for a, b in zip(found, problem.solve(jagged_attention_reference, dtype=torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    tried += 1
assert tried >= 20, tried
"""


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    done = run_python("-c", CHECK, interpreted=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    from ziggurat.ops.attention.problem import AttentionForm
    from ziggurat.ops.attention.reference import jagged_attention_reference

    q, k, v = (torch.randn(90, 2, 32, device="cuda", requires_grad=True) for _ in range(3))
    layout = JaggedLayout(offsets=torch.tensor([0, 70, 90], device="cuda"))
    found = jagged_attention_triton(q, k, v, layout=layout, scale=0.2, divisor=70.0)
    expected = jagged_attention_reference(q, k, v, layout=layout, form=AttentionForm.SILU, scale=0.2, divisor=70.0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    gradients = (torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_asking_for_triton_where_it_cannot_run_is_an_error() -> None:
    q = torch.randn(3, 1, 4)
    if not why_not_triton(q, q):
        pytest.skip("Triton runs here")
    with pytest.raises(MissingDependencyError, match="Triton"):
        jagged_attention_triton(q, q, q, layout=JaggedLayout(offsets=torch.tensor([0, 3])), scale=1.0, divisor=3.0)
