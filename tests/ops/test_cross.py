"""The fast cross layers against the reference, value and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ziggurat.ops.cross import cross_layers, cross_layers_reference


def problem(size: int, dim: int, rank: int, num_layers: int) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """x₀ and the weights; rank 0: full rank."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    downs = [random(rank, dim) for _ in range(num_layers)] if rank else []
    ups = [random(dim, rank or dim) for _ in range(num_layers)]
    return random(size, dim), downs, ups, [random(dim) for _ in range(num_layers)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_equals_the_reference_and_so_do_all_gradients(size: int, dim: int, rank: int, num_layers: int) -> None:
    inputs, downs, ups, biases = problem(size, dim, rank, num_layers)
    results = [layers(inputs, downs=downs, ups=ups, biases=biases) for layers in (cross_layers, cross_layers_reference)]
    torch.testing.assert_close(results[0], results[1])
    gradient, leaves = torch.randn_like(results[0]), [inputs, *downs, *ups, *biases]
    kept = gradient.clone()
    if num_layers:
        found, expected = (torch.autograd.grad(result, leaves, gradient) for result in results)
        torch.testing.assert_close(found, expected)
    assert torch.equal(gradient, kept)  # the incoming gradient is not written to


@pytest.mark.parametrize("rank", [0, 2])
def test_gradient_equals_finite_differences(rank: int) -> None:
    inputs, downs, ups, biases = problem(3, 4, rank, 2)

    def apply(*leaves: Tensor) -> Tensor:
        weights = leaves[1:]
        count = len(downs)
        return cross_layers(leaves[0], downs=weights[:count], ups=weights[count:-2], biases=weights[-2:])

    assert torch.autograd.gradcheck(apply, (inputs, *downs, *ups, *biases))
    assert torch.autograd.gradgradcheck(apply, (inputs, *downs, *ups, *biases))


def test_a_weight_may_be_frozen() -> None:
    inputs, downs, ups, biases = problem(3, 4, 2, 2)
    ups[1].requires_grad_(False)
    cross_layers(inputs, downs=downs, ups=ups, biases=biases).sum().backward()
    assert ups[1].grad is None
    assert ups[0].grad is not None


def test_autocast_and_no_grad_run_the_reference() -> None:
    leaves = [[each.detach().float() for each in group] for group in problem(3, 4, 2, 2)[1:]]
    inputs = torch.randn(3, 4, requires_grad=True)
    arguments = dict(zip(("downs", "ups", "biases"), leaves, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = cross_layers(inputs, **arguments)
    result.float().sum().backward()
    assert inputs.grad is not None
    with torch.no_grad():
        assert torch.equal(cross_layers(inputs, **arguments), cross_layers_reference(inputs, **arguments))
