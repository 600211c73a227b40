"""Arithmetic: how the dense products of a model are computed.

    linear    x Wᵀ + b            MLPs, crosses, heads, projections, gates, recurrences
    matmul    A B, batched        products between fields, maps of one field each

A module computes its products through `self.arithmetic` (`products.py`). `NATIVE` stands for torch's own operations in
the dtype of weights or of autocast, and for the fused kernels that compute the same. Any other arithmetic replaces
these products one by one, forward and backward; weights and optimizer state stay FP32.

`RoundedArithmetic` is the form that most number formats share: operands are rounded to the format along the dim over
which a product sums, multiplied, and the sum is kept in FP32. Backward has two more products with the same rule:

    Y = q(X) q(W)        ∂X = q(∂Y) q(W)ᵀ        ∂W = q(X)ᵀ q(∂Y)

Each q rounds along the dim that its own product sums over, so a format whose numbers share a scale in blocks rounds
X and W differently forward and backward. It is one `ArithmeticByDirection`: these three products stand once, in
`_Product`, and an arithmetic says how each is multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ziggurat.errors import ConfigError
from ziggurat.numerics.probe import Direction
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.specification import answer_of


class Arithmetic(ABC):
    """Computes the dense products of modules, forward and backward. See the module's docstring.

    Attributes:
        name: what reports and error messages call it.
        is_native: fused kernels, which compute products in torch's own way, may stand in for this arithmetic.
        holds_weight: `linear` multiplies by a weight of its own, whatever weight of the module it is given.
    """

    name: str
    is_native: ClassVar[bool] = False
    holds_weight: bool = False

    @abstractmethod
    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply matrices; leading dims are broadcast."""

    def linear(
        self, inputs: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
    ) -> Float[Tensor, "*B o"]:
        """Compute x Wᵀ + b."""
        # Leading dims together: one matrix, as `F.linear` multiplies it.
        outputs = self.matmul(inputs.flatten(0, -2), weight.t()).unflatten(0, inputs.shape[:-1])
        return outputs if bias is None else outputs + bias.to(outputs.dtype)

    def relu_chain(
        self, following: Sequence[Arithmetic], *, relu_last: bool
    ) -> Callable[[Float[Tensor, "B i"]], Float[Tensor, "B o"] | None] | None:
        """Return what computes `linear` of this arithmetic and of those that follow at once, with ReLU in between.

        It gives the bits of the layers one after the other, or None for an input that it does not take. None instead
        of it: each layer is asked alone.

        Args:
            following: of the layers that follow.
            relu_last: whether ReLU follows the last layer, too.
        """
        return None

    def of_module(self, name: str) -> Arithmetic:
        """Return this arithmetic for one module, whose name its messages then have; mostly the arithmetic itself.

        Args:
            name: of the module in its model; "" for what all modules share.
        """
        return self

    def take_overflow(self) -> str:
        """Return which operand was no number of this arithmetic since the last call, for messages; "" for none."""
        return ""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # It is a setting and no state: the copy of a model computes as the model does, and says so.
        return self

    def __repr__(self) -> str:
        return f"<arithmetic {self.name}>"


class NativeArithmetic(Arithmetic):
    """Multiplies by torch's operations, in the dtype of the operands or of autocast."""

    name = "native"
    is_native = True

    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply matrices; leading dims are broadcast."""
        return torch.matmul(left, right)

    def linear(
        self, inputs: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
    ) -> Float[Tensor, "*B o"]:
        """Compute x Wᵀ + b."""
        return F.linear(inputs, weight, bias)


NATIVE = NativeArithmetic()


class ArithmeticByDirection(Arithmetic):
    """Computes the forward product and both products of the backward pass each in a way of its own."""

    @abstractmethod
    def multiply(
        self,
        direction: Direction,
        left: Float[Tensor, "*B m k"],
        right: Float[Tensor, "*B k n"],
        *,
        dtype: torch.dtype,
    ) -> Float[Tensor, "*B m n"]:
        """Multiply the matrices of a direction.

        Args:
            direction: which of the three products.
            left: operand.
            right: operand; leading dims are broadcast.
            dtype: of the result.
        """

    def prepared(self, operand: Tensor, first: Direction, second: Direction) -> Tensor:
        """Return an operand in the form that `multiply` makes of it in two directions, so that it is made once."""
        return operand

    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply matrices; leading dims are broadcast."""
        return self.product(left, right, dtype=left.dtype)

    def product(self, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply by `multiply`, forward and backward; the result has a dtype, and gradients that of their operand."""
        return _Product.apply(left, right, self, dtype)


class RoundedArithmetic(ArithmeticByDirection):
    """Rounds the operands of each product, forward and backward, and sums in the dtype of the operands."""

    @abstractmethod
    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        """Return an operand as the format holds it, in its own dtype.

        Args:
            operand: of a product.
            dim: over which the product sums, -1 or -2.
        """

    def multiply(self, direction: Direction, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply rounded matrices, in the dtype that they have or autocast says; leading dims are broadcast."""
        # Rounded as it lies in memory: code from outside sees operands, and never a transposed one.
        if direction is Direction.INPUT_GRADIENT:
            return torch.matmul(_rounded(self, left, dim=-1), _rounded(self, right.mT, dim=-1).mT)
        if direction is Direction.WEIGHT_GRADIENT:
            return torch.matmul(_rounded(self, left.mT, dim=-2).mT, _rounded(self, right, dim=-2))
        return torch.matmul(_rounded(self, left, dim=-1), _rounded(self, right, dim=-2))


class _ProductCtx(SavedCtx, Protocol):
    arithmetic: ArithmeticByDirection
    dtypes: tuple[torch.dtype, torch.dtype]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ProductCtx, left: Tensor, right: Tensor, arithmetic: ArithmeticByDirection, dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes = (left.dtype, right.dtype)
        # Both products that read an operand may share its converted form, which is then also what is kept.
        left = arithmetic.prepared(left, Direction.FORWARD, Direction.WEIGHT_GRADIENT)
        right = arithmetic.prepared(right, Direction.FORWARD, Direction.INPUT_GRADIENT)
        ctx.save_for_backward(left, right)
        ctx.arithmetic = arithmetic
        return arithmetic.multiply(Direction.FORWARD, left, right, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ProductCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        left, right = ctx.saved_tensors
        multiply = ctx.arithmetic.multiply
        gradient = ctx.arithmetic.prepared(gradient, Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT)
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            product = multiply(Direction.INPUT_GRADIENT, gradient, right.mT, dtype=ctx.dtypes[0])
            of_left = product.sum_to_size(left.shape)  # a matrix that was broadcast has the sum of all its gradients
        if ctx.needs_input_grad[1]:
            product = multiply(Direction.WEIGHT_GRADIENT, left.mT, gradient, dtype=ctx.dtypes[1])
            of_right = product.sum_to_size(right.shape)
        return of_left, of_right, None, None


def _rounded(arithmetic: RoundedArithmetic, operand: Tensor, *, dim: int) -> Tensor:
    """Round an operand, and look at the answer of code from outside the package.

    Raises:
        ConfigError: `rounded` failed, changed its operand, or returned another shape or dtype.
    """
    kind = type(arithmetic)
    # What is compiled was tried eagerly when the model was converted, and has no place for these questions.
    if kind.__module__.startswith("ziggurat.") or torch.compiler.is_compiling():
        return arithmetic.rounded(operand, dim=dim)
    where = f"arithmetic {arithmetic.name!r}, {kind.__module__}.{kind.__qualname__}.rounded"
    expected = f"the rounded operand, {_shown(operand)} as it was given, in a tensor of its own"
    # Tensors of inference mode have no version counter.
    version = 0 if operand.is_inference() else operand._version
    found: object = answer_of(lambda: arithmetic.rounded(operand, dim=dim), expected=expected, where=where)
    problem = ""
    if not isinstance(found, Tensor):
        problem = type(found).__name__
    elif found.shape != operand.shape or found.dtype != operand.dtype or found.device != operand.device:
        problem = _shown(found)
    elif not operand.is_inference() and operand._version != version:
        problem = "the operand itself, changed in place: a weight of the model, or what another product reads"
    if problem or not isinstance(found, Tensor):
        raise ConfigError(
            expected=expected,
            found=problem,
            where=where,
            ways_out=(
                "return the operand's own shape and dtype for every operand, along either dim, and change no operand: "
                "end with .to(operand.dtype), and use torch.round(x) in place of x.round_()",
                "precision fp32, which rounds nothing",
            ),
        )
    return found


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
