"""Topology: the live ranks of a job, grouped by host, by tower and by peers.

Data centres are hierarchical: links inside a host are 10 to 60 times faster than links between hosts. Everything that
is exchanged therefore belongs to one of three groups (Luo et al., "Disaggregated Multi-Tower", arXiv 2403.00877):

    2 hosts × 4 devices, towers of S = 4 ranks         rank r = t·S + s

                 s=0   s=1   s=2   s=3
      group t=0 [ 0     1     2     3 ]  ◄─ tower group: S consecutive ranks, usually one host
      group t=1 [ 4     5     6     7 ]
                  └ peers: {0, 4}, {1, 5} …: the ranks with the same s, one in every tower group

S needs only to divide the number of ranks: S below the devices of a host puts several towers on a host, S above it
lets a tower span hosts, and S = world is the flat model: one tower group, no peers.

Without torch.distributed the topology is one rank on one host, and every exchange is a local copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ziggurat.errors import TopologyError, ZigguratError
from ziggurat.parallel.lost_ranks import communicating, end_process_if_uncaught, is_lost_rank


@dataclass(frozen=True)
class RankGroup:
    """Some ranks of the job in a fixed order, and the process group that joins them.

    Args:
        ranks: global ranks.
        position: this process's place among them.
        process_group: None for a group of one.
    """

    ranks: tuple[int, ...]
    position: int
    process_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """See the module's docstring.

    Args:
        rank: of this process.
        world_size: ranks of the job.
        ranks_a_host: L, the same on every host; ranks are numbered host after host.
        tower_size: S.
        world: all ranks.
        tower: the S ranks that hold the same towers as this one.
        peers: the ranks with the same place in every tower group.
        host: the ranks of this host.
    """

    rank: int
    world_size: int
    ranks_a_host: int
    tower_size: int
    world: RankGroup
    tower: RankGroup
    peers: RankGroup
    host: RankGroup

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.world_size // self.ranks_a_host

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
        """The host of a rank."""
        return rank // self.ranks_a_host

    @property
    def groups_span_hosts(self) -> bool:
        """True if a tower group (or the world of a flat model) has ranks on several hosts."""
        return self.ranks_a_host % self.tower_size != 0

    @property
    def peer_order(self) -> tuple[int, ...]:
        """All ranks, first those with s = 0 in the order of their tower groups, then those with s = 1, …

        Samples in this order leave the lookup ready for the tower hop: what goes to one tower-local rank lies
        together. It is step (c) of the tower transform, made on the ids instead of the embeddings, at no cost.
        """
        size = self.tower_size
        return tuple(t * size + s for s in range(size) for t in range(self.num_groups))

    def describe(self) -> str:
        """One line for start-up reports."""
        return (
            f"{self.world_size} ranks on {self.num_hosts} hosts of {self.ranks_a_host}; "
            f"{self.num_groups} tower groups of {self.tower_size}"
        )

    @staticmethod
    def create(*, tower_size: int = 0, ranks_a_host: int = 0) -> Topology:
        """Group the ranks of the default process group; collective over all of them.

        Args:
            tower_size: S; 0: the whole world (flat).
            ranks_a_host: L; 0: torchrun's LOCAL_WORLD_SIZE, or all ranks.

        Raises:
            TopologyError: hosts have different numbers of ranks, or S does not divide the ranks; on every rank.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            alone = RankGroup(ranks=(0,), position=0)
            return Topology(0, 1, 1, 1, world=alone, tower=alone, peers=alone, host=alone)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ranks_a_host = ranks_a_host or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        tower_size = tower_size or world_size
        _check(rank, world_size, ranks_a_host=ranks_a_host, tower_size=tower_size)
        towers = [range(first, first + tower_size) for first in range(0, world_size, tower_size)]
        peers = [range(place, world_size, tower_size) for place in range(tower_size)]
        hosts = [range(first, first + ranks_a_host) for first in range(0, world_size, ranks_a_host)]
        tower = _join(towers, rank)
        return Topology(
            rank,
            world_size,
            ranks_a_host,
            tower_size,
            world=RankGroup(tuple(range(world_size)), rank, dist.group.WORLD),
            tower=tower,
            peers=_join(peers, rank),
            host=tower if hosts == towers else _join(hosts, rank),
        )


def join_job(*, backend: str = "", timeout_s: float = 300.0) -> bool:
    """Enter the job that torchrun started; True if there is one.

    Args:
        backend: "gloo" or "nccl"; "" takes NCCL where there are GPUs.
        timeout_s: how long a rank waits for the others in any exchange before it gives up with an error.

    Raises:
        TopologyError: the ranks did not all come within `timeout_s`.
    """
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    try:
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise TopologyError(
            expected=f"all {world_size} ranks to join the job within {timeout_s:g} s",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            where=f"rank {rank}, joining the job at {os.environ.get('MASTER_ADDR', '')}",
            ways_out=(
                "look in the log of the rank that ended first: it says why",
                "start the job again; on slow hosts with more time: --parallel.timeout-s 900",
                "check that every host reaches MASTER_ADDR and MASTER_PORT",
            ),
        ) from error
    return True


def leave_job() -> None:
    """Leave it again; nobody leaves while another still communicates."""
    if dist.is_initialized():
        with communicating("end of the job"):
            dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def job(*, timeout_s: float = 300.0) -> Iterator[None]:
    """Take part in the job that torchrun started, if there is one; leave it at the end, unless it was joined before.

    After an error it is not left: the others may have gone, and this process is about to end. It then ends for certain
    (`lost_ranks.py`): the error is marked (`left_job`), and if nobody catches it the process ends once it was shown.

    Args:
        timeout_s: see `join_job`.
    """
    was_in_it = dist.is_available() and dist.is_initialized()
    joined = join_job(timeout_s=timeout_s)
    if was_in_it or not joined:
        yield
        return
    try:
        yield
        leave_job()
    except BaseException as error:
        if isinstance(error, ZigguratError):
            error.left_job = True
        end_process_if_uncaught()
        raise


def _join(groups: Sequence[range], rank: int) -> RankGroup:
    """Make every group (torch demands that all ranks make all of them, in order); return this rank's."""
    mine = None
    for ranks in groups:
        if len(ranks) == dist.get_world_size():
            group = dist.group.WORLD
        else:
            with communicating("meeting of ranks that hold towers together, or lie on one host"):
                group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            known = group if isinstance(group, dist.ProcessGroup) else None
            mine = RankGroup(tuple(ranks), list(ranks).index(rank), known)
    assert mine is not None
    return mine


def _check(rank: int, world_size: int, *, ranks_a_host: int, tower_size: int) -> None:
    """Compare what all ranks think; each raises the same error."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor([ranks_a_host, int(os.environ.get("LOCAL_RANK", rank % ranks_a_host)), tower_size]).to(device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    with communicating("first exchange of all ranks"):
        dist.all_gather(gathered, mine)
    hosts, local_ranks, sizes = torch.stack(gathered).t().tolist()
    even = len(set(hosts)) == 1 and world_size % hosts[0] == 0
    if not even:
        raise TopologyError(
            expected="the same number of ranks on every host",
            found=f"ranks per host, as each rank sees it: {hosts}",
            where=f"a job of {world_size} ranks",
            ways_out=(
                "start torchrun with the same --nproc-per-node everywhere",
                "leave the odd host out",
            ),
        )
    del local_ranks  # emulated hosts share one machine: a local rank there says nothing about the host
    if len(set(sizes)) != 1 or world_size % sizes[0]:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise TopologyError(
            expected=f"one tower size on all ranks that divides {world_size}: one of {divisors}",
            found=f"{sorted(set(sizes))}",
            where="tower_size",
            ways_out="change tower_size in the plan, or the number of ranks",
        )
