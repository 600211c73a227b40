"""A collective from outside the package: its cost, the order that is found for it, and what a broken one is told."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.planning.rank_order.networks import network
from ziggurat.errors import ConfigError, PlanError
from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm, Costs, Orders, algorithm_named
from ziggurat.planning.rank_order.pair_times import Matrix, PairTimes
from ziggurat.planning.rank_order.rank_order import Machine, make_order
from ziggurat.planning.rank_order.search import find_order

MIB = 1 << 20


@pytest.fixture(scope="module")
def broadcast_tree() -> Iterator[CollectiveAlgorithm]:
    """The collective, listed while these tests run: others of this process ask for all that are listed."""
    module = importlib.import_module("examples.extensions.broadcast_tree")
    yield CollectiveAlgorithm.add(module.BROADCAST_TREE)
    del CollectiveAlgorithm._members["broadcast_tree"]


def sent_down(order: list[int], message_ms: Matrix) -> float:
    """Return when the last place of a binomial tree has the buffer, subtree by subtree.

    The first place of a stretch hands the rest of it to a place half-way, at the largest power of two, and both go on.
    """
    if len(order) == 1:
        return 0.0
    half = 1 << (len(order) - 1).bit_length() - 1
    sent = message_ms[order[0], order[half]]
    return float(sent + max(sent_down(order[:half], message_ms), sent_down(order[half:], message_ms)))


@pytest.mark.parametrize("size", range(2, 10))
def test_a_broadcast_ends_with_its_slowest_place(broadcast_tree: CollectiveAlgorithm, size: int) -> None:
    pairs = network(range(size), [rank % 3 for rank in range(size)])
    orders = np.stack([np.random.default_rng(seed).permutation(size) for seed in range(5)])
    costs = broadcast_tree.costs_ms(orders, pairs, num_bytes=4 * MIB)
    assert costs == pytest.approx([sent_down(order.tolist(), pairs.ms(4 * MIB)) for order in orders])


def test_an_order_is_found_and_kept_for_it_by_name(broadcast_tree: CollectiveAlgorithm) -> None:
    # Each message of the given order crosses between the racks: their number is the parity of the bits of a place.
    pairs = network(range(8), [rank.bit_count() % 2 for rank in range(8)])
    order = make_order(pairs, [Machine(name=f"host{rank}") for rank in range(8)], algorithm="broadcast_tree")
    costs = {cost.algorithm: cost for cost in order.costs}["broadcast_tree"]
    found = find_order(pairs, broadcast_tree, num_bytes=order.num_bytes)
    assert order.order == found.order
    assert costs.found_ms == pytest.approx(found.cost_ms, rel=1e-3)
    # Three messages on the way to the last place: all far, against one far and two near.
    assert costs.given_ms > 1.8 * costs.found_ms


class _AlwaysFree(CollectiveAlgorithm):
    """Says of each order that it costs nothing."""

    name = "always_free"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        return np.zeros(len(orders))


class _HopsOfNoOrder(CollectiveAlgorithm):
    """Adds up hops, and says that no order helps."""

    name = "hops_of_no_order"
    depends_on_order = False

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        return pairs.ms(num_bytes)[orders[:, :-1], orders[:, 1:]].sum(axis=1)


class _FirstOrderAlone(CollectiveAlgorithm):
    """Gives the cost of the first order to all of them."""

    name = "first_order_alone"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        hops = pairs.ms(num_bytes)[orders[:, :-1], orders[:, 1:]].sum(axis=1)
        return np.full(len(orders), hops[0])


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (_AlwaysFree(), "a cost above 0 for each order"),
        (_HopsOfNoOrder(), "one cost whatever the order"),
        (_FirstOrderAlone(), "costs of many orders at once as of each by itself"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_one_that_breaks_a_promise_is_refused_where_it_is_added(broken: CollectiveAlgorithm, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        CollectiveAlgorithm.add(broken)
    assert broken.name not in {each.name for each in CollectiveAlgorithm}


def test_a_name_that_is_not_listed_says_how_one_from_outside_is() -> None:
    with pytest.raises(PlanError) as refused:
        algorithm_named("my_own_tree")
    assert "ziggurat --extension MODULE cluster order …" in refused.value.ways_out[-1]
