"""Judge: what a plan costs, in a form that a search can evaluate a hundred thousand times a second.

Looking up several tables in one kernel costs less than the sum of looking up each (about half, for ten tables on one
GPU: systems such as NeuroShard measure 0.51), and an exchange waits for the slowest device. A judge may know both, as
long as it has this form:

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
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32

from ziggurat.planning.problem import ShardProfile


class Judge(Protocol):
    """Prices of plans. A device without shards has the state 0."""

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S H"]:
        """One vector a shard; the state of a device is their sum."""
        ...

    def local(self, states: Float32[np.ndarray, "M H"]) -> Float32[np.ndarray, "M K"]:
        """What depends on one device alone, for M devices of any plans; first the milliseconds of its own work."""
        ...

    def exchange(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, "N P"]:
        """Milliseconds of every device in N plans: its own work, and what it waits for."""
        ...


@runtime_checkable
class EstimatingJudge(Judge, Protocol):
    """A judge whose exchange is expensive, with a cheap guess of it: a search prices only what looks promising."""

    def estimate(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, " N"]:
        """About the cost of N plans, up to a constant; used to choose candidates, never to compare results."""
        ...


@dataclass(frozen=True, kw_only=True)
class NetworkForm:
    """Prices as dense layers with ReLU between them, which a compiled search can evaluate by itself.

        local ms     = layers(relu(state[:W] + bias))              of each device
        sums         = state[sum_place], rounded                   of each device
        start        = local ms + together(sums of the group)
        device's ms  = start + apart(sums of the group, start − first start of the group)

    A group is the whole plan, or else G neighbours in the order of their sums. The cost is that of the most expensive
    device, as always. Layers are pairs of (in, out) weights and (out,) biases, in float32.

    Args:
        bias: (W,) of the first numbers of a state.
        local: from (W,) to (1,) ms.
        sum_place: place of the sum in the state.
        together: from (G,) to (G,) ms.
        apart: from (2 G,) to (G,) ms.
    """

    bias: Float32[np.ndarray, " W"]
    local: Sequence[tuple[np.ndarray, np.ndarray]]
    sum_place: int
    together: Sequence[tuple[np.ndarray, np.ndarray]]
    apart: Sequence[tuple[np.ndarray, np.ndarray]]

    @property
    def group(self) -> int:
        """G, devices that the exchange networks see."""
        return int(self.together[-1][1].size)


@runtime_checkable
class NetworkJudge(Judge, Protocol):
    """A judge that consists of small networks, and hands them out: the search then runs as compiled code."""

    def networks(self) -> NetworkForm:
        """The networks, which give the same prices as `local` and `exchange`."""
        ...


def device_costs(judge: Judge, states: Float[np.ndarray, "N P H"]) -> Float32[np.ndarray, "N P"]:
    """Milliseconds of every device in N plans, from the devices' states."""
    num, devices, width = states.shape
    local = judge.local(np.asarray(states, dtype=np.float32).reshape(num * devices, width))
    return judge.exchange(local.reshape(num, devices, -1))
