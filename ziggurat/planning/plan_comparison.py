"""Plans to compare with: what simpler rules would do with the same tables, under the same prices.

    default       what `ziggurat train` does without --plan: whole tables, balanced by numbers read and sent
    size, dim, lookup, size_lookup    whole tables, the largest first by that number, each to the rank with least of it
    additive      the same by the table's own milliseconds (how TorchRec's planner adds up)
    fused, grid, beam                 by what the cost model says of the rank; NeuroShard's steps (`search.py`)
    row_wise      every table cut into rows over all its ranks
    random        whole tables, anywhere

A rule that finds no plan is shown with its reason: too little memory, or a limit of the rule itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ziggurat.errors import PlanError
from ziggurat.placements import ROW_WISE, by_columns
from ziggurat.planning.placement import place_tables
from ziggurat.planning.plan_model import PlannedModel, bytes_of_ranks, ms_of_ranks
from ziggurat.planning.problem import Assignment, PlanningProblem
from ziggurat.planning.search.search import Strategy, search

HEADING = ("plan", "step ms", "tables ms", "imbalance", "GiB on the fullest rank", "")


def compare_plans(planned: PlannedModel, *, budget_s: float = 2.0, seed: int = 0) -> list[tuple[str, ...]]:
    """Heading and one line a plan, ours first.

    Args:
        planned: our plan, and the prices that hold for all.
        budget_s: of each rule that searches.
        seed: of the random plan.
    """
    rows = [_row("this plan", planned, planned.assignments)]
    rows += [_row(name, planned, assignments) for name, assignments in fixed_plans(planned)]
    for strategy in Strategy:
        if strategy is not Strategy.ANNEALING:
            rows.append(_searched(strategy, planned, budget_s=budget_s, seed=seed))
    return [HEADING, *rows]


def fixed_plans(planned: PlannedModel) -> Iterator[tuple[str, tuple[Assignment, ...]]]:
    """Names and assignments of the rules that look at no prices and no memory."""
    problem = planned.problem
    model = planned.model
    default = place_tables(
        model.inputs,
        dim=getattr(model.config, "embedding_dim", 1),
        world_size=problem.num_devices,
        towers=model.towers,
        tower_size=planned.plan.tower_size,
        list_lengths=model.list_lengths,
    )
    entries = {entry.table: Assignment(placement=entry.placement, devices=entry.ranks) for entry in default.tables}
    yield "default", tuple(entries[table.name] for table in problem.tables)
    if problem.num_devices > 1:
        yield "row_wise", tuple(_spread(problem, index) for index in range(len(problem.tables)))


def _spread(problem: PlanningProblem, index: int) -> Assignment:
    devices = problem.devices_of(index)
    placement = ROW_WISE if len(devices) > 1 else by_columns(1)
    return Assignment(placement=placement, devices=devices)


def _searched(strategy: Strategy, planned: PlannedModel, *, budget_s: float, seed: int) -> tuple[str, ...]:
    try:
        found = search(planned.problem, planned.cost_model, strategy=strategy, budget_s=budget_s, seed=seed)
    except PlanError as error:
        return (strategy.value, "–", "–", "–", "–", f"no plan: {error.found}")
    if found.assignments:
        return _row(strategy.value, planned, found.assignments)
    return _figures(strategy.value, "–", found.device_ms, found.device_bytes, "parts of one table on one rank")


def _row(name: str, planned: PlannedModel, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    problem = planned.problem
    costs = ms_of_ranks(problem, assignments, cost_model=planned.cost_model)
    sizes = bytes_of_ranks(problem, assignments)
    over = [rank for rank, size in enumerate(sizes) if size > problem.room_bytes[rank]]
    others = f" and {len(over) - 1} others" if len(over) > 1 else ""
    plan = problem.to_plan(assignments, towers=planned.model.towers, tower_size=planned.plan.tower_size)
    step_ms = 1e3 * planned.simulator.timeline(plan).step_s
    note = f"does not fit: rank {over[0]}{others}" if over else ""
    return _figures(name, f"{step_ms:.2f}", [float(cost) for cost in costs], sizes, note)


def _figures(name: str, step_ms: str, costs: Sequence[float], sizes: Sequence[int], note: str) -> tuple[str, ...]:
    most = max(costs)
    mean = sum(costs) / len(costs)
    return (name, step_ms, f"{most:.3f}", f"{most / max(mean, 1e-9):.2f}", f"{max(sizes) / 2**30:.2f}", note)
