"""Types of the `ctx` that autograd hands to a function's forward and backward pass.

Torch gives it no type, and lets a function hang any attribute on it. What a function of ours leaves there for its
backward pass is declared, in a protocol of its own above the function:

    class _ScaledCtx(SavedCtx, Protocol):
        scale: float

    class _Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: _ScaledCtx, inputs: Tensor, scale: float) -> Tensor: ...

Tensors go through `save_for_backward`, which guards them against changes in place; what is no tensor is an attribute.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ctx(Protocol):
    """Ctx of a function, without what it saved."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs and outputs; a change of one in place is then an error of the backward pass."""
        ...

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Name inputs that were changed in place."""
        ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Name outputs that have no gradient."""
        ...


class SavedCtx(Ctx, Protocol):
    """Ctx of a function that saves tensors, each of which is there."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of `save_for_backward`."""
        ...
