"""Matrix-normal distribution of a weight while it trains: W ~ MN(M, U, V), vec W ~ N(vec M, V ⊗ U).

M is an exponential average of the weight; U (rows) and V (columns) are covariances around it. One flip-flop step an
observation, with Wc = W − M, momentum m:

    V + εI = L_V L_Vᵀ     Û = (1/N) (Wc L_V⁻ᵀ)(Wc L_V⁻ᵀ)ᵀ     U ← m U + (1 − m) Û, made symmetric
    U + εI = L_U L_Uᵀ     V̂ = (1/M) (L_U⁻¹ Wc)ᵀ (L_U⁻¹ Wc)     V ← m V + (1 − m) V̂, made symmetric
    s = trace(U)/M        U ← U/s     V ← s V                  only U ⊗ V is determined; the mean variance stays in V

ε is 10⁻⁶ of the mean of the diagonal. The first observation sets M, and has no spread: samples are then the weight
itself. The averages begin at U = I and V = v I, with v the mean square of the first change: few observations give an
estimate of low rank, whose inverse would be noise. A side of more than `FULL_SIDE` keeps the diagonal of its factor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

FULL_SIDE = 256
MOMENTUM = 0.95
_EPSILON = 1e-6


class MatrixNormal:
    """Keeps M, U and V of a weight. See the module's docstring.

    Args:
        num_rows: M.
        num_columns: N.

    Attributes:
        count: observations so far.
        mean: M.
        rows: U, or its diagonal.
        columns: V, or its diagonal; zeros until the weight has changed.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.count = 0
        self.mean = torch.zeros(num_rows, num_columns)
        self.rows = _identity(num_rows)
        self.columns = torch.zeros_like(_identity(num_columns))

    def update(self, weight: Float[Tensor, "M N"]) -> None:
        """Take in the weight as it is now, on any device."""
        weight = weight.detach().to(self.mean.device, torch.float32)
        self.count += 1
        if self.count == 1:
            self.mean = weight.clone()
            return
        centred = weight - self.mean
        self.mean.lerp_(weight, 1 - MOMENTUM)
        if not bool(centred.any()):
            return
        num_rows, num_columns = centred.shape
        columns = self.columns
        if not bool(columns.any()):
            columns = centred.square().mean() * _identity(num_columns)
        by_rows = _whitened(centred.t(), columns) / num_columns**0.5
        rows = self.rows.lerp(_second_moment(by_rows, like=self.rows), 1 - MOMENTUM)
        by_columns = _whitened(centred, rows) / num_rows**0.5
        columns = columns.lerp(_second_moment(by_columns, like=columns), 1 - MOMENTUM)
        scale = _diagonal(rows).mean()
        self.rows = rows / scale
        self.columns = columns * scale

    def sample(self, *, generator: torch.Generator) -> Float[Tensor, "M N"]:
        """Draw a weight: M + L_U Z L_Vᵀ."""
        noise = torch.randn(self.mean.shape, generator=generator)
        return self.mean + _times_root(_times_root(noise, self.rows).t(), self.columns).t()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors, from which `of` makes the same object."""
        count = torch.tensor(self.count, dtype=torch.int64)
        return {"count": count, "mean": self.mean, "rows": self.rows, "columns": self.columns}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MatrixNormal:
        """Return the distribution that `tensors` described."""
        found = cls(*tensors["mean"].shape)
        found.count = int(tensors["count"])
        found.mean = tensors["mean"].clone()
        found.rows = tensors["rows"].clone()
        found.columns = tensors["columns"].clone()
        return found


def _identity(side: int) -> Tensor:
    return torch.eye(side) if side <= FULL_SIDE else torch.ones(side)


def _diagonal(factor: Tensor) -> Float[Tensor, "n"]:
    return factor if factor.dim() == 1 else factor.diagonal()


def _root(factor: Tensor) -> Tensor:
    """Return L with L Lᵀ = factor + εI; of a diagonal its square root."""
    epsilon = _EPSILON * _diagonal(factor).mean()
    if factor.dim() == 1:
        return (factor + epsilon).sqrt()
    root, failed = torch.linalg.cholesky_ex(factor + epsilon * torch.eye(len(factor)))
    if not bool(failed):
        return root
    # Rounding made it indefinite. By eigenvalues factor = B Bᵀ; with Bᵀ = QR that is RᵀR, and Rᵀ is triangular.
    values, vectors = torch.linalg.eigh(factor)
    upper = torch.linalg.qr((vectors * (values.clamp_min(0) + epsilon).sqrt()).t()).R
    return upper.t()


def _whitened(matrix: Float[Tensor, "n k"], factor: Tensor) -> Float[Tensor, "n k"]:
    """Return L⁻¹ of a factor (n, n) times a matrix."""
    root = _root(factor)
    if root.dim() == 1:
        return matrix / root[:, None]
    return torch.linalg.solve_triangular(root, matrix, upper=False)


def _times_root(matrix: Float[Tensor, "n k"], factor: Tensor) -> Float[Tensor, "n k"]:
    """Return L of a factor (n, n) times a matrix."""
    if not bool(factor.any()):
        return torch.zeros_like(matrix)
    root = _root(factor)
    return matrix * root[:, None] if root.dim() == 1 else root @ matrix


def _second_moment(matrix: Float[Tensor, "k n"], *, like: Tensor) -> Tensor:
    """Return AᵀA, which is symmetric, or its diagonal."""
    if like.dim() == 1:
        return matrix.square().sum(dim=0)
    product = matrix.t() @ matrix
    return (product + product.t()) / 2
