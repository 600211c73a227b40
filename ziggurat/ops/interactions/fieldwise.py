"""A linear map of its own for every field: o_f = W_f x_f, without the shapes on which BLAS is slow.

    x (B, F·d)   ─►   [ x_0 W_0 | x_1 W_1 | … ]  (B, F·o)            W (F, d, o)

One batched product says the same, and is right for a GPU. On a CPU it has two costs. Its operands are transposed views,
so results come out field-major and are copied into place afterwards. And o is small (a tower module compresses), which
BLAS does not like everywhere: the gradient of a weight as xᵀ g, (d × B)·(B × o), took 47 ms at B = 2048, F = 13,
d = 128, o = 8 on a Zen 3 core, as its transpose gᵀ x 1.7 ms. Here each field is one product that writes where its
result belongs, in the orientation that is fast:

    o ≥ 16   o_f = x_f W_f           o < 16   o_fᵀ = W_fᵀ x_fᵀ, then one small transposition
    ∂x_f = g_f W_fᵀ                  ∂W_f = (g_fᵀ x_f)ᵀ

`fieldwise_products_reference` is the definition. `fieldwise_products` runs it too on GPUs, under autocast and under
torch.compile; a second derivative is taken through it.

Cost: 2·B·F·d·o FLOPs forward, twice that backward.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.function_ctx import Ctx, SavedCtx

# Columns below which BLAS is slow in this orientation, so the transpose is computed (see the top).
_NARROW = 16


def fieldwise_products_reference(
    inputs_BT: Float[Tensor, "B Fd"], weights_Fdo: Float[Tensor, "F d o"]
) -> Float[Tensor, "B Fo"]:
    """Every field through its own map, as one batched product.

    Args:
        inputs_BT: F fields of d numbers side by side.
        weights_Fdo: a matrix for each field.
    """
    fields_BFd = inputs_BT.unflatten(1, weights_Fdo.shape[:2])
    return torch.bmm(fields_BFd.transpose(0, 1), weights_Fdo).transpose(0, 1).flatten(1)


def fieldwise_products(inputs_BT: Float[Tensor, "B Fd"], weights_Fdo: Float[Tensor, "F d o"]) -> Float[Tensor, "B Fo"]:
    """`fieldwise_products_reference`, in the way of the module docstring where it applies.

    Args:
        inputs_BT: F fields of d numbers side by side.
        weights_Fdo: a matrix for each field.
    """
    on_cpu = inputs_BT.device.type == "cpu" and inputs_BT.dtype is weights_Fdo.dtype
    if not on_cpu or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return fieldwise_products_reference(inputs_BT, weights_Fdo)
    return _FieldwiseProducts.apply(inputs_BT, weights_Fdo)


class _FieldwiseProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedCtx, inputs_BT: Tensor, weights_Fdo: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_BT, weights_Fdo)
        num_fields, d, o = weights_Fdo.shape
        size = len(inputs_BT)
        if o < _NARROW:
            outputs_FoB = inputs_BT.new_empty(num_fields, o, size)
            for field in range(num_fields):
                # Written in place, field after field: no batch of results to be turned around.
                torch.mm(weights_Fdo[field].t(), _columns(inputs_BT, field, d).t(), out=outputs_FoB[field])
            return outputs_FoB.view(num_fields * o, size).t().contiguous()
        outputs_BT = inputs_BT.new_empty(size, num_fields * o)
        for field in range(num_fields):
            torch.mm(_columns(inputs_BT, field, d), weights_Fdo[field], out=_columns(outputs_BT, field, o))
        return outputs_BT

    @staticmethod
    def backward(ctx: SavedCtx, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs_BT, weights_Fdo = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: through the reference, which can be differentiated again
            return _differentiable_backward(inputs_BT, weights_Fdo, gradient_BT=gradients[0], context=ctx)
        [gradient_BT] = gradients
        num_fields, d, o = weights_Fdo.shape
        inputs_gradient = weights_gradient = None
        if ctx.needs_input_grad[0]:
            inputs_gradient = gradient_BT.new_empty(inputs_BT.shape)
            for field in range(num_fields):
                matrix = weights_Fdo[field].t()
                torch.mm(_columns(gradient_BT, field, o), matrix, out=_columns(inputs_gradient, field, d))
        if ctx.needs_input_grad[1]:
            transposed_Fod = gradient_BT.new_empty(num_fields, o, d)
            for field in range(num_fields):
                # gᵀ x, and not xᵀ g: a narrow o is slow in the second (see the top).
                gradient_oB = _columns(gradient_BT, field, o).t()
                torch.mm(gradient_oB, _columns(inputs_BT, field, d), out=transposed_Fod[field])
            weights_gradient = transposed_Fod.transpose(1, 2).contiguous()
        return inputs_gradient, weights_gradient


def _columns(matrix_BT: Tensor, field: int, width: int) -> Tensor:
    return matrix_BT[:, field * width : (field + 1) * width]


def _differentiable_backward(
    inputs_BT: Tensor, weights_Fdo: Tensor, *, gradient_BT: Tensor, context: Ctx
) -> tuple[Tensor | None, Tensor | None]:
    """The same gradients by autograd, through the reference."""
    result_BT = fieldwise_products_reference(inputs_BT, weights_Fdo)
    needed = context.needs_input_grad
    wanted = [each for each, need in zip((inputs_BT, weights_Fdo), needed, strict=True) if need]
    found = iter(torch.autograd.grad(result_BT, wanted, gradient_BT, create_graph=True))
    return next(found) if needed[0] else None, next(found) if needed[1] else None
