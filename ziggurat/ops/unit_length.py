"""Rows of length 1, with a gradient that passes over memory four times instead of ten.

    y = x / max(|x|, ε)        dx = (dy − y ⟨dy, y⟩) / |x|        where |x| ≤ ε: dy / ε

Torch's own `F.normalize` is the definition, and serves under torch.compile, on other devices and in other dtypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ziggurat.ops.function_ctx import SavedCtx


def unit_length(rows: Float[Tensor, "N D"], *, eps: float) -> Float[Tensor, "N D"]:
    """Rows divided by their length; shorter ones than `eps` by `eps`."""
    plain = rows.device.type == "cpu" and rows.dtype is torch.float32 and rows.requires_grad
    if plain and not torch.compiler.is_compiling():
        return _UnitLength.apply(rows, eps)
    return F.normalize(rows, dim=1, eps=eps)


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedCtx, rows: Tensor, eps: float) -> Tensor:
        lengths_N1 = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        divisors_N1 = lengths_N1.clamp_min(eps)
        unit = rows / divisors_N1
        ctx.save_for_backward(unit, divisors_N1, (lengths_N1 > eps).to(rows.dtype))
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        unit, divisors_N1, turns_N1 = ctx.saved_tensors
        along_N1 = (grad * unit).sum(dim=1, keepdim=True) * turns_N1
        return torch.addcmul(grad, unit, along_N1, value=-1.0).div_(divisors_N1), None
