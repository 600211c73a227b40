"""Rendle's factorization machine: the sum of all pairwise dot products, without forming them (ICDM 2010).

    Σ_{i<j} ⟨x_i, x_j⟩ = ½ Σ_d [ (Σ_i x_id)² − Σ_i x_id² ]

n·d additions and products instead of n²·d; no matrix product at all, so it counts no FLOPs (see `costs/model_cost.py`).

The sum has n(n−1)/2·d products. Of fields whose numbers have the standard deviation s it has one of s²·√(n(n−1)/2·d):
with 30 columns of numbers that start as a linear layer does (s = 0.58, d = 16) a logit starts at ±28, far outside of
what labels are. So the weights of numbers start smaller where fields are many (`largest_start`); the formula stays.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

_STARTING_STD = 0.3  # of the sum, where the deviation of a label, or a logit, is about 1


def sum_of_pairs(fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B 1"]:
    """Σ_{i<j} ⟨x_i, x_j⟩ of every sample, in FP32 or wider (a difference of large numbers)."""
    fields_BFD = fields_BFD.float() if fields_BFD.dtype.itemsize < 4 else fields_BFD
    squares_BD = fields_BFD.sum(dim=1).square() - fields_BFD.square().sum(dim=1)
    return 0.5 * squares_BD.sum(dim=1, keepdim=True)


def largest_start(num_fields: int, *, dim: int) -> float:
    """Return the standard deviation of the numbers of fields with which the sum of their pairs has one of 0.3.

    Args:
        num_fields: n.
        dim: d.
    """
    num_products = max(1, num_fields * (num_fields - 1) // 2 * dim)
    return math.sqrt(_STARTING_STD / math.sqrt(num_products))
