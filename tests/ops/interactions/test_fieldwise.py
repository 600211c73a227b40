"""The fast maps of single fields against the reference, value and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.ops.interactions.fieldwise import fieldwise_products, fieldwise_products_reference


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 7), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 3, 15, 16, 20]))
def test_equals_the_reference_and_so_do_all_gradients(size: int, num_fields: int, d: int, o: int) -> None:
    inputs = torch.randn(size, num_fields * d, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(num_fields, d, o, dtype=torch.float64, requires_grad=True)
    found, expected = (call(inputs, weights) for call in (fieldwise_products, fieldwise_products_reference))
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    both = [torch.autograd.grad(result, [inputs, weights], gradient) for result in (found, expected)]
    torch.testing.assert_close(*both)
    assert both[0][1].is_contiguous()  # DDP copies gradients of other strides, with a warning


@pytest.mark.parametrize("o", [3, 17])
def test_strided_inputs_and_gradients(o: int) -> None:
    wide = torch.randn(6, 20, requires_grad=True)
    weights = torch.randn(2, 4, o, requires_grad=True)
    gradient = torch.randn(2 * o, 6).t()
    results = [call(wide[:, 5:13], weights) for call in (fieldwise_products, fieldwise_products_reference)]
    found, expected = (torch.autograd.grad(result, [wide, weights], gradient) for result in results)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("o", [2, 16])
def test_second_derivatives(o: int) -> None:
    inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 2, o, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(fieldwise_products, (inputs, weights))


def test_one_gradient_alone() -> None:
    inputs, weights = torch.randn(3, 4), torch.randn(2, 2, 3, requires_grad=True)
    fieldwise_products(inputs, weights).sum().backward()
    assert inputs.grad is None
    expected = inputs.view(3, 2, 2).sum(0).unsqueeze(2).expand(2, 2, 3)
    torch.testing.assert_close(weights.grad, expected)


def test_autocast_computes_in_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fieldwise_products(torch.randn(3, 4), torch.randn(2, 2, 3)).dtype is torch.bfloat16
