"""Clustered vectors, queries like them, and filters: the data of `ziggurat bench retrieval`.

64 centres, 64 smaller centres around each; sizes fall as rank^−0.5. Noise has the spectrum i^−0.5 in a random rotation
and is larger than the distance between centres, so that a search must look into a dozen of a thousand clusters for a
recall of 0.95; everything has length one and the metric is the inner product. Queries are drawn as the vectors are.
"""

from __future__ import annotations

import numpy as np

_CENTRES = 64
_CHUNK = 1_000_000  # vectors that are drawn at a time


def make_vectors(num: int, dim: int, *, num_queries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and queries, FP32."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((_CENTRES, 1, dim)) / np.sqrt(dim)
    small = (centres + 0.7 * draw.standard_normal((_CENTRES, _CENTRES, dim)) / np.sqrt(dim)).reshape(-1, dim)
    weights = draw.permutation(np.arange(1, len(small) + 1) ** -0.5)
    weights /= weights.sum()
    spectrum = np.arange(1, dim + 1) ** -0.5
    spectrum /= np.sqrt((spectrum**2).sum())
    rotation = np.linalg.qr(draw.standard_normal((dim, dim)))[0].astype(np.float32)

    def some(count: int) -> np.ndarray:
        vectors = np.empty((count, dim), np.float32)
        for begin in range(0, count, _CHUNK):
            own = vectors[begin : begin + _CHUNK]
            chosen = draw.choice(len(small), len(own), p=weights)
            noise = (draw.standard_normal(own.shape, dtype=np.float32) * spectrum.astype(np.float32)) @ rotation
            own[:] = small[chosen].astype(np.float32) + 1.45 * noise
            own /= np.linalg.norm(own, axis=1, keepdims=True)
        return vectors

    return some(num), some(num_queries)


def make_filters(num: int, *, share: float, count: int, seed: int = 1) -> np.ndarray:
    """Which items pass, for `count` filters: random, independent of the vectors."""
    draw, passes = np.random.default_rng(seed), np.empty((count, num), bool)
    for own in passes:
        own[:] = draw.random(num) < share
    return passes


def make_near_filters(vectors: np.ndarray, *, share: float, count: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Filters that let the items nearest to an item of theirs pass, and these `count` items."""
    centres = vectors[np.random.default_rng(seed).choice(len(vectors), count, replace=False)]
    passes = np.empty((count, len(vectors)), bool)
    for own, centre in zip(passes, centres, strict=True):
        scores = vectors @ centre
        own[:] = scores >= np.partition(scores, -max(1, int(share * len(scores))))[-max(1, int(share * len(scores)))]
    return passes, centres
