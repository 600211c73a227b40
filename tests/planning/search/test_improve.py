"""Places: what is put can be taken, improving never makes a plan worse, and few tables on many ranks are balanced."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.clusters import round_cluster
from ziggurat.errors import PlanError
from ziggurat.placements import Placement
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.costs.analytic import AnalyticCostModel, AnalyticCosts, HopSettings
from ziggurat.planning.plan_model import bytes_of_ranks, states_of
from ziggurat.planning.problem import Assignment, PlanningProblem, TableProfile
from ziggurat.planning.search.improve import Places, best_plan, greedy_places, improve, norm


def never() -> bool:
    return False


def problem(num_tables: int, *, hosts: int = 2, memory: int = 10**9) -> tuple[PlanningProblem, AnalyticCostModel]:
    tables = tuple(
        TableProfile(name=f"t{i}", num_rows=1000 * (i + 1), dim=16, pooling_factor=1 + i % 5, optimizer_bytes_per_row=4)
        for i in range(num_tables)
    )
    cluster = round_cluster(hosts=hosts)
    found = PlanningProblem(
        tables=tables,
        num_devices=cluster.world_size,
        memory_bytes=(memory,),
        devices_per_host=2,
        placements=tuple(Placement),
    )
    return found, AnalyticCostModel(AnalyticCosts(cluster, HopSettings(batch_size=32)))


def test_states_and_room_are_those_of_the_assignments() -> None:
    tables, cost_model = problem(6)
    places = greedy_places(tables, cost_model, until=never)
    assert places is not None
    taken = places.take(3)
    places.put(3, taken)
    plan = places.in_order()
    np.testing.assert_allclose(places.states, states_of(tables, plan, cost_model=cost_model), rtol=1e-4, atol=1e-6)
    assert [10**9 - int(free) for free in places.free] == list(bytes_of_ranks(tables, plan))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_improving_never_makes_a_plan_worse(num_tables: int, random: object) -> None:
    tables, cost_model = problem(num_tables)
    places = Places(tables, cost_model)
    for table in range(num_tables):
        device = random.randrange(4)  # type: ignore[attr-defined]
        places.put(table, Assignment(placement=Placement.TABLE_WISE, devices=(device,)))
    before = float(norm(places.costs()[None])[0])
    improve(places, until=never)
    after = float(norm(places.costs()[None])[0])
    assert after <= before * (1 + 1e-5)
    costs = device_costs(cost_model, states_of(tables, places.in_order(), cost_model=cost_model)[None])
    assert float(norm(costs)[0]) == pytest.approx(after, rel=1e-3)


def test_the_norm_is_near_the_busiest_rank_and_sees_the_others() -> None:
    costs = np.array([[4.0, 4.0, 1.0, 1.0], [4.0, 3.0, 1.0, 1.0]], dtype=np.float32)
    first, second = norm(costs)
    assert second < first <= 4.0
    assert norm(np.zeros((1, 3)))[0] == 0.0


def test_few_tables_on_many_ranks_are_cut() -> None:
    tables, cost_model = problem(3, hosts=8)
    plan = best_plan(tables, cost_model, budget_s=0.3).assignments
    costs = device_costs(cost_model, states_of(tables, plan, cost_model=cost_model)[None])[0]
    whole = Places(tables, cost_model)
    for table in range(3):
        whole.put(table, Assignment(placement=Placement.TABLE_WISE, devices=(table,)))
    assert costs.max() < 0.6 * whole.costs().max()


def test_memory_is_kept() -> None:
    tables, cost_model = problem(
        6, memory=21_000 * (16 * 4 + 4) // 4 + 30_000
    )  # a quarter of all tables, and little more
    plan = best_plan(tables, cost_model, budget_s=0.3).assignments
    assert max(bytes_of_ranks(tables, plan)) <= tables.room_bytes[0]


def test_what_fits_nowhere_is_refused() -> None:
    tables, cost_model = problem(6, memory=1000)
    with pytest.raises(PlanError):
        best_plan(tables, cost_model, budget_s=0.2)


def test_settled_means_that_no_table_gains_by_moving() -> None:
    tables, cost_model = problem(5)
    found = best_plan(tables, cost_model, budget_s=0.3)
    assert found.settled
    assert 0.0 <= found.apart_ms < math.inf
    places = Places(tables, cost_model)
    for table, assignment in enumerate(found.assignments):
        places.put(table, assignment)
    best = float(norm(places.costs()[None])[0])
    for table in range(5):
        own = places.take(table)
        assert float(norm(places.costs_with(table, places.options(table))).min()) >= best * (1 - 1e-5)
        places.put(table, own)
    hasty = best_plan(tables, cost_model, budget_s=1e-6)
    assert not hasty.settled
    assert hasty.apart_ms == math.inf
