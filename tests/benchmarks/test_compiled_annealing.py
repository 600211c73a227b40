import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.compiled_annealing import plan_chain
from benchmarks.compiled_annealing.annealing import (
    NetworkAnnealingConfig,
    NetworkForm,
    anneal_networks,
    chain_networks,
    compiled,
    why_not,
)
from benchmarks.compiled_annealing.plan_chain import price_states, why_no_chain
from tests.planning.search.set_cost_model import RootCostModel, random_problem
from ziggurat.errors import PlanError
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.placements import Placement
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.problem import PlanningProblem
from ziggurat.planning.search.annealing import Budget
from ziggurat.planning.search.greedy import starting_plan
from ziggurat.planning.search.search import SearchConfig, search
from ziggurat.planning.search.space import ColumnParts, SearchSpace

CUTS = (Placement.TABLE_WISE, Placement.COLUMN_WISE)
needs_kernel = pytest.mark.skipif(bool(why_no_chain()), reason=f"no compiled search: {why_no_chain()}")


class RandomNetworks:
    """A cost model of random networks: 11 numbers and the columns of each shard, exchanges in groups."""

    def __init__(self, *, group: int, seed: int = 0, hidden: tuple[int, ...] = (13,)) -> None:
        rng = np.random.default_rng(seed)
        self.group = group
        self.mix = rng.random((2, 11)).astype(np.float32)
        self.bias = rng.normal(size=11).astype(np.float32)
        self.local_layers = [(np.abs(weight), bias + 1.0) for weight, bias in _dense(rng, (11, *hidden, 1), scale=1.0)]
        self.together = _dense(rng, (group, 70, 24, group), scale=0.1)
        self.apart = _dense(rng, (2 * group, 40, 9, group), scale=0.1)

    def encode(self, shards) -> np.ndarray:
        sizes = np.array([[each.pooling_factor * each.dim / 50, 1.0] for each in shards], dtype=np.float32)
        dims = np.array([[each.dim] for each in shards], dtype=np.float32)
        return np.concatenate([sizes @ self.mix, dims], axis=1).astype(np.float32)

    def local(self, states: np.ndarray) -> np.ndarray:
        work = _run(np.maximum(states[:, :11] + self.bias, 0.0), self.local_layers)[:, 0]
        return np.stack([work, states[:, 11]], axis=1).astype(np.float32)

    def exchange(self, local: np.ndarray) -> np.ndarray:
        num, devices, _ = local.shape
        order = np.argsort(local[..., 1], axis=1, kind="stable")
        if devices == self.group:
            order = np.tile(np.arange(devices), (num, 1))
        grouped = np.take_along_axis(local, order[..., None], axis=1).reshape(-1, self.group, 2)
        start = grouped[..., 0] + _run(grouped[..., 1], self.together)
        waits = np.concatenate([grouped[..., 1], start - start.min(axis=1, keepdims=True)], axis=1)
        costs = (start + _run(waits, self.apart)).reshape(num, devices)
        result = np.empty_like(costs)
        np.put_along_axis(result, order, costs, axis=1)
        return result

    def networks(self) -> NetworkForm:
        return NetworkForm(
            bias=self.bias, local=self.local_layers, sum_place=11, together=self.together, apart=self.apart
        )


def _dense(rng: np.random.Generator, sizes: tuple[int, ...], *, scale: float) -> list[tuple[np.ndarray, np.ndarray]]:
    layers = []
    for low, high in itertools.pairwise(sizes):
        weight = scale / np.sqrt(low) * rng.normal(size=(low, high))
        layers.append((weight.astype(np.float32), np.full(high, 0.1, dtype=np.float32)))
    return layers


def _run(values: np.ndarray, layers: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    for index, (weight, bias) in enumerate(layers):
        values = values @ weight + bias
        if index + 1 < len(layers):
            values = np.maximum(values, 0.0)
    return values


def _check(problem: PlanningProblem, found, cost_model, *, parts: ColumnParts) -> None:
    """Every table once, in rules and memory, at the price that is said."""
    widths, places = [0] * len(problem.tables), []
    for shard in found.shards:
        widths[shard.table] += problem.tables[shard.table].dim >> shard.level
        places.append((shard.table, shard.device))
        assert shard.device in problem.devices_of(shard.table)
    assert widths == [table.dim for table in problem.tables]
    if parts is ColumnParts.DISTINCT:
        assert len(set(places)) == len(places)
        assert len(found.assignments) == len(problem.tables)
    space = SearchSpace(problem, cost_model, parts=parts)
    kinds = np.array([space.column_kind[shard.table, shard.level] for shard in found.shards])
    states, held = space.sum_kinds(kinds, np.array([shard.device for shard in found.shards]))
    assert not space.overflow(held)
    assert device_costs(cost_model, states[None]).max() == pytest.approx(found.cost_ms, rel=1e-5)


def _settings(**settings) -> SearchConfig:
    return SearchConfig(anneal=compiled, **settings)


@needs_kernel
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 4), (4, 8), (2, 6), (5, 5), (8, 8)]),
    st.booleans(),
)
def test_prices_are_those_of_the_cost_model(seed, sizes, deep):
    group, devices = sizes
    cost_model = RandomNetworks(group=group, seed=seed, hidden=(70, 13) if deep else ())
    states = np.abs(np.random.default_rng(seed).normal(size=(40, devices, 12))).astype(np.float32)
    states[..., 11] = np.round(states[..., 11] * 20)
    prices = price_states(chain_networks(cost_model.networks()), states)
    np.testing.assert_allclose(prices, device_costs(cost_model, states), rtol=1e-4)


@needs_kernel
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(list(ColumnParts)), st.sampled_from([(4, 4), (2, 6), (3, 3)]))
def test_any_answer_is_a_plan_that_fits_and_costs_what_it_says(seed, parts, sizes):
    cost_model, problem = RandomNetworks(group=sizes[0]), random_problem(seed, num_devices=sizes[1], placements=CUTS)
    found = search(problem, cost_model, seed=seed, config=_settings(max_evaluations=20_000, parts=parts))
    assert found.engine == "C++"
    assert 20_000 <= found.evaluations <= 21_100
    _check(problem, found, cost_model, parts=parts)


@needs_kernel
def test_tables_stay_on_devices_that_they_may_use():
    homes = tuple((0, 1) if index % 2 else (1, 2, 3) for index in range(12))
    for parts in ColumnParts:
        problem = random_problem(1, allowed=homes, room=1.8, placements=CUTS)
        cost_model = RandomNetworks(group=4)
        _check(
            problem,
            search(problem, cost_model, config=_settings(max_evaluations=50_000, parts=parts)),
            cost_model,
            parts=parts,
        )


@needs_kernel
@pytest.mark.parametrize("parts", list(ColumnParts))
def test_many_small_changes_lose_nothing(parts):
    """More changes than pass between two sums, with costs that drift: the answer still costs what it says."""
    cost_model, problem = RandomNetworks(group=4), random_problem(3, num_tables=30, placements=CUTS, room=1.1)
    hot = NetworkAnnealingConfig(hot=50.0, cold=1.0)
    config = SearchConfig(anneal=functools.partial(compiled, config=hot), max_evaluations=400_000, parts=parts)
    _check(problem, search(problem, cost_model, config=config), cost_model, parts=parts)


@needs_kernel
def test_the_same_seed_and_number_of_evaluations_find_the_same_plan():
    problem, config = (
        random_problem(2, num_tables=30, placements=CUTS),
        _settings(max_evaluations=30_000),
    )
    first, second, other = (search(problem, RandomNetworks(group=4), seed=seed, config=config) for seed in (5, 5, 6))
    assert first.shards == second.shards
    assert first.cost_ms == second.cost_ms
    assert [cost for _, cost in first.history] != [cost for _, cost in other.history]


@needs_kernel
def test_compiled_annealing_is_no_worse_than_the_reference():
    for seed in range(3):
        problem, cost_model = random_problem(seed, num_tables=25, placements=CUTS), RandomNetworks(group=4)
        slow = search(problem, cost_model, config=SearchConfig(max_evaluations=20_000))
        fast = search(problem, cost_model, config=_settings(max_evaluations=1_500_000))
        assert slow.engine == "numpy"
        assert fast.cost_ms <= slow.cost_ms * 1.002


@needs_kernel
def test_a_budget_in_seconds_is_kept_and_an_interrupt_gets_through():
    problem = random_problem(3, num_tables=40, placements=CUTS)
    found = search(problem, RandomNetworks(group=4), budget_s=0.3, config=_settings())
    assert 0.25 < found.seconds < 2.0
    assert found.history[-1][0] <= found.seconds

    def interrupted() -> float:
        raise KeyboardInterrupt

    space = SearchSpace(problem, RandomNetworks(group=4))
    budget = Budget(clock=interrupted, began=0.0)
    with pytest.raises(KeyboardInterrupt):
        anneal_networks(space, [starting_plan(space)], config=NetworkAnnealingConfig(), seed=0, budget=budget)


@needs_kernel
@pytest.mark.parametrize("parts", list(ColumnParts))
def test_tiny_problems(parts):
    cost_model = RandomNetworks(group=2)
    for num_devices in (2, 4):
        problem = random_problem(7, num_tables=1, num_devices=num_devices, placements=CUTS, room=9.0)
        _check(
            problem,
            search(problem, cost_model, config=_settings(max_evaluations=100, parts=parts)),
            cost_model,
            parts=parts,
        )
    alone = random_problem(7, num_tables=3, num_devices=1, placements=CUTS, room=9.0)
    found = search(
        alone,
        RandomNetworks(group=1),
        config=_settings(max_evaluations=100, parts=ColumnParts.DISTINCT),
    )
    assert {shard.devices for shard in found.assignments} == {(0,)}
    tight = dataclasses.replace(random_problem(7, placements=CUTS), memory_bytes=(2000,))
    with pytest.raises(PlanError):
        search(tight, cost_model, config=_settings(max_evaluations=2000, parts=parts))


def test_what_keeps_the_kernel_from_searching_is_said(monkeypatch):
    problem = random_problem(4, placements=CUTS)
    assert why_not(SearchSpace(problem, RootCostModel())) == "the cost model has no networks"
    assert why_not(SearchSpace(problem, RandomNetworks(group=3))) == "4 devices are no groups of 3"
    assert why_not(SearchSpace(random_problem(4), RandomNetworks(group=4))) == "placements with fixed devices"
    monkeypatch.setattr(plan_chain, "_LIBRARY", CppLibrary.missing("no compiler"))
    cost_model, config = RandomNetworks(group=4), _settings(max_evaluations=3000)
    found = search(problem, cost_model, config=config)
    assert found.engine == "numpy: no compiler"
    _check(problem, found, cost_model, parts=ColumnParts.DISTINCT)
