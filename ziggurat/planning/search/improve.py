"""Improve a plan table by table: each to its best place given all others, until no table moves. Coordinate descent.

    greedy        tables by falling cost, each to the place that leaves the busiest ranks best off
    improve       from any plan; again and again through the tables

Places that are tried for a table: whole, on each of the ranks that now do least; by columns in 2, 4, … parts on those
ranks; every way that fixes its ranks (rows over all, rows over a host, a copy everywhere). What counts is

    ‖c‖ = (mean over ranks of c^p)^(1/p),   p = 16,   c = milliseconds of a rank

which is close to the busiest rank, and yet sees that one of several equally busy ranks became less busy.

A plan in which no table gains by moving alone is *settled*; one whose time ran out before may have been better with
more of it. How far the two searches end *apart* says what to expect of a third one. Whoever reads a step is told both.

It complements the annealing of `search.py`, which has no such global steps: with few tables on many devices ("26 tables
on 128") whole tables cannot be balanced, and the way to a plan in which most tables are cut is long. `best_plan` takes
the better of both. Cost: tables × places × ranks prices a pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32

from ziggurat.placements import by_columns
from ziggurat.planning.cost_model import CostModel, device_costs
from ziggurat.planning.problem import Assignment, PlanningProblem
from ziggurat.planning.search.search import search

_LEAST = 4  # ranks that are tried as a new home of a whole table
_POWER = 16
# Of the budget, until then; the rest improves what both found.
_GREEDY_SHARE = 0.3
_SEARCH_SHARE = 0.75
_MIN_GAIN = 1e-6


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The plan that a search found.

    Args:
        assignments: one a table, in the order of the problem.
        settled: whether no table gains by moving alone; False where time ran out before that was known.
        apart_ms: what the other of the two searches was worse by, on its busiest rank: how far they are from agreeing;
            infinite where there was no other one.
    """

    assignments: tuple[Assignment, ...]
    settled: bool
    apart_ms: float = math.inf


class Places:
    """A plan that is being changed: states of ranks, and what is free on them.

    Args:
        problem: tables and devices.
        cost_model: prices.
    """

    def __init__(self, problem: PlanningProblem, cost_model: CostModel) -> None:
        self.problem = problem
        self.cost_model = cost_model
        self.assignments: dict[int, Assignment] = {}
        width = cost_model.encode(problem.shards(0, _whole(problem, 0))).shape[1]
        self.states = np.zeros((problem.num_devices, width), dtype=np.float32)
        self.free = np.array(problem.room_bytes, dtype=np.int64)

    def put(self, table: int, assignment: Assignment) -> None:
        """Place a table that is not placed."""
        self.assignments[table] = assignment
        self._add(table, assignment, 1)

    def take(self, table: int) -> Assignment:
        """Remove a table; returns where it was."""
        assignment = self.assignments.pop(table)
        self._add(table, assignment, -1)
        return assignment

    def options(self, table: int) -> list[Assignment]:
        """Places that have room for a table that is not placed."""
        problem = self.problem
        costs = self.costs()
        least = sorted(problem.devices_of(table), key=lambda device: (costs[device], device))
        found = [Assignment(placement=by_columns(1), devices=(device,)) for device in least[:_LEAST]]
        for parts in problem.column_parts(table)[1:]:
            devices = tuple(sorted(least[:parts]))
            found.append(Assignment(placement=by_columns(len(devices)), devices=devices))
        found += problem.spread_options(table)
        # The place with most room, in case none of the cheapest has enough.
        found += [_whole(problem, table, max(least, key=lambda device: int(self.free[device])))]
        return [each for each in dict.fromkeys(found) if self.fits(table, each)]

    def fits(self, table: int, assignment: Assignment) -> bool:
        """Return True if every part has room."""
        shards = self.problem.shards(table, assignment)
        pairs = zip(assignment.devices, shards, strict=True)
        return all(shard.memory_bytes <= self.free[device] for device, shard in pairs)

    def costs(self) -> Float32[np.ndarray, " P"]:
        """Milliseconds of every rank."""
        return device_costs(self.cost_model, self.states[None])[0]

    def costs_with(self, table: int, options: Sequence[Assignment]) -> Float32[np.ndarray, "N P"]:
        """Milliseconds of every rank if a table that is not placed went to each of several places."""
        states = np.repeat(self.states[None], len(options), axis=0)
        for number, option in enumerate(options):
            encodings = self.cost_model.encode(self.problem.shards(table, option)[:1])
            states[number, list(option.devices)] += encodings  # parts are equal
        return device_costs(self.cost_model, states)

    def in_order(self) -> tuple[Assignment, ...]:
        """All assignments, in the order of the problem's tables."""
        return tuple(self.assignments[table] for table in range(len(self.problem.tables)))

    def _add(self, table: int, assignment: Assignment, sign: int) -> None:
        shard = self.problem.shards(table, assignment)[0]
        devices = list(assignment.devices)
        self.states[devices] += sign * self.cost_model.encode([shard])
        self.free[devices] -= sign * shard.memory_bytes


def norm(costs: Float[np.ndarray, "N P"]) -> Float[np.ndarray, " N"]:
    """‖c‖ of several plans; see the module's docstring."""
    most = costs.max(axis=1)
    # Divided by the largest: 16th powers of milliseconds would leave what FP32 holds.
    safe = np.maximum(most, 1e-30)
    return most * np.power(np.mean(np.power(costs / safe[:, None], _POWER), axis=1), 1 / _POWER)


def greedy_places(problem: PlanningProblem, cost_model: CostModel, *, until: Callable[[], bool]) -> Places | None:
    """Tables by falling cost, each to its best place; None if one finds no room, or time is over."""
    alone = cost_model.encode(
        [problem.shards(table, _whole(problem, table))[0] for table in range(len(problem.tables))]
    )
    weights = device_costs(cost_model, alone[:, None, :].repeat(1, axis=1)).max(axis=1)
    places = Places(problem, cost_model)
    for table in sorted(range(len(problem.tables)), key=lambda index: -weights[index]):
        options = places.options(table)
        if not options or until():
            return None
        places.put(table, options[int(norm(places.costs_with(table, options)).argmin())])
    return places


def improve(places: Places, *, until: Callable[[], bool]) -> bool:
    """Move tables, one at a time, until none gains (True) or time is over (False)."""
    best = float(norm(places.costs()[None])[0])
    moved = True
    while moved:
        moved = False
        for table in range(len(places.problem.tables)):
            if until():
                return False
            own = places.take(table)
            options = places.options(table)
            prices = norm(places.costs_with(table, options)) if options else np.array([])
            # Less than this is rounding, by which a table could go to and fro for ever.
            if len(prices) and prices.min() < best * (1 - _MIN_GAIN):
                own = options[int(prices.argmin())]
                best = float(prices.min())
                moved = True
            places.put(table, own)
    return True


def best_plan(problem: PlanningProblem, cost_model: CostModel, *, budget_s: float, seed: int = 0) -> FoundPlan:
    """The better of annealing and greedy places, both improved.

    Args:
        problem: tables and devices.
        cost_model: prices.
        budget_s: seconds in all.
        seed: of the annealing.

    Raises:
        PlanError: nothing fits.
    """
    began = time.perf_counter()

    def after(share: float) -> Callable[[], bool]:
        return lambda: time.perf_counter() - began > share * budget_s

    greedy = greedy_places(problem, cost_model, until=after(_GREEDY_SHARE))
    if greedy is not None:
        improve(greedy, until=after(_GREEDY_SHARE))
    spent = (time.perf_counter() - began) / budget_s
    answer = search(problem, cost_model, budget_s=max(0.1, _SEARCH_SHARE - spent) * budget_s, seed=seed)
    annealed = Places(problem, cost_model)
    for table, assignment in enumerate(answer.assignments):
        annealed.put(table, assignment)
    found = [annealed] if greedy is None else [annealed, greedy]
    # The first gets half of the time that is left, so that the second has some.
    settled = [
        improve(places, until=after(0.5 * (1 + _SEARCH_SHARE) if number == 0 else 1.0))
        for number, places in enumerate(found)
    ]
    costs = [float(places.costs().max()) for places in found]
    best = min(range(len(found)), key=lambda number: costs[number])
    apart_ms = max(costs) - min(costs) if len(costs) > 1 else math.inf
    return FoundPlan(assignments=found[best].in_order(), settled=settled[best], apart_ms=apart_ms)


def _whole(problem: PlanningProblem, table: int, device: int | None = None) -> Assignment:
    first = problem.devices_of(table)[0] if device is None else device
    return Assignment(placement=by_columns(1), devices=(first,))
