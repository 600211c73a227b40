"""k-means whose clusters stay within limits: candidates for towers.

    repeat   assign    every item to a centre, as near as the limits allow
             update    every centre to the mean of its items

*Assign* is exact where only the number of items is limited: a minimum-cost flow (`transport`). With loads that differ
(bytes, lookups, features that share a table, memory) it would be a generalised assignment problem, which is NP-hard:
there the heaviest items choose first among the clusters with room, and moves and swaps (`local_search`) repair what
does not fit. First centres are drawn as k-means++ does (Arthur and Vassilvitskii, 2007). Coordinates may have any
number of dimensions.

Reference: Bradley, Bennett and Demiriz, "Constrained K-Means Clustering" (MSR 2000). Cost: 0.1 s an iteration for 1,000
items in 64 clusters, 5 to 15 iterations.
"""

from __future__ import annotations

import numpy as np

from ziggurat.planning.towers.items import Floats, Indexes, Limits
from ziggurat.planning.towers.transport import assign_within

_MAX_ITERATIONS = 15


def balanced_clusters(
    points: Floats, *, counts: Floats, limits: Limits, num_clusters: int, generator: np.random.Generator
) -> Indexes:
    """One run of size-constrained k-means.

    Args:
        points: (M, d).
        counts: (M,) features of each item: its weight in the mean of a cluster.
        limits: room in the clusters. With loads that differ a cluster may still be too full or empty in the end.
        num_clusters: T.
        generator: of the first centres.

    Returns:
        (M,) cluster of each item.
    """
    centres = _first_centres(points, num_clusters=num_clusters, generator=generator)
    assignment = np.full(len(points), -1)
    for _ in range(_MAX_ITERATIONS):
        # In few dimensions the differences themselves, which are exact; in many they would be M · T · d numbers.
        costs = ((points[:, None] - centres) ** 2).sum(axis=2) if points.shape[1] <= 4 else _squared(points, centres)
        before = assignment
        assignment = _assign(costs, limits=limits)
        if bool((assignment == before).all()):
            break
        for cluster in np.unique(assignment):
            mine = assignment == cluster
            centres[cluster] = np.average(points[mine], axis=0, weights=counts[mine])
    return assignment


def _assign(costs: Floats, *, limits: Limits) -> Indexes:
    if limits.sizes_alone:
        return assign_within(costs, lower=int(limits.lower[0]), upper=int(limits.upper[0]))
    held = np.zeros((costs.shape[1], limits.loads.shape[1]))
    assignment = np.zeros(len(costs), dtype=np.int64)
    for item in np.argsort(-(limits.loads / limits.upper).max(axis=1), kind="stable"):
        over = np.maximum((held + limits.loads[item]) / limits.upper - 1, 0.0).sum(axis=1)
        # Rounded, so that the noise of a division does not outweigh the costs.
        cluster = int(np.lexsort((costs[item], np.round(over, 12)))[0])
        assignment[item] = cluster
        held[cluster] += limits.loads[item]
    return assignment


def _squared(points: Floats, centres: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    return np.maximum(squares - 2 * points @ centres.T, 0.0)


def _first_centres(points: Floats, *, num_clusters: int, generator: np.random.Generator) -> Floats:
    """k-means++: each next centre is an item, drawn by its squared distance to the nearest one so far."""
    chosen = [int(generator.integers(len(points)))]
    nearest = _squared(points, points[chosen])[:, 0]
    while len(chosen) < num_clusters:
        nearest[chosen] = 0.0
        total = float(nearest.sum())
        if total > 0:
            item = int(np.searchsorted(np.cumsum(nearest), generator.random() * total, side="right"))
        else:  # all items lie on a centre: any that is left will do
            item = int(np.setdiff1d(np.arange(len(points)), chosen)[0])
        chosen.append(min(item, len(points) - 1))  # by rounding, a draw may fall behind the last
        nearest = np.minimum(nearest, _squared(points, points[chosen[-1:]])[:, 0])
    return points[chosen].copy()
