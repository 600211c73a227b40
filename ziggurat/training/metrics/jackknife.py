"""Estimate how far a metric may lie from its true value by chance: the delete-a-block jackknife.

    m₋ᵦ     = the metric without block β                  samples of a group (a user) are in one block
    se²     = (K − 1)/K · Σᵦ (m₋ᵦ − mean of m₋ᵦ)²         K = 20 blocks
    m ± 2.09·se                                           95 %, Student's t with 19 degrees

It needs no formula for the metric, so AUC, GAUC, NDCG and differences of two models all have their error. Samples of a
user resemble each other: blocks are made of whole groups, where there are groups.

Reference: Efron and Tibshirani, "An introduction to the bootstrap" (1993), chapter 11. Cost: the metric 20 times.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int64, UInt64

from ziggurat.features.hashing import mix

BLOCKS = 20
_T_95 = 2.093  # Student's t: the 97.5 % quantile at BLOCKS - 1 degrees


def blocks_of(units: Int64[np.ndarray, " N"]) -> UInt64[np.ndarray, " N"]:
    """Return the block of each sample.

    Args:
        units: what belongs together: the group of each sample, or its number.
    """
    return mix(units.astype(np.uint64)) % np.uint64(BLOCKS)


def half_width(without_B: Float[np.ndarray, " B"]) -> float:
    """Return half of the 95 % interval; NaN where a block leaves the metric undefined.

    Args:
        without_B: the metric without each block.
    """
    spread = math.sqrt((BLOCKS - 1) / BLOCKS * float(((without_B - without_B.mean()) ** 2).sum()))
    return _T_95 * spread
