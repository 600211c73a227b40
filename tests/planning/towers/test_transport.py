"""The flow is as cheap as an exact solver's assignment to slots, and keeps its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from ziggurat.planning.towers.transport import assign_within


def cheapest(costs: np.ndarray, lower: int, upper: int) -> float:
    """Every cluster as `upper` slots, of which `lower` are so cheap that they are filled first."""
    bonus = 1e4
    slots = np.concatenate([np.repeat(costs, lower, axis=1) - bonus, np.repeat(costs, upper - lower, axis=1)], axis=1)
    items, chosen = linear_sum_assignment(slots)
    return float(slots[items, chosen].sum()) + bonus * lower * costs.shape[1]


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_clusters = draw(st.integers(1, 6))
    num_items = draw(st.integers(num_clusters, 30))
    lower = draw(st.integers(0, num_items // num_clusters))
    upper = draw(st.integers(-(-num_items // num_clusters), num_items))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    costs = rng.random((num_items, num_clusters))
    if draw(st.booleans()):
        costs = np.round(costs, 1)  # ties
    return costs, lower, upper


@settings(max_examples=150, deadline=None)
@given(problems())
def test_it_is_optimal_and_within_bounds(problem: tuple[np.ndarray, int, int]) -> None:
    costs, lower, upper = problem
    assignment = assign_within(costs, lower=lower, upper=upper)
    counts = np.bincount(assignment, minlength=costs.shape[1])
    assert counts.min() >= lower
    assert counts.max() <= upper
    assert float(costs[np.arange(len(costs)), assignment].sum()) == pytest.approx(
        cheapest(costs, lower, upper), abs=1e-6
    )


def test_without_pressure_everyone_gets_the_cheapest() -> None:
    costs = np.random.default_rng(0).random((20, 4))
    assert (assign_within(costs, lower=0, upper=20) == costs.argmin(axis=1)).all()


def test_equal_costs_end() -> None:
    counts = np.bincount(assign_within(np.zeros((12, 4)), lower=3, upper=3))
    assert counts.tolist() == [3, 3, 3, 3]
