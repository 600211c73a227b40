"""Plans to compare with: what simpler rules would do with the same tables, under the same prices.

    default       what `ziggurat train` does without --plan: whole tables, balanced by numbers read and sent
    by bytes      whole tables, the largest first, each to the rank that holds the fewest bytes
    by columns    the same by columns sent                  by lookups   by numbers read
    additive      the same by the table's own milliseconds (how TorchRec's planner adds up)
    row_wise      every table cut into rows over all its ranks
    random        whole tables, anywhere

All whole-table rules go around full ranks as long as they can; a plan that still does not fit is shown with the rank
that is too full, because that is what one would be told on the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ziggurat.plan import Placement
from ziggurat.planning.judge import device_costs
from ziggurat.planning.placement import place_tables
from ziggurat.planning.plan_model import PlannedModel, bytes_of_ranks, states_of
from ziggurat.planning.problem import Assignment, PlanningProblem

HEADING = ("plan", "step ms", "tables ms", "imbalance", "GiB on the fullest rank", "")


def compare_plans(planned: PlannedModel, *, seed: int = 0) -> list[tuple[str, ...]]:
    """Heading and one line a plan, ours first.

    Args:
        planned: our plan, and the prices that hold for all.
        seed: of the random plan.
    """
    rows = [_row("this plan", planned, planned.assignments)]
    rows += [_row(name, planned, assignments) for name, assignments in baselines(planned, seed=seed)]
    return [HEADING, *rows]


def baselines(planned: PlannedModel, *, seed: int = 0) -> Iterator[tuple[str, tuple[Assignment, ...]]]:
    """Names and assignments of the simpler rules."""
    problem, model = planned.problem, planned.model
    default = place_tables(
        model.inputs,
        dim=model.config.embedding_dim if hasattr(model.config, "embedding_dim") else 1,
        world_size=problem.num_devices,
        towers=model.towers,
        tower_size=planned.plan.tower_size,
        list_lengths=model.list_lengths,
    )
    entries = {entry.table: Assignment(placement=entry.placement, devices=entry.ranks) for entry in default.tables}
    yield "default", tuple(entries[table.name] for table in problem.tables)
    costs = planned.simulator.costs(group_size=planned.plan.ranks_a_group)
    whole = [problem.shards(index, _whole(problem, index)) for index in range(len(problem.tables))]
    tables = problem.tables
    rules: dict[str, Callable[[int], float]] = {
        "by bytes": lambda index: whole[index][0].memory_bytes,
        "by columns": lambda index: tables[index].dim * tables[index].num_features,
        "by lookups": lambda index: tables[index].dim * tables[index].pooling_factor,
        "additive": lambda index: costs.table_cost(whole[index]).total_ms,
    }
    for name, load in rules.items():
        yield name, greedy(problem, [load(index) for index in range(len(tables))])
    if problem.num_devices > 1:
        yield "row_wise", tuple(_spread(problem, index) for index in range(len(tables)))
    generator = np.random.default_rng(seed)
    homes = [problem.devices_of(index) for index in range(len(tables))]
    chosen = [int(generator.choice(devices)) for devices in homes]
    yield "random", tuple(Assignment(placement=Placement.TABLE_WISE, devices=(device,)) for device in chosen)


def greedy(problem: PlanningProblem, loads: Sequence[float]) -> tuple[Assignment, ...]:
    """Whole tables, the heaviest first, each to the rank with the least load that has room (or to the emptiest)."""
    load_of, free = [0.0] * problem.num_devices, list(problem.room_bytes)
    chosen: dict[int, int] = {}
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        size = problem.tables[index].bytes_of(num_rows=problem.tables[index].num_rows, dim=problem.tables[index].dim)
        devices = problem.devices_of(index)
        fitting = [device for device in devices if free[device] >= size]
        device = min(fitting, key=lambda d: (load_of[d], d)) if fitting else max(devices, key=lambda d: (free[d], -d))
        load_of[device] += loads[index]
        free[device] -= size
        chosen[index] = device
    return tuple(Assignment(placement=Placement.TABLE_WISE, devices=(chosen[i],)) for i in range(len(loads)))


def _whole(problem: PlanningProblem, index: int) -> Assignment:
    return Assignment(placement=Placement.TABLE_WISE, devices=problem.devices_of(index)[:1])


def _spread(problem: PlanningProblem, index: int) -> Assignment:
    devices = problem.devices_of(index)
    if len(devices) == 1:
        return _whole(problem, index)
    return Assignment(placement=Placement.ROW_WISE, devices=devices)


def _row(name: str, planned: PlannedModel, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    problem = planned.problem
    costs = device_costs(planned.judge, states_of(problem, assignments, judge=planned.judge)[None])[0]
    sizes = bytes_of_ranks(problem, assignments)
    over = [rank for rank, size in enumerate(sizes) if size > problem.room_bytes[rank]]
    plan = problem.to_plan(assignments, towers=planned.model.towers, tower_size=planned.plan.tower_size)
    step_ms = 1e3 * planned.simulator.timeline(plan).step_s
    note = f"does not fit: rank {over[0]} and {len(over) - 1} others" if len(over) > 1 else ""
    note = f"does not fit: rank {over[0]}" if len(over) == 1 else note
    return (
        name,
        f"{step_ms:.2f}",
        f"{costs.max():.3f}",
        f"{costs.max() / max(float(costs.mean()), 1e-9):.2f}",
        f"{max(sizes) / 2**30:.2f}",
        note,
    )
