"""Mean and covariance of the rows of an activation, updated batch by batch and without its rows.

Batched Welford (Chan et al. 1983), with μ_b and S_b the mean and the scatter Σ(x − μ_b)(x − μ_b)ᵀ of a batch of B rows:

    n' = n + B     d = μ_b − μ     μ' = μ + (B/n') d     S' = S + S_b + (n B / n') d dᵀ     Σ = S'/(n' − 1)

Up to `FULL_WIDTH` features S is kept whole. Above, it is a diagonal and `RANK` directions:

    S ≈ DᵀD + diag(s − diag(DᵀD))       s: the exact diagonal of S       D (r, K): its leading directions

D comes of an incremental principal component analysis: the directions so far and the centred rows of a batch, of which
the leading r are kept. Variances are exact then; covariances are those of the leading directions. A tensor of K
features takes 4 K² bytes up to the limit (256 KiB), and 4 (r + 2) K bytes above it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

FULL_WIDTH = 256
RANK = 16


class Moments:
    """Keeps the mean and the covariance of rows. See the module's docstring.

    Args:
        width: features of a row.

    Attributes:
        count: rows so far.
        mean: of each feature.
        scatter: S, where it is kept whole; else its diagonal.
        directions: D, of no rows where S is kept whole.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.is_full = width <= FULL_WIDTH
        self.count = 0
        self.mean = torch.zeros(width)
        self.scatter = torch.zeros(width, width) if self.is_full else torch.zeros(width)
        self.directions = torch.zeros(0 if self.is_full else RANK, width)

    def update(self, rows: Float[Tensor, "B K"]) -> None:
        """Take in a batch of rows, on any device."""
        num_rows = len(rows)
        if not num_rows:
            return
        rows = rows.detach().to(self.mean.device, torch.float32)
        total = self.count + num_rows
        batch_mean = rows.mean(dim=0)
        centred = rows - batch_mean
        shift = batch_mean - self.mean
        between = self.count * num_rows / total
        if self.is_full:
            self.scatter.addmm_(centred.t(), centred)
            self.scatter.addr_(shift, shift, alpha=between)
        else:
            self.scatter += centred.square().sum(dim=0) + between * shift.square()
            self.directions = _leading(torch.cat([self.directions, centred, between**0.5 * shift[None]]))
        self.mean += shift * (num_rows / total)
        self.count = total

    def covariance(self) -> Float[Tensor, "K K"]:
        """Return Σ, as far as it is kept."""
        scatter = self.scatter
        if not self.is_full:
            scatter = self.directions.t() @ self.directions + torch.diag(self._rest())
        return scatter / max(self.count - 1, 1)

    def sample(self, num_rows: int, *, generator: torch.Generator) -> Float[Tensor, "B K"]:
        """Draw rows from N(μ, Σ)."""
        scale = max(self.count - 1, 1) ** -0.5
        if self.is_full:
            # Σ of features that depend on one another is singular: its root by eigenvalues exists all the same. Of
            # correlations, because the eigenvalues of a covariance know nothing of features whose variance is below
            # FP32's resolution of the largest one.
            deviations = self.scatter.diagonal().clamp_min(0).sqrt()
            safe = torch.where(deviations > 0, deviations, 1.0)
            values, vectors = torch.linalg.eigh(self.scatter / safe / safe[:, None])
            root = vectors * values.clamp_min(0).sqrt() * deviations[:, None]
            return self.mean + scale * (torch.randn(num_rows, self.width, generator=generator) @ root.t())
        along = torch.randn(num_rows, len(self.directions), generator=generator) @ self.directions
        beside = torch.randn(num_rows, self.width, generator=generator) * self._rest().sqrt()
        return self.mean + scale * (along + beside)

    def _rest(self) -> Float[Tensor, "K"]:
        """Return the part of the diagonal that the directions do not explain."""
        return (self.scatter - self.directions.square().sum(dim=0)).clamp_min(0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors, from which `of` makes the same object."""
        count = torch.tensor(self.count, dtype=torch.int64)
        return {"count": count, "mean": self.mean, "scatter": self.scatter, "directions": self.directions}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Moments:
        """Return the moments that `tensors` described."""
        found = cls(len(tensors["mean"]))
        found.count = int(tensors["count"])
        found.mean = tensors["mean"].clone()
        found.scatter = tensors["scatter"].clone()
        found.directions = tensors["directions"].clone()
        return found


def _leading(rows: Float[Tensor, "n K"]) -> Float[Tensor, "r K"]:
    """Return r rows whose Gram matrix (K, K) is the best approximation of that of n rows of rank r."""
    # By the smaller side: n is a batch of a few hundred, K may be thousands.
    if len(rows) <= rows.shape[1]:
        _, vectors = torch.linalg.eigh(rows @ rows.t())
        return vectors[:, -RANK:].t() @ rows
    values, vectors = torch.linalg.eigh(rows.t() @ rows)
    return vectors[:, -RANK:].t() * values[-RANK:].clamp_min(0).sqrt()[:, None]
