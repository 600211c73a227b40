"""Attention by Triton against the reference, by Triton's interpreter (`make test-triton`)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.ops.triton_runs import run_python
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionForm, JaggedLayout
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import jagged_attention_triton, why_not_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHECK = """
import sys
from dataclasses import replace
import torch
from tests.ops.attention.jagged_problems import cut_problem, random_problem
from ziggurat.ops.attention.launches import AttentionLaunch, AttentionPart, launched_as
from ziggurat.ops.attention.problem import AttentionForm
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import jagged_attention_triton

seeds, dtype = range(int(sys.argv[1]), int(sys.argv[2])), getattr(torch, sys.argv[3])
small = AttentionLaunch(rows=16, columns=16, warps=4, stages=1)  # short sequences have whole tiles, too
wide = {AttentionPart.FORWARD: replace(small, rows=32), AttentionPart.KEYS: replace(small, columns=32)}
tried = 0
for seed in seeds:
    with launched_as(dict.fromkeys(AttentionPart, small) | (wide if seed % 2 else {})):
        problem = random_problem(seed)
        if len(problem.qkv[1]) > 150 or problem.qkv[1].shape[1] > 2:
            continue
        allowed = 1e-4
        if dtype is not torch.float32:
            problem, allowed = problem.rounded(), 1e-2
        found = problem.solve(jagged_attention_triton, dtype=dtype)
        for a, b in zip(found, problem.solve(jagged_attention_reference, dtype=torch.float64), strict=True):
            assert a.shape == b.shape
            if b.numel():
                error = float((a - b).abs().max())
                assert error <= allowed * max(1.0, float(b.abs().max())), (seed, error, problem)
        tried += 1
        if dtype is torch.float32 and len(problem.layout.offsets) > 2 and problem.w_pos is None:
            q, k, v = problem.qkv
            for rows, columns, layout in cut_problem(problem, seed):
                options = {"layout": layout, "form": problem.form, "scale": 0.5, "divisor": problem.divisor}
                expected = jagged_attention_reference(q[rows], k[columns], v[columns], **options)
                part = jagged_attention_triton(q[rows], k[columns], v[columns], **options)
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
assert tried >= len(seeds) // 3, tried
"""


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
@pytest.mark.parametrize(("first", "last", "dtype"), [(0, 24, "float32"), (24, 42, "float32"), (42, 54, "float16")])
def test_kernels_equal_the_reference_under_the_interpreter(first: int, last: int, dtype: str) -> None:
    done = run_python("-c", CHECK, str(first), str(last), dtype, interpreted=True)
    assert done.returncode == 0, done.stderr


# A window of 16 to 31 events: a tile of 16 rows fits inside, a tile of 32 columns does not.
WINDOW = """
import torch
from dataclasses import replace
from ziggurat.ops.attention.launches import AttentionLaunch, AttentionPart, launched_as
from ziggurat.ops.attention.problem import AttentionForm, AttentionMask, JaggedLayout
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import jagged_attention_triton

small = AttentionLaunch(rows=16, columns=16, warps=4, stages=1)
launches = dict.fromkeys(AttentionPart, small) | {AttentionPart.KEYS: replace(small, columns=32)}
for reach in (15, 20):
    generator = torch.Generator().manual_seed(reach)
    q, k, v = (torch.randn(70, 1, 8, generator=generator, requires_grad=True) for _ in range(3))
    layout = JaggedLayout(offsets=torch.tensor([0, 70]), mask=AttentionMask(max_attention_length=reach))
    options = {"layout": layout, "form": AttentionForm.SILU, "scale": 0.3, "divisor": 10.0}
    found = []
    with launched_as(launches):
        for attend in (jagged_attention_triton, jagged_attention_reference):
            found.append(torch.autograd.grad(attend(q, k, v, **options).square().sum(), (q, k, v)))
    for name, a, b in zip("qkv", *found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}, reach {reach}: {text}")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_a_window_that_is_shorter_than_a_tile_of_keys_is_masked_in_their_gradients() -> None:
    done = run_python("-c", WINDOW, interpreted=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    q, k, v = (torch.randn(90, 2, 32, device="cuda", requires_grad=True) for _ in range(3))
    layout = JaggedLayout(offsets=torch.tensor([0, 70, 90], device="cuda"), longest=70)
    options = {"layout": layout, "form": AttentionForm.SILU, "scale": 0.2, "divisor": 70.0}
    found = jagged_attention(q, k, v, **options)
    assert "jagged_attention_triton" in str(found.grad_fn)
    expected = jagged_attention_reference(q, k, v, **options)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    gradients = (torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_asking_for_triton_where_it_cannot_run_is_an_error() -> None:
    q = torch.randn(3, 1, 4)
    if not why_not_triton(q, q):
        pytest.skip("Triton runs here")
    layout = JaggedLayout(offsets=torch.tensor([0, 3]))
    with pytest.raises(MissingDependencyError, match="Triton"):
        jagged_attention_triton(q, q, q, layout=layout, form=AttentionForm.SILU, scale=1.0, divisor=3.0)
