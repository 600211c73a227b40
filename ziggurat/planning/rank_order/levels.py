"""Levels: the hosts and racks that times between ranks show, as groups within groups, each with a confidence.

    0.5 ms │ ┌┴┐ ┌┴┐ ┌┴┐ ┌┴┐      a tree of clusters over log(ms), average linkage (scipy): a level is where nothing
           │ │ │ │ │ │ │ │ │      merges for a factor of 1.5 or more
    8 ms   │ └┬┘ └─┬─┘ …  hosts
    40 ms  │  └────┴──    racks

The confidence of a level is the share of pairs of a pair inside a group and a pair between two groups (of those that
the level above does not part already) in which the one inside is faster: 1 where the two kinds do not overlap, 0.5
where the level says nothing. Levels below 0.9 are reported and not used. Groups that the times themselves have chosen
look well parted by them, also in noise: the gap of 1.5 keeps noise out, and a measured all-reduce has the last word.

What is a host? Ranks that say that they are one machine, where any say so; otherwise the lowest level, if a message
inside it runs as through memory (1 GB/s or more, three times as fast as between groups), because towers gain nothing by
groups that a network parts. Levels above are racks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from scipy.stats import rankdata

from ziggurat.planning.rank_order.pair_times import Matrix, PairTimes
from ziggurat.typed import checked

MIN_CONFIDENCE = 0.9
_MIN_GAP = np.log(1.5)
_MEMORY_BYTES_PER_S = 1e9
_MEMORY_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
@checked
class Level:
    """A partition of the ranks into groups that are near.

    Args:
        name: "host" or "rack"; "rack 2" is of racks.
        groups: the group of every rank, numbered from 0 in the order of their first ranks.
        confidence: see the module.
        by: what it was seen in: "long messages", "latency" or "addresses".
        inside_ms: of a long message inside a group, median; 0 where no group has two ranks.
        between_ms: between groups.
    """

    name: str
    groups: tuple[int, ...]
    confidence: float
    by: str
    inside_ms: float
    between_ms: float

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(set(self.groups))

    @property
    def is_used(self) -> bool:
        """True if it is certain enough to be acted on."""
        return self.confidence >= MIN_CONFIDENCE

    @property
    def is_even(self) -> bool:
        """True if all groups have equally many ranks."""
        counts = np.bincount(self.groups)
        return bool((counts == counts[0]).all())


def infer_levels(pairs: PairTimes, *, machines: Sequence[str] = ()) -> tuple[Level, ...]:
    """Find hosts and racks, the nearest groups first; () where all ranks are equally far from each other.

    Args:
        pairs: times between ranks.
        machines: what each rank says of the machine that it runs on; equal text is one machine. () knows nothing.
    """
    long_messages = _partitions(pairs.long_ms)
    latencies = _partitions(pairs.latency_ms)
    # Latencies of ranks that share cores are noise, and rates see what is shared: those come first where they are sure.
    rates_are_sure = _mean_confidence(pairs.long_ms, long_messages) >= MIN_CONFIDENCE
    by_latency = not rates_are_sure and _mean_confidence(pairs.latency_ms, latencies) >= MIN_CONFIDENCE
    partitions = latencies if by_latency else long_messages
    matrix = pairs.latency_ms if by_latency else pairs.long_ms
    by = "latency" if by_latency else "long messages"
    found = [_level(pairs, matrix, groups, by=by, above=partitions[at + 1 :]) for at, groups in enumerate(partitions)]
    hosts = _hosts(pairs, found, machines)
    racks = [level for level in found if hosts is None or _is_coarser(level.groups, hosts.groups)]
    names = ["rack", *(f"rack {number}" for number in range(2, len(racks) + 1))]
    named = [_renamed(level, name) for level, name in zip(racks, names[: len(racks)], strict=True)]
    return tuple([*([] if hosts is None else [hosts]), *named])


def without_noise(pairs: PairTimes, levels: Sequence[Level]) -> PairTimes:
    """Return times in which all pairs that the levels put equally far have their median; the same without levels."""
    used = [level.groups for level in levels if level.is_used]
    if not used:
        return pairs
    # Of every pair, how many levels part it: pairs of one kind have one number.
    parted = sum(np.not_equal.outer(groups, groups).astype(int) for groups in map(np.asarray, used))
    latency_ms = pairs.latency_ms.copy()
    long_ms = pairs.long_ms.copy()
    apart = ~np.eye(pairs.num_ranks, dtype=bool)
    for kind in range(len(used) + 1):
        those = (parted == kind) & apart
        if those.any():
            latency_ms[those] = np.median(pairs.latency_ms[those])
            long_ms[those] = np.median(pairs.long_ms[those])
    return PairTimes(latency_ms=latency_ms, long_ms=long_ms, long_bytes=pairs.long_bytes)


def _hosts(pairs: PairTimes, levels: Sequence[Level], machines: Sequence[str]) -> Level | None:
    """Return the level of hosts, None where every rank has a host to itself or nobody can tell."""
    said = _numbered(machines)
    if machines and len(set(said)) < len(said):
        if len(set(said)) == 1:
            return None
        same = next((level for level in levels if level.groups == said), None)
        above = [level.groups for level in levels if _is_coarser(level.groups, said)]
        return _renamed(same or _level(pairs, pairs.long_ms, said, by="addresses", above=above), "host")
    if not levels:
        return None
    lowest = levels[0]
    rate = pairs.long_bytes / (lowest.inside_ms / 1e3) if lowest.inside_ms else 0.0
    is_memory = rate >= _MEMORY_BYTES_PER_S and lowest.between_ms >= _MEMORY_FACTOR * lowest.inside_ms
    return _renamed(lowest, "host") if is_memory else None


def cluster_tree(matrix: Matrix) -> tuple[NDArray[np.float64], float]:
    """Return the tree of clusters over the logarithms of times, as scipy's linkage, and the least logarithm.

    Args:
        matrix: (N, N) times between ranks.

    Returns:
        The tree, whose heights are above the least logarithm: linkage wants distances from 0 on.
    """
    is_apart = ~np.eye(len(matrix), dtype=bool)
    logs = np.log(np.where(is_apart, matrix, 1.0))
    least = float(logs[is_apart].min())
    distances = logs - least
    np.fill_diagonal(distances, 0.0)
    return linkage(squareform(distances, checks=False), "average"), least


def _partitions(matrix: Matrix) -> list[tuple[int, ...]]:
    """Return the groups of every rank at each level of a matrix of times, finest first."""
    size = len(matrix)
    if size < 3:
        return []
    tree, _ = cluster_tree(matrix)
    heights = tree[:, 2]
    found = []
    for merges in range(1, size - 1):
        if heights[merges] - heights[merges - 1] >= _MIN_GAP:
            between = (heights[merges] + heights[merges - 1]) / 2
            found.append(_numbered(fcluster(tree, between, "distance").tolist()))
    return found


def _level(
    pairs: PairTimes, matrix: Matrix, groups: tuple[int, ...], *, by: str, above: Sequence[tuple[int, ...]]
) -> Level:
    inside, between = _kinds(groups, above[0] if above else None)
    return Level(
        name="",
        groups=groups,
        confidence=round(_confidence(matrix, groups, above=above[0] if above else None), 4),
        by=by,
        inside_ms=float(np.median(pairs.long_ms[inside])) if inside.any() else 0.0,
        between_ms=float(np.median(pairs.long_ms[between])) if between.any() else 0.0,
    )


def _kinds(groups: tuple[int, ...], above: tuple[int, ...] | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which pairs i < j are inside a group, and which between two groups that the level above joins."""
    number = np.asarray(groups)
    upper = np.triu(np.ones((len(number), len(number)), dtype=bool), 1)
    same = number[:, None] == number[None]
    joined = np.ones_like(same)
    if above is not None:
        outer = np.asarray(above)
        joined = outer[:, None] == outer[None]
    return same & upper, ~same & joined & upper


def _confidence(matrix: Matrix, groups: tuple[int, ...], *, above: tuple[int, ...] | None = None) -> float:
    """Return the share of (pair inside, pair between) in which the one inside is faster; ties count half."""
    inside, between = _kinds(groups, above)
    if not (inside.any() and between.any()):
        return 0.0
    near = matrix[inside]
    far = matrix[between]
    # The statistic of Mann and Whitney, from the ranks of all times: no product of the two numbers of pairs.
    ranks = rankdata(np.concatenate([near, far]))
    wins = ranks[len(near) :].sum() - len(far) * (len(far) + 1) / 2
    return float(wins / (len(near) * len(far)))


def _mean_confidence(matrix: Matrix, partitions: Sequence[tuple[int, ...]]) -> float:
    found = [_confidence(matrix, groups) for groups in partitions]
    return sum(found) / len(found) if found else 0.0


def _numbered(labels: Sequence[object]) -> tuple[int, ...]:
    """Return labels as numbers from 0 in the order of their first occurrence."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


def _is_coarser(groups: tuple[int, ...], finer: tuple[int, ...]) -> bool:
    """Return True if every group of `finer` lies in one of `groups`, and some lie together."""
    pairs = set(zip(finer, groups, strict=True))
    return len(pairs) == len(set(finer)) and len(set(groups)) < len(set(finer))


def _renamed(level: Level, name: str) -> Level:
    return replace(level, name=name)
