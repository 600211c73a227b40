import numpy as np
import pytest

from benchmarks.exact_plan import exact_plan
from tests.planning.search.set_cost_model import RootCostModel, random_problem
from ziggurat.errors import ConfigError, PlanError
from ziggurat.placements import Placement
from ziggurat.planning.costs.additive import AdditiveCostModel
from ziggurat.planning.problem import Assignment, PlanningProblem, TableProfile
from ziggurat.planning.search.search import SearchConfig, search
from ziggurat.planning.search.space import ColumnParts, SearchSpace

CONFIG = SearchConfig(max_evaluations=150_000)


def test_the_search_comes_near_the_optimum():
    gaps = []
    for seed in range(3):
        problem = random_problem(seed, num_tables=8, placements=(Placement.TABLE_WISE, Placement.COLUMN_WISE))
        space = SearchSpace(problem, AdditiveCostModel())
        exact = exact_plan(space, time_limit_s=20.0)
        ms, held = space.price(exact.assignments)
        assert ms.max() == pytest.approx(exact.cost_ms)
        assert not space.overflow(held)
        assert exact.bound_ms <= exact.cost_ms * (1 + 1e-6)
        gaps.append(search(problem, AdditiveCostModel(), config=CONFIG).cost_ms / exact.bound_ms - 1.0)
    assert min(gaps) > -1e-4
    assert np.mean(gaps) < 0.02


def test_rows_over_all_devices_are_chosen_where_they_pay():
    table = TableProfile(name="long", num_rows=3000, dim=4, pooling_factor=90.0)
    placements = (Placement.TABLE_WISE, Placement.COLUMN_WISE, Placement.ROW_WISE)
    problem = PlanningProblem(tables=(table,), num_devices=3, memory_bytes=(100_000,), placements=placements)
    exact = exact_plan(SearchSpace(problem, AdditiveCostModel()))
    assert exact.assignments == (Assignment(placement=Placement.ROW_WISE, devices=(0, 1, 2)),)
    assert search(problem, AdditiveCostModel(), config=CONFIG).assignments == exact.assignments


def test_what_it_cannot_do_is_refused():
    problem = random_problem(4)
    with pytest.raises(ConfigError, match="add up"):
        exact_plan(SearchSpace(problem, RootCostModel()))
    with pytest.raises(PlanError, match="different devices"):
        exact_plan(SearchSpace(problem, AdditiveCostModel(), parts=ColumnParts.ANYWHERE))
    tight = random_problem(4, num_tables=3, num_devices=2, room=0.9, placements=(Placement.TABLE_WISE,))
    with pytest.raises(PlanError, match="more memory"):
        exact_plan(SearchSpace(tight, AdditiveCostModel()))
