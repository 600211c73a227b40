"""Paired differences of two models on the same samples, with an error bar.

    d       = metric of one − metric of the other, on all samples
    d₋ᵦ     = the same without block β                    samples of a group (a user) are in one block
    se²     = (K − 1)/K · Σᵦ (d₋ᵦ − mean of d₋ᵦ)²         the delete-a-block jackknife, K = 20 blocks

Both models are judged on the same samples, and what is hard for one is hard for the other, so the error of their
difference is far smaller than that of either. Samples of a user resemble each other: blocks are made of whole groups,
where there are groups. Any metric of an evaluation can be compared so, GAUC and NDCG as well as AUC.

The interval is d ± 2.09·se (95 %, Student's t with 19 degrees). Reference: Efron and Tibshirani, "An introduction to
the bootstrap" (1993), chapter 11. Cost: 40 times the metrics of the split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ziggurat.features.hashing import mix
from ziggurat.training.metrics.accumulator import MetricAccumulator

_BLOCKS = 20
_T_95 = 2.093


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of a metric, and half of its 95 % interval; NaN where a block leaves it undefined."""

    value: float
    half_width: float


def paired_differences(
    first: MetricAccumulator, second: MetricAccumulator, *, units: Int64[np.ndarray, " N"]
) -> Mapping[str, Difference]:
    """Compare two models by every metric that both have.

    Args:
        first: holds the scores of one model.
        second: of the other, of the same samples in the same order.
        units: what belongs together: the group of each sample, or its number.
    """
    block_N = mix(units.astype(np.uint64)) % np.uint64(_BLOCKS)
    whole = _differences(first.compute(), second.compute())
    without = []
    for block in range(_BLOCKS):
        kept = block_N != block
        without.append(_differences(first.compute_where(kept), second.compute_where(kept)))
    found: dict[str, Difference] = {}
    for name, value in whole.items():
        values = np.array([each[name] for each in without])
        spread = math.sqrt((_BLOCKS - 1) / _BLOCKS * float(((values - values.mean()) ** 2).sum()))
        found[name] = Difference(value=value, half_width=_T_95 * spread)
    return found


def _differences(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: value - second[name] for name, value in first.items() if name in second}
