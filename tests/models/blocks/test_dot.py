from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.models.blocks.dot import PairwiseDot


def looped(fields: np.ndarray) -> np.ndarray:
    """Every pair, one by one."""
    size, num_fields, _ = fields.shape
    pairs = [[row[i] @ row[j] for i in range(num_fields) for j in range(i + 1, num_fields)] for row in fields]
    return np.array(pairs).reshape(size, num_fields * (num_fields - 1) // 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(2, 7), st.integers(1, 9))
def test_equals_the_loop_and_so_does_its_gradient(size, num_fields, dim):
    dot = PairwiseDot(num_fields, dim=dim)
    fields = torch.randn(size, num_fields, dim, dtype=torch.float64, requires_grad=True)
    pairs = dot(fields)
    np.testing.assert_allclose(pairs.detach().numpy(), looped(fields.detach().numpy()), atol=1e-12)
    gradient = torch.randn_like(pairs)
    found = torch.autograd.grad(pairs, fields, gradient)[0]
    twin = fields.detach().requires_grad_()
    rows, columns = torch.triu_indices(num_fields, num_fields, offset=1)
    plain = torch.einsum("bfd,bgd->bfg", twin, twin)[:, rows, columns]
    torch.testing.assert_close(found, torch.autograd.grad(plain, twin, gradient)[0])


def test_gradient_equals_finite_differences():
    fields = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PairwiseDot(4, dim=3), (fields,))
    assert torch.autograd.gradgradcheck(PairwiseDot(4, dim=3), (fields,))


def test_works_without_gradients():
    dot = PairwiseDot(3, dim=2)
    fields = torch.randn(2, 3, 2)
    with torch.no_grad():
        without = dot(fields)
    torch.testing.assert_close(without, dot(fields.requires_grad_()))


def test_has_nothing_to_save():
    assert PairwiseDot(5, dim=4).state_dict() == {}


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_decides_the_dtype(enabled):
    fields = torch.randn(3, 4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        pairs = PairwiseDot(4, dim=8)(fields)
    assert pairs.dtype == (torch.bfloat16 if enabled else torch.float32)
    pairs.sum().backward()
    assert fields.grad is not None
    assert fields.grad.dtype == torch.float32
    np.testing.assert_allclose(pairs.detach().float().numpy(), looped(fields.detach().numpy()), rtol=0.05, atol=0.1)
