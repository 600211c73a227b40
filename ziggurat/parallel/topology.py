"""Topology: the live ranks of a job along named axes: host, tower, peer, replica.

Data centres are hierarchical: links inside a host are 10 to 60 times faster than links between hosts. Everything that
is exchanged therefore runs along one axis (Luo et al., "Disaggregated Multi-Tower", arXiv 2403.00877):

    2 hosts × 4 devices, towers of S = 4 ranks         place p = t·S + s

                 s=0   s=1   s=2   s=3
      group t=0 [ 0     1     2     3 ]  ◄─ TOWER: S consecutive places, usually one host
      group t=1 [ 4     5     6     7 ]
                  └ PEER: {0, 4}, {1, 5} …: the places with the same s, one in every tower group

    CONTEXT: consecutive places that divide long histories between them (`parallel/context`).
    HOST: the places of one host.  REPLICA: the same place of every host, {0, 4}, {1, 5} …; dense weights that are cut
    inside a host (HSDP) are copied along it.

S needs only to divide the number of ranks: S below the devices of a host puts several towers on a host, S above it
lets a tower span hosts, and S = world is the flat model: one tower group, no peers.

Places and ranks. Launchers number ranks as they like (Slurm's cyclic distribution gives neighbouring ranks to different
hosts), while plans want neighbours on one host. So the topology has an order, which rank sits at which place, host
after host unless told otherwise:

    launcher's rank   0 1 2 3        host of each   a b a b        order   0 2 1 3        places   0 1 | 2 3

Plans, shards and groups speak of places, and all process groups are made in that order, so `Topology.rank` is this
process's place. It is the launcher's rank wherever hosts come one after the other. Rings of collectives follow the
places, too: in an order that was found for the network (`ziggurat cluster order`) they cross between racks seldom.

Without torch.distributed the topology is one rank on one host, and every exchange is a local copy.

A topology ends with the job, or before: a process that makes one after the other closes each, and with it go the
process groups, threads and shared memory of all that was made parallel on it.

    with Topology.create(tower_size=4) as topology:
        parallel = parallelize(model, plan, topology)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType

import torch
import torch.distributed as dist

from ziggurat.errors import TopologyError
from ziggurat.parallel.exchange.host_memory import HostMemory, open_host_memory
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.process_groups import communication_device, end_group, has_nccl, host_number, make_group


@dataclass(frozen=True)
class RankGroup:
    """Some ranks of the job in a fixed order, and the process group that joins them in that order.

    Args:
        ranks: places (`Topology.order` has the launcher's ranks).
        position: this process's place among them.
        process_group: None for a group of one.
        memory: what ranks of one host exchange through; None: through the process group.
        why_no_memory: the reason, where a group of one host has none.
    """

    ranks: tuple[int, ...]
    position: int
    process_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    memory: HostMemory | None = field(default=None, repr=False, compare=False)
    why_no_memory: str = field(default="", repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Axis(StrEnum):
    """Along which ranks an exchange runs; see the picture above."""

    WORLD = "world"
    HOST = "host"
    TOWER = "tower"
    PEER = "peer"
    CONTEXT = "context"
    REPLICA = "replica"


class Lane(StrEnum):
    """The kind of data sent between ranks: on GPUs each kind has a communicator of its own, elsewhere all share one."""

    HOPS = "hops"  # embeddings and their gradients
    IDS = "ids"
    DENSE = "dense"  # gradients of copies, and the few numbers that a step adds up


class Ending:
    """What ends when a topology is closed, in the order in which it was made."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self.is_over = False

    def add(self, action: Callable[[], None]) -> None:
        """Call this at the end: it waits for nobody."""
        self._actions.append(action)

    def add_group(self, group: RankGroup) -> None:
        """End the process group and the shared memory of ranks."""
        self.add_process_group(group.process_group)
        if group.memory is not None:
            self.add(group.memory.release)

    def add_process_group(self, group: dist.ProcessGroup | None) -> None:
        """End a process group; the one of the whole job stays."""
        if group is not None:
            self.add(lambda: end_group(group))

    def end(self) -> None:
        """End everything, once."""
        self.is_over = True
        # Emptied first: an action that raises is not called once more by a second end.
        actions = self._actions
        self._actions = []
        for action in actions:
            action()


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of a job, their hosts and groups. Ranks here are places; see the module's text.

    Args:
        rank: place of this process.
        tower_size: S.
        hosts: the host of every place, numbered from 0.
        order: the launcher's rank at every place.
        axes: the group of this process along every axis.
        lanes: groups beside those, of the same ranks, for what is not to wait behind them.
        ending: what ends with the topology.
    """

    rank: int
    tower_size: int
    hosts: tuple[int, ...]
    order: tuple[int, ...]
    axes: Mapping[Axis, RankGroup]
    lanes: Mapping[tuple[Axis, Lane], RankGroup] = field(default_factory=dict)
    ending: Ending = field(default_factory=Ending, repr=False, compare=False)

    def close(self) -> None:
        """End all process groups but that of the job, and the shared memory; collective. A second call does nothing.

        Read what you want of the models that were made parallel on the topology before: they compute no more.
        """
        if self.ending.is_over:
            return
        if self.world.process_group is not None:
            with communicating("end of a topology"):  # no rank ends groups while another still communicates
                dist.barrier(self.world.process_group)
        self.ending.end()

    def __enter__(self) -> Topology:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:  # after an error others may be gone, or wait elsewhere
            self.close()

    def lane(self, axis: Axis, lane: Lane) -> RankGroup:
        """This process's group along an axis, for what travels."""
        # Off GPUs there are no lanes: every kind of data shares the group of the axis.
        return self.lanes.get((axis, lane), self.axes[axis])

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.hosts)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.hosts))

    @property
    def ranks_per_host(self) -> int:
        """L, the same on every host."""
        return self.world_size // self.num_hosts

    @property
    def world(self) -> RankGroup:
        """The group of all ranks."""
        return self.axes[Axis.WORLD]

    @property
    def tower(self) -> RankGroup:
        """The S ranks that hold the same towers as this one."""
        return self.axes[Axis.TOWER]

    @property
    def peers(self) -> RankGroup:
        """The ranks with the same place in every tower group."""
        return self.axes[Axis.PEER]

    @property
    def context(self) -> RankGroup:
        """The ranks that have pieces of the same histories."""
        return self.axes[Axis.CONTEXT]

    @property
    def host(self) -> RankGroup:
        """The ranks of this host."""
        return self.axes[Axis.HOST]

    @property
    def replica(self) -> RankGroup:
        """The ranks with the same place on every host."""
        return self.axes[Axis.REPLICA]

    @property
    def num_groups(self) -> int:
        """Number of tower groups G / S."""
        return self.world_size // self.tower_size

    @property
    def group_index(self) -> int:
        """t: which tower group this rank is in."""
        return self.rank // self.tower_size

    def towers_of(self, group: int, *, num_towers: int) -> range:
        """The towers that a tower group holds: consecutive ones, the same number in every group."""
        per_group = num_towers // self.num_groups
        return range(group * per_group, (group + 1) * per_group)

    def host_of(self, rank: int) -> int:
        """The host of a place."""
        return self.hosts[rank]

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        """The places of a host."""
        return tuple(rank for rank, each in enumerate(self.hosts) if each == host)

    @property
    def host_grid(self) -> tuple[tuple[int, ...], ...]:
        """The launcher's ranks, one row a host, in the order of their places: a device mesh over hosts."""
        # By the launcher's ranks, not by places: a device mesh of torch's knows no others.
        return tuple(tuple(self.order[rank] for rank in self.ranks_of_host(h)) for h in range(self.num_hosts))

    @property
    def groups_span_hosts(self) -> bool:
        """True if a tower group (or the world of a flat model) has ranks on several hosts."""
        size = self.tower_size
        groups = (self.hosts[first : first + size] for first in range(0, self.world_size, size))
        return any(len(set(group)) > 1 for group in groups)

    @property
    def peer_order(self) -> tuple[int, ...]:
        """All ranks, first those with s = 0 in the order of their tower groups, then those with s = 1, …

        Samples in this order leave the lookup ready to travel inside the group: what goes to one tower-local rank lies
        together. It is step (c) of the tower transform, made on the ids instead of the embeddings, at no cost.
        """
        size = self.tower_size
        return tuple(t * size + s for s in range(size) for t in range(self.num_groups))

    def describe(self) -> str:
        """One line for start-up reports."""
        text = (
            f"{self.world_size} ranks on {self.num_hosts} hosts of {self.ranks_per_host}; "
            f"{self.num_groups} tower groups of {self.tower_size}"
        )
        if self.order == tuple(range(self.world_size)):
            return text
        hosts = (f"host {h}: {', '.join(str(self.order[r]) for r in self.ranks_of_host(h))}" for h in set(self.hosts))
        return f"{text}; ranks by host: {'; '.join(hosts)}"

    @staticmethod
    def create(
        *,
        tower_size: int = 0,
        ranks_per_host: int = 0,
        hosts: Sequence[int] = (),
        order: Sequence[int] = (),
        ranks_a_host: int = 0,
        context_size: int = 1,
    ) -> Topology:
        """Group the ranks of the default process group; collective over all of them.

        Args:
            tower_size: S; 0: the whole world (flat).
            ranks_per_host: L of emulated hosts, L consecutive ranks each; 0: hosts are those that ranks report
                (host name, and torchrun's GROUP_RANK).
            hosts: the host of every rank of the launcher, for layouts that are emulated or known better.
            order: the launcher's rank at every place, rank 0 first; () puts host after host.
            ranks_a_host: the old name of `ranks_per_host`.
            context_size: consecutive places that divide histories between them; 1: none does.

        Raises:
            TopologyError: hosts have different numbers of ranks, S does not divide the ranks, or the order is none;
                on every rank.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            # One rank is alone along every axis, so code behind this asks nobody how many there are.
            alone = RankGroup(ranks=(0,), position=0)
            return Topology(rank=0, tower_size=1, hosts=(0,), order=(0,), axes=dict.fromkeys(Axis, alone))
        world_size = dist.get_world_size()
        tower_size = tower_size or world_size
        # Before any group is made: an error must come on every rank, while all can still hear of it.
        host_of = _agree(ranks_per_host=ranks_per_host or ranks_a_host, hosts=hosts, tower_size=tower_size)
        _check_context(context_size, world_size)
        first_rank = {host: host_of.index(host) for host in host_of}
        # Hosts in the order of their first ranks, so that rank 0, which writes, stays at the first place.
        order = tuple(order) or tuple(sorted(range(world_size), key=lambda rank: (first_rank[host_of[rank]], rank)))
        _check_order(order, world_size)
        # Reported hosts have any numbers; from here on they are counted from 0 in the order of the places.
        numbers = {host: number for number, host in enumerate(dict.fromkeys(host_of[rank] for rank in order))}
        places = tuple(numbers[host_of[rank]] for rank in order)
        by_host = [[p for p, host in enumerate(places) if host == number] for number in range(len(numbers))]
        wanted = {
            Axis.WORLD: [list(range(world_size))],
            Axis.TOWER: [list(range(first, first + tower_size)) for first in range(0, world_size, tower_size)],
            Axis.CONTEXT: [list(range(first, first + context_size)) for first in range(0, world_size, context_size)],
            Axis.PEER: [list(range(place, world_size, tower_size)) for place in range(tower_size)],
            Axis.HOST: by_host,
            # `strict`: hosts have equally many ranks, which `_agree` has checked.
            Axis.REPLICA: [list(column) for column in zip(*by_host, strict=True)],
        }
        rank = order.index(dist.get_rank())
        # Axes with the same groups share one process group: each costs memory and connections.
        made: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
        axes = {}
        ending = Ending()
        for axis, groups in wanted.items():
            key = tuple(map(tuple, groups))
            # All ranks walk the axes in one order, as torch demands of those who make groups.
            if key not in made:
                made[key] = _join(groups, rank, order=order, hosts=places)
                ending.add_group(made[key])
            axes[axis] = made[key]
        made_topology = Topology(rank=rank, tower_size=tower_size, hosts=places, order=order, axes=axes, ending=ending)
        return replace(made_topology, lanes=_lanes(made_topology)) if has_nccl() else made_topology


def _lanes(topology: Topology) -> dict[tuple[Axis, Lane], RankGroup]:
    """Groups apart for ids and for gradients of copies, made in one order; collective."""
    lanes = {
        (Axis.WORLD, lane): own_group(topology, Axis.WORLD, what=f"exchange {lane.value}")
        for lane in (Lane.IDS, Lane.DENSE)
    }
    tower = topology.tower
    # Groups of all ranks, or of one, need no second process group: the world's serves, or none is wanted.
    is_world = tower.size in (1, topology.world_size)
    of_tower = lanes[Axis.WORLD, Lane.DENSE] if is_world else own_group(topology, Axis.TOWER, what="exchange dense")
    return lanes | {(Axis.TOWER, Lane.DENSE): of_tower if tower.size > 1 else tower}


def _join(groups: Sequence[Sequence[int]], rank: int, *, order: tuple[int, ...], hosts: tuple[int, ...]) -> RankGroup:
    """Make every group (torch demands that all ranks make all of them, in order); return this rank's."""
    joined = []
    for ranks in groups:
        members = [order[place] for place in ranks]
        # Only in the launcher's order: in another one the world's group would number its members otherwise.
        if members == list(range(dist.get_world_size())):
            group = dist.group.WORLD
        else:
            with communicating("meeting of ranks that hold towers together, or lie on one host"):
                group = make_group(members) if len(members) > 1 else None
        if rank in ranks:
            joined.append(RankGroup(tuple(ranks), list(ranks).index(rank), group))
    mine = joined[0]  # each rank is in one group along an axis
    # Shared memory is for ranks of one host alone.
    if mine.process_group is None or len({hosts[place] for place in mine.ranks}) > 1:
        return mine
    # Ranks that exchange from GPU to GPU have no use for the host's memory.
    if communication_device(mine.process_group).type != "cpu":
        return mine
    with communicating("meeting of ranks that share memory"):
        memory, reason = open_host_memory(mine.process_group)
    return replace(mine, memory=memory, why_no_memory=reason)


def sizes_device(group: RankGroup) -> torch.device:
    """Return the device of the few numbers that tell a group how much comes: host memory if it can exchange that."""
    return torch.device("cpu") if group.process_group is None else communication_device(group.process_group)


def own_group(topology: Topology, axis: Axis, *, what: str, backend: str = "") -> RankGroup:
    """This rank's group along an axis once more, joined by a process group that nothing else uses; collective.

    Exchanges of two process groups never get into each other's order, so one may run behind the other.

    Args:
        topology: the ranks; the group ends with it.
        axis: any but PEER.
        what: what the ranks meet for, for errors.
        backend: of the process group; "": that of the job.
    """
    mine = topology.axes[axis]
    if mine.process_group is None:
        return mine
    joined = []
    with communicating(f"meeting of ranks, to {what}"):
        for places in _groups_along(topology, axis):
            group = make_group([topology.order[place] for place in places], backend=backend)
            # Ranks outside of a group get None of it.
            joined += [] if group is None else [group]
        made = joined[0]  # each rank is in one group along an axis
        mine = RankGroup(mine.ranks, mine.position, made)
        is_on_one_host = len({topology.host_of(rank) for rank in mine.ranks}) == 1
        if is_on_one_host and communication_device(made).type == "cpu":
            memory, reason = open_host_memory(made)
            mine = replace(mine, memory=memory, why_no_memory=reason)
    topology.ending.add_group(mine)
    return mine


def _groups_along(topology: Topology, axis: Axis) -> list[tuple[int, ...]]:
    """The places of every group along an axis."""
    by_host = [topology.ranks_of_host(host) for host in range(topology.num_hosts)]
    if axis is Axis.HOST:
        return by_host
    if axis is Axis.REPLICA:
        return list(zip(*by_host, strict=True))
    size = topology.axes[axis].size
    return [tuple(range(first, first + size)) for first in range(0, topology.world_size, size)]


def _agree(*, ranks_per_host: int, hosts: Sequence[int], tower_size: int) -> list[int]:
    """The host of every rank, as all ranks report it, in any numbers; each rank raises the same error."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    mine = torch.tensor([host_number(rank, ranks_per_host, hosts), tower_size]).to(communication_device())
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    with communicating("first exchange of all ranks"):
        dist.all_gather(gathered, mine)
    host_of, sizes = torch.stack(gathered).t().tolist()
    # From here on each rank looks at the same numbers, so all raise or none does.
    counts = [host_of.count(host) for host in dict.fromkeys(host_of)]
    if len(set(counts)) != 1 or (hosts and len(hosts) != world_size):
        raise TopologyError(
            expected="the same number of ranks on every host",
            found=f"hosts with {', '.join(map(str, counts))} ranks",
            where=f"a job of {world_size} ranks",
            ways_out=(
                "start torchrun with the same --nproc-per-node everywhere",
                "leave the odd host out",
            ),
        )
    if len(set(sizes)) != 1 or world_size % sizes[0]:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise TopologyError(
            expected=f"one tower size on all ranks that divides {world_size}: one of {divisors}",
            found=f"{sorted(set(sizes))}",
            where="tower_size",
            ways_out="change tower_size in the plan, or the number of ranks",
        )
    return host_of


def _check_context(size: int, world_size: int) -> None:
    if size >= 1 and world_size % size == 0:
        return
    divisors = [each for each in range(1, world_size + 1) if world_size % each == 0]
    raise TopologyError(
        expected=f"a number of ranks for each history that divides {world_size}: one of {divisors}",
        found=str(size),
        where="context",
        ways_out=("change --context", "start another number of ranks"),
    )


def _check_order(order: Sequence[int], world_size: int) -> None:
    if sorted(order) == list(range(world_size)) and order[0] == 0:
        return
    raise TopologyError(
        expected=f"every rank from 0 to {world_size - 1} once, rank 0 first (it writes the run's files)",
        found=f"{list(order)}",
        where="order of ranks",
        ways_out="leave the order out: ranks are then ordered host after host",
    )
