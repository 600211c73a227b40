"""Plan a run for a cluster, compare plans, and simulate how it grows: what `ziggurat plan` and `simulate` do.

A run's own settings decide the step: samples a rank (`training.loader.batch-size`), wire formats, the reduction and the
parts of a batch (`parallel.*`), what is multiplied in (`training.precision`; auto takes BF16 where the cluster has it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from ziggurat.errors import ConfigError, PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import TowerModuleKind
from ziggurat.models.contract.reads import is_linear
from ziggurat.ops.machine.memory import size_of_text, unit_missing
from ziggurat.parallel.dense import Reduction
from ziggurat.parallel.exchange.wire import Wire, WireFormat
from ziggurat.placements import Placement
from ziggurat.plan import Towers
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.plan_model import ModelToPlace, PlannedModel, PlanSettings, memory_ledger, plan_model
from ziggurat.planning.simulator.step_simulator import MatmulFormat, StepSettings
from ziggurat.planning.simulator.timeline import Timeline
from ziggurat.planning.tiers.choice import choose_rungs, smallest_rungs
from ziggurat.precision.choice import MIN_BF16_SPEEDUP
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.planning.plan_inputs import PlanInputs, plan_inputs
from ziggurat.runs.tables.memory_limit import rung_lines, tier_problem
from ziggurat.training.config import Precision

MEASURED_PLACEMENTS = tuple(each for each in Placement if each.is_searched)  # what a probe measures
_MEASURED_IN_FP32 = "measured prices are those of rows in FP32; memory is counted in the formats of the tables"
_POOLED = (1.0, 0.97, 0.93, 0.85, 0.7)  # shares of all devices' memory that formats are chosen for, until a plan fits
_TRIAL_S = 0.2  # seconds
_WIRE_WIDTH = 64  # numbers that share a scale, where a format has scales


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The settings to plan with.

    Args:
        budget_s: seconds for each search.
        seed: of the searches.
        rows: rows of tables that the user gives.
        list_lengths: mean ids a sample that the user gives.
        folder: of the run, if it was trained.
        costs: a cost model that `ziggurat cluster probe` learned, for prices of tables; "" takes formulas.
        memory_limit: what tables may take on a device, such as 20GiB: chooses the format of each; "" chooses none.
    """

    budget_s: float = 3.0
    seed: int = 0
    rows: Mapping[str, int] | None = None
    list_lengths: Mapping[str, float] | None = None
    folder: Path | None = None
    costs: str = ""
    memory_limit: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan for a run, and the flat model beside it where there are towers.

    Args:
        planned: the plan.
        flat: of the same model without towers; None if the run has none, or it does not fit.
        notes: what the numbers rest on.
        formats: what was chosen for tables by a limit of memory, and why, in words.
    """

    planned: PlannedModel
    flat: PlannedModel | None
    notes: tuple[str, ...]
    formats: Mapping[str, str] = field(default_factory=dict)


def plan_run(config: RunConfig, cluster: Cluster, *, request: PlanRequest | None = None) -> PlannedRun:
    """Plan a run for a cluster.

    Args:
        config: of the run, with towers or without.
        cluster: for what.
        request: budget, sizes that the user knows better.

    Raises:
        PlanError: it does not fit, or there is nothing to place.
        ConfigError: sizes that nobody knows.
    """
    request = request or PlanRequest()
    config.check()
    data = _inputs(config, request)
    settings = plan_settings(config, cluster, request)
    cost_model = None
    notes = data.notes
    if request.costs:
        cost_model = measured_cost_model(request.costs, config=config, cluster=cluster)
        settings = replace(settings, placements=MEASURED_PLACEMENTS)
        notes = (
            *notes,
            f"whole tables and columns only; ranks are priced by {cost_model.describe()}; the rest by formulas",
            *((_MEASURED_IN_FP32,) if config.tables.has_few_bits else ()),
        )
    formats: dict[str, str] = {}
    if request.memory_limit:
        limit = size_of_text(request.memory_limit, where="--memory-limit")
        settings = replace(settings, tables_bytes=limit)
        way_out = unit_missing(request.memory_limit, setting="--memory-limit")
        config, formats = _with_formats(config, data, cluster, settings=settings, way_out=way_out)
    planned = plan_model(model_to_place(config, data), cluster, settings=settings, cost_model=cost_model)
    # The same model without towers, so that the report can say what they gain.
    flat = None
    if config.towers is not None:
        try:
            alone = replace(config, towers=None)
            flat_settings = replace(settings, step=step_settings(alone, cluster))
            flat = plan_model(model_to_place(alone, data), cluster, settings=flat_settings)
        except PlanError:
            flat = None  # the report says that there is none
    return PlannedRun(planned=planned, flat=flat, notes=notes, formats=formats)


def _with_formats(
    config: RunConfig, data: PlanInputs, cluster: Cluster, *, settings: PlanSettings, way_out: str
) -> tuple[RunConfig, dict[str, str]]:
    """A format for each table with which they fit all devices together, and a first plan of them each device."""
    model = model_to_place(config, data)
    room = min(settings.tables_bytes, cluster.device.memory_bytes - memory_ledger(model.work, cluster).total)
    whole = max(1, room * cluster.world_size)
    problem = tier_problem(config, data.inputs, list_lengths=data.list_lengths, limit_bytes=whole)
    problem = replace(problem, devices=cluster.world_size)
    pools = _pools(whole, least=smallest_rungs(problem)[1])
    while True:
        pool = pools.pop(0)
        choice = choose_rungs(replace(problem, limit_bytes=pool), way_out=way_out)
        formats = {name: rung.row_format for name, rung in choice.rungs.items()}
        limited = replace(config, tables=replace(config.tables, by_table=formats, memory_limit=""))
        try:
            # A short search tells whether tables fit; the caller plans them again with all of its time.
            plan_model(model_to_place(limited, data), cluster, settings=replace(settings, budget_s=_TRIAL_S))
        except PlanError:
            if not pools:
                raise  # not even the smallest formats fit
        else:
            return limited, rung_lines(replace(problem, limit_bytes=pool), choice)


def _pools(whole: int, *, least: int) -> list[int]:
    """Bytes of all devices that formats are chosen for: what there is, then less, down to the smallest formats.

    Tables of a tower share the devices of its group alone, so that much of the whole may be out of their reach.
    """
    if least >= whole:
        return [whole]  # is enough, or refused with what would be
    pools = [int(share * whole) for share in _POOLED]
    while pools[-1] > least:
        pools.append(int(_POOLED[-1] * pools[-1]))
    return [*(pool for pool in pools if pool > least), least]


def measured_cost_model(costs: str, *, config: RunConfig, cluster: Cluster) -> LearnedCostModel:
    """A cost model that was learned on the machines of the cluster, for this many samples a step.

    Raises:
        ConfigError: it was measured with another number of samples, or the run has towers, whose hops it does not know.
        MissingFileError: there is none.
    """
    cost_model = LearnedCostModel.load(costs)
    batch_size = config.training.loader.batch_size
    if config.towers is not None:
        raise ConfigError(
            expected="a flat model: the exchange was measured between all ranks",
            found=f"{len(config.towers)} towers",
            where=f"--costs {costs}",
            ways_out=("leave --costs out: formulas price towers", "leave --towers out"),
        )
    if cost_model.card.num_samples != batch_size * cluster.world_size:
        fitting = cost_model.card.num_samples // cluster.world_size
        raise ConfigError(
            expected=f"costs of {batch_size * cluster.world_size:,} samples a step: "
            f"{batch_size:,} a rank on {cluster.world_size} ranks",
            found=f"costs of {cost_model.card.num_samples:,} samples",
            where=f"--costs {costs}",
            ways_out=(
                f"--training.loader.batch-size {fitting}",
                "measure with this many: ziggurat cluster probe --samples",
                "leave --costs out",
            ),
        )
    return cost_model


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One point of a simulation.

    Args:
        cluster: how large.
        kind: "flat" or "towers".
        timeline: the step; None if it does not fit.
        note: why not, or what the towers are.
        samples_per_s: of all ranks.
        settled: whether the search of the plan ended by itself, and not because its time was over.
        apart_ms: how far two independent searches of the plan ended apart, on the busiest rank.
    """

    cluster: Cluster
    kind: str
    timeline: Timeline | None
    note: str = ""
    samples_per_s: float = 0.0
    settled: bool = True
    apart_ms: float = 0.0


def simulate_run(
    config: RunConfig, clusters: Sequence[Cluster], *, request: PlanRequest | None = None
) -> Iterator[SimulatedStep]:
    """Steps of a model, flat and with towers, as its cluster grows. Each is planned anew.

    Args:
        config: of the run. Without towers of its own it gets blocks of neighbouring features, a block a host, or for
            each of several hosts where there are more hosts than features: speed does not depend on what is in them.
        clusters: in the order to show.
        request: budget of each search.

    Raises:
        PlanError, ConfigError: see `plan_run`; what does not fit is a step without a timeline, with the reason.
    """
    request = request or PlanRequest()
    data = _inputs(config, request)
    for cluster in clusters:
        settings = plan_settings(config, cluster, request)
        alone = replace(config, towers=None)
        flat_settings = replace(settings, step=step_settings(alone, cluster))
        yield _simulated(alone, data, cluster, flat_settings, kind="flat")
        towers = config.towers or neighbours(data.inputs, most=cluster.hosts)
        if cluster.hosts > 1 and len(towers) > 1:
            with_towers = replace(config, towers=towers)
            with_towers.check()
            tower_settings = replace(settings, step=step_settings(with_towers, cluster))
            yield _simulated(with_towers, data, cluster, tower_settings, kind="towers")


def neighbours(inputs: InputSpec, *, most: int) -> Towers:
    """Blocks of neighbouring tables, with about the same number of features: the largest power of two up to `most`."""
    tables = list(dict.fromkeys(spec.table for spec in inputs.lookups))
    count = 1
    while count * 2 <= min(most, len(tables)):
        count *= 2
    bounds = [len(tables) * index // count for index in range(count + 1)]
    blocks = [set(tables[first:last]) for first, last in pairwise(bounds)]
    towers = tuple(tuple(spec.name for spec in inputs.lookups if spec.table in block) for block in blocks)
    return Towers(towers=towers, strategy="sequential")


def model_to_place(config: RunConfig, data: PlanInputs) -> ModelToPlace:
    """The part of a run that a planner looks at."""
    return ModelToPlace(
        config=config.model,
        inputs=data.inputs,
        batch_size=config.training.loader.batch_size,
        list_lengths=data.list_lengths,
        towers=config.towers,
        tables=config.tables,
    )


def plan_settings(config: RunConfig, cluster: Cluster, request: PlanRequest) -> PlanSettings:
    """Return the run's settings as a planner takes them."""
    return PlanSettings(
        budget_s=request.budget_s,
        seed=request.seed,
        tower_size=config.parallel.tower_size if config.towers is not None else 0,
        step=step_settings(config, cluster),
    )


def step_settings(config: RunConfig, cluster: Cluster) -> StepSettings:
    """Return what a step of the run computes in, and how many bytes its numbers take on the way."""
    parallel = config.parallel
    matmul = matmul_format(config.training.precision, cluster)
    computed = torch.float32  # what is looked up, and what identity modules pass on
    module = getattr(config.model, "tower_module", None)  # a model without has no towers
    if config.towers is not None and module is not None and module.kind is not TowerModuleKind.IDENTITY:
        computed = torch.bfloat16 if matmul is MatmulFormat.BF16 else computed
    return StepSettings(
        matmul=matmul,
        in_tower_bytes=wire_bytes(parallel.wire.in_tower),
        between_bytes=wire_bytes(parallel.wire.between_towers, computed=computed),
        reduction_bytes=2.0 if parallel.reduction is Reduction.BF16 else 4.0,
        num_parts=parallel.num_parts,
    )


def matmul_format(precision: Precision, cluster: Cluster) -> MatmulFormat:
    """Return a run's matmul format; auto decides as the trainer would, by the cluster's rates, not a measurement."""
    device = cluster.device
    pays = device.bf16_flop_per_s >= MIN_BF16_SPEEDUP * device.fp32_flop_per_s
    if precision.is_measured:
        return MatmulFormat.BF16 if pays else MatmulFormat.FP32
    return MatmulFormat(precision.counts_as)


def wire_bytes(wire: WireFormat, *, computed: torch.dtype = torch.float32) -> float:
    """Bytes of a number on the wire, its share of a scale included.

    Args:
        wire: the format.
        computed: what the number is before it travels; an FP32 wire carries BF16 as it is.
    """
    return Wire(wire, (_WIRE_WIDTH,)).bytes_per_number(computed)


def _inputs(config: RunConfig, request: PlanRequest) -> PlanInputs:
    if is_linear(config.model):
        raise ConfigError(
            expected="a model with embeddings: dlrm, dcn_v2, dnn …",
            found=f"{config.model.kind!r}, whose tables have one column",
            where="planning",
            ways_out="one device is enough for it",
        )
    return plan_inputs(config, folder=request.folder, rows=request.rows, list_lengths=request.list_lengths)


def _simulated(
    config: RunConfig, data: PlanInputs, cluster: Cluster, settings: PlanSettings, *, kind: str
) -> SimulatedStep:
    try:
        planned = plan_model(model_to_place(config, data), cluster, settings=settings)
    except PlanError as error:
        return SimulatedStep(cluster=cluster, kind=kind, timeline=None, note=f"{error.found} ({error.where})")
    towers = config.towers
    note = "" if towers is None else f"{len(towers)} towers × {planned.plan.ranks_per_group}"
    return SimulatedStep(
        cluster=cluster,
        kind=kind,
        timeline=planned.timeline,
        note=note,
        samples_per_s=planned.timeline.samples_per_s(config.training.loader.batch_size),
        settled=planned.settled,
        apart_ms=planned.apart_ms,
    )
