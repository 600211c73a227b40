"""From the gradient of the output to what kernels sum: contiguous, in full precision, means divided out.

Mean pooling divides the sum over a list by its length n, so each of its rows receives grad / n. Dividing once for
each list, here, leaves kernels with plain sums. The scan for NaN and infinity is here too, because it is one cheap
pass over the same numbers: B·T values instead of one for each lookup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.lookup.layout import FieldKind, LookupLayout, Lookups, mean_scale

if TYPE_CHECKING:
    from ziggurat.ops.lookup.kernel import GradientPart


def prepare_gradient(
    grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
) -> Float[Tensor, "B T"]:
    """The gradient that kernels sum; a copy only where something has to change (dtype, layout, mean pooling)."""
    means = [layout for layout in layouts if layout.has_mean]
    if not means:
        return grad.to(dtype).contiguous()
    if len(layouts) == 1 and layouts[0].is_dense_block:
        grad_BFD = grad.to(dtype).reshape(lookups.batch_size, layouts[0].width // layouts[0].dim, layouts[0].dim)
        return (grad_BFD * mean_scale(layouts[0], lookups, dtype=dtype).unsqueeze(-1)).view(grad.shape)
    prepared = grad.to(dtype, memory_format=torch.contiguous_format, copy=True)
    for layout in means:
        scale_BF = mean_scale(layout, lookups, dtype=dtype)
        for position, slot in enumerate(layout.slots):
            if slot.kind is FieldKind.MEAN:
                prepared[:, slot.column : slot.column + layout.dim] *= scale_BF[:, position : position + 1]
    return prepared


def every_sum_is_finite(parts: Sequence[GradientPart]) -> bool | None:
    """Whether every sum of gradients of equal rows is finite; None if only summing can tell.

    A sum of n numbers of magnitude at most M is finite if n·M does not overflow, which a scan of the output gradient
    settles for all but absurd gradients: B·T numbers, each output's gradient once. A NaN or an infinity reaches a row
    unless its list is empty or holds padding alone; then None, and the exact sums decide.
    """
    gradients = {part.grad.data_ptr(): part.grad for part in parts if part.grad.numel()}
    largest, finite = 0.0, True
    for grad in gradients.values():
        low, high = torch.aminmax(grad)
        largest = max(largest, -float(low), float(high))
        finite = finite and math.isfinite(float(low)) and math.isfinite(float(high))
    if not finite:
        hidden = any(part.layout.jagged or bool((part.lookups.single == 0).any()) for part in parts)
        return None if hidden else False
    count = sum(part.lookups.values.numel() + part.lookups.single.numel() for part in parts)
    dtypes = [torch.finfo(grad.dtype).max for grad in gradients.values()]
    return True if largest * count < min(dtypes, default=math.inf) else None
