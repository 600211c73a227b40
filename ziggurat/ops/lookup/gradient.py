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
from jaxtyping import Bool, Float
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
    # A copy always: the caller's gradient may be read by others, and is divided here in place.
    prepared = grad.to(dtype, memory_format=torch.contiguous_format, copy=True)
    for layout in means:
        scale_BF = mean_scale(layout, lookups, dtype=dtype)
        for position, slot in enumerate(layout.slots):
            if slot.kind is FieldKind.MEAN:
                prepared[:, slot.column : slot.column + layout.dim] *= scale_BF[:, position : position + 1]
    return prepared


def every_sum_is_finite(parts: Sequence[GradientPart]) -> bool | None:
    """Return whether every sum of gradients of equal rows is finite; None if only summing can tell.

    A sum of n numbers of magnitude at most M is finite if n·M does not overflow, which a scan of the output gradient
    settles for all but absurd gradients: B·T numbers, each output's gradient once. A NaN or an infinity reaches a row
    unless its list is empty or holds padding alone; then None, and the exact sums decide.
    """
    # Layouts of other dims share one output, and so one gradient: it is scanned once.
    gradients = {part.grad.data_ptr(): part.grad for part in parts if part.grad.numel()}
    ends = [end.double() for grad in gradients.values() for end in torch.aminmax(grad)]
    sizes = [abs(end) for end in torch.stack(ends).tolist()] if ends else [0.0]  # asked for at once
    largest = max(sizes)
    if not all(map(math.isfinite, sizes)):
        # It may have met padding or an empty list alone, and so have reached no row.
        hidden = any(part.layout.jagged or bool((part.lookups.single == 0).any()) for part in parts)
        return None if hidden else False
    count = sum(part.lookups.values.numel() + part.lookups.single.numel() for part in parts)
    dtypes = [torch.finfo(grad.dtype).max for grad in gradients.values()]
    return True if largest * count < min(dtypes, default=math.inf) else None


def are_finite_sums(parts: Sequence[GradientPart]) -> Bool[Tensor, ""]:
    """`every_sum_is_finite` on the device, without an answer that the host has to wait for.

    The gradient of what read nothing (an empty list, a padding row) does not count. What only sums could tell, a list
    of padding alone and magnitudes near the largest number, counts as not finite.
    """
    verdict = None
    for part in parts:
        size = part.lookups.batch_size
        num_fields = len(part.layout.slots)
        if not size or not num_fields:
            continue
        low_BF, high_BF = torch.aminmax(_by_field(part), dim=-1)
        largest_BF = torch.where(_reads(part), torch.maximum(-low_BF, high_BF), 0.0)
        # Compared this way round, NaN is out of bounds.
        bounded = (largest_BF < largest_summand(part, parts)).all()  # false for NaN
        verdict = bounded if verdict is None else verdict & bounded
    return torch.ones((), dtype=torch.bool, device=parts[0].grad.device) if verdict is None else verdict


def largest_summand(part: GradientPart, parts: Sequence[GradientPart]) -> float:
    """Return the magnitude below which no sum of the gradients of all parts overflows in the dtype of this part."""
    count = sum(each.lookups.values.numel() + each.lookups.single.numel() for each in parts)
    return torch.finfo(part.grad.dtype).max / max(count, 1)


def _by_field(part: GradientPart) -> Float[Tensor, "B F D"]:
    """The gradient of each field of a layout."""
    layout = part.layout
    size = part.lookups.batch_size
    if layout.is_dense_block:
        return part.grad.view(size, len(layout.slots), layout.dim)
    return torch.stack([part.grad[:, slot.column : slot.column + layout.dim] for slot in layout.slots], dim=1)


def _reads(part: GradientPart) -> Bool[Tensor, "B F"]:
    """Mark the fields of samples that read rows that can change: the row is not padding, or the list is not empty."""
    layout = part.layout
    lookups = part.lookups
    numbers = layout.numbers_on(part.grad.device)
    size = lookups.batch_size
    found = [lookups.single[numbers.single] != 0] if layout.single else []
    if layout.jagged:
        found.append(lookups.offsets.diff().view(-1, size)[numbers.jagged] > 0)
    return torch.cat(found).t()
