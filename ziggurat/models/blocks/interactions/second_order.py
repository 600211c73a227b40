"""Rendle's factorization machine: the sum of all pairwise dot products, without forming them (ICDM 2010).

    Σ_{i<j} ⟨x_i, x_j⟩ = ½ Σ_d [ (Σ_i x_id)² − Σ_i x_id² ]

n·d additions and products instead of n²·d; no matrix product at all, so it counts no FLOPs (see `costs/model_cost.py`).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def sum_of_pairs(fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B 1"]:
    """Σ_{i<j} ⟨x_i, x_j⟩ of every sample, in FP32 or wider (a difference of large numbers)."""
    fields_BFD = fields_BFD.float() if fields_BFD.dtype.itemsize < 4 else fields_BFD
    squares_BD = fields_BFD.sum(dim=1).square() - fields_BFD.square().sum(dim=1)
    return 0.5 * squares_BD.sum(dim=1, keepdim=True)
