"""k-means of a million vectors in seconds: groups first, clusters inside groups, then nearest clusters of near groups.

    vectors ──► √C groups ──► each group's own k-means, its share of the C clusters ──► every vector among the clusters
                                                                                     of its 8 nearest groups

Plain k-means compares every vector with all C centroids: for a million vectors of 64 numbers and 4,096 clusters half a
teraFLOP for one round. Here a vector meets the √C centres of groups and the clusters of eight groups, an eighth of the
work, and the first rounds, inside groups, cost next to nothing; while centres still move, four groups do.
On the data of `ziggurat bench retrieval` the clusters
are as good: as many rows must be scanned for a recall of 0.95 as with plain k-means (docs/experiments).

Everything follows from the seed. A cluster that no vector is near takes half of the largest one; one that is empty in
the end is left out, so there may be fewer clusters than were asked for. Distances are squared
Euclidean ones: |c|²/2 − x·c, one matrix product for a block of vectors.

Reference: Lloyd, "Least squares quantization in PCM", 1982; two levels: Nistér and Stewénius, "Scalable recognition
with a vocabulary tree", 2006.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_BLOCK = 16_384  # vectors that are compared at a time
_GROUP_SAMPLE = 256  # vectors a group that its centre is found with
_CLUSTER_SAMPLE = 48  # vectors a cluster, likewise
_ROUNDS = 8
_NEAR_GROUPS = 8  # whose clusters a vector is compared with at last
_FEW_GROUPS = 4  # likewise, while the centres still move


class Clusters(NamedTuple):
    """Centres, and the cluster of every vector.

    Args:
        centroids: mean of the vectors of each cluster.
        labels: number of the cluster of each vector.
    """

    centroids: Float[Tensor, "C D"]
    labels: Int64[Tensor, "N"]


def cluster(vectors: Float[Tensor, "N D"], *, num_clusters: int, seed: int = 0) -> Clusters:
    """Divide vectors into clusters of near ones; the same seed gives the same clusters.

    Args:
        vectors: finite FP32 numbers.
        num_clusters: how many at most; no more than there are vectors.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    num_groups = min(num_clusters, round(math.sqrt(num_clusters)))
    # The nearest groups would be half of all: comparing with every centre costs little more, and is exact.
    if num_groups <= 2 * _NEAR_GROUPS:
        sample = _sample(vectors, num_clusters * _CLUSTER_SAMPLE, generator)
        centroids = _means(sample, num_clusters, generator)
        return _without_empty(vectors, _nearest(vectors, centroids), num_clusters)
    groups = _means(_sample(vectors, num_groups * _GROUP_SAMPLE, generator), num_groups, generator)
    centroids, group_of = _split_groups(vectors, groups, num_clusters, generator)
    sample = _sample(vectors, num_clusters * _CLUSTER_SAMPLE, generator)
    for _ in range(2):
        centroids = _update(sample, _nearest_of_near_groups(sample, centroids, group_of, near=_FEW_GROUPS), centroids)
    return _without_empty(
        vectors, _nearest_of_near_groups(vectors, centroids, group_of, near=_NEAR_GROUPS), num_clusters
    )


def spreads(
    vectors: Float[Tensor, "N D"], centroids: Float[Tensor, "C D"], labels: Int64[Tensor, "N"]
) -> Float[Tensor, "C"]:
    """Compute the root of the mean squared distance to the mean, a number, for each cluster."""
    sums = torch.zeros(len(centroids), dtype=torch.float64)
    for part, own in zip(vectors.split(_BLOCK), labels.split(_BLOCK), strict=True):
        sums.index_add_(0, own, (part - centroids[own]).square().sum(1).double())
    sizes = torch.bincount(labels, minlength=len(centroids)) * vectors.shape[1]
    return (sums / sizes).sqrt().float()


def _without_empty(vectors: Tensor, labels: Tensor, num_clusters: int) -> Clusters:
    """Means of the clusters that have vectors, which are numbered again."""
    sizes = torch.bincount(labels, minlength=num_clusters)
    has_some = sizes > 0
    labels = (has_some.cumsum(0) - 1)[labels]
    sums = torch.zeros(int(has_some.sum()), vectors.shape[1]).index_add_(0, labels, vectors)
    return Clusters(sums / sizes[has_some].unsqueeze(1), labels)


def _sample(vectors: Tensor, size: int, generator: torch.Generator) -> Tensor:
    if size >= len(vectors):
        return vectors
    return vectors[torch.randperm(len(vectors), generator=generator)[:size].sort().values]


def _means(vectors: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Plain k-means: centres of `num` clusters."""
    centroids = vectors[torch.randperm(len(vectors), generator=generator)[:num]].clone()
    for _ in range(_ROUNDS):
        centroids = _update(vectors, _nearest(vectors, centroids), centroids)
    return centroids


def _nearest(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Number of the nearest centre of each vector; the first of equally near ones."""
    halves = -0.5 * centroids.square().sum(dim=1)
    turned = centroids.t().contiguous()
    # Two million products at a time (8 MiB in FP32), however many centres there are.
    block = max(256, min(_BLOCK, 2**21 // max(1, len(centroids))))
    parts = [torch.addmm(halves, part, turned).argmax(dim=1) for part in vectors.split(block)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _update(vectors: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Means of the vectors of each cluster; an empty cluster moves beside a large one."""
    sizes = torch.bincount(labels, minlength=len(centroids))
    sums = torch.zeros_like(centroids).index_add_(0, labels, vectors)
    means = sums / sizes.clamp(min=1).unsqueeze(1)
    empty = (sizes == 0).nonzero().view(-1)
    if len(empty):
        largest = sizes.argsort(descending=True, stable=True)[: len(empty)]
        apart = 1e-3 * centroids.std(dim=0, correction=0)
        means[empty[: len(largest)]] = means[largest] + apart
        means[largest] -= apart
    return means


def _split_groups(
    vectors: Tensor, groups: Tensor, num_clusters: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Centres of clusters that each group is divided into, and the group of each."""
    labels = _nearest(vectors, groups)
    sizes = torch.bincount(labels, minlength=len(groups))
    order = labels.argsort(stable=True)
    ends = sizes.cumsum(0)
    shares = _shares(sizes, num_clusters)
    centroids = []
    group_of = []
    for group, (size, end, share) in enumerate(zip(sizes.tolist(), ends.tolist(), shares.tolist(), strict=True)):
        if share:
            own = vectors[order[end - size : end]]
            centroids.append(_means(_sample(own, share * _CLUSTER_SAMPLE, generator), share, generator))
            group_of += [group] * share
    return torch.cat(centroids), torch.tensor(group_of)


def _shares(sizes: Tensor, num_clusters: int) -> Tensor:
    """Clusters of each group: in proportion to its vectors, at most one a vector, `num_clusters` together."""
    total = int(sizes.sum())
    shares = torch.minimum((sizes * num_clusters) // total, sizes)
    wanted = sizes.double() * num_clusters / total
    while (rest := num_clusters - int(shares.sum())) > 0:
        order = torch.where(shares < sizes, wanted - shares, -torch.inf).argsort(descending=True, stable=True)
        chosen = order[: min(rest, int((shares < sizes).sum()))]
        shares[chosen] += 1
    return shares


def _nearest_of_near_groups(vectors: Tensor, centroids: Tensor, group_of: Tensor, *, near: int) -> Tensor:
    """Number of the nearest centre among those of the `near` nearest groups, for each vector."""
    members = [(group_of == group).nonzero().view(-1) for group in range(int(group_of.max()) + 1)]
    middles = torch.stack(
        [centroids[own].mean(0) if len(own) else torch.full_like(centroids[0], torch.inf) for own in members]
    )
    halves = -0.5 * centroids.square().sum(dim=1)
    turned = centroids.t().contiguous()
    # `_split_groups` appends centres group by group, so the clusters of a group are a slice of columns.
    bounds = torch.cumsum(torch.tensor([0] + [len(own) for own in members]), 0).tolist()
    # No vector may choose a group without clusters. Its middle becomes 0 below, since 0 · ∞ is not a number.
    group_halves = torch.where(middles.isfinite().all(1), -0.5 * middles.square().sum(1), -torch.inf)
    group_turned = torch.where(middles.isfinite(), middles, 0.0).t().contiguous()
    parts = []
    for part in vectors.split(4 * _BLOCK):
        rows, groups = _by_group(
            torch.addmm(group_halves, part, group_turned).topk(min(near, len(members)), dim=1).indices
        )
        best = torch.full((len(part),), -torch.inf)
        labels = torch.zeros(len(part), dtype=torch.int64)
        for group, own in zip(groups, rows, strict=True):
            begin = bounds[group]
            end = bounds[group + 1]
            if begin == end:
                continue
            score, index = torch.addmm(halves[begin:end], part[own], turned[:, begin:end]).max(dim=1)
            is_better = score > best[own]
            best[own] = torch.where(is_better, score, best[own])
            labels[own] = torch.where(is_better, index + begin, labels[own])
        parts.append(labels)
    return torch.cat(parts)


def _by_group(near: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return for each group that occurs the rows of `near` that name it."""
    flat = near.view(-1)
    order = flat.argsort(stable=True)
    groups, counts = flat[order].unique_consecutive(return_counts=True)
    return list((order // near.shape[1]).split(counts.tolist())), groups.tolist()
