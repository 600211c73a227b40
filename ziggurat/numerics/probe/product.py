"""Statistics of one dense product: its two operands, and the gradient of what it gives.

    Y = L R        ∂L = ∂Y Rᵀ        ∂R = Lᵀ ∂Y

An operand is a weight (`MatrixNormal`) or an activation, of which the vectors that the product sums over are rows
(`Moments`): rows of L, columns of R, rows of ∂Y. Operands are drawn independently of one another, and rows of one
operand too; a product of an activation with itself (X Xᵀ) is drawn as a product of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.numerics.probe.matrix_normal import MatrixNormal
from ziggurat.numerics.probe.moments import Moments

MAX_SAMPLED_ROWS = 512  # of an activation, in one drawn operand; a step has thousands

Shape = tuple[int, ...]
Operand = Moments | MatrixNormal


class Direction(StrEnum):
    """One of the three products that a dense product computes in a step."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"  # of the left operand
    WEIGHT_GRADIENT = "weight_gradient"  # of the right operand


@dataclass(kw_only=True)
class ProductStatistics:
    """Keeps the statistics of one product.

    Args:
        name: of the module; with `#2` and so on for further products of the module, in the order of a forward pass.
        left_shape: (*B, m, k), in a step of a full batch.
        right_shape: (*B, k, n).
        left: distribution of the left operand.
        right: distribution of the right operand.
        gradient: distribution of the gradient of the product.
    """

    name: str
    left_shape: Shape
    right_shape: Shape
    left: Operand
    right: Operand
    gradient: Moments = field(init=False)

    def __post_init__(self) -> None:
        # Of the columns of the product, which are those of the right operand.
        self.gradient = Moments(self.right_shape[-1])

    @classmethod
    def of(
        cls, name: str, left: Tensor, right: Tensor, *, weights: tuple[bool, bool], shapes: tuple[Shape, Shape]
    ) -> ProductStatistics:
        """Return empty statistics for operands like these.

        Args:
            name: of the product.
            left: an operand (*B, m, k).
            right: an operand (*B, k, n).
            weights: whether left and right are weights.
            shapes: of both in a step of a full batch.
        """
        return cls(
            name=name,
            left_shape=shapes[0],
            right_shape=shapes[1],
            left=_empty(left, is_weight=weights[0], width=left.shape[-1]),
            right=_empty(right, is_weight=weights[1], width=right.shape[-2]),
        )

    @property
    def shape(self) -> Shape:
        """The shape of the product."""
        batch = torch.broadcast_shapes(self.left_shape[:-2], self.right_shape[:-2])
        return (*batch, self.left_shape[-2], self.right_shape[-1])

    @property
    def is_finite(self) -> bool:
        """True if all statistics are finite, so that operands can be drawn; squares of large numbers overflow."""
        kept = [*self.left.tensors().values(), *self.right.tensors().values(), *self.gradient.tensors().values()]
        return all(bool(each.isfinite().all()) for each in kept)

    def fits(self, left: Tensor, right: Tensor) -> bool:
        """Return whether operands have the widths that the statistics are of."""
        # Distributions of activations are by the column that a product sums over, so the right operand is turned.
        return _fits(self.left, left) and _fits(self.right, right.mT if isinstance(self.right, Moments) else right)

    def update(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> None:
        """Take in the operands of one forward pass."""
        _take(self.left, left)
        _take(self.right, right.mT if isinstance(self.right, Moments) else right)

    def update_gradient(self, gradient: Float[Tensor, "*B m n"]) -> None:
        """Take in the gradient of the product."""
        _take(self.gradient, gradient)

    def shapes(self, direction: Direction) -> tuple[Shape, Shape]:
        """Return the shapes of the two matrices that a direction multiplies, in a step of a full batch."""
        if direction is Direction.FORWARD:
            return self.left_shape, self.right_shape
        if direction is Direction.INPUT_GRADIENT:
            return self.shape, _transposed(self.right_shape)
        return _transposed(self.left_shape), self.shape

    def operands(
        self, direction: Direction, *, generator: torch.Generator, index: int = 0
    ) -> tuple[Float[Tensor, "M K"], Float[Tensor, "K N"]]:
        """Draw the two matrices that a direction multiplies.

        Args:
            direction: which of the three products.
            generator: of random numbers.
            index: of the pair; of a stack of weights it says whose turn it is.
        """
        if direction is Direction.FORWARD:
            return self._left(generator, index), self._right(generator, index)
        gradient = self.gradient.sample(self._num_rows(), generator=generator)
        if direction is Direction.INPUT_GRADIENT:
            return gradient, self._right(generator, index).t()
        return self._left(generator, index).t(), gradient

    def normal_operands(
        self, direction: Direction, *, generator: torch.Generator
    ) -> tuple[Float[Tensor, "M K"], Float[Tensor, "K N"]]:
        """Draw matrices of the same shapes from N(0, 1): what a benchmark without a probe would multiply."""
        num_rows = self._num_rows()
        width, num_columns = self.right_shape[-2:]
        sizes = {
            Direction.FORWARD: (num_rows, width, num_columns),
            Direction.INPUT_GRADIENT: (num_rows, num_columns, width),
            Direction.WEIGHT_GRADIENT: (width, num_rows, num_columns),
        }
        m, k, n = sizes[direction]
        return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)

    def _num_rows(self) -> int:
        if isinstance(self.left, MatrixNormal):
            return self.left_shape[-2]
        # Errors need a sample of rows, not a full batch.
        return min(self.left_shape[-2], MAX_SAMPLED_ROWS)

    def _left(self, generator: torch.Generator, index: int) -> Float[Tensor, "m k"]:
        if isinstance(self.left, MatrixNormal):
            return _one_of(self.left.sample(generator=generator), self.left_shape, index)
        return self.left.sample(self._num_rows(), generator=generator)

    def _right(self, generator: torch.Generator, index: int) -> Float[Tensor, "k n"]:
        if isinstance(self.right, MatrixNormal):
            return _one_of(self.right.sample(generator=generator), self.right_shape, index)
        return self.right.sample(self.right_shape[-1], generator=generator).t()


def _empty(operand: Tensor, *, is_weight: bool, width: int) -> Operand:
    if not is_weight:
        return Moments(width)
    num_rows, num_columns = operand.flatten(0, -2).shape  # a stack of weights lies under one another
    return MatrixNormal(num_rows, num_columns)


def _fits(kept: Operand, operand: Tensor) -> bool:
    if isinstance(kept, Moments):
        return kept.width == operand.shape[-1]
    return kept.mean.shape == operand.flatten(0, -2).shape


def _take(kept: Operand, operand: Tensor) -> None:
    kept.update(operand.flatten(0, -2))


def _one_of(stack: Float[Tensor, "s n"], shape: Shape, index: int) -> Float[Tensor, "m n"]:
    matrices = stack.unflatten(0, (-1, shape[-2]))
    return matrices[index % len(matrices)]


def _transposed(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
