from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ziggurat.ops.dropout import dropout, dropout_reference, random_bits, relu_dropout_, relu_dropout_sum


@pytest.mark.parametrize("shape", [(5,), (37, 11), (0, 4), (3, 7, 2)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_reference(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    inputs = torch.randn(shape, dtype=dtype, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    torch.manual_seed(3)
    out = dropout(inputs, p=p, training=True)
    torch.manual_seed(3)
    expected = dropout_reference(twin, bits=random_bits(inputs.numel()).view(shape), p=p)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(shape, dtype=dtype)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_relu_and_dropout_in_one(p: float) -> None:
    inputs = torch.randn(40, 9, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    torch.manual_seed(5)
    out = relu_dropout_(inputs * 1.0, p=p, training=True)
    torch.manual_seed(5)
    expected = dropout_reference(F.relu(twin), bits=random_bits(360).view(40, 9), p=p) if p else F.relu(twin)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(40, 9)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("p", "dtype"), [(0.3, torch.float32), (0.3, torch.bfloat16), (0.0, torch.float32)])
def test_sums_of_rows_are_those_of_what_is_dropped(p: float, dtype: torch.dtype, in_place: bool) -> None:
    inputs = torch.randn(40, 2, 5, 9, dtype=dtype, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    torch.manual_seed(5)
    given = inputs * 1.0
    before = given.detach().clone()
    out = relu_dropout_sum(given, p=p, training=True, in_place=in_place)
    assert in_place or torch.equal(given, before)
    torch.manual_seed(5)
    bits = random_bits(twin.numel()).view(twin.shape)
    expected = (dropout_reference(F.relu(twin), bits=bits, p=p) if p else F.relu(twin)).sum(dim=2)
    torch.testing.assert_close(out, expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    weights = torch.randn(40, 2, 9, dtype=dtype)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_share_and_mean_are_right() -> None:
    torch.manual_seed(0)
    out = dropout(torch.ones(400_000), p=0.3, training=True)
    assert abs(float((out == 0).float().mean()) - 0.3) < 0.004  # five standard deviations
    assert abs(float(out.mean()) - 1.0) < 0.006


def test_every_position_of_a_draw_is_fair() -> None:
    torch.manual_seed(0)
    kept = dropout(torch.ones(100_000, 4), p=0.5, training=True) > 0
    assert (kept.float().mean(dim=0) - 0.5).abs().max() < 0.01


def test_not_training_changes_nothing() -> None:
    inputs = torch.randn(6)
    assert dropout(inputs, p=0.5, training=False) is inputs
    torch.testing.assert_close(relu_dropout_(inputs.clone(), p=0.5, training=False), F.relu(inputs))
    rows = torch.randn(2, 1, 3, 4)
    sums = relu_dropout_sum(rows, p=0.5, training=False, in_place=False)
    torch.testing.assert_close(sums, F.relu(rows).sum(dim=2))


def test_other_dtypes_take_torchs_own() -> None:
    out = dropout(torch.ones(1000, dtype=torch.float64), p=0.5, training=True)
    assert out.dtype is torch.float64
    assert set(out.unique().tolist()) == {0.0, 2.0}
