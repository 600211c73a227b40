"""Gated norms by Triton against torch's operations: by Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ops.triton_runs import LAUNCHING_NOTHING, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no package triton"),
]
CHECK = """
import itertools
import torch
from ziggurat.ops.gated_norm import Beside, GatedNormForm, gated_norm_reference, gated_norm_triton

draw = torch.Generator().manual_seed(0)
cases = itertools.product(list(Beside), (False, True), (False, True), ((5, 24), (0, 16), (600, 16)))
forms = [(beside, activates, is_affine, size, True) for beside, activates, is_affine, size in cases]
forms += [(Beside.NOTHING, False, is_affine, (40, 25), False) for is_affine in (False, True)]
for beside, activates, is_affine, (num_rows, dim), is_gated in forms:
    form = GatedNormForm(eps=1e-6, activates=activates, beside=beside)
    wide = torch.randn(num_rows, 2 * dim + 3, generator=draw)
    rows = [wide[:, :dim], wide[:, dim : 2 * dim]]  # rows that are apart, as parts of a projection are
    affine = [torch.randn(dim, generator=draw) for _ in range(2)] if is_affine else [None, None]
    given = [rows[0] if is_gated else None, rows[1], *affine]
    upstream = None
    found = []
    for function, dtype in ((gated_norm_triton, torch.float32), (gated_norm_reference, torch.float64)):
        leaves = [None if each is None else each.detach().to(dtype).requires_grad_() for each in given]
        out = function(*leaves, form=form)
        if upstream is None:
            upstream = torch.randn(out.shape, generator=draw)
        asked = [each for each in leaves if each is not None]
        found.append([out, *torch.autograd.grad(out, asked, upstream.to(dtype))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)

leaves = [torch.randn(*size, generator=draw).double().requires_grad_() for size in ((4, 6), (4, 6), (6,), (6,))]
form = GatedNormForm(eps=1e-6, activates=True, beside=Beside.NORMED)
seconds = []
for function, dtype in ((gated_norm_triton, torch.float32), (gated_norm_reference, torch.float64)):
    out = function(*(each.to(dtype) for each in leaves), form=form).double()
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    seconds.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
for one, other in zip(*seconds, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

rows = torch.randn(7, 48, generator=draw).bfloat16()
with torch.autocast("cpu", dtype=torch.bfloat16):
    given = (rows, rows.flip(0), torch.ones(48), torch.zeros(48))
    form = GatedNormForm(eps=1e-6, activates=True, beside=Beside.RAW)
    found = gated_norm_triton(*given, form=form)
    assert found.dtype is torch.bfloat16
    expected = gated_norm_reference(*(each.double() for each in given), form=form)
torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=1e-2)
"""


def test_kernels_equal_torch_under_the_interpreter() -> None:
    done = run_python("-c", CHECK, interpreted=True)
    assert done.returncode == 0, done.stderr


COMPILED = """
from ziggurat.ops.gated_norm import Beside, GatedNormForm, gated_norm_triton

for dim, beside in ((512, Beside.RAW), (50, Beside.NOTHING)):
    for is_gated in (True, False):
        gate, values = (torch.zeros(100, dim, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        affine = [torch.ones(dim).requires_grad_() for _ in range(2)]
        form = GatedNormForm(eps=1e-6, activates=True, beside=beside if is_gated else Beside.NOTHING)
        gated_norm_triton(gate if is_gated else None, values, *affine, form=form).sum().backward()
assert set(compiled) == {"gated_norm_kernel", "gated_norm_backward_kernel"}, compiled
"""


def test_kernels_are_compiled_by_the_call_that_launches_them() -> None:
    done = run_python("-c", LAUNCHING_NOTHING + COMPILED, interpreted=False)
    assert done.returncode == 0, done.stderr
