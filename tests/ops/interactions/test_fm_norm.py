"""LN(flatten(X (Xᵀ Y))): the reference against numpy, the Triton kernel against the reference, by its interpreter."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from tests.ops.triton_runs import run_python
from ziggurat.config import override
from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.models import WukongConfig
from ziggurat.ops.interactions.fm_norm import FMKernel, fm_norm, fm_norm_reference, why_not_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernel cannot be interpreted")

CHECK = """
import torch
from ziggurat.ops.interactions.fm_norm import FMKernel, fm_norm, fm_norm_reference
for size, fields, dim, rank in ((3, 5, 4, 3), (2, 20, 24, 8), (1, 16, 16, 16), (0, 4, 4, 2)):
    inputs = [torch.randn(s) for s in ((size, fields, dim), (fields, rank), (fields * rank,), (fields * rank,))]
    results = []
    for function, options in ((fm_norm, {"kernel": FMKernel.TRITON}), (fm_norm_reference, {})):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = function(leaves[0], leaves[1], scale_P=leaves[2], shift_P=leaves[3], eps=1e-5, **options)
        out.square().sum().backward()
        results.append((out, *(each.grad for each in leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

# Under autocast fields come in BF16 and weights stay in FP32, and the backward pass runs outside of it.
inputs = [torch.randn(s) for s in ((3, 5, 16), (5, 4), (20,), (20,))]
inputs[0] = inputs[0].bfloat16()
upstream = torch.randn(3, 20)
results = []
for kernel in (FMKernel.TRITON, FMKernel.TORCH):
    leaves = [each.clone().requires_grad_() for each in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fm_norm(leaves[0], leaves[1], scale_P=leaves[2], shift_P=leaves[3], eps=1e-5, kernel=kernel)
    out.backward(upstream.to(out.dtype))
    assert [each.grad.dtype for each in leaves] == [each.dtype for each in inputs]
    results.append((out, *(each.grad for each in leaves)))
for found, expected in zip(*results, strict=True):
    torch.testing.assert_close(found.float(), expected.float(), rtol=5e-2, atol=5e-2)
"""


def test_reference_is_the_equation():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 4), (5, 3)))
    scale, shift = (torch.randn(15, generator=generator, dtype=torch.float64) for _ in range(2))
    found = fm_norm_reference(x, y, scale_P=scale, shift_P=shift, eps=1e-5)
    for sample in range(2):
        products = (x[sample].numpy() @ x[sample].numpy().T @ y.numpy()).reshape(-1)
        normal = (products - products.mean()) / np.sqrt(products.var() + 1e-5)
        np.testing.assert_allclose(found[sample].numpy(), normal * scale.numpy() + shift.numpy(), rtol=1e-9)


@needs_triton
@pytest.mark.slow
def test_kernel_equals_the_reference_under_the_interpreter():
    done = run_python("-c", CHECK, interpreted=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernel_equals_the_reference_on_a_gpu():
    inputs = [torch.randn(shape, device="cuda") for shape in ((64, 40, 64), (40, 24), (960,), (960,))]
    affine = {"scale_P": inputs[2], "shift_P": inputs[3], "eps": 1e-5}
    found = fm_norm(inputs[0], inputs[1], **affine, kernel=FMKernel.TRITON)
    torch.testing.assert_close(found, fm_norm_reference(inputs[0], inputs[1], **affine), rtol=1e-3, atol=1e-3)


def test_asking_for_triton_where_it_cannot_run_is_an_error():
    x, y = torch.randn(2, 3, 8), torch.randn(3, 2)
    if not why_not_triton(x, y):
        pytest.skip("Triton runs here")
    with pytest.raises(MissingDependencyError, match="triton"):
        fm_norm(x, y, scale_P=torch.ones(6), shift_P=torch.zeros(6), eps=1e-5, kernel=FMKernel.TRITON)


def test_triton_is_for_the_optimised_form_with_layer_norm():
    with pytest.raises(ConfigError, match="kernel = triton"):
        override(WukongConfig(), {"kernel": "triton", "fm": "plain"})
    assert override(WukongConfig(), {"kernel": "triton"}).kernel is FMKernel.TRITON
