"""AdditiveCostModel: the simplest prices there are, under which the best plan can be computed and a search held to it.

Every shard has a price, and a device costs their sum; nothing is saved by looking up tables together, and no exchange
is waited for. `analytic.py` and `learned.py` price a real machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from ziggurat.planning.problem import ShardProfile


@dataclass(frozen=True, kw_only=True)
class AdditiveCostModel:
    """The simplest cost model: every shard has a price, and devices add them up.

        ms = lookups · columns · ms_per_number  +  columns · ms_per_column  +  ms_per_shard

    Args:
        ms_per_number: of reading one number for each sample of the batch.
        ms_per_column: of sending one column of each sample there and back.
        ms_per_shard: of a shard that does nothing else.
    """

    ms_per_number: float = 0.002
    ms_per_column: float = 0.02
    ms_per_shard: float = 0.05

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S 1"]:
        """The price of each shard."""
        prices = [
            shard.pooling_factor * shard.dim * self.ms_per_number + shard.dim * self.ms_per_column + self.ms_per_shard
            for shard in shards
        ]
        return np.array(prices, dtype=np.float32)[:, None]

    def local(self, states: Float32[np.ndarray, "M 1"]) -> Float32[np.ndarray, "M 1"]:
        """The sum of the prices."""
        return states

    def exchange(self, local: Float32[np.ndarray, "N P 1"]) -> Float32[np.ndarray, "N P"]:
        """The sum of the prices."""
        return local[..., 0]
