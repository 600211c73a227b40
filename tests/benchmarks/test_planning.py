import json

import numpy as np
import pytest

from benchmarks.compiled_annealing.annealing import chain_networks, compiled
from benchmarks.compiled_annealing.plan_chain import price_states, why_no_chain
from benchmarks.neuroshard_cost_model import NeuroShardCostModel, problem_of
from benchmarks.planning import parse_options, run, together
from benchmarks.planning_tasks import draw_tables, draw_tasks
from ziggurat.placements import Placement
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.search import SearchConfig, Strategy, search
from ziggurat.planning.search.space import ColumnParts, SearchSpace
from ziggurat.testing.data import shared_data


def _released():
    folder = shared_data("neuroshard")
    return folder, json.loads((folder / "tasks.json").read_text())


def test_the_cost_model_gives_the_published_prices():
    folder, data = _released()
    cost_model = NeuroShardCostModel(folder / "judge.npz")
    for check in data["checks"]:
        problem = problem_of(data["sets"][check["set"]][check["task"]]["tables"])
        space = SearchSpace(problem, cost_model)
        plan = [
            Assignment(placement=Placement.TABLE_WISE, devices=(index % 4,)) for index in range(len(problem.tables))
        ]
        states, _ = space.states(plan)
        assert device_costs(cost_model, states[None]).max() == pytest.approx(check["cost_ms"], rel=1e-5)
        np.testing.assert_allclose(cost_model.local(states)[:, 0], check["compute_ms"], rtol=1e-4)


def test_greedy_rules_reach_what_was_published_for_them():
    folder, data = _released()
    cost_model = NeuroShardCostModel(folder / "judge.npz")
    for strategy, name in ((Strategy.SIZE, "size_greedy"), (Strategy.LOOKUP, "lookup_greedy")):
        for task in data["sets"]["max_dim_32"][:4]:
            found = search(problem_of(task["tables"]), cost_model, strategy=strategy)
            assert found.cost_ms == pytest.approx(task["cost_ms"][name], rel=1e-4)


def test_a_remembered_estimate_is_the_estimate():
    """The latest start and an exchange in which all start together, whatever was asked before."""
    folder, _ = _released()
    cost_model, fresh = (NeuroShardCostModel(folder / "judge.npz") for _ in range(2))
    rng = np.random.default_rng(0)
    local = np.stack([rng.uniform(1, 10, (3000, 4)), 4 * rng.integers(20, 60, (3000, 4))], axis=2).astype(np.float32)
    first, again = cost_model.estimate(local), cost_model.estimate(local)
    np.testing.assert_allclose(first, again, rtol=1e-5)
    alone = np.concatenate([fresh.estimate(each[None]) for each in local[:200]])
    np.testing.assert_allclose(first[:200], alone, rtol=1e-4)
    assert np.corrcoef(first, cost_model.exchange(local).max(axis=1))[0, 1] > 0.95


@pytest.mark.skipif(bool(why_no_chain()), reason=f"no compiled search: {why_no_chain()}")
@pytest.mark.parametrize("num_devices", [4, 8])
def test_the_compiled_search_knows_the_cost_models_prices(num_devices):
    folder, _ = _released()
    cost_model = NeuroShardCostModel(folder / "judge.npz", num_devices=num_devices)
    problem = problem_of(draw_tasks(1, max_dim=64, seed=5, num_devices=num_devices)[0], num_devices=num_devices)
    space, rng = SearchSpace(problem, cost_model), np.random.default_rng(0)
    plans = [
        space.sum_kinds(space.column_kind[:, 0], rng.integers(num_devices, size=space.num_tables))[0]
        for _ in range(200)
    ]
    prices = price_states(chain_networks(cost_model.networks()), np.stack(plans))
    np.testing.assert_allclose(prices, device_costs(cost_model, np.stack(plans)), rtol=1e-4)
    assert search(problem, cost_model, config=SearchConfig(anneal=compiled, max_evaluations=5000)).engine == "C++"


def test_together_is_the_price_where_no_device_has_two_parts():
    folder, data = _released()
    cost_model = NeuroShardCostModel(folder / "judge.npz")
    problem = problem_of(data["sets"]["max_dim_128"][9]["tables"])
    found = search(problem, cost_model, config=SearchConfig(anneal=compiled, max_evaluations=20_000))
    assert together(problem, cost_model, found) == pytest.approx(found.cost_ms, rel=1e-4)
    free = search(
        problem, cost_model, config=SearchConfig(anneal=compiled, max_evaluations=20_000, parts=ColumnParts.ANYWHERE)
    )
    places = [(shard.table, shard.device) for shard in free.shards]
    if len(set(places)) < len(places):
        assert together(problem, cost_model, free) != pytest.approx(free.cost_ms, rel=1e-6)


def test_tasks_are_drawn_again_from_their_seed_and_keep_their_limits():
    tasks = draw_tasks(5, max_dim=32, seed=3)
    assert tasks == draw_tasks(5, max_dim=32, seed=3) != draw_tasks(5, max_dim=32, seed=4)
    for task in tasks:
        assert 10 <= len(task) < 60
        assert {table["dim"] for table in task} <= {4.0, 8.0, 16.0, 32.0}
        assert sum(table["row"] * table["dim"] * 4 for table in task) <= 15 * 2**30
    rows = [table["row"] for table in draw_tables(20_000, dims=(4,), seed=1)]
    assert np.mean(rows) == pytest.approx(4_107_472, rel=0.1)


@pytest.mark.slow
def test_the_benchmark_runs_without_the_released_data(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.planning.DATA", tmp_path)
    report = run(quick=True, options=parse_options([]))
    names = [entry["name"] for entry in report.extra["cases"]]
    assert {"own_judge_dim32", "own_judge_dim128", "milp_gap", "thousand_tables"} <= set(names)
    assert any("no data of NeuroShard" in note for note in report.notes)
