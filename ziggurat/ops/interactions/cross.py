"""The cross layers of DCNv2 as one operation, with a backward pass of fewer trips through memory.

    x_{l+1} = x₀ ⊙ f_l + x_l,     f_l = U_l low_l + b_l,     low_l = V_l x_l   (full rank: low_l = x_l, no V_l)

With g the gradient of x_{l+1}, autograd computes the parts of each layer one by one and adds them afterwards:

    ∂x₀ += g ⊙ f_l          a product written, read again and added
    ∂x_l = g + V_lᵀ U_lᵀ (g ⊙ x₀)          a matrix product written, read again and added

Both sums can be made where the part is computed: `addcmul_` for the first, and a matrix product that starts from g
(`addmm_`, BLAS's beta = 1) for the second. At width 1728 and batch 2048 each matrix is 14 MiB, so what is saved is
memory traffic: two of five passes a layer.

On CUDA devices Triton does what is not a matrix product, where it can be imported (`interactions/cross_triton.py`) and
was faster than torch's operations (`machine/measured_choice.py`): one trip through memory forward and one backward, the
cast for the next layer and the bias's gradient among them.

Under autocast x stays FP32 and only the products are made in the lower dtype. What autograd keeps of a layer for them,
x_l in FP32 and its cast, is here the cast alone, and g ⊙ x₀ is rounded where it is computed.

`cross_layers_reference` is the definition. `cross_layers` runs it too where the fast form does not apply: under
torch.compile (which fuses by itself), on the meta device, where x₀ needs no gradient and where dtypes differ. A second
derivative is taken through the reference, whose layers are then computed once more.

Reference: arXiv 2008.13535, equations 1 and 2. Cost: the matrix products are those of autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.interactions.cross_triton import CROSS_KERNELS, add_crossed, add_crossed_backward, why_not_triton
from ziggurat.ops.kernel_choice import is_interpreted
from ziggurat.ops.machine.measured_choice import Answer, fastest, timed_size


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
    # The backward pass below adds gradients in place, in the dtype of x.
    same_dtype = all(weight.dtype is inputs_Bd.dtype for weight in (*downs, *ups, *biases))
    wanted = torch.is_grad_enabled() and inputs_Bd.requires_grad
    if not ups or not wanted or not same_dtype or inputs_Bd.is_meta or torch.compiler.is_compiling():
        return cross_layers_reference(inputs_Bd, downs=downs, ups=ups, biases=biases)
    device = inputs_Bd.device.type
    lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs_Bd.dtype
    # The dtype of products is an argument from here on: autocast would cast x, which has to stay FP32.
    with torch.autocast(device, enabled=False):
        return _CrossLayers.apply(inputs_Bd, len(ups), lower, *downs, *ups, *biases)


class _CrossCtx(SavedCtx, Protocol):
    num_layers: int
    num_weights: int
    dtype: torch.dtype


class _CrossLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CrossCtx, inputs_Bd: Tensor, num_layers: int, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        # Kept beside the weights: backward multiplies these casts, a second derivative needs the weights themselves.
        used = [weight.to(dtype) for weight in weights]
        downs, ups, biases = _split(used, num_layers)
        crossed_Bd = inputs_Bd
        kept = []
        # x itself stays FP32 from layer to layer; products see this rounded copy.
        cast_Bd = inputs_Bd.to(dtype)
        for index, (up, bias) in enumerate(zip(ups, biases, strict=True)):
            low = F.linear(cast_Bd, downs[index]) if downs else cast_Bd
            factor_Bd = F.linear(low, up, bias)
            # Without V_l the cast is what U_l multiplies, and is kept once.
            kept += [cast_Bd, low, factor_Bd] if downs else [cast_Bd, factor_Bd]
            crossed_Bd, cast_Bd = _add(crossed_Bd, inputs_Bd, factor_Bd, is_last=index == num_layers - 1)
        ctx.num_layers = num_layers
        ctx.num_weights = len(weights)
        ctx.dtype = dtype
        ctx.save_for_backward(inputs_Bd, *weights, *used, *kept)
        return crossed_Bd

    @staticmethod
    def backward(ctx: _CrossCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs_Bd, *saved = ctx.saved_tensors
        weights = saved[: ctx.num_weights]
        used = saved[ctx.num_weights : 2 * ctx.num_weights]
        kept = saved[2 * ctx.num_weights :]
        if torch.is_grad_enabled():  # create_graph=True: through the reference, which can be differentiated again
            return _differentiable_backward(inputs_Bd, weights, gradient_Bd=gradients[0], context=ctx)
        needed = ctx.needs_input_grad[3:]
        found = _backward(inputs_Bd, used, kept, num_layers=ctx.num_layers, needed=needed, gradient_Bd=gradients[0])
        # Gradients of casts go back to the dtype of the weights.
        wide = [each if each is None else each.to(inputs_Bd.dtype) for each in found]
        return (wide[0], None, None, *wide[1:])


def _backward(
    inputs_Bd: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    num_layers: int,
    needed: Sequence[bool],
    gradient_Bd: Tensor,
) -> list[Tensor | None]:
    """Gradients of x₀ and of each weight, with both sums made in place."""
    downs, ups, _ = _split(weights, num_layers)
    gradients: list[Tensor | None] = [None] * len(weights)
    # As many as `forward` has kept of each layer.
    per_layer = 3 if downs else 2
    # ∂L/∂x of the layer above, on its way down.
    flowing_Bd = gradient_Bd
    first_Bd = None
    for index in reversed(range(num_layers)):
        cast_Bd, *lows, factor_Bd = kept[index * per_layer : (index + 1) * per_layer]
        low = lows[0] if downs else cast_Bd
        bias_at = len(downs) + len(ups) + index
        factor_gradient_Bd, first_Bd, of_bias = _add_backward(
            flowing_Bd, inputs_Bd, factor_Bd, first_Bd=first_Bd, needs_bias=needed[bias_at]
        )
        gradients[bias_at] = of_bias
        if needed[len(downs) + index]:
            gradients[len(downs) + index] = factor_gradient_Bd.t() @ low
        # Full rank: there is no V_l, so one product fewer.
        low_gradient = factor_gradient_Bd
        matrix = ups[index]
        if downs:
            low_gradient = factor_gradient_Bd @ ups[index]
            matrix = downs[index]
            if needed[index]:
                gradients[index] = low_gradient.t() @ cast_Bd
        mine = flowing_Bd is not gradient_Bd  # the incoming gradient is not ours to overwrite
        # BLAS starts from its own dtype alone; under autocast the product is made in the lower one, and added in FP32.
        if low_gradient.dtype is flowing_Bd.dtype:
            flowing_Bd = torch.addmm(flowing_Bd, low_gradient, matrix, out=flowing_Bd if mine else None)
        else:
            flowing_Bd = torch.add(flowing_Bd, low_gradient @ matrix, out=flowing_Bd if mine else None)
    # x₀ enters every layer as a factor, and the first one as x: both add up.
    return [flowing_Bd if first_Bd is None else first_Bd.add_(flowing_Bd), *gradients]


def _add(
    crossed_Bd: Tensor, inputs_Bd: Tensor, factor_Bd: Tensor, *, is_last: bool
) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d"]]:
    """The next x, and what the next layer multiplies: rounded to the dtype of products, but for the last one."""
    if _takes_triton(inputs_Bd, factor_Bd.dtype):
        return add_crossed(crossed_Bd, inputs_Bd, factor_Bd, needs_cast=not is_last)
    return _add_by_torch(crossed_Bd, inputs_Bd, factor_Bd, is_last=is_last)


def _add_by_torch(crossed_Bd: Tensor, inputs_Bd: Tensor, factor_Bd: Tensor, *, is_last: bool) -> tuple[Tensor, Tensor]:
    crossed_Bd = torch.addcmul(crossed_Bd, inputs_Bd, factor_Bd)
    return crossed_Bd, crossed_Bd if is_last else crossed_Bd.to(factor_Bd.dtype)


def _add_backward(
    flowing_Bd: Tensor, inputs_Bd: Tensor, factor_Bd: Tensor, *, first_Bd: Tensor | None, needs_bias: bool
) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d"], Float[Tensor, "d"] | None]:
    """Gradients of f, of x₀ so far (`first_Bd` is added to in place), and of the bias."""
    if _takes_triton(inputs_Bd, factor_Bd.dtype):
        of_factor_Bd, first_Bd, of_bias = add_crossed_backward(flowing_Bd, inputs_Bd, factor_Bd, first_Bd=first_Bd)
        return of_factor_Bd, first_Bd, of_bias if needs_bias else None
    return _add_backward_by_torch(flowing_Bd, inputs_Bd, factor_Bd, first_Bd=first_Bd, needs_bias=needs_bias)


def _add_backward_by_torch(
    flowing_Bd: Tensor, inputs_Bd: Tensor, factor_Bd: Tensor, *, first_Bd: Tensor | None, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    of_factor_Bd = torch.mul(flowing_Bd, inputs_Bd, out=torch.empty_like(factor_Bd))
    # The first to come makes the sum; later layers add to it in place.
    first_Bd = flowing_Bd * factor_Bd if first_Bd is None else first_Bd.addcmul_(flowing_Bd, factor_Bd)
    return of_factor_Bd, first_Bd, of_factor_Bd.sum(0) if needs_bias else None


def _takes_triton(inputs_Bd: Tensor, dtype: torch.dtype) -> bool:
    """Say whether the Triton kernels add: if they can, and were faster than torch's operations when both were timed."""
    if why_not_triton(inputs_Bd, dtype):
        return False
    if inputs_Bd.device.type != "cuda" or is_interpreted():
        return True
    size, dim = inputs_Bd.shape
    return measured_form(timed_size(size), dim, dtype, inputs_Bd.device).name == "triton"


def measured_form(size: int, dim: int, dtype: torch.dtype, device: torch.device) -> Answer:
    """Time the kernels and torch's operations of one layer between others, forward and backward.

    Args:
        size: samples.
        dim: d.
        dtype: of products.
        device: a GPU.
    """

    @functools.cache
    def scratch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # A generator of its own: measuring must not move the random numbers of training.
        draw = torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(size, dim, generator=draw, device=device) for _ in range(4)]
        return drawn[0], drawn[1], drawn[2].to(dtype), drawn[3]

    def by_triton() -> None:
        crossed_Bd, inputs_Bd, factor_Bd, first_Bd = scratch()
        add_crossed(crossed_Bd, inputs_Bd, factor_Bd, needs_cast=True)
        add_crossed_backward(crossed_Bd, inputs_Bd, factor_Bd, first_Bd=first_Bd)

    def by_torch() -> None:
        crossed_Bd, inputs_Bd, factor_Bd, first_Bd = scratch()
        _add_by_torch(crossed_Bd, inputs_Bd, factor_Bd, is_last=False)
        _add_backward_by_torch(crossed_Bd, inputs_Bd, factor_Bd, first_Bd=first_Bd, needs_bias=True)

    return fastest(
        "cross_layers",
        {"triton": by_triton, "torch": by_torch},
        shape=f"{size} samples of {dim}, products in {dtype}",
        kernels=CROSS_KERNELS,
        device=device,
    )


def _differentiable_backward(
    inputs_Bd: Tensor, weights: Sequence[Tensor], *, gradient_Bd: Tensor, context: _CrossCtx
) -> tuple[Tensor | None, ...]:
    """The same gradients by autograd, recomputing the layers."""
    downs, ups, biases = _split(weights, context.num_layers)
    device = inputs_Bd.device.type
    with torch.autocast(device, dtype=context.dtype, enabled=context.dtype is not inputs_Bd.dtype):
        result_Bd = cross_layers_reference(inputs_Bd, downs=downs, ups=ups, biases=biases)
    every = [inputs_Bd, *weights]
    # Two arguments between x₀ and the weights are no tensors.
    needed = [context.needs_input_grad[0], *context.needs_input_grad[3:]]
    wanted = [each for each, need in zip(every, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result_Bd, wanted, gradient_Bd, create_graph=True))
    # `found` has gradients of what was wanted alone; the others are None, in their places.
    first, *others = (next(found) if need else None for need in needed)
    return (first, None, None, *others)


def _split(weights: Sequence[Tensor], num_layers: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Down, up and bias of each layer, from one flat list."""
    num_downs = len(weights) - 2 * num_layers
    return weights[:num_downs], weights[num_downs:-num_layers], weights[-num_layers:]
