"""Moves and swaps are priced as they turn out, lower the cost, and keep the limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.planning.towers.items import Limits
from ziggurat.planning.towers.local_search import Partition


def cost_of(assignment: np.ndarray, distances: np.ndarray, counts: np.ndarray, num_towers: int) -> float:
    """The objective, pair by pair."""
    total = 0.0
    for tower in range(num_towers):
        mine = np.flatnonzero(assignment == tower)
        pairs = sum(distances[i, j] for i, j in itertools.combinations(mine, 2)) + sum(distances[i, i] for i in mine)
        total += pairs / max(counts[mine].sum(), 1)
    return total


def problem(seed: int, *, num_items: int = 12, num_towers: int = 3, num_resources: int = 1) -> Partition:
    rng = np.random.default_rng(seed)
    half = np.triu(rng.random((num_items, num_items)))
    distances = half + np.triu(half, 1).T
    counts = rng.integers(1, 4, num_items).astype(float)
    loads = rng.integers(1, 9, (num_items, num_resources)).astype(float)
    assignment = rng.permutation(np.arange(num_items) % num_towers)
    upper = loads.sum(axis=0) / num_towers * (1 + rng.random())
    limits = Limits(loads=loads, lower=0.5 * loads.sum(axis=0) / num_towers, upper=np.maximum(upper, loads.max(axis=0)))
    return Partition(assignment, distances=distances, counts=counts, limits=limits, num_towers=num_towers)


def check_books(partition: Partition) -> None:
    """What it tracks is what a fresh one computes."""
    num_towers = len(partition._within)
    distances = partition._distances + np.diag(partition._inner)
    fresh = Partition(
        partition.assignment,
        distances=distances,
        counts=partition._item_counts,
        limits=partition.limits,
        num_towers=num_towers,
    )
    for name in ("_sums", "_within", "_counts", "_num_items", "held", "_violation"):
        np.testing.assert_allclose(getattr(partition, name), getattr(fresh, name), atol=1e-9, err_msg=name)
    assert partition.cost == pytest.approx(cost_of(partition.assignment, distances, partition._item_counts, num_towers))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_resources=st.integers(1, 2))
def test_prices_are_what_changes_cost(seed: int, num_resources: int) -> None:
    rng = np.random.default_rng(seed)
    for is_swap in (False, True):
        partition = problem(seed, num_resources=num_resources)
        item = int(rng.integers(12))
        costs, violations = partition._price_swaps(item) if is_swap else partition._price_moves(item)
        for other in np.flatnonzero(np.isfinite(costs)):
            trial = problem(seed, num_resources=num_resources)
            cost, violation = trial.cost, trial._violation.sum()
            trial._apply(item, int(other), is_swap=is_swap)
            assert trial.cost - cost == pytest.approx(costs[other], abs=1e-9)
            assert trial._violation.sum() - violation == pytest.approx(violations[other], abs=1e-9)
            check_books(trial)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_resources=st.integers(1, 2))
def test_repair_and_polish_never_make_it_worse(seed: int, num_resources: int) -> None:
    partition = problem(seed, num_resources=num_resources)
    violation = partition._violation.sum()
    partition.repair()
    repaired = partition._violation.sum()
    assert repaired <= violation + 1e-9
    fits, cost = partition.fits, partition.cost
    partition.polish()
    assert partition.cost <= cost + 1e-9
    assert partition._violation.sum() <= repaired + 1e-6
    assert partition.fits >= fits
    check_books(partition)


def test_empty_towers_are_filled() -> None:
    limits = Limits(loads=np.ones((5, 1)), lower=np.zeros(1), upper=np.full(1, 5.0))
    partition = Partition(
        np.zeros(5, dtype=np.int64), distances=np.ones((5, 5)), counts=np.ones(5), limits=limits, num_towers=4
    )
    assert not partition.fits
    partition.repair()
    assert partition.fits
    check_books(partition)


def test_small_problems_end_near_the_best_of_all_partitions() -> None:
    """From 5 starts each: the best of all 3^8 assignments that keep the sizes is found nearly always."""
    found = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        half = np.triu(rng.random((8, 8)), 1)
        distances, counts = half + half.T, np.ones(8)
        limits = Limits(loads=np.ones((8, 1)), lower=np.full(1, 2.0), upper=np.full(1, 3.0))
        costs = []
        for start in range(5):
            assignment = np.random.default_rng(start).permutation(np.arange(8) % 3)
            partition = Partition(assignment, distances=distances, counts=counts, limits=limits, num_towers=3)
            partition.polish()
            costs.append(partition.cost)
        every = (np.array(each) for each in itertools.product(range(3), repeat=8))
        fitting = (each for each in every if sorted(np.bincount(each, minlength=3)) == [2, 3, 3])
        best = min(cost_of(each, distances, counts, 3) for each in fitting)
        assert min(costs) >= best - 1e-9
        found += min(costs) <= best + 1e-9
    assert found >= 8
