"""What the cross layers of DCNv2 do beside their matrix products, by Triton: one trip through memory each way.

    forward     x ← x + x₀ ⊙ f, written in FP32 and, for the next layer's product, in the dtype of products
    backward    g ⊙ x₀ in the dtype of products; ∂x₀ += g ⊙ f; ∂b = Σ of the first over the batch

In torch these are two operations forward and three backward, each of which reads and writes all of it. f = W x + b has
its bias from the product, where it costs nothing. Sums over the batch are made of blocks of rows, in order: the same
bits on every repeat. `cross.py` says when these are taken, and its own operations are what they must equal.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, why_no_triton
from ziggurat.ops.machine.launches import Launch, LaunchPart, launches_on

CROSS_KERNELS = "ziggurat.ops.interactions.cross_triton_kernels"
# Of the backward pass; they are the order of the sums over the batch, and so no choice of a launch.
_ROWS, _COLUMNS = 16, 128  # of a tile
_TILES = 16  # tiles below each other that a program goes through
_LOWER = (torch.float32, torch.bfloat16, torch.float16)


def why_not_triton(inputs_Bd: Tensor, dtype: torch.dtype) -> str:
    """The reason why the kernels cannot serve cross layers; "" if they can."""
    if inputs_Bd.dtype != torch.float32 or dtype not in _LOWER:
        return f"{inputs_Bd.dtype} with products in {dtype}"
    return why_no_triton(CROSS_KERNELS, inputs_Bd, what="inputs")


def add_crossed(
    crossed_Bd: Float[Tensor, "B d"],
    inputs_Bd: Float[Tensor, "B d"],
    factor_Bd: Float[Tensor, "B d"],
    *,
    needs_cast: bool,
    launch: Launch | None = None,
) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d"]]:
    """Compute x + x₀ ⊙ f in FP32, and rounded to the dtype of f; the same tensor twice where that is not needed.

    Args:
        crossed_Bd: x, FP32.
        inputs_Bd: x₀, FP32.
        factor_Bd: f, in the dtype of products.
        needs_cast: whether another product follows.
        launch: of the kernel; that of the device's family unless given.
    """
    crossed_Bd, inputs_Bd, factor_Bd = (each.contiguous() for each in (crossed_Bd, inputs_Bd, factor_Bd))
    out = torch.empty_like(crossed_Bd)
    cast = torch.empty_like(factor_Bd) if needs_cast and factor_Bd.dtype != out.dtype else out
    if out.numel():
        launch = launch or launches_on(out.device)[LaunchPart.CROSSED]
        kernels_of(CROSS_KERNELS).add_crossed_kernel[(-(-out.numel() // launch.numbers),)](
            crossed_Bd,
            inputs_Bd,
            factor_Bd,
            out,
            cast,
            out.numel(),
            has_cast=cast is not out,
            interpreted=is_interpreted(),
            tile=launch.numbers,
            num_warps=launch.warps,
        )
    return out, cast


def add_crossed_backward(
    gradient_Bd: Float[Tensor, "B d"],
    inputs_Bd: Float[Tensor, "B d"],
    factor_Bd: Float[Tensor, "B d"],
    *,
    first_Bd: Float[Tensor, "B d"] | None,
) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d"], Float[Tensor, "d"]]:
    """The gradient of f in its dtype, that of x₀ so far, and that of the bias.

    Args:
        gradient_Bd: of x + x₀ ⊙ f, FP32.
        inputs_Bd: x₀, FP32.
        factor_Bd: f.
        first_Bd: of the layers above, FP32; added to in place. None: the first one.
    """
    gradient_Bd, inputs_Bd, factor_Bd = (each.contiguous() for each in (gradient_Bd, inputs_Bd, factor_Bd))
    size, dim = gradient_Bd.shape
    of_factor = torch.empty_like(factor_Bd)
    blocks = -(-size // (_ROWS * _TILES))
    # A row a block of samples, summed in order below: atomic additions would come in any order.
    partials = gradient_Bd.new_empty(blocks, dim)
    first = torch.empty_like(gradient_Bd) if first_Bd is None else first_Bd
    if gradient_Bd.numel():
        kernels_of(CROSS_KERNELS).add_crossed_backward_kernel[(blocks, -(-dim // _COLUMNS))](
            gradient_Bd,
            inputs_Bd,
            factor_Bd,
            of_factor,
            first,
            partials,
            size,
            dim,
            is_first=first_Bd is None,
            interpreted=is_interpreted(),
            rows=_ROWS,
            columns=_COLUMNS,
            tiles=_TILES,
        )
    return of_factor, first, partials.sum(0)
