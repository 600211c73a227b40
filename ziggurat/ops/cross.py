"""The cross layers of DCNv2 as one operation, with a backward pass of fewer trips through memory.

    x_{l+1} = x₀ ⊙ f_l + x_l,     f_l = U_l low_l + b_l,     low_l = V_l x_l   (full rank: low_l = x_l, no V_l)

With g the gradient of x_{l+1}, autograd computes the parts of each layer one by one and adds them afterwards:

    ∂x₀ += g ⊙ f_l          a product written, read again and added
    ∂x_l = g + V_lᵀ U_lᵀ (g ⊙ x₀)          a matrix product written, read again and added

Both sums can be made where the part is computed: `addcmul_` for the first, and a matrix product that starts from g
(`addmm_`, BLAS's beta = 1) for the second. At width 1728 and batch 2048 each matrix is 14 MiB, so what is saved is
memory traffic: two of five passes a layer.

`cross_layers_reference` is the definition. `cross_layers` runs it too where the fast form does not apply: under
autocast (its backward pass would have to know about the casts), under torch.compile (which fuses by itself) and where
x₀ needs no gradient. A second derivative is taken through the reference, whose layers are then computed once more.

Reference: arXiv 2008.13535, equations 1 and 2. Cost: the matrix products are those of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def cross_layers_reference(
    inputs_Bd: Float[Tensor, "B d"], *, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Float[Tensor, "B d"]:
    """All cross layers, as the equation says.

    Args:
        inputs_Bd: x₀.
        downs: V_l (r × d) of each layer; empty for full rank.
        ups: U_l (d × r) of each layer, or W_l (d × d) for full rank.
        biases: b_l (d) of each layer.
    """
    crossed_Bd = inputs_Bd
    for index, (up, bias) in enumerate(zip(ups, biases, strict=True)):
        low = F.linear(crossed_Bd, downs[index]) if downs else crossed_Bd
        crossed_Bd = torch.addcmul(crossed_Bd, inputs_Bd, F.linear(low, up, bias))
    return crossed_Bd


def cross_layers(
    inputs_Bd: Float[Tensor, "B d"], *, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Float[Tensor, "B d"]:
    """`cross_layers_reference`, with the backward pass of the module docstring where it applies.

    Args:
        inputs_Bd: x₀.
        downs: V_l (r × d) of each layer; empty for full rank.
        ups: U_l (d × r) of each layer, or W_l (d × d) for full rank.
        biases: b_l (d) of each layer.
    """
    same_dtype = all(weight.dtype is inputs_Bd.dtype for weight in (*downs, *ups, *biases))
    autocast = not inputs_Bd.is_meta and torch.is_autocast_enabled(inputs_Bd.device.type)
    wanted = torch.is_grad_enabled() and inputs_Bd.requires_grad
    if not ups or not wanted or not same_dtype or autocast or torch.compiler.is_compiling():
        return cross_layers_reference(inputs_Bd, downs=downs, ups=ups, biases=biases)
    return _CrossLayers.apply(inputs_Bd, len(ups), *downs, *ups, *biases)  # type: ignore[return-value]


class _CrossLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs_Bd: Tensor, num_layers: int, *weights: Tensor) -> Tensor:
        downs, ups, biases = _split(weights, num_layers)
        crossed_Bd, kept = inputs_Bd, []
        for index, (up, bias) in enumerate(zip(ups, biases, strict=True)):
            low = F.linear(crossed_Bd, downs[index]) if downs else crossed_Bd
            factor_Bd = F.linear(low, up, bias)
            kept += [crossed_Bd, low, factor_Bd] if downs else [crossed_Bd, factor_Bd]
            crossed_Bd = torch.addcmul(crossed_Bd, inputs_Bd, factor_Bd)
        ctx.num_layers, ctx.num_weights = num_layers, len(weights)
        ctx.save_for_backward(*weights, *kept)
        return crossed_Bd

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
        if torch.is_grad_enabled():  # create_graph=True: through the reference, which can be differentiated again
            return _differentiable_backward(kept[0], weights, gradient_Bd=gradients[0], context=ctx)
        needed = ctx.needs_input_grad[2:]
        found = _backward(weights, kept, num_layers=ctx.num_layers, needed=needed, gradient_Bd=gradients[0])
        return (found[0], None, *found[1:])


def _backward(
    weights: Sequence[Tensor], kept: Sequence[Tensor], *, num_layers: int, needed: Sequence[bool], gradient_Bd: Tensor
) -> list[Tensor | None]:
    """Gradients of x₀ and of each weight, with both sums made in place."""
    downs, ups, _ = _split(weights, num_layers)
    gradients: list[Tensor | None] = [None] * len(weights)
    per_layer = 3 if downs else 2
    inputs_Bd, flowing_Bd, first_Bd = kept[0], gradient_Bd, None
    for index in reversed(range(num_layers)):
        crossed_Bd, *lows, factor_Bd = kept[index * per_layer : (index + 1) * per_layer]
        low = lows[0] if downs else crossed_Bd
        factor_gradient_Bd = flowing_Bd * inputs_Bd
        up_at = len(downs) + index
        if needed[up_at]:
            gradients[up_at] = factor_gradient_Bd.t() @ low
        if needed[up_at + len(ups)]:
            gradients[up_at + len(ups)] = factor_gradient_Bd.sum(0)
        first_Bd = flowing_Bd * factor_Bd if first_Bd is None else first_Bd.addcmul_(flowing_Bd, factor_Bd)
        low_gradient, matrix = factor_gradient_Bd, ups[index]
        if downs:
            low_gradient, matrix = factor_gradient_Bd @ ups[index], downs[index]
            if needed[index]:
                gradients[index] = low_gradient.t() @ crossed_Bd
        mine = flowing_Bd is not gradient_Bd  # the incoming gradient is not ours to overwrite
        flowing_Bd = torch.addmm(flowing_Bd, low_gradient, matrix, out=flowing_Bd if mine else None)
    assert first_Bd is not None
    return [first_Bd.add_(flowing_Bd), *gradients]


def _differentiable_backward(
    inputs_Bd: Tensor, weights: Sequence[Tensor], *, gradient_Bd: Tensor, context: Any
) -> tuple[Tensor | None, ...]:
    """The same gradients by autograd, recomputing the layers."""
    downs, ups, biases = _split(weights, context.num_layers)
    result_Bd = cross_layers_reference(inputs_Bd, downs=downs, ups=ups, biases=biases)
    every = [inputs_Bd, *weights]
    needed = [context.needs_input_grad[0], *context.needs_input_grad[2:]]
    wanted = [each for each, need in zip(every, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result_Bd, wanted, gradient_Bd, create_graph=True))
    first, *others = (next(found) if need else None for need in needed)
    return (first, None, *others)


def _split(weights: Sequence[Tensor], num_layers: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Down, up and bias of each layer, from one flat list."""
    num_downs = len(weights) - 2 * num_layers
    return weights[:num_downs], weights[num_downs:-num_layers], weights[-num_layers:]
