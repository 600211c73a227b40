"""Plans of whole models: memory, towers in their groups, why, comparison, and what more or larger devices must do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.planning.clusters import round_cluster
from ziggurat.cli.planning.plan_verbs import _flat_lines
from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig, LogisticRegressionConfig, MLPConfig
from ziggurat.placements import Placement
from ziggurat.plan import Towers
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.plan_comparison import compare_plans
from ziggurat.planning.plan_model import (
    ModelToPlace,
    PlannedModel,
    PlanSettings,
    bytes_of_ranks,
    plan_model,
    planning_problem,
    tower_sizes,
)
from ziggurat.planning.plan_report import PlanReport
from ziggurat.planning.problem import Assignment
from ziggurat.runs.planning.plan_run import PlannedRun

NAMES = tuple("abcdefgh")
TOWERS = Towers(towers=(("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")))
SMALL = MLPConfig(hidden_dims=(16,))


def inputs(num_rows: int = 10_000) -> InputSpec:
    return InputSpec(
        dense=("x",),
        single=tuple(SingleSpec(name=name, table=name) for name in NAMES[:7]),
        jagged=(JaggedSpec(name="h", table="h"),),
        tables=tuple(TableSpec(name=name, num_rows=num_rows * (index + 1)) for index, name in enumerate(NAMES)),
        labels=(LabelSpec(name="label"),),
    )


def model(*, num_rows: int = 10_000, towers: Towers | None = None) -> ModelToPlace:
    config = DLRMConfig(embedding_dim=16, bottom=SMALL, top=SMALL)
    return ModelToPlace(config=config, inputs=inputs(num_rows), batch_size=64, list_lengths={"h": 4.0}, towers=towers)


def planned(cluster: Cluster, **changes: object) -> PlannedModel:
    return plan_model(model(**changes), cluster, settings=PlanSettings(budget_s=0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("towers", [None, TOWERS], ids=["flat", "towers"])
def test_a_plan_covers_every_table_and_fits(towers: Towers | None) -> None:
    found = planned(round_cluster(), towers=towers)
    found.plan.check(
        tables={spec.name: spec.table for spec in found.model.inputs.fields},
        world_size=4,
        names=[table.name for table in found.model.inputs.tables],
    )
    assert max(found.rank_bytes) <= found.problem.room_bytes[0]
    assert found.rank_bytes == bytes_of_ranks(found.problem, found.assignments)
    assert found.rank_ms.shape == (4,)
    assert found.timeline.step_s > 0


def test_bytes_are_weights_and_state_of_each_part() -> None:
    problem, _ = planning_problem(model(), round_cluster(), tower_size=0)
    first = Assignment(placement=Placement.COLUMN_WISE, devices=(1, 2))
    others = [Assignment(placement=Placement.TABLE_WISE, devices=(3,))] * 7
    sizes = bytes_of_ranks(problem, [first, *others])
    assert sizes[:3] == (0, 10_000 * (8 * 4 + 4), 10_000 * (8 * 4 + 4))
    assert sizes[3] == sum(10_000 * (index + 1) * (16 * 4 + 4) for index in range(1, 8))


def test_memory_is_given_away_in_the_order_that_the_guide_says() -> None:
    cluster = round_cluster(reserve=0.2)
    problem, memory = planning_problem(model(), cluster, tower_size=0)
    work = model().work
    assert memory.reserve == 200_000_000
    assert memory.dense == 16 * work.num_dense_parameters
    assert memory.buffers == 2 * (64 * 8 * 16 * 4) * 2
    assert problem.room_bytes[0] == 10**9 - memory.total
    assert "reserve 0.19 GiB" in memory.describe()


def test_a_larger_cluster_never_holds_more_on_a_rank() -> None:
    fullest = [max(planned(round_cluster(hosts=hosts), num_rows=300_000).rank_bytes) for hosts in (1, 2, 4)]
    total = sum(table.bytes_of(num_rows=table.num_rows, dim=16) for table in model(num_rows=300_000).work.tables)
    assert fullest[0] >= total / 2
    assert fullest[-1] < fullest[0]


def test_what_does_not_fit_is_an_error_with_table_rank_bytes_and_ways_out() -> None:
    with pytest.raises(PlanError) as caught:
        planned(round_cluster(hosts=1), num_rows=20_000_000)
    error = caught.value
    table = 20_000_000 * 2 * 16 * 4 + 20_000_000 * 2 * 4  # rows are twice the setting; 16 columns and a state in FP32
    assert f"table 'b' has {table / 2**30:.2f} GiB (40,000,000 rows × 16 columns" in error.found
    assert "rank 0 has 953 MiB free of 953 MiB" in error.found
    assert error.where.startswith("table 'b', rank 0: 954 MiB of memory")
    assert "\n  3. --tables.weights int4: all tables then have 10.73 GiB (not enough alone)" in str(error)


def test_the_tower_size_with_the_shortest_step_is_chosen_and_all_are_reported() -> None:
    found = planned(round_cluster(hosts=4), towers=TOWERS)
    steps = {each.size: each.step_s for each in found.sizes_tried}
    assert len(steps) > 1
    assert found.plan.tower_size in steps
    assert steps[found.plan.tower_size] == min(step for step in steps.values() if step is not None)
    assert found.timeline.step_s == steps[found.plan.tower_size]
    alone = plan_model(model(towers=TOWERS), round_cluster(hosts=4), settings=PlanSettings(budget_s=0.1, tower_size=8))
    assert [each.size for each in alone.sizes_tried] == [8]
    assert planned(round_cluster()).sizes_tried == ()


@pytest.mark.parametrize(("times", "words"), [(0.5, "no tower size that was tried gains"), (2.0, "faster")])
def test_the_report_says_when_no_tower_size_gains(times: float, words: str) -> None:
    towers, flat = planned(round_cluster(hosts=4), towers=TOWERS), planned(round_cluster(hosts=4))
    flat.__dict__["timeline"] = SimpleNamespace(step_s=times * towers.timeline.step_s)
    lines = _flat_lines(PlannedRun(planned=towers, flat=flat, notes=()))
    assert words in lines[0]
    assert lines[1].startswith("sizes     steps with tower groups of")
    assert lines[1].endswith(f"{towers.plan.tower_size} ranks is chosen, the shortest")
    assert all(f"{each.size}: " in lines[1] for each in towers.sizes_tried)


def test_towers_lie_in_groups_near_the_size_of_a_host() -> None:
    cluster = named_cluster("h100x32")
    assert tower_sizes(TOWERS, cluster)[0] == 8
    assert tower_sizes(None, cluster) == [0]
    assert tower_sizes(TOWERS, cluster, asked=16) == [16]
    with pytest.raises(PlanError, match="tower_size S"):
        tower_sizes(TOWERS, cluster, asked=5)
    found = planned(round_cluster(), towers=TOWERS)
    assert found.plan.towers is TOWERS
    for index, tower in enumerate(TOWERS.towers):
        for entry in found.plan.tables:
            if entry.table in tower:
                assert set(entry.ranks) <= set(found.plan.tower_ranks(index))


def test_the_report_says_where_why_and_how_long() -> None:
    found = planned(round_cluster(), towers=TOWERS)
    report = PlanReport(found)
    heading, *lines = report.table()
    assert heading == ("table", "rows × columns", "placement", "ranks", "tower", "MiB", "ms", "next best")
    assert {line[0] for line in lines} == set(NAMES)
    costs = [float(line[6]) for line in lines]
    assert costs == sorted(costs, reverse=True)
    assert all(line[7] == "nothing else fits" or line[7].endswith(" ms") for line in lines)
    text = "\n".join(report.lines())
    for word in ("step ", "samples/s", "imbalance", "GiB", "4 towers in groups of"):
        assert word in text
    assert [row.rank for row in report.ranks] == [0, 1, 2, 3]


def test_next_best_is_what_the_cost_model_says_of_the_changed_plan() -> None:
    from ziggurat.planning.cost_model import device_costs
    from ziggurat.planning.plan_model import states_of

    found = planned(round_cluster())
    for table, best in enumerate(PlanReport(found).next_best):
        assert best.assignment is not None
        changed = [*found.assignments]
        changed[table] = best.assignment
        costs = device_costs(found.cost_model, states_of(found.problem, changed, cost_model=found.cost_model)[None])[0]
        assert best.more_ms == pytest.approx(float(costs.max() - found.rank_ms.max()), abs=1e-4)


def test_baselines_are_compared_under_the_same_prices() -> None:
    found = plan_model(model(), round_cluster(), settings=PlanSettings(budget_s=1.0))
    heading, ours, *others = compare_plans(found)
    assert heading[0] == "plan"
    assert ours[0] == "this plan"
    assert {row[0] for row in others} >= {"default", "size", "additive", "beam", "row_wise", "random"}
    assert float(ours[2]) <= 1.05 * min(float(row[2]) for row in others)
    assert np.isfinite([float(row[1]) for row in others if row[1] != "–"]).all()


def test_a_comparison_says_what_does_not_fit() -> None:
    found = planned(round_cluster())
    room = sum(found.rank_bytes) // 8  # for four ranks
    tight = replace(found, problem=replace(found.problem, memory_bytes=(found.problem.reserve_bytes + room,)))
    notes = {row[0]: row[-1] for row in compare_plans(tight)[1:]}
    assert "does not fit: rank" in notes["default"]
    assert "4 devices have" in notes["size"]


def test_a_model_without_tables_has_no_plan() -> None:
    empty = ModelToPlace(
        config=LogisticRegressionConfig(),
        inputs=InputSpec(dense=("x",), labels=(LabelSpec(name="label"),)),
        batch_size=8,
    )
    with pytest.raises(PlanError, match="embedding tables"):
        plan_model(empty, round_cluster())
