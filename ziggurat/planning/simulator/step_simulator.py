"""StepSimulator: one training step of a plan on a cluster, flat or with towers, as a timeline.

Every rank does the same at the same time, so one rank's step is drawn, with the work of the busiest rank in each task:

    flat     lookup ► exchange ► dense network, there and back ► exchange ► update of tables
    towers   lookup ► intra ► tower modules ► inter ► dense network ► inter ► modules ► intra ► update
    both     ids of the next batch; gradients of the dense network, then its optimizer

`Overlap` says which tasks may run ahead:

    none      nothing: each task after the one before
    executed  what `parallel/` does: ids of the next batch travel beside this one, gradients of the dense network beside
              the backward hop and the update; with `num_parts` the last hop beside computation (`parallel/pipeline.py`)
    full      also the bottom network beside the forward hop, and its backward pass beside the backward hop

Seconds of a compute task: FLOPs over rate and its layers' numbers over memory rate, and never less than its launches.
Seconds of a hop: `AnalyticCosts`, from the bytes of the busiest rank. Packing and unpacking what travels is computing.
Constants of the machine are in `ziggurat.planning.cluster.cluster`; errors against published and measured steps in
`docs/guides/planning.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.errors import ConfigError
from ziggurat.plan import Plan
from ziggurat.planning.cluster.cluster import Cluster, Device, Launch, Port
from ziggurat.planning.costs.analytic import AnalyticCosts, HopSettings, ShardWork
from ziggurat.planning.problem import TableProfile
from ziggurat.planning.simulator.step_work import NetworkWork, StepWork, TowerWork
from ziggurat.planning.simulator.timeline import Resource, SimulatedTask, Span, Timeline, run_tasks
from ziggurat.typed import checked

_PASSES_FORWARD = 4.0  # bytes a number: FP32, read or written once
_PASSES_BACKWARD = 8.0  # twice that
_OPTIMIZER_BYTES = 28.0  # a dense weight: gradient, weight and two moments of Adam read, the last three written
_LOOKUP_LAUNCHES = 4
_HOP_LAUNCHES = 6
_OPTIMIZER_LAUNCHES = 6


class Overlap(StrEnum):
    """The work that may run beside something else; see the module's docstring."""

    NONE = "none"
    EXECUTED = "executed"
    FULL = "full"


class MatmulFormat(StrEnum):
    """The format in which the dense network multiplies."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
@checked
class StepSettings:
    """Settings that decide how a step runs.

    Args:
        matmul: format of matrix products; one that the device does not have falls back to FP32.
        in_tower_bytes: of a number in the intra-group all-to-all, scales included.
        between_bytes: of a number in the last hop.
        reduction_bytes: of a dense weight's gradient.
        overlap: what runs beside what.
        num_parts: parts of a batch (with overlap executed or full).
    """

    matmul: MatmulFormat = MatmulFormat.FP32
    in_tower_bytes: float = 4.0
    between_bytes: float = 4.0
    reduction_bytes: float = 4.0
    overlap: Overlap = Overlap.EXECUTED
    num_parts: int = 1

    def __post_init__(self) -> None:
        sizes = (self.in_tower_bytes, self.between_bytes, self.reduction_bytes, float(self.num_parts))
        if min(sizes) <= 0:
            raise ConfigError(
                expected="bytes above 0, one part or more",
                found=str(sizes),
                where="StepSettings",
                ways_out="correct the number",
            )


class StepSimulator:
    """Timelines of one model on one cluster.

    Args:
        cluster: machines.
        work: of the model: flat, or with towers.
        settings: formats and overlap.
    """

    def __init__(self, cluster: Cluster, work: StepWork, *, settings: StepSettings | None = None) -> None:
        self.cluster = cluster
        self.work = work
        self.settings = settings or StepSettings()

    def costs(self, *, group_size: int = 0) -> AnalyticCosts:
        """Costs of tables for hops of `group_size` ranks (0: all)."""
        # With towers the embeddings stay in a group, and only what modules make crosses to others.
        crosses = group_size in (0, self.cluster.world_size) and not self.work.towers
        number = self.settings.between_bytes if crosses else self.settings.in_tower_bytes
        hop = HopSettings(batch_size=self.work.batch_size, group_size=group_size, number_bytes=number)
        return AnalyticCosts(self.cluster, hop)

    def timeline(self, plan: Plan) -> Timeline:
        """One step of a plan.

        Args:
            plan: for as many ranks as the cluster has, with towers if the model has them.

        Raises:
            ConfigError: a plan for another number of ranks.
        """
        if plan.world_size != self.cluster.world_size:
            raise ConfigError(
                expected=f"a plan for {self.cluster.world_size} ranks, as the cluster has",
                found=f"one for {plan.world_size}",
                where=f"cluster {self.cluster.name}",
                ways_out="plan for this cluster: ziggurat plan … --cluster",
            )
        size = plan.ranks_per_group
        costs = self.costs(group_size=size)
        loads = rank_loads(plan, self.work.tables, costs=costs)
        builder = _Step(self, costs, loads, group_size=size)
        spans = run_tasks(builder.tasks())
        end_s = max(span.end_s for span in spans)
        least_s = self.cluster.device.step_s
        # The devices wait for the program that starts their operations.
        if self.cluster.device.launch is Launch.AHEAD and end_s < least_s:
            spans += (Span(SimulatedTask("rest", Resource.COMPUTE, least_s - end_s), end_s, least_s),)
        return Timeline(spans, self.cluster)


def rank_loads(plan: Plan, tables: Sequence[TableProfile], *, costs: AnalyticCosts) -> list[ShardWork]:
    """Return the work of each rank for its tables in a step."""
    profiles = {table.name: table for table in tables}
    loads = [ShardWork()] * plan.world_size
    for entry in plan.tables:
        work = costs.work(profiles[entry.table].shard(entry.placement, num_parts=len(entry.ranks)))
        for rank in entry.ranks:
            loads[rank] = loads[rank] + work
    return loads


def _busiest(loads: Sequence[ShardWork]) -> ShardWork:
    """The largest of each part over ranks; nobody receives less in a hop than the mean of what is sent."""
    names = ShardWork.__dataclass_fields__
    return ShardWork(**{name: max(getattr(load, name) for load in loads) for name in names})


def compute_s(device: Device, part: NetworkWork, *, batch_size: float, settings: StepSettings) -> tuple[float, float]:
    """Seconds of a part of the network, forward and backward."""
    rates = {MatmulFormat.TF32: device.tf32_flop_per_s, MatmulFormat.BF16: device.bf16_flop_per_s}
    # A format that the device has no rate for runs as FP32.
    rate = (rates.get(settings.matmul) or device.fp32_flop_per_s) * device.matmul_efficiency
    found = []
    # A layer has two products backward, for the gradients of its inputs and of its weights.
    for flop, passes, times in (
        (part.forward_flop, _PASSES_FORWARD, 1),
        (part.backward_flop, _PASSES_BACKWARD, 2),
    ):
        moved = part.numbers * passes / device.memory_bytes_per_s
        # Launches are a floor: a small part of a network takes as long as its kernels take to start.
        found.append(max(batch_size * (flop / rate + moved), part.launches * times * device.launch_s))
    return found[0], found[1]


class _Step:
    """Builds the tasks of one step."""

    def __init__(
        self, simulator: StepSimulator, costs: AnalyticCosts, loads: Sequence[ShardWork], *, group_size: int
    ) -> None:
        self.work = simulator.work
        self.settings = simulator.settings
        self.cluster = simulator.cluster
        self.costs = costs
        self.load = _busiest(loads)
        self.group_size = group_size
        self.list: list[SimulatedTask] = []
        self.last: int | None = None  # what everything waits for if nothing overlaps
        self.parts = self.settings.num_parts if self.settings.overlap is not Overlap.NONE else 1
        device = self.cluster.device
        # Each part of a batch is computed by itself.
        share = self.work.batch_size / self.parts
        self.bottom_s = compute_s(device, self.work.bottom, batch_size=share, settings=self.settings)
        self.top_s = compute_s(device, self.work.top, batch_size=share, settings=self.settings)
        self.tower_s = self._tower_seconds(share)
        self.lookup_s, self.hop_s, self.back_hop_s, self.update_s = self._table_seconds(loads)

    def tasks(self) -> list[SimulatedTask]:
        """Return the tasks in the order of `parallel/pipeline.py`: below the last hop, above it, back."""
        full = self.settings.overlap is Overlap.FULL
        device = self.cluster.device
        # Where the program does not run ahead, its own time stands in front of the step.
        if device.launch is Launch.INLINE and device.step_s:
            self._compute("rest", device.step_s)
        self._add("ids", self._link(), self._ids_s())
        hops = [self._below() for _ in range(self.parts)]
        back = []
        last_top = 0
        for hop in hops:
            bottom = [self._compute("bottom network", self.bottom_s[0])] if full else []
            # Without full overlap the bottom network is computed with the rest, after the hop.
            seconds = self.top_s[0] + (0 if full else self.bottom_s[0])
            forward = self._compute("dense network", seconds + self._unpack_s(), after=(hop, *bottom))
            backward_s = self.top_s[1] + (0 if full else self.bottom_s[1]) + self._pack_s()
            last_top = self._compute("dense network", backward_s, after=(forward,))
            back.append(self._last_hop(after=(last_top,), seconds=self.back_hop_s))
            if full:
                last_top = self._compute("bottom network", self.bottom_s[1], after=(last_top,))
        gradients = self.work.num_dense_parameters * self.settings.reduction_bytes
        reduced = self._add("dense gradients", self._link(), self.costs.all_reduce_s(gradients), after=(last_top,))
        for hop in back:
            self._back(hop)
        launches = _OPTIMIZER_LAUNCHES * self.cluster.device.launch_s
        moved = self.work.num_dense_parameters * _OPTIMIZER_BYTES / self.cluster.device.memory_bytes_per_s
        # Of both sides the slower one: reading weights, or starting kernels.
        self._compute("optimizers", max(moved, launches), after=(reduced,))
        return self.list

    # ---------------------------------------------------------------------------------------------- the parts of a step

    def _below(self) -> int:
        """Lookup and, with towers, intra-group all-to-all and modules; returns the last hop."""
        lookup_s = self.lookup_s
        if not self.work.towers:
            lookup = self._compute("lookup", lookup_s + self._pack_s())
            return self._last_hop(after=(lookup,), seconds=self.hop_s)
        # Half of the packing: the other half is the unpacking, behind the hop.
        inner_s = self._packing_s(self._tower_bytes()) / 2
        lookup = self._compute("lookup", lookup_s + inner_s)
        hop = self._tower_hop(after=(lookup,), seconds=self.hop_s)
        module = self._compute("tower modules", inner_s + self.tower_s[0] + self._pack_s(), after=(hop,))
        return self._last_hop(after=(module,), seconds=self.hop_s)

    def _back(self, hop: int) -> None:
        """Add the tasks from the gradient of the last hop to the tables."""
        before = hop
        if self.work.towers:
            inner_s = self._packing_s(self._tower_bytes()) / 2
            module = self._compute("tower modules", self._unpack_s() + self.tower_s[1] + inner_s, after=(hop,))
            before = self._tower_hop(after=(module,), seconds=self.back_hop_s)
            weights = sum(tower.network.num_parameters for tower in self._own_towers())
            seconds = self.costs.all_reduce_s(4.0 * weights / self.parts, group_size=self.group_size)
            self._add("tower gradients", Resource.INSIDE, seconds, after=(module,))
            unpack_s = inner_s
        else:
            unpack_s = self._unpack_s()
        # Only tables with copies on several ranks have gradients to add up.
        if self.load.gathered_inside:
            moved = self.costs.moved_s(inside=self.load.gathered_inside, between=self.load.gathered_between)
            before = self._add("gradients of copies", self._link(), moved / self.parts, after=(before,))
        self._compute("update of tables", self.update_s + unpack_s, after=(before,))

    def _last_hop(self, *, after: tuple[int, ...], seconds: float) -> int:
        """The flat exchange, which takes so many seconds, or the hop between peers."""
        if self.work.towers:
            inside, between = self._peer_bytes()
            size = self.cluster.world_size // self.group_size
            seconds = self._peer_hop_s(inside / self.parts, between / self.parts, num_groups=size)
            return self._add("inter-group all-to-all", self._link(), seconds, after=after)
        return self._add("exchange", self._link(), seconds, after=after)

    def _tower_hop(self, *, after: tuple[int, ...], seconds: float) -> int:
        spans_hosts = self.group_size > self.cluster.devices_per_host
        resource = Resource.BETWEEN if spans_hosts else Resource.INSIDE
        return self._add("intra-group all-to-all", resource, seconds, after=after)

    # --------------------------------------------------------------------------------------------------- bytes, seconds

    def _table_seconds(self, loads: Sequence[ShardWork]) -> tuple[float, float, float, float]:
        """Lookup, hop, hop back, update: of the slowest rank in lookup and hop together, and in hop back and update.

        A rank that looks up little may send much meanwhile: only the sum of both is waited for.
        """
        floor = _LOOKUP_LAUNCHES * self.cluster.device.launch_s
        lookups = [max(load.lookup_s / self.parts, floor) for load in loads]
        updates = [max(load.update_s / self.parts, floor) for load in loads]
        hops = self._hops(loads)
        lookup_s = max(lookups)
        back_s = max(hops)
        forward_s = max(lookup + hop for lookup, hop in zip(lookups, hops, strict=True))
        backward_s = max(hop + update for hop, update in zip(hops, updates, strict=True))
        return lookup_s, forward_s - lookup_s, back_s, backward_s - back_s

    def _hops(self, loads: Sequence[ShardWork]) -> list[float]:
        """Seconds of the embedding hop of every rank: of what it sends, or of what it receives, which is the mean."""
        near = self.cluster.devices_per_host
        size = len(loads)
        inside = [load.sent_inside for load in loads]
        between = [load.sent_between for load in loads]
        if self.cluster.between.port is Port.HOST:  # what the ranks of a host send goes through one port
            between = [sum(between[host : host + near]) / near for host in range(0, size, near) for _ in range(near)]
        least = sum(inside) / size, sum(between) / size
        return [
            self.costs.hop_s(inside=max(near_bytes, least[0]) / self.parts, between=max(far, least[1]) / self.parts)
            for near_bytes, far in zip(inside, between, strict=True)
        ]

    def _own_towers(self) -> list[TowerWork]:
        """The towers of the group whose modules take longest."""
        groups = self.cluster.world_size // self.group_size
        each = len(self.work.towers) // groups
        cut = [self.work.towers[index * each : (index + 1) * each] for index in range(groups)]
        # The output decides between modules without products, which only pass columns on.
        return list(max(cut, key=lambda towers: sum(t.network.forward_flop + t.output_dim for t in towers)))

    def _tower_seconds(self, share: float) -> tuple[float, float]:
        """A rank runs its group's modules for the samples of all its peers."""
        if not self.work.towers:
            return 0.0, 0.0
        samples = share * (self.cluster.world_size // self.group_size)
        times = [
            compute_s(self.cluster.device, tower.network, batch_size=samples, settings=self.settings)
            for tower in self._own_towers()
        ]
        return sum(time[0] for time in times), sum(time[1] for time in times)

    def _ids_s(self) -> float:
        return self.costs.hop_s(
            inside=self.load.ids_inside, between=self.load.ids_between, group_size=self.cluster.world_size
        )

    def _peer_bytes(self) -> tuple[float, float]:
        """Return the bytes that the busiest rank sends to peers in its host and in others."""
        groups = self.cluster.world_size // self.group_size
        columns = max(sum(tower.output_dim for tower in self._own_towers()), self.work.output_dim / groups)
        a_peer = self.work.batch_size * columns * self.settings.between_bytes
        near = max(1, self.cluster.devices_per_host // self.group_size)  # peers in one host, with itself
        near = min(near, groups)
        # Itself is among the peers of its host, and gets nothing sent.
        return a_peer * (near - 1), a_peer * (groups - near)

    def _peer_hop_s(self, inside: float, between: float, *, num_groups: int) -> float:
        if num_groups == 1:
            return 0.0
        near = min(max(1, self.cluster.devices_per_host // self.group_size), num_groups)
        return self.costs.transfer_s(inside=inside, between=between, messages=(near - 1, num_groups - near))

    def _tower_bytes(self) -> float:
        return (self.load.sent_inside + self.load.sent_between) / self.parts

    def _pack_s(self) -> float:
        """Packing what this rank sends in the last hop (forward), or its gradient (backward)."""
        sent = sum(self._peer_bytes()) if self.work.towers else self.load.sent_inside + self.load.sent_between
        # Half of a pass over the bytes: the other half is the unpacking.
        return self._packing_s(sent / self.parts) / 2

    def _unpack_s(self) -> float:
        return self._pack_s()

    def _packing_s(self, num_bytes: float) -> float:
        return max(num_bytes / self.cluster.device.packing_bytes_per_s, _HOP_LAUNCHES * self.cluster.device.launch_s)

    # ------------------------------------------------------------------------------------------------------------ tasks

    def _link(self) -> Resource:
        return Resource.BETWEEN if self.cluster.hosts > 1 else Resource.INSIDE

    def _compute(self, name: str, seconds: float, *, after: tuple[int, ...] = ()) -> int:
        return self._add(name, Resource.COMPUTE, seconds, after=after)

    def _add(self, name: str, resource: Resource, seconds: float, *, after: tuple[int, ...] = ()) -> int:
        if self.settings.overlap is Overlap.NONE and self.last is not None:
            # As if each task waited for the one before.
            after = (*after, self.last)
        self.list.append(SimulatedTask(name, resource, seconds, after))
        self.last = len(self.list) - 1
        return self.last
