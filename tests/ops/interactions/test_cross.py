"""The fast cross layers against the reference, value and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ziggurat.ops.interactions.cross import cross_layers, cross_layers_reference


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


def test_without_gradients_the_reference_runs() -> None:
    downs, ups, biases = problem(3, 4, 2, 2)[1:]
    arguments = {"downs": downs, "ups": ups, "biases": biases}
    inputs = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(cross_layers(inputs, **arguments), cross_layers_reference(inputs, **arguments))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(0, 9), st.integers(1, 3))
def test_under_autocast_it_rounds_where_the_reference_does(size: int, dim: int, rank: int, num_layers: int) -> None:
    problem_fp64 = problem(size, dim, rank, num_layers)
    leaves = [problem_fp64[0].detach(), *(0.3 * each.detach() for group in problem_fp64[1:] for each in group)]
    upstream, found = torch.randn(size, dim), []
    for layers in (cross_layers, cross_layers_reference):
        inputs, *weights = (leaf.float().requires_grad_() for leaf in leaves)
        count = len(weights) - 2 * num_layers
        with torch.autocast("cpu", dtype=torch.bfloat16):
            split = {"downs": weights[:count], "ups": weights[count:-num_layers], "biases": weights[-num_layers:]}
            crossed = layers(inputs, **split)
        assert crossed.dtype is torch.float32
        found.append([crossed, *torch.autograd.grad(crossed, [inputs, *weights], upstream)])
    for mine, reference in zip(*found, strict=True):
        assert mine.dtype is torch.float32
        scale = float(reference.detach().abs().max()) if reference.numel() else 1.0
        torch.testing.assert_close(mine, reference, rtol=2**-6, atol=0.01 * scale + 1e-6)


def test_autocast_can_be_differentiated_twice() -> None:
    inputs, downs, ups, biases = problem(3, 4, 2, 2)
    weights = [[each.detach().float().requires_grad_() for each in group] for group in (downs, ups, biases)]
    leaf = inputs.detach().float().requires_grad_()
    found = []
    for layers in (cross_layers, cross_layers_reference):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            crossed = layers(leaf, **dict(zip(("downs", "ups", "biases"), weights, strict=True)))
        (first,) = torch.autograd.grad(crossed.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05 * float(found[1].abs().max()))
