"""Costs of orders, against sums that are written down rank by rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ziggurat.errors import PlanError
from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm, algorithm_named
from ziggurat.planning.rank_order.pair_times import PairTimes

from .networks import interleaved, network

MIB = 1 << 20
ORDERED = [each.name for each in CollectiveAlgorithm if each.depends_on_order]


def test_a_ring_adds_up_its_hops() -> None:
    pairs = interleaved(4, noise=0.0)
    hop = pairs.ms(4 * MIB)
    cost = CollectiveAlgorithm.named("ring").cost_ms((0, 2, 3, 1), pairs, num_bytes=16 * MIB)
    assert cost == pytest.approx(3 * (hop[0, 2] + hop[2, 3] + hop[3, 1] + hop[1, 0]))


def test_a_ring_costs_the_same_from_every_beginning_and_in_both_directions() -> None:
    pairs = network([0, 0, 1, 2, 2, 3], [0, 0, 0, 1, 1, 1])
    ring = CollectiveAlgorithm.named("ring")
    order = [0, 3, 1, 5, 2, 4]
    costs = [ring.cost_ms(order[at:] + order[:at], pairs, num_bytes=MIB) for at in range(6)]
    assert np.ptp([*costs, ring.cost_ms(order[::-1], pairs, num_bytes=MIB)]) == pytest.approx(0.0, abs=1e-9)


def test_halving_doubling_sends_halves_to_partners_at_halving_distances() -> None:
    pairs = network(range(4), [0, 0, 1, 1])
    half, quarter = pairs.ms(2 * MIB), pairs.ms(MIB)
    order = (0, 3, 1, 2)
    expected = 2 * (half[0, 1] + half[3, 2]) + 2 * (quarter[0, 3] + quarter[1, 2])
    assert CollectiveAlgorithm.named("halving_doubling").cost_ms(order, pairs, num_bytes=4 * MIB) == pytest.approx(
        expected
    )


def test_halving_doubling_prefers_its_large_messages_inside_racks() -> None:
    """The first round, of half of the buffer, is between places that are N/2 apart: racks that alternate are good."""
    pairs = network(range(4), [0, 0, 1, 1])
    costs = {
        order: CollectiveAlgorithm.named("halving_doubling").cost_ms(order, pairs, num_bytes=4 * MIB)
        for order in ((0, 2, 1, 3), (0, 1, 2, 3), (0, 2, 3, 1))
    }
    assert list(costs) == sorted(costs, key=costs.__getitem__)


def test_ranks_beyond_a_power_of_two_hand_everything_over() -> None:
    pairs = network(range(5), [0] * 5, noise=0.0)
    four = PairTimes(latency_ms=pairs.latency_ms[:4, :4], long_ms=pairs.long_ms[:4, :4])
    algorithm = CollectiveAlgorithm.named("halving_doubling")
    more = algorithm.cost_ms(range(5), pairs, num_bytes=MIB) - algorithm.cost_ms(range(4), four, num_bytes=MIB)
    assert more == pytest.approx(2 * pairs.ms(MIB)[4, 0])


def test_a_tree_is_as_slow_as_its_longest_path() -> None:
    pairs = network(range(6), [0, 0, 0, 1, 1, 1])
    edge = pairs.ms(MIB)
    #        a
    #     b     c
    #    d e   f
    a, b, c, d, e, f = order = (0, 4, 2, 1, 5, 3)
    paths = [edge[a, b] + max(edge[b, d], edge[b, e]), edge[a, c] + edge[c, f]]
    assert CollectiveAlgorithm.named("tree").cost_ms(order, pairs, num_bytes=MIB) == pytest.approx(2 * max(paths))


@pytest.mark.parametrize("size", range(2, 20))
def test_no_rank_is_an_inner_node_of_both_trees(size: int) -> None:
    from ziggurat.planning.rank_order.algorithms import _inorder_parents

    parents = _inorder_parents(size)
    assert parents.count(-1) == 1
    inner = {parent for parent in parents if parent >= 0}
    moved = {(place + 1) % size for place in inner}
    if size % 2 == 0:
        assert not inner & moved
    # The tree of an odd number of ranks moves onto itself at one place.
    assert len(inner & moved) <= 1
    for place, parent in enumerate(parents):
        steps = 0
        while parent >= 0:
            place, parent = parent, parents[parent]
            steps += 1
            assert steps <= size.bit_length()
        assert parents[place] == -1


def test_no_order_helps_an_exchange_of_all_with_all() -> None:
    pairs = interleaved(5)
    orders = np.asarray(list(itertools.permutations(range(5))))
    costs = CollectiveAlgorithm.named("all_to_all").costs_ms(orders, pairs, num_bytes=MIB)
    assert np.ptp(costs) == 0.0
    with pytest.raises(PlanError, match="every pair of ranks communicates in every order"):
        algorithm_named("all_to_all")


@pytest.mark.parametrize("name", [each.name for each in CollectiveAlgorithm])
def test_many_orders_at_once_cost_what_each_does(name: str) -> None:
    pairs = network([0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 0, 1, 1, 1])
    generator = np.random.default_rng(0)
    orders = np.stack([generator.permutation(7) for _ in range(20)])
    together = CollectiveAlgorithm.named(name).costs_ms(orders, pairs, num_bytes=MIB)
    apart = [CollectiveAlgorithm.named(name).cost_ms(order, pairs, num_bytes=MIB) for order in orders]
    assert np.allclose(together, apart)
    assert (together > 0).all()


def test_an_unknown_collective_names_the_nearest() -> None:
    with pytest.raises(PlanError) as refused:
        algorithm_named("rings")
    assert refused.value.ways_out[0] == "did you mean 'ring'?"
    assert all(algorithm_named(name).name == name for name in ORDERED)


def test_times_that_are_none_are_refused() -> None:
    good = interleaved(3)
    for changed in (np.zeros((3, 3)), good.long_ms[:2], good.long_ms + np.triu(np.ones((3, 3)))):
        with pytest.raises(PlanError, match="times above 0 between any two"):
            PairTimes(latency_ms=good.latency_ms, long_ms=changed)
    with pytest.raises(PlanError, match="times of 3 pairs"):
        PairTimes.from_upper([1.0], [1.0], num_ranks=3, long_bytes=MIB)


def test_times_are_written_to_four_digits_and_read_back() -> None:
    pairs = interleaved(5)
    again = PairTimes.from_upper(*pairs.upper(), num_ranks=5, long_bytes=pairs.long_bytes)
    assert np.allclose(again.long_ms, pairs.long_ms, rtol=1e-3)
    assert np.allclose(again.latency_ms, pairs.latency_ms, rtol=1e-3)
