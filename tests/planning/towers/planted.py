"""Interactions with groups planted in them, and plain features to go with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.planning.towers.affinity import InteractionSums
from ziggurat.planning.towers.items import FeatureLoad


def features_of(num_features: int, *, num_bytes: int = 4) -> list[FeatureLoad]:
    return [FeatureLoad(name=f"f{i}", table=f"t{i}", table_bytes=num_bytes) for i in range(num_features)]


def planted_interactions(
    num_features: int, num_groups: int, *, dim: int, noise: float, seed: int, num_samples: int = 256
) -> tuple[Tensor, frozenset[frozenset[str]]]:
    """Embeddings that share a random direction (of either sign) within a group, plus noise; shuffled.

    Returns the interactions that a stream of them gives, and the groups.
    """
    generator = torch.Generator().manual_seed(seed)
    group_F = torch.arange(num_features)[torch.randperm(num_features, generator=generator)] % num_groups
    directions, _ = torch.linalg.qr(torch.randn(dim, num_groups, generator=generator))
    sums = InteractionSums(num_features)
    for _ in range(2):
        signs = torch.randint(0, 2, (num_samples // 2, num_features, 1), generator=generator) * 2 - 1
        noise_BFD = noise * dim**-0.5 * torch.randn(num_samples // 2, num_features, dim, generator=generator)
        sums.add(directions.T[group_F] * signs + noise_BFD)
    groups = frozenset(
        frozenset(f"f{i}" for i in range(num_features) if group_F[i] == group) for group in range(num_groups)
    )
    return sums.matrix, groups
