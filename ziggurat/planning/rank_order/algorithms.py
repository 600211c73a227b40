"""Collective algorithms: what an order of ranks costs each of them. One object each, listed once at the end.

    order (o_0, o_1, …)         who sends to whom                                          how often, how much
    ring                        o_i to o_{i+1}, the last to the first                      2 (N−1) times S/N
    halving_doubling            o_i with o_{i xor d}, d = N/2, N/4 … 1, and back           S/2, S/4 …, and back
    tree                        o_i with its parent in a binary tree over the places       S up, S down
    double_tree                 two trees, in which no rank is an inner node of both       S/2 each
    all_to_all                  everybody with everybody                                   S/N: no order helps

Costs are numbers to compare orders by, in ms, from times between pairs alone. Two sums decide:

- Ring and halving-doubling add up all messages of a round, and do not take the slowest one: any ring over two racks has
  a slow hop, and what makes a bad order slow is that many of its hops share one link between the racks. A round of
  messages in both directions of a link takes half of the sum.
- Trees take the slowest path from a leaf to the root and back: an edge, then what is below it.

The paper (Luo et al., "Cloud Collectives", arXiv 2105.14088) has models of the same algorithms; these are our own
formulas. All are computed for many orders at once.

An algorithm of your own derives from `CollectiveAlgorithm` and is listed by `CollectiveAlgorithm.add`
(docs/guides/extending.md); `cluster order --for NAME` then takes it.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ziggurat.errors import ConfigError, PlanError, nearest_names
from ziggurat.planning.rank_order.pair_times import Matrix, PairTimes
from ziggurat.specification import Specification

Orders = NDArray[np.int64]  # (K, N): the rank at every place, in K orders
Costs = NDArray[np.float64]  # (K,)


class CollectiveAlgorithm(Specification, kind="collective"):
    """A way to compute a collective, and what it costs in an order of ranks.

    Attributes:
        name: in commands and files.
        depends_on_order: False where every order costs the same.
        is_gloos: gloo's all-reduce sends the same messages, so that two orders can be timed by it.
    """

    depends_on_order: ClassVar[bool] = True
    is_gloos: ClassVar[bool] = False

    @abstractmethod
    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return the cost of each order, (K,).

        Args:
            orders: (K, N), the rank at every place.
            pairs: times between ranks.
            num_bytes: S, of the buffer of every rank.
        """

    def cost_ms(self, order: Sequence[int] | NDArray[np.int64], pairs: PairTimes, *, num_bytes: float) -> float:
        """Return the cost of one order."""
        return float(self.costs_ms(np.asarray(order, dtype=np.int64)[None], pairs, num_bytes=num_bytes)[0])

    def try_out(self) -> None:
        """Ask for the costs of all orders of five ranks in two racks.

        Raises:
            ConfigError: they are no positive numbers, one for each order, or depend on the order where they say not.
        """
        racks = np.array([0, 1, 0, 1, 1])
        is_far = np.not_equal.outer(racks, racks)
        pairs = PairTimes(latency_ms=np.where(is_far, 0.5, 0.1), long_ms=np.where(is_far, 40.0, 5.0))
        orders = np.asarray([(0, *rest) for rest in itertools.permutations(range(1, 5))])
        costs = self.costs_ms(orders, pairs, num_bytes=1 << 20)
        if costs.shape != (len(orders),) or not (np.isfinite(costs).all() and (costs > 0).all()):
            raise self._broken("a cost above 0 for each order, (K,)", f"costs of shape {costs.shape}: {costs}"[:200])
        alone = [self.cost_ms(order, pairs, num_bytes=1 << 20) for order in orders]
        if not np.allclose(costs, alone):
            raise self._broken("costs of many orders at once as of each by itself", f"{costs[0]:g} and {alone[0]:g}")
        if not self.depends_on_order and not np.allclose(costs, costs[0]):
            found = f"from {costs.min():g} to {costs.max():g} ms"
            raise self._broken("one cost whatever the order, as depends_on_order = False says", found)

    def _broken(self, expected: str, found: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=f"{type(self).__name__}.costs_ms of the collective {self.name!r}",
            ways_out="correct it; docs/guides/extending.md says what it is asked, and what it promises",
        )


class Ring(CollectiveAlgorithm):
    """Every rank sends to the next one: reduce-scatter, then all-gather."""

    name = "ring"
    is_gloos = True

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return (N−1) times the sum of all hops: 2 (N−1) rounds, whose hops run half in one direction."""
        size = orders.shape[1]
        hops = pairs.ms(num_bytes / size)[orders, np.roll(orders, -1, axis=1)]
        return (size - 1) * hops.sum(axis=1)


class HalvingDoubling(CollectiveAlgorithm):
    """Partners at halving distances exchange halves of what is left, and gather it in the opposite order.

    Where N is no power of two, the ranks above the largest one below it first hand all they have to a partner, and get
    the result from it at the end.
    """

    name = "halving_doubling"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return the sum over all rounds, there and back, of half of the sum over all messages."""
        size = orders.shape[1]
        core = 1 << (size.bit_length() - 1)
        found = np.zeros(len(orders))
        if core < size:
            whole = pairs.ms(num_bytes)
            # There and back; each is a message in one direction, so that nothing is halved.
            found += 2 * whole[orders[:, core:], orders[:, : size - core]].sum(axis=1)
        places = np.arange(core)
        distance = core // 2
        part = num_bytes / 2
        while distance:
            partners = orders[:, places ^ distance]
            messages = pairs.ms(part)[orders[:, :core], partners].sum(axis=1)
            # Each round happens twice, and its messages run half in one direction: the factors cancel.
            found += messages
            distance //= 2
            part /= 2
        return found


class BinaryTree(CollectiveAlgorithm):
    """Sums go up a binary tree over the places, whose root is the first one; the result comes down."""

    name = "tree"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return twice the slowest path: max over children of (edge + what is below it)."""
        return 2 * _longest_path(orders, _heap_parents(orders.shape[1]), pairs.ms(num_bytes))


class DoubleBinaryTree(CollectiveAlgorithm):
    """Two trees with half of the buffer each; leaves of one are inner nodes of the other."""

    name = "double_tree"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return twice the slower one of the two trees, which run at the same time."""
        size = orders.shape[1]
        first = _inorder_parents(size)
        # The same tree over the places moved on by one: even places are leaves of the first, odd ones of the second.
        moved = np.roll(np.arange(size), -1)
        half = pairs.ms(num_bytes / 2)
        return 2 * np.maximum(_longest_path(orders, first, half), _longest_path(orders[:, moved], first, half))


class AllToAll(CollectiveAlgorithm):
    """Every rank sends a part of its own to every other one: every pair communicates, whatever the order."""

    name = "all_to_all"
    depends_on_order = False

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return the same for every order: what the rank with the slowest links sends, one message after the other."""
        slowest = pairs.ms(num_bytes / orders.shape[1]).sum(axis=1).max()
        return np.full(len(orders), slowest)


def algorithm_named(name: str) -> CollectiveAlgorithm:
    """Return the algorithm that an order is to be found for.

    Raises:
        PlanError: there is none of that name, or no order helps it.
    """
    known = {each.name: each for each in CollectiveAlgorithm}
    ordered = [each.name for each in CollectiveAlgorithm if each.depends_on_order]
    if name in ordered:
        return known[name]
    every_pair = f"{name}, in which every pair of ranks communicates in every order"
    near = [f"did you mean {match!r}?" for match in nearest_names(name, ordered, most=1)]
    from_outside = [] if name in known else ["one of your own: ziggurat --extension MODULE cluster order …"]
    raise PlanError(
        expected=f"a collective that an order of ranks helps: {', '.join(ordered)}",
        found=every_pair if name in known else repr(name),
        where="order of ranks",
        ways_out=(*near, "leave it out: ring, which gloo and NCCL use for large buffers", *from_outside),
    )


def _heap_parents(size: int) -> list[int]:
    """Return the parent of every place, −1 for the root: place p below (p − 1) / 2."""
    return [-1, *((place - 1) // 2 for place in range(1, size))]


def _inorder_parents(size: int) -> list[int]:
    """Return the parent of every place in a tree whose places are in order: every second place is a leaf."""
    parents = [-1] * size

    def hang(first: int, last: int, parent: int) -> None:
        if first >= last:
            return
        # The largest power of two that is not past the end: leaves have even places, inner nodes odd ones.
        span = 1 << ((last - first).bit_length() - 1)
        root = first + span - 1
        parents[root] = parent
        hang(first, root, root)
        hang(root + 1, last, root)

    hang(0, size, -1)
    return parents


def _longest_path(orders: Orders, parents: list[int], ms: Matrix) -> Costs:
    """Return the longest path from the root of a tree over places to a leaf, for each order."""
    size = orders.shape[1]
    # Place by place, so that the many orders lie together.
    by_place = orders.T
    below = np.zeros(by_place.shape)
    depth = [0] * size
    for place in _from_root(parents):
        if parents[place] >= 0:
            depth[place] = depth[parents[place]] + 1
    # Deepest first, so that what is below a place is known when its parent asks for it.
    by_depth: dict[int, list[int]] = {}
    for place in range(size):
        by_depth.setdefault(depth[place], []).append(place)
    for level in sorted(by_depth, reverse=True)[:-1]:
        places = by_depth[level]
        above = np.asarray([parents[place] for place in places])
        paths = ms[by_place[above], by_place[places]] + below[places]
        # `maximum.at` and no plain maximum: two children have one parent.
        np.maximum.at(below, above, paths)
    return below[parents.index(-1)]


def _from_root(parents: list[int]) -> list[int]:
    """Return all places, each after its parent."""
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
    found = list(children[-1])
    for place in found:
        found.extend(children.get(place, ()))
    return found


for _algorithm in (Ring(), HalvingDoubling(), BinaryTree(), DoubleBinaryTree(), AllToAll()):
    CollectiveAlgorithm.add(_algorithm)
