"""CostModel: what a plan costs, in a form that a search can evaluate a hundred thousand times a second.

Looking up several tables in one kernel costs less than the sum of looking up each (about half, for ten tables on one
GPU: systems such as NeuroShard measure 0.51), and an exchange waits for the slowest device. A cost model may know both,
as long as it has this form:

    shard  ──encode──►  (H,)                 once for each shard that ever occurs
    device  =  Σ of the encodings of its shards          (H,)       a move is two vector additions
    device  ──local──►  (K,)                 what depends on this device alone: kernel ms, columns sent, bytes …
    all devices ──exchange──►  (P,) ms       what depends on everybody: all-to-all, skew of starting times

    cost of a plan = max over devices

Set models fit it (Deep Sets, Zaheer et al. 2017; NeuroShard, Zha et al., arXiv 2305.01868, equation 1), and so does
every additive formula (encode = the milliseconds and bytes of the shard). A search caches encodings, recomputes `local`
only for the devices that a candidate changes, and evaluates candidates in batches of N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32

from ziggurat.planning.problem import ShardProfile


class CostModel(Protocol):
    """The prices of plans, asked by every search. A device without shards has the state 0."""

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S H"]:
        """One vector a shard; the state of a device is their sum."""
        ...

    def local(self, states: Float32[np.ndarray, "M H"]) -> Float32[np.ndarray, "M K"]:
        """Return terms of one device alone, for M devices of any plans; first the milliseconds of its own work."""
        ...

    def exchange(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, "N P"]:
        """Milliseconds of every device in N plans: its own work, and what it waits for."""
        ...


@runtime_checkable
class EstimatingCostModel(CostModel, Protocol):
    """A cost model whose exchange is expensive, with a cheap guess of it: a search prices only what looks promising."""

    def estimate(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, " N"]:
        """About the cost of N plans, up to a constant; used to choose candidates, never to compare results."""
        ...


def device_costs(cost_model: CostModel, states: Float[np.ndarray, "N P H"]) -> Float32[np.ndarray, "N P"]:
    """Milliseconds of every device in N plans, from the devices' states."""
    num, devices, width = states.shape
    local = cost_model.local(np.asarray(states, dtype=np.float32).reshape(num * devices, width))
    return cost_model.exchange(local.reshape(num, devices, -1))
