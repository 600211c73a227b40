"""Estimate how far a metric may lie from its true value by chance: the delete-a-block jackknife.

    m₋ᵦ     = the metric without block β                  samples of a group (a user) are in one block
    se²     = (K − 1)/K · Σᵦ (m₋ᵦ − mean of m₋ᵦ)²         K blocks
    m ± t·se                                              95 %, Student's t with K − 1 degrees: 2.09 for 20 blocks

It needs no formula for the metric, so AUC, GAUC, NDCG and differences of two models all have their error. Samples of a
user resemble each other: blocks are made of whole groups, where there are groups.

With K blocks se itself is off by about 1/√(2(K − 1)), 16 % for 20 and 7 % for 100: so one metric of few samples, which
costs little, takes more of them (`blocks_for`).

Reference: Efron and Tibshirani, "An introduction to the bootstrap" (1993), chapter 11. Cost: the metric K times.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int64, UInt64

from ziggurat.features.hashing import mix

BLOCKS = 20
_MAX_BLOCKS = 100
_MIN_UNITS = 20  # of a block, beyond the first BLOCKS of them
_MAX_WORK = 5_000_000  # samples that one metric is computed of in all its blocks, beyond the first BLOCKS of them


def blocks_for(units: Int64[np.ndarray, " N"]) -> int:
    """Return how many blocks samples are worth where one metric is computed: 20 to 100.

    Args:
        units: as in `blocks_of`.
    """
    most = min(_MAX_BLOCKS, _MAX_WORK // max(len(units), 1))
    if most <= BLOCKS:
        return BLOCKS
    return max(BLOCKS, min(most, len(np.unique(units)) // _MIN_UNITS))


def blocks_of(units: Int64[np.ndarray, " N"], *, num: int = BLOCKS) -> UInt64[np.ndarray, " N"]:
    """Return the block of each sample.

    Args:
        units: what belongs together: the group of each sample, or its number.
        num: how many blocks there are.
    """
    return mix(units.astype(np.uint64)) % np.uint64(num)


def half_width(without_B: Float[np.ndarray, " B"]) -> float:
    """Return half of the 95 % interval; NaN where a block leaves the metric undefined.

    Args:
        without_B: the metric without each block.
    """
    degrees = len(without_B) - 1
    spread = math.sqrt(degrees / (degrees + 1) * float(((without_B - without_B.mean()) ** 2).sum()))
    # Student's t, its 97.5 % quantile, to three digits from 19 degrees on (Abramowitz and Stegun, 26.7.5).
    quantile = 1.95996 + 2.3722 / degrees + 2.8225 / degrees**2
    return quantile * spread
