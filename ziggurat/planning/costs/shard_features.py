"""What a learned cost model sees of a shard: sizes on a log scale, work per batch, and how often rows come again.

NeuroShard's 20 features (Zha et al., arXiv 2305.01868, section 3.2: reuse histogram, columns, pooling factor, rows),
and what follows from them and decides the time on a processor: how many rows are read, how many *distinct* rows are
sorted out and updated, and how many bytes they are, since caches care about distinct bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int

from ziggurat.planning.costs.probe_tables import NUM_REUSE_BINS
from ziggurat.planning.problem import ShardProfile

# The middle of 1, 2, 3–4, 5–8, … occurrences.
_OCCURRENCES = np.array([1.0, 2.0] + [0.75 * 2.0**k for k in range(2, NUM_REUSE_BINS)])
NUM_WORK = 6  # the first features: amounts of work, to which a cost is about proportional
NUM_CLASSES = 8
NUM_FEATURES = NUM_WORK + 7 + NUM_REUSE_BINS


def distinct_rows(*, lookups: float, num_rows: int, reuse: Sequence[float]) -> float:
    """Distinct rows that `lookups` lookups read."""
    shares = np.asarray(reuse)
    if lookups <= 0 or shares.sum() <= 0:
        return 0.0
    mean = float((shares * _OCCURRENCES).sum() / shares.sum())
    return float(min(lookups / mean, num_rows, lookups))


def shard_features(
    shards: Sequence[ShardProfile], *, num_samples: int, default_reuse: Sequence[float]
) -> Float32[np.ndarray, "S F"]:
    """Features of shards, one row each, for a single feature of the table (see `multiplicity`).

    The first six are amounts of work, in units that make them about 1: the lookup itself, rows read, numbers read,
    distinct rows, their numbers, numbers of the result.

    Args:
        shards: to describe.
        num_samples: of all ranks together.
        default_reuse: for tables that do not know theirs.
    """
    features = np.empty((len(shards), NUM_FEATURES), dtype=np.float32)
    for index, shard in enumerate(shards):
        table = shard.table
        reuse = table.reuse or tuple(default_reuse)
        lookups = num_samples * shard.pooling_factor / max(table.num_features, 1)
        distinct = distinct_rows(lookups=lookups, num_rows=shard.num_rows, reuse=reuse)
        single = table.pooling_factor == table.num_features and not shard.placement.cuts_rows
        features[index, :NUM_WORK] = (
            0.01,
            lookups / 1e5,
            lookups * shard.dim / 1e6,
            distinct / 1e5,
            distinct * shard.dim / 1e6,
            num_samples * shard.dim / 1e6,
        )
        features[index, NUM_WORK : NUM_WORK + 7] = (
            np.log1p(shard.num_rows),
            np.log(shard.dim),
            np.log1p(lookups),
            np.log1p(distinct),
            np.log1p(distinct * shard.dim),
            np.log1p(shard.num_rows * shard.dim),
            float(single),
        )
        features[index, NUM_WORK + 7 :] = reuse
    return features


def width_class(dims: Int[np.ndarray, "S"]) -> Int[np.ndarray, "S"]:
    """Return the class of tables that one kernel call looks up: those of equal columns; 8 classes, by powers of two."""
    # 4 columns are class 0.
    return np.clip(np.round(np.log2(np.maximum(dims, 1))) - 2, 0, NUM_CLASSES - 1).astype(np.int64)


def call_sizes(features: Float32[np.ndarray, "S F"]) -> Float32[np.ndarray, "S 2"]:
    """Return the sizes that decide how a call's cost grows: rows to sort (1e5), distinct numbers to update (1e6)."""
    return features[:, [1, 4]]


def multiplicity(shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S"]:
    """Count the features that look each shard up: each is one lookup of the described kind."""
    return np.array([max(shard.table.num_features, 1) for shard in shards], dtype=np.float32)
