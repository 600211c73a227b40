"""Made-up networks: what messages take between ranks on hosts in racks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ziggurat.planning.rank_order.pair_times import PairTimes

HOST_MS = 0.5
RACK_MS = 8.0
CORE_MS = 40.0


def network(hosts: Sequence[int], racks: Sequence[int], *, noise: float = 0.1, seed: int = 0) -> PairTimes:
    """Times of a long message: inside a host, inside a rack, between racks; each off by a random factor."""
    generator = np.random.default_rng(seed)
    host = np.asarray(hosts)
    rack = np.asarray(racks)
    same_host = host[:, None] == host[None]
    same_rack = rack[:, None] == rack[None]
    long_ms = np.where(same_host, HOST_MS, np.where(same_rack, RACK_MS, CORE_MS))
    factors = np.triu(np.exp(generator.normal(0.0, noise, long_ms.shape)), 1)
    long_ms = long_ms * (factors + factors.T)
    return PairTimes(latency_ms=np.where(long_ms > 0, 0.1, 0.0), long_ms=long_ms)


def interleaved(size: int, *, noise: float = 0.1) -> PairTimes:
    """One rank a host, two racks, neighbouring ranks in different ones."""
    return network(range(size), [rank % 2 for rank in range(size)], noise=noise)
