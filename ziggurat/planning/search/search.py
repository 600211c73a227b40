"""search: find a plan whose most expensive device is as cheap as possible, and fits.

    problem, cost model ──► SearchSpace ──► start (greedy) ──► anneal ──► SearchResult ──► problem.to_plan(…)

Placing tables is bin packing with costs that do not add up, so an exact answer is for small cases with additive costs
(`benchmarks/exact_plan.py`). Greedy rules (`greedy.py`) are fast, and on the published benchmark 10 to 30 % from the
best that is known; NeuroShard's beam over column cuts (`beam.py`) is better; annealing over moves, swaps and cuts
(`annealing.py`) better still in the same time, and it can use whatever time there is. All take the same problem and
cost model, so that a comparison is a loop over `Strategy`.

A search with `max_evaluations` finds the same plan each time; one with `budget_s` does not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ziggurat.planning.cost_model import CostModel, device_costs
from ziggurat.planning.problem import Assignment, PlanningProblem
from ziggurat.planning.search.annealing import Anneal, AnnealingConfig, Best, Budget, anneal_in_numpy
from ziggurat.planning.search.beam import beam_search
from ziggurat.planning.search.greedy import GRID, Rule, greedy, grid, kinds_of, random_plan, starting_plan, whole_tables
from ziggurat.planning.search.infeasible import check_room, from_overflow, rule_without_plan
from ziggurat.planning.search.space import ColumnParts, SearchSpace, Shard
from ziggurat.typed import checked


class Strategy(StrEnum):
    """A way to look for a plan."""

    ANNEALING = "annealing"
    RANDOM = "random"
    SIZE = "size"
    DIM = "dim"
    LOOKUP = "lookup"
    SIZE_LOOKUP = "size_lookup"
    ADDITIVE = "additive"
    FUSED = "fused"
    GRID = "grid"
    BEAM = "beam"


_LIMITED = (Strategy.GRID, Strategy.BEAM)


class Clock(StrEnum):
    """The clock that a budget in seconds is measured with."""

    WALL = "wall"
    CPU = "cpu"  # of this process: comparable on a machine that does other things, too


@dataclass(frozen=True, kw_only=True)
@checked
class SearchConfig:
    """Settings of a search that few will change.

    Args:
        max_evaluations: candidates to price; 0: until the budget is spent.
        clock: of the budget.
        parts: where the parts of a table cut by columns may be.
        annealing: temperatures and chains.
        anneal: another annealer than our own, with settings of its own; the result names what annealed.
    """

    max_evaluations: int = 0
    clock: Clock = Clock.WALL
    parts: ColumnParts = ColumnParts.DISTINCT
    annealing: AnnealingConfig = field(default_factory=AnnealingConfig)
    anneal: Anneal | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
        assignments: one a table, in the order of the problem; () where parts may be anywhere.
        shards: the same as single parts; () for tables with rows on several devices.
        cost_ms: of the most expensive device.
        device_ms: of every device.
        device_bytes: tables and optimizer state of every device.
        evaluations: plans that were priced.
        seconds: of the budget's clock.
        history: (seconds, ms) of each improvement.
        engine: what annealed, in its own words; "" for other strategies.
    """

    assignments: tuple[Assignment, ...]
    shards: tuple[Shard, ...]
    cost_ms: float
    device_ms: tuple[float, ...]
    device_bytes: tuple[int, ...]
    evaluations: int
    seconds: float
    history: tuple[tuple[float, float], ...] = ()
    engine: str = ""


def search(
    problem: PlanningProblem,
    cost_model: CostModel,
    *,
    budget_s: float = 1.0,
    seed: int = 0,
    strategy: Strategy = Strategy.ANNEALING,
    config: SearchConfig | None = None,
) -> SearchResult:
    """Find a plan whose most expensive device is as cheap as possible, and fits.

    Args:
        problem: tables, devices, rules.
        cost_model: prices.
        budget_s: seconds; greedy rules need less, the beam stops between two rounds.
        seed: of all randomness.
        strategy: how.
        config: further settings.

    Raises:
        PlanError: nothing fits; names the table, its bytes, the rank, what is free, and the ways out.
    """
    config = config or SearchConfig()
    clock = time.process_time if config.clock is Clock.CPU else time.perf_counter
    began = clock()
    check_room(problem)
    space = SearchSpace(problem, cost_model, parts=config.parts)
    engine = ""
    if strategy is Strategy.ANNEALING:
        best, engine = _anneal(space, config, seed=seed, budget=_rest(budget_s, config, clock, began))
    else:
        best = _other(space, strategy, seed=seed, until=lambda: clock() - began > budget_s)
    if not np.isfinite(best.cost_ms):
        raise _nothing_fits(space, strategy)
    assignments = best.assignments
    if assignments is not None:
        device_ms, held = space.price(assignments)
    else:
        states, held = space.sum_kinds(*kinds_of(space, best.shards))
        device_ms = device_costs(cost_model, states[None])[0].astype(np.float64)
    return SearchResult(
        assignments=tuple(assignments or ()),
        shards=tuple(best.shards),
        cost_ms=float(device_ms.max()),
        device_ms=tuple(device_ms.tolist()),
        device_bytes=tuple(int(each) for each in held),
        evaluations=best.evaluations,
        seconds=clock() - began,
        history=tuple(best.history),
        engine=engine,
    )


def _rest(budget_s: float, config: SearchConfig, clock: Callable[[], float], began: float) -> Budget:
    """The budget as the annealer sees it: its clock starts when the search began."""
    return Budget(seconds=budget_s, evaluations=config.max_evaluations, clock=clock, began=began)


def _anneal(space: SearchSpace, config: SearchConfig, *, seed: int, budget: Budget) -> tuple[Best, str]:
    # By cost, and by bytes, which packs more tightly where memory is short.
    starts = [starting_plan(space, largest_first=first) for first in (False, True)]
    if space.num_devices == 1:
        best = Best(assignments=starts[0], evaluations=1)
        ms, held = space.price(starts[0])
        best.cost_ms = float(ms.max()) if not space.overflow(held) else np.inf
        return best, ""
    anneal = config.anneal or functools.partial(anneal_in_numpy, config=config.annealing)
    return anneal(space, starts, seed=seed, budget=budget)


def _other(space: SearchSpace, strategy: Strategy, *, seed: int, until: Callable[[], bool]) -> Best:
    if strategy is Strategy.RANDOM:
        shards = random_plan(space, np.random.default_rng(seed))
    elif strategy is Strategy.GRID:
        shards, _ = grid(space)
    elif strategy is Strategy.BEAM:
        shards = beam_search(space, until=until)
    else:
        shards = greedy(space, Rule(strategy.value))
    if shards is None:
        return Best()
    whole = all(shard.level == 0 for shard in shards)
    # The cost is any finite number: whoever asked prices the plan.
    return Best(cost_ms=0.0, shards=tuple(shards), assignments=whole_tables(space, shards) if whole else None)


def _nothing_fits(space: SearchSpace, strategy: Strategy) -> Exception:
    """Return the error that says why there is no plan: memory, or a rule that does not look at the plans that fit."""
    plans: Sequence[list[Assignment]] = [starting_plan(space, largest_first=first) for first in (False, True)]
    held = [space.states(plan)[1] for plan in plans]
    nearest = int(np.argmin([space.overflow(each) for each in held]))
    if strategy is not Strategy.ANNEALING and not space.overflow(held[nearest]):
        return rule_without_plan(space, strategy.value, limits=GRID if strategy in _LIMITED else ())
    tables_on: dict[int, list[tuple[int, int]]] = {device: [] for device in range(space.num_devices)}
    for table, each in enumerate(plans[nearest]):
        for device in each.devices:
            tables_on[device].append((table, space.kind_of(table, each)))
    return from_overflow(space, held[nearest], tables_on)
