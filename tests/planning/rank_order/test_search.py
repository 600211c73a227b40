"""The search finds the cheapest order: all of them where they are few, the known best where they are many."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm
from ziggurat.planning.rank_order.search import SearchConfig, find_order

from .networks import interleaved, network

MIB = 1 << 20
ORDERED = [each.name for each in CollectiveAlgorithm if each.depends_on_order]


def crossings(order: tuple[int, ...], groups: list[int]) -> int:
    """Hops of a ring that leave a group."""
    hops = zip(order, [*order[1:], order[0]], strict=True)
    return sum(groups[one] != groups[other] for one, other in hops)


@pytest.mark.parametrize("size", [4, 8])
def test_a_ring_over_two_racks_crosses_twice(size: int) -> None:
    pairs = interleaved(size)
    found = find_order(pairs, CollectiveAlgorithm.named("ring"), num_bytes=16 * MIB)
    assert found.is_exact
    assert found.order[0] == 0
    assert crossings(found.order, [rank % 2 for rank in range(size)]) == 2
    assert found.given_cost_ms == CollectiveAlgorithm.named("ring").cost_ms(range(size), pairs, num_bytes=16 * MIB)


@pytest.mark.parametrize("name", ORDERED)
def test_exact_means_no_order_is_cheaper(name: str) -> None:
    pairs = network([0, 1, 2, 3, 4, 5], [0, 1, 0, 2, 1, 2], noise=0.3)
    orders = np.asarray([(0, *rest) for rest in itertools.permutations(range(1, 6))])
    best = CollectiveAlgorithm.named(name).costs_ms(orders, pairs, num_bytes=4 * MIB).min()
    assert find_order(pairs, CollectiveAlgorithm.named(name), num_bytes=4 * MIB).cost_ms == pytest.approx(best)


@pytest.mark.parametrize("name", ORDERED)
def test_the_local_search_comes_near_the_exact_one(name: str) -> None:
    pairs = network(range(8), [0, 1, 0, 1, 1, 0, 1, 0], noise=0.2)
    exact = find_order(pairs, CollectiveAlgorithm.named(name), num_bytes=4 * MIB)
    local = find_order(
        pairs, CollectiveAlgorithm.named(name), num_bytes=4 * MIB, config=SearchConfig(max_exact=3, patience=150)
    )
    assert not local.is_exact
    assert exact.cost_ms <= local.cost_ms * (1 + 1e-9) <= 1.1 * exact.cost_ms


def test_ranks_of_a_host_stay_together() -> None:
    """The cheapest order for halving-doubling would take them apart: its large messages go N/2 places far."""
    hosts = [0, 1, 2, 3, 0, 1, 2, 3]
    pairs = network(hosts, [0, 1, 0, 1, 0, 1, 0, 1])
    algorithm = CollectiveAlgorithm.named("halving_doubling")
    free = find_order(pairs, algorithm, num_bytes=16 * MIB)
    assert crossings(free.order, hosts) > 4
    for config in (SearchConfig(), SearchConfig(max_exact=3, patience=100)):
        held = find_order(pairs, algorithm, num_bytes=16 * MIB, hosts=hosts, config=config)
        assert crossings(held.order, hosts) == 4
        assert held.cost_ms >= free.cost_ms


def test_a_given_order_that_is_as_good_stays() -> None:
    pairs = network(range(6), [0] * 6, noise=0.0)
    found = find_order(pairs, CollectiveAlgorithm.named("ring"), num_bytes=MIB, given=(0, 3, 1, 5, 2, 4))
    assert found.order == (0, 3, 1, 5, 2, 4)
    assert found.cost_ms == found.given_cost_ms


def test_a_given_order_that_takes_hosts_apart_is_replaced_even_if_it_is_as_cheap() -> None:
    pairs = network(range(4), [0] * 4, noise=0.0)
    found = find_order(pairs, CollectiveAlgorithm.named("ring"), num_bytes=MIB, hosts=(0, 1, 0, 1))
    assert crossings(found.order, [0, 1, 0, 1]) == 2


@pytest.mark.slow
def test_a_thousand_ranks_are_ordered_host_by_host_and_rack_by_rack() -> None:
    """128 hosts of 8 in 8 racks, dealt at random: the best ring leaves every host and every rack once."""
    generator = np.random.default_rng(1)
    places = generator.permutation(1024)
    hosts = [int(place) // 8 for place in places]
    racks = [host // 16 for host in hosts]
    found = find_order(
        network(hosts, racks),
        CollectiveAlgorithm.named("ring"),
        num_bytes=512 * MIB,
        hosts=hosts,
        config=SearchConfig(time_limit_s=8),
    )
    assert sorted(found.order) == list(range(1024))
    assert crossings(found.order, hosts) == 128
    assert crossings(found.order, racks) == 8
