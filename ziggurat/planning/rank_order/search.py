"""find_order: the cheapest order of ranks for a collective, from times between pairs.

    up to 10 ranks   every order with rank 0 in front, in batches: exact
    above            local search from two starts, both host by host: the leaves of a tree of clusters, in which what is
                     near stays together, and the order that was given

A step of the local search draws a batch of changes (swap two ranks, turn a stretch around, move a stretch, swap two
hosts), computes the costs of all of them at once, and takes the cheapest if it is cheaper. It ends after a number of
batches without a gain, or when the time is up. Rank 0 stays in front: it writes a run's files, and a ring or
halving-doubling costs the same from any beginning.

Ranks of one host stay together where hosts are known: tower groups and files of hosts need it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm, Costs, Orders
from ziggurat.planning.rank_order.pair_times import PairTimes
from ziggurat.typed import checked

Order = tuple[int, ...]

MAX_EXACT = 10
_BATCH = 96
_EXACT_BATCH = 40_000


@dataclass(frozen=True, kw_only=True)
@checked
class SearchConfig:
    """Settings of the search of an order.

    Args:
        max_exact: ranks up to which every order is tried.
        patience: batches of the local search without a gain, for each start.
        time_limit_s: of the whole local search.
        seed: of the changes that are drawn.
    """

    max_exact: int = MAX_EXACT
    patience: int = 300
    time_limit_s: float = 20.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FoundOrder:
    """The result of a search.

    Args:
        order: the rank at every place, rank 0 first.
        cost_ms: of it.
        given_cost_ms: of the order that was given.
        is_exact: True if every order was tried.
    """

    order: Order
    cost_ms: float
    given_cost_ms: float
    is_exact: bool


def find_order(
    pairs: PairTimes,
    algorithm: CollectiveAlgorithm,
    *,
    num_bytes: float,
    hosts: Sequence[int] = (),
    given: Sequence[int] = (),
    config: SearchConfig | None = None,
) -> FoundOrder:
    """Find the cheapest order; the order that was given is returned where none is cheaper.

    Args:
        pairs: times between ranks.
        algorithm: that the order is for.
        num_bytes: of the buffer of every rank.
        hosts: the host of every rank, whose ranks are to stay together; () knows of none.
        given: an order to start from and to beat, rank 0 first; () is 0, 1, 2 …
        config: how long to search.
    """
    config = config or SearchConfig()
    size = pairs.num_ranks
    given_order = np.asarray(given or range(size), dtype=np.int64)
    space = _Space(pairs, algorithm, num_bytes=num_bytes, hosts=np.asarray(hosts or range(size), dtype=np.int64))
    given_ms = algorithm.cost_ms(given_order, pairs, num_bytes=num_bytes)
    is_exact = size <= config.max_exact
    best, best_ms = _exact(space) if is_exact else _local(space, given_order, config)
    # Rounding must not change an order that is as good.
    if best_ms >= given_ms * (1 - 1e-9) and np.isfinite(space.costs(given_order[None])[0]):
        best = given_order
        best_ms = given_ms
    return FoundOrder(
        order=tuple(int(rank) for rank in best), cost_ms=best_ms, given_cost_ms=given_ms, is_exact=is_exact
    )


class _Space:
    """The orders that are allowed, and their costs: infinite for those that take ranks of a host apart."""

    def __init__(
        self, pairs: PairTimes, algorithm: CollectiveAlgorithm, *, num_bytes: float, hosts: NDArray[np.int64]
    ) -> None:
        self.pairs = pairs
        self.hosts = hosts
        self._algorithm = algorithm
        self._num_bytes = num_bytes
        self._num_hosts = len(set(hosts.tolist()))

    def costs(self, orders: Orders) -> Costs:
        found = self._algorithm.costs_ms(orders, self.pairs, num_bytes=self._num_bytes)
        at = self.hosts[orders]
        changes = (at[:, 1:] != at[:, :-1]).sum(axis=1)
        return np.where(changes == self._num_hosts - 1, found, np.inf)

    def host_by_host(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Put the ranks of each host where its first one is, rank 0 in front of all."""
        order = np.concatenate([[0], order[order != 0]])
        first = {int(host): place for place, host in reversed(list(enumerate(self.hosts[order])))}
        keys = [first[int(host)] for host in self.hosts[order]]
        return order[np.argsort(keys, kind="stable")]


def _exact(space: _Space) -> tuple[NDArray[np.int64], float]:
    size = space.pairs.num_ranks
    best = np.arange(size)
    best_ms = float("inf")
    for batch in _permutations(size):
        costs = space.costs(batch)
        at = int(costs.argmin())
        if costs[at] < best_ms:
            best = batch[at]
            best_ms = float(costs[at])
    return best, best_ms


def _permutations(size: int) -> Iterator[Orders]:
    """Yield all orders with rank 0 in front, in batches."""
    rest = itertools.permutations(range(1, size))
    while batch := list(itertools.islice(rest, _EXACT_BATCH)):
        yield np.pad(np.asarray(batch, dtype=np.int64).reshape(len(batch), size - 1), ((0, 0), (1, 0)))


def _local(space: _Space, given: NDArray[np.int64], config: SearchConfig) -> tuple[NDArray[np.int64], float]:
    deadline = time.monotonic() + config.time_limit_s
    generator = np.random.default_rng(config.seed)
    starts = [space.host_by_host(start) for start in (_leaves(space.pairs), given)]
    best = starts[0]
    best_ms = float("inf")
    for number, start in enumerate(starts):
        # The first start, which knows what is near, has most of the time.
        limit = deadline - (config.time_limit_s / 4 if number < len(starts) - 1 else 0.0)
        order, cost = _improved(space, start, config, generator=generator, deadline=limit)
        if cost < best_ms:
            best = order
            best_ms = cost
    return best, best_ms


def _leaves(pairs: PairTimes) -> NDArray[np.int64]:
    """Return the ranks as the leaves of a tree of clusters, nearest together; rank 0 in front."""
    # Over ms, which costs add up, and not over their logarithms as levels are: a ring by the leaves of `cluster_tree`
    # cost 0.87 to 1.36 times as much on 60 made-up networks (median 1.00).
    order = leaves_list(linkage(squareform(pairs.ms(pairs.long_bytes), checks=False), "average")).astype(np.int64)
    # Turned and not cut: whose cluster rank 0 is in stays whole at the two ends of a ring.
    return np.roll(order, -int(np.flatnonzero(order == 0)[0]))


def _improved(
    space: _Space,
    order: NDArray[np.int64],
    config: SearchConfig,
    *,
    generator: np.random.Generator,
    deadline: float,
) -> tuple[NDArray[np.int64], float]:
    cost = float(space.costs(order[None])[0])
    idle = 0
    while idle < config.patience and time.monotonic() < deadline:
        changed = np.stack([_changed(order, space.hosts, generator) for _ in range(_BATCH)])
        costs = space.costs(changed)
        at = int(costs.argmin())
        idle += 1
        if costs[at] < cost * (1 - 1e-12):
            order = changed[at]
            cost = float(costs[at])
            idle = 0
    return order, cost


def _changed(order: NDArray[np.int64], hosts: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw one change of an order; rank 0 stays in front."""
    size = len(order)
    kind = int(generator.integers(4))
    first, last = sorted(generator.integers(1, size, 2).tolist())
    if kind == 0:
        changed = order.copy()
        changed[[first, last]] = order[[last, first]]
        return changed
    if kind == 1:
        changed = order.copy()
        changed[first : last + 1] = order[first : last + 1][::-1]
        return changed
    if kind == 2:
        rest = np.concatenate([order[:first], order[last + 1 :]])
        at = int(generator.integers(1, len(rest) + 1))
        return np.concatenate([rest[:at], order[first : last + 1], rest[at:]])
    return _hosts_swapped(order, hosts, generator)


def _hosts_swapped(
    order: NDArray[np.int64], hosts: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Swap the stretches of two hosts, neither that of rank 0."""
    at = hosts[order]
    bounds = [0, *(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(order)]
    stretches = [order[first:last] for first, last in itertools.pairwise(bounds)]
    if len(stretches) < 3:
        return order
    one, other = generator.choice(np.arange(1, len(stretches)), 2, replace=False)
    stretches[one], stretches[other] = stretches[other], stretches[one]
    return np.concatenate(stretches)
