"""parallelize: a model that was written for one device becomes parallel, and no number changes. All on one page.

    plan checked ─► tables spread ─► towers spread, their modules replicated in the tower group (`SpreadFields`)
                 ─► attention over histories spread over the ranks of a context group
                 ─► dense network replicated or sharded over all ranks

Every rank must bring the same model, plan and settings (`same_model.py` compares them before anything is built), and a
plan that does not fit the model or the job is refused on all ranks. On one rank every exchange is a local copy. No
number changes while the wire is FP32, up to the order of sums.

The result is the same model object with other parts inside: names of weights, and so checkpoints, are those of one
device. A step on it is a step on the global batch if each rank divides its loss by the global weight
(`training/step/train_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from ziggurat.arguments import check_arguments
from ziggurat.config import to_json
from ziggurat.data.balance.cost import SampleCost
from ziggurat.embeddings.contract import with_innermost
from ziggurat.embeddings.tables import whole_tables
from ziggurat.errors import PlanError, TopologyError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Model
from ziggurat.models.costs.length_cost import length_cost
from ziggurat.parallel.context.attention import check_context, spread_stack
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.context.dividing import DividedOutputs
from ziggurat.parallel.dense import (
    DenseNetwork,
    DenseParallelism,
    Reduction,
    ShardedNetwork,
    check_dense,
    parallel_dense,
)
from ziggurat.parallel.exchange.hierarchical import ReductionRoute
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.fields import SpreadFields
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.prioritised.exchange import PrioritisedExchange
from ziggurat.parallel.prioritised.making import prioritise
from ziggurat.parallel.same_model import require_same_model
from ziggurat.parallel.tables.embeddings import Flow, ShardedEmbeddings, SpreadEmbeddings
from ziggurat.parallel.tables.optimizer import ShardedTableOptimizer
from ziggurat.parallel.tables.repeated import Deduplicated
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.topology import Topology
from ziggurat.parallel.towers import TowerTransform
from ziggurat.parallel.whole_batch import see_whole_batches
from ziggurat.plan import Plan
from ziggurat.typed import checked

_NOT_COUNTED = "not counted: parallelize(…, count_costs=True) does"


@dataclass(frozen=True, kw_only=True)
@checked
class ParallelConfig:
    """Settings of a model that runs on many ranks.

    Args:
        dense: how the dense network is spread.
        wire: what embeddings and their gradients travel as.
        reduction: what gradients of the dense network travel as.
        reduction_route: flat, over all ranks at once; hierarchical, host by host first (`exchange/hierarchical.py`).
        num_parts: parts of a batch in a training step, so that the last hop overlaps with computation
            (`pipeline.py`); 1 does not cut.
        exchange: when rows of the next batch travel; see `Exchange`.
        passing: what travels between ranks that divide histories between them: keys and values, or queries.

    Example:
        >>> zg.ParallelConfig(num_parts=2).num_parts
        2
    """

    dense: DenseParallelism = DenseParallelism.DDP
    wire: WireConfig = field(default_factory=WireConfig)
    reduction: Reduction = Reduction.FP32
    reduction_route: ReductionRoute = ReductionRoute.FLAT
    num_parts: int = 1
    exchange: Exchange = Exchange.PLAIN
    passing: Passing = Passing.AUTO


@dataclass(frozen=True)
class Parallel:
    """The parts of a parallel model beside the model itself.

    Args:
        plan: as executed.
        topology: the ranks.
        config: settings.
        traffic: what this rank has sent.
        embeddings: of the model, as it calls them.
        spread: the tables of this rank behind them, and the exchange of batches without slices.
        fields: what the model calls for lookup and towers, and a pipeline starts ahead.
        prioritised: what looks ahead between both; None: nothing does.
        cost: what a sample costs by its lengths, counted before the model was spread (`models/costs/length_cost.py`).
        cost_source: how that was found.
    """

    plan: Plan
    topology: Topology
    config: ParallelConfig
    traffic: Traffic
    embeddings: SpreadEmbeddings
    spread: ShardedEmbeddings
    fields: SpreadFields
    prioritised: PrioritisedExchange | None = None
    cost: SampleCost = field(default_factory=SampleCost)
    cost_source: str = _NOT_COUNTED

    def table_optimizer(self, model: Model) -> ShardedTableOptimizer:
        """The exact optimizer of a parallel model's tables."""
        del model
        return ShardedTableOptimizer(self.spread, topology=self.topology, traffic=self.traffic, ahead=self.prioritised)


@check_arguments
def parallelize(
    model: Model,
    plan: Plan,
    topology: Topology,
    *,
    config: ParallelConfig | None = None,
    seed: int | None = None,
    count_costs: bool = False,
) -> Parallel:
    """Make a model parallel, in place; collective over all ranks.

    Args:
        model: built the same way on every rank (`build_model` with one seed). Its tables may be open
            (`build_model(…, draw_tables=False)`): then each rank draws only its own part, with the same numbers.
        plan: the same on every rank. `plan.tower_size` must be the topology's.
        topology: the live ranks.
        config: dense parallelism, wire formats.
        seed: of open tables; None leaves them open, to be loaded (`embeddings.tables.mark_filled`) or drawn
            (`embeddings.tables.draw`) later. A lookup in open tables raises.
        count_costs: count what a sample costs by its lengths, for balanced steps; it takes a second.

    Returns:
        What the trainer needs to know. The model then computes the logits of this rank's batch.

    Raises:
        PlanError: the plan does not fit the model or the job, or ranks have different plans.
        ConfigError: ranks have different models, settings or seeds; names what differs. Or histories are to be
            divided and the model has none, or its batches are cut in parts.
    """
    config = config or ParallelConfig()
    # Before anything collective is built, in which ranks that differ would wait for each other.
    require_same_model(model, plan, settings=to_json(config), seed=seed)
    check_plan(plan, model.inputs, topology)
    _check_towers(model, plan)
    check_dense(model, num_parts=config.num_parts)
    check_context(model, topology, num_parts=config.num_parts)
    # Counted on the model of one device: what is put into its slots below can be run on many ranks alone.
    cost, cost_source = length_cost(model) if count_costs else (SampleCost(), _NOT_COUNTED)
    traffic, flow = Traffic(topology), Flow()
    # Tables that nobody has drawn yet (`is_open`) are drawn part by part, so no rank needs room for a whole one.
    whole = whole_tables(model.embeddings)
    is_open = whole.tables.is_open
    tables = ShardedTables(
        whole.inputs,
        whole.config,
        plan=plan,
        topology=topology,
        seed=seed if is_open else None,
        make_storage=whole.tables.make_storage,
        device=whole.tables.device,
    )
    if not is_open:
        tables.load_from(whole.tables)
    if not tables.is_open:
        tables.share_copies()
    field_dims = {spec.name: dim for spec, dim in zip(model.inputs.fields, whole.field_dims, strict=True)}
    spread = ShardedEmbeddings(tables, plan=plan, topology=topology, wire=config.wire, traffic=traffic, flow=flow)
    prioritised = None
    if config.exchange is not Exchange.PLAIN and topology.world_size > 1:
        prioritised = prioritise(
            spread, topology=topology, wire=config.wire, traffic=traffic, num_parts=config.num_parts
        )
    deduplicated = Deduplicated(
        prioritised or spread, spread=spread, towers=plan.towers, topology=topology, traffic=traffic
    )
    model.embeddings = with_innermost(model.embeddings, deduplicated)
    embeddings = cast(SpreadEmbeddings, model.embeddings)
    transform = None
    if plan.towers is not None:
        transform = TowerTransform(
            model.towers,
            towers=plan.towers,
            embeddings=spread,
            field_dims=field_dims,
            topology=topology,
            wire=config.wire,
            reduction=config.reduction,
            traffic=traffic,
            flow=flow,
        )
    fields = SpreadFields(model, embeddings, towers=transform)
    model.slots.fields = fields
    if topology.context.size > 1:
        spread_stack(model, topology=topology, traffic=traffic, passing=config.passing)
    dense = DenseNetwork(model)
    see_whole_batches(dense, topology=topology, traffic=traffic)
    network = parallel_dense(
        dense,
        how=config.dense,
        reduction=config.reduction,
        route=config.reduction_route,
        topology=topology,
        traffic=traffic,
    )
    model.slots.network = network
    # An evaluation leaves weights gathered; whoever names them for a checkpoint wants parts.
    if isinstance(network, ShardedNetwork):
        network.reshard_for_states_of(model)
    if topology.context.size > 1:
        model.slots.outputs = DividedOutputs(model, topology=topology, traffic=traffic)
    return Parallel(
        plan=plan,
        topology=topology,
        config=config,
        traffic=traffic,
        embeddings=embeddings,
        spread=spread,
        fields=fields,
        prioritised=prioritised,
        cost=cost,
        cost_source=cost_source,
    )


def check_plan(plan: Plan, inputs: InputSpec, topology: Topology) -> None:
    """Check a plan against a model's inputs and the live ranks; see `Plan.check`.

    Raises:
        PlanError: it does not fit, or a table-row-wise table has ranks on several hosts.
        TopologyError: the topology was closed.
    """
    if topology.ending.is_over:
        raise TopologyError(
            expected="a topology that is open",
            found="one that was closed",
            where="parallelize",
            ways_out=f"Topology.create(tower_size={plan.ranks_per_group}) makes another",
        )
    plan.check(
        tables={spec.name: spec.table for spec in inputs.lookups},
        world_size=topology.world_size,
        names=[table.name for table in inputs.tables],
    )
    if plan.ranks_per_group != topology.tower_size:
        raise PlanError(
            expected=f"a topology of tower groups of {plan.ranks_per_group} ranks, as the plan has them",
            found=f"groups of {topology.tower_size}",
            where="parallelize",
            ways_out=f"Topology.create(tower_size={plan.ranks_per_group})",
        )
    for entry in plan.tables:
        hosts = sorted({topology.host_of(rank) for rank in entry.ranks})
        if entry.placement.is_of_one_host and len(hosts) > 1:
            raise PlanError(
                expected=f"ranks of one host for {entry.placement}; host {hosts[0]} has ranks "
                f"{', '.join(map(str, topology.ranks_of_host(hosts[0])))}",
                found=f"ranks {list(entry.ranks)} on hosts {hosts}",
                where=f"plan, table {entry.table!r}",
                ways_out=("name ranks of one host", "place the table row_wise"),
            )


def _check_towers(model: Model, plan: Plan) -> None:
    """A model's towers are part of what it computes; a plan only says where they are."""
    if model.towers is None or (plan.towers is not None and plan.towers.towers == model.towers.towers.towers):
        return
    raise PlanError(
        expected="the towers of the model, in their order",
        found="none" if plan.towers is None else str([list(tower) for tower in plan.towers.towers]),
        where="plan, towers",
        ways_out=("plan with the towers of the run (config.json, towers)", "build the model with the plan's towers"),
    )
