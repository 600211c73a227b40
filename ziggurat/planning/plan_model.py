"""Plan a model on a cluster: towers to hosts, tables inside, memory, and the step that comes out. No ranks, no GPU.

    model, inputs ──► StepWork ──► PlanningProblem ──► search ──► Plan ──► StepSimulator ──► predicted step
    cluster ────────────┴──────────────┴── memory left for tables

Memory of a device, in the order in which it is given away:

    reserve       a share of it (`Cluster.reserve`): context, fragmentation, what nobody counts
    dense         16 bytes a weight: FP32 weight, gradient, two moments of Adam; tower modules of its group too
    activations   8 bytes for each number that a layer reads or writes, B samples: kept forward, with a gradient back
    buffers       looked-up columns for all samples, and received columns for its own, each with gradients
    tables        the rest: weights in their formats, and optimizer state

With towers, sizes S of tower groups that the towers allow are tried, those nearest to a host first, since the
intra-group all-to-all is to stay inside one. The plan whose simulated step is shortest wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float32

from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.build import ModelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, Towers, possible_tower_sizes
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.cost_model import CostModel, device_costs
from ziggurat.planning.costs.analytic import AnalyticCostModel
from ziggurat.planning.problem import Assignment, PlanningProblem
from ziggurat.planning.search.improve import best_plan
from ziggurat.planning.simulator.step_simulator import StepSettings, StepSimulator
from ziggurat.planning.simulator.step_work import StepWork, step_work
from ziggurat.planning.simulator.timeline import Timeline
from ziggurat.typed import Count, CountOrNone, checked

ALL_PLACEMENTS = tuple(Placement)
_BYTES_PER_WEIGHT = 16  # FP32: the weight, its gradient and two moments of Adam
_MAX_SIZES = 3  # sizes of tower groups, which share the time of the search


@dataclass(frozen=True, kw_only=True)
@checked
class PlanSettings:
    """Settings of how a model is planned.

    Args:
        budget_s: seconds for the search, of all tower sizes together.
        seed: of the search.
        tower_size: S; 0 tries those that the towers allow.
        placements: ways to cut tables that may be used.
        step: formats and overlap of the step.
        tables_bytes: most that tables and their optimizer state may take on a device; 0: what its memory leaves.
    """

    budget_s: float = 3.0
    seed: int = 0
    tower_size: int = 0
    placements: tuple[Placement, ...] = ALL_PLACEMENTS
    step: StepSettings = dataclasses.field(default_factory=StepSettings)
    tables_bytes: CountOrNone = 0


@dataclass(frozen=True, kw_only=True)
class ModelToPlace:
    """A model as a planner sees it.

    Args:
        config: of the model.
        inputs: features and tables.
        batch_size: B, samples a rank.
        list_lengths: mean rows a sample of features that are lists.
        towers: groups of features; None for a flat model.
        tables: what rows of tables are kept as.
    """

    config: ModelConfig
    inputs: InputSpec
    batch_size: Count
    list_lengths: Mapping[str, float] = dataclasses.field(default_factory=dict)
    towers: Towers | None = None
    tables: TablesConfig = dataclasses.field(default_factory=TablesConfig)

    @cached_property
    def work(self) -> StepWork:
        """The work of a step."""
        return step_work(
            self.config,
            self.inputs,
            batch_size=self.batch_size,
            towers=self.towers,
            list_lengths=self.list_lengths,
            kept=self.tables,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Memory of a device that is taken beside its tables, in bytes."""

    reserve: int
    dense: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.reserve + self.dense + self.activations + self.buffers

    def describe(self) -> str:
        """Describe the memory in one line."""
        parts = {"reserve": self.reserve, "dense network": self.dense, "activations": self.activations}
        parts["exchange buffers"] = self.buffers
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items())


@dataclass(frozen=True, kw_only=True)
class SizeTried:
    """A size of tower groups that was planned.

    Args:
        size: S.
        step_s: the predicted step of its best plan; None if none fits.
    """

    size: int
    step_s: float | None

    def describe(self) -> str:
        """Size and milliseconds."""
        return f"{self.size}: " + ("does not fit" if self.step_s is None else f"{1e3 * self.step_s:.2f} ms")


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A plan and what was thought about it.

    Args:
        plan: for `parallel/`.
        model: what was planned.
        cluster: for what.
        problem: as the search saw it.
        assignments: its answer, in the order of the problem's tables.
        cost_model: its prices.
        simulator: of the whole step.
        memory: what tables could not have.
        sizes_tried: sizes of tower groups that were compared; () for a flat model.
        settled: whether the search ended by itself, with no table that gains by moving alone, for every size.
        apart_ms: how far two independent searches of this plan ended apart, on the busiest rank.
    """

    plan: Plan
    model: ModelToPlace
    cluster: Cluster
    problem: PlanningProblem
    assignments: tuple[Assignment, ...]
    cost_model: CostModel
    simulator: StepSimulator
    memory: MemoryLedger
    sizes_tried: tuple[SizeTried, ...] = ()
    settled: bool = True
    apart_ms: float = 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return self.simulator.timeline(self.plan)

    @cached_property
    def rank_ms(self) -> Float32[np.ndarray, " P"]:
        """The cost of tables on each rank: lookup, ids, hop there and back, update."""
        return ms_of_ranks(self.problem, self.assignments, cost_model=self.cost_model)

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Tables and optimizer state on each rank."""
        return bytes_of_ranks(self.problem, self.assignments)


def plan_model(
    model: ModelToPlace, cluster: Cluster, *, settings: PlanSettings | None = None, cost_model: CostModel | None = None
) -> PlannedModel:
    """Find towers and placements for a model on a cluster.

    Args:
        model: what to place.
        cluster: on what.
        settings: budget, formats.
        cost_model: prices of tables; None: `AnalyticCostModel` of the cluster.

    Raises:
        PlanError: it does not fit, with the table, the rank, bytes and ways out; or the towers do not fit the ranks.
    """
    settings = settings or PlanSettings()
    if not model.inputs.tables:
        raise PlanError(
            expected="a model with embedding tables",
            found="none",
            where="plan",
            ways_out="nothing has to be placed: every rank holds the whole model",
        )
    sizes = tower_sizes(model.towers, cluster, asked=settings.tower_size)
    found: list[PlannedModel] = []
    refusals: list[PlanError] = []
    tried: list[SizeTried] = []
    for size in sizes:
        try:
            share = replace(settings, budget_s=settings.budget_s / len(sizes))
            found.append(_plan_for(model, cluster, share, size=size, cost_model=cost_model))
            tried.append(SizeTried(size=size, step_s=found[-1].timeline.step_s))
        except PlanError as error:
            refusals.append(error)
            tried.append(SizeTried(size=size, step_s=None))
    if not found:
        # That of a host, which is tried first.
        raise refusals[0]
    best = min(found, key=lambda planned: planned.timeline.step_s)
    if model.towers is None:
        return best
    return replace(best, sizes_tried=tuple(tried), settled=all(each.settled for each in found))


def tower_sizes(towers: Towers | None, cluster: Cluster, *, asked: int = 0) -> list[int]:
    """Sizes of tower groups to try: that of a host first, then others near it; [0] for a flat model.

    Raises:
        PlanError: the towers cannot be shared out evenly, or not with the size that was asked for.
    """
    if towers is None:
        return [0]
    possible = possible_tower_sizes(cluster.world_size, len(towers))
    if asked:
        Plan(world_size=cluster.world_size, tables=(), towers=towers, tower_size=asked)  # refuses what is impossible
        return [asked]
    host = cluster.devices_per_host
    # By ratios: half as many ranks are as near as twice as many.
    near = sorted(possible, key=lambda size: (abs(np.log2(size / host)), size))
    return near[:_MAX_SIZES]


def planning_problem(
    model: ModelToPlace,
    cluster: Cluster,
    *,
    tower_size: int,
    placements: Sequence[Placement] = ALL_PLACEMENTS,
    tables_bytes: int = 0,
) -> tuple[PlanningProblem, MemoryLedger]:
    """Build the problem that the search is given.

    Args:
        model: tables and towers.
        cluster: devices and memory.
        tower_size: S; 0 for a flat model.
        placements: ways to cut tables that may be used.
        tables_bytes: most that tables may take on a device; 0: what its memory leaves.
    """
    work = model.work
    world = cluster.world_size
    memory = memory_ledger(work, cluster)
    allowed: tuple[tuple[int, ...] | None, ...] = ()
    if model.towers is not None:
        shell = Plan(world_size=world, tables=(), towers=model.towers, tower_size=tower_size)
        ranks = {
            name: tuple(shell.tower_ranks(index)) for index, tower in enumerate(model.towers.towers) for name in tower
        }
        homes = {spec.table: ranks[spec.name] for spec in model.inputs.lookups}
        allowed = tuple(homes.get(table.name) for table in work.tables)
    most = memory.total + tables_bytes if tables_bytes else cluster.device.memory_bytes
    usable = [each for each in placements if world > 1 or each.fits_one_rank]
    problem = PlanningProblem(
        tables=work.tables,
        num_devices=world,
        memory_bytes=(min(most, cluster.device.memory_bytes),),
        reserve_bytes=memory.total,
        allowed=allowed,
        devices_per_host=cluster.devices_per_host,
        placements=tuple(usable),
        has_limit=bool(tables_bytes) and most < cluster.device.memory_bytes,
    )
    return problem, memory


def memory_ledger(work: StepWork, cluster: Cluster) -> MemoryLedger:
    """Return the memory that a device needs beside its tables; see the module's docstring."""
    parts = [work.bottom, work.top, *(tower.network for tower in work.towers)]
    columns = sum(dim for _, _, dim in work.fields)
    looked_up = work.batch_size * columns * 4  # G·B samples of Σ D / G columns
    received = work.batch_size * work.output_dim * 4
    return MemoryLedger(
        reserve=cluster.device.memory_bytes - cluster.usable_bytes,
        dense=_BYTES_PER_WEIGHT * sum(part.num_parameters for part in parts),
        activations=int(8 * work.batch_size * sum(part.numbers for part in parts)),  # and a gradient for each
        buffers=2 * (looked_up + received),  # and their gradients
    )


def states_of(
    problem: PlanningProblem, assignments: Sequence[Assignment], *, cost_model: CostModel
) -> Float32[np.ndarray, "P H"]:
    """The state of every device: sums of the encodings of its shards."""
    shards = [shard for table, each in enumerate(assignments) for shard in problem.shards(table, each)]
    devices = [device for each in assignments for device in each.devices]
    encodings = cost_model.encode(shards)
    states = np.zeros((problem.num_devices, encodings.shape[1]), dtype=np.float32)
    # Not `states[devices] += …`, which would count one shard of a device that has several.
    np.add.at(states, devices, encodings)
    return states


def ms_of_ranks(
    problem: PlanningProblem, assignments: Sequence[Assignment], *, cost_model: CostModel
) -> Float32[np.ndarray, " P"]:
    """Return the cost of tables on each device, as the cost model prices them."""
    return device_costs(cost_model, states_of(problem, assignments, cost_model=cost_model)[None])[0]


def bytes_of_ranks(problem: PlanningProblem, assignments: Sequence[Assignment]) -> tuple[int, ...]:
    """Tables and optimizer state on each device."""
    found = [0] * problem.num_devices
    for table, each in enumerate(assignments):
        for device, shard in zip(each.devices, problem.shards(table, each), strict=True):
            found[device] += shard.memory_bytes
    return tuple(found)


def _plan_for(
    model: ModelToPlace, cluster: Cluster, settings: PlanSettings, *, size: int, cost_model: CostModel | None
) -> PlannedModel:
    problem, memory = planning_problem(
        model, cluster, tower_size=size, placements=settings.placements, tables_bytes=settings.tables_bytes
    )
    simulator = StepSimulator(cluster, model.work, settings=settings.step)
    cost_model = cost_model or AnalyticCostModel(simulator.costs(group_size=size))
    answer = best_plan(problem, cost_model, budget_s=settings.budget_s, seed=settings.seed)
    return PlannedModel(
        plan=problem.to_plan(answer.assignments, towers=model.towers, tower_size=size),
        model=model,
        cluster=cluster,
        problem=problem,
        assignments=answer.assignments,
        cost_model=cost_model,
        simulator=simulator,
        memory=memory,
        settled=answer.settled,
        apart_ms=answer.apart_ms,
    )
