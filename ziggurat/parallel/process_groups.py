"""Process groups: how all of a job's are made, with its time limit, and on GPUs with a device and a second limit.

    gloo    tensors of the host: sizes, agreements, counts     waits for another rank as long as the job allows
    nccl    tensors of GPUs: ids, embeddings, gradients        twice as long

Under NCCL a rank that waits for another one cannot be told anything: when its time is up, NCCL's watchdog ends the
process, without a word on who was silent. Every step begins with sizes that travel on the host (`tables/ids.py`), so
gloo, whose patience ends first, sees the silent rank and names it (`lost_ranks.py`).

Each NCCL group is told its GPU when it is made and connects at once, on all ranks in the same order; a group that
connects in its first exchange may do so while others are under way, in another order on another rank.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ziggurat.errors import ConfigError, TopologyError

_NCCL_PATIENCE = 2
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


def has_nccl() -> bool:
    """Return True if tensors on GPUs travel through NCCL in this job."""
    return dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend())


def nccl_version() -> str:
    """The version of NCCL that torch has, or why there is none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return "none: torch was built without NCCL; ranks exchange through gloo"
    return ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))


def copy_engines_line() -> str:
    """Say why hops travel without the copy engines of GPUs, and without symmetric memory; for start-up reports.

    Neither is used anywhere: docs/decisions/0007-hops-without-copy-engines.md.
    """
    if communication_device().type == "cpu":
        return "not available: messages of a CPU are copied by its cores"
    if not hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"):
        return f"not available: torch {torch.__version__} has no NCCL_CTA_POLICY_ZERO"
    return "not used: messages of a hop differ in size, and copy engines move equal ones, in memory registered before"


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device where tensors must be to be sent: this rank's GPU under NCCL, else the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time_limit_s(group: dist.ProcessGroup | None = None) -> float:
    """Return how long ranks of a process group (None: of the job) wait for another, on the host if they meet there."""
    group = group or dist.distributed_c10d._get_default_group()
    # A job may have both gloo and NCCL: gloo's limit is the one that ranks were given.
    device = _CPU if _CPU in group._device_types else group._device_types[0]
    return group._get_backend(device).options._timeout.total_seconds()


def make_group(members: Sequence[int], *, backend: str = "") -> dist.ProcessGroup | None:
    """A process group of these ranks, in this order; None on others. Collective over the whole job.

    Args:
        members: the launcher's ranks.
        backend: of the group; "": that of the job.

    Raises:
        ConfigError: their order is not that of the launcher, and this torch sorts them (2.11 does).
    """
    # New groups would have torch's own limit, not that of the job.
    timeout = timedelta(seconds=time_limit_s())
    on_gpu = has_nccl() and "nccl" in (backend or "nccl")
    # Named, so that NCCL makes its communicator now and not at the first message.
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    made = dist.new_group(
        list(members), timeout=timeout, backend=backend or None, device_id=device, **_in_this_order(members)
    )
    group = made if isinstance(made, dist.ProcessGroup) else None
    if on_gpu and group is not None:
        let_gloo_speak_first(group)
    return group


def meeting_group(ranks: Sequence[int] | None = None, *, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group for what ranks agree on beside the step; collective over its ranks.

    Args:
        ranks: of the launcher, with this one; None: all. Ranks that are not named take no part in the call.
        timeout_s: how long a rank waits for another one.

    Raises:
        TopologyError: this rank is none of them.
    """
    # Without local synchronisation torch makes every rank of the job call it, whatever ranks it is for.
    only_these = ranks is not None
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(
        None if ranks is None else list(ranks), backend="gloo", timeout=timeout, use_local_synchronization=only_these
    )
    if isinstance(group, dist.ProcessGroup):
        return group
    raise TopologyError(
        expected=f"a call on the ranks {list(ranks or ())} alone, which are to meet",
        found=f"rank {dist.get_rank()}",
        where="a process group of some ranks",
        ways_out=("call it on these ranks alone", "name this rank, too"),
    )


def end_group(group: dist.ProcessGroup) -> None:
    """End a process group that `make_group` or torch made; collective over its ranks, which all have done with it.

    A group of gloo has three threads, one of which looks around a hundred times a second, whether anything is sent or
    not: 0.6 ms of a core each second, so that two thousand forgotten groups keep a core busy. They end with the last
    object that holds the group.

    Args:
        group: the group of the whole job stays, and so does one that ended with the job.
    """
    # torch would raise for a group that has ended already, with the job or before it.
    if dist.is_initialized() and group is not dist.group.WORLD and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _in_this_order(members: Sequence[int]) -> dict[str, bool]:
    """Return the argument that tells torch to keep the order of ranks; nothing where it knows no order but theirs."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return {"sort_ranks": False}
    if list(members) != sorted(members):
        raise ConfigError(
            expected="a torch whose process groups keep the order of ranks that they are given (2.13 does)",
            found=f"torch {torch.__version__}, which sorts them, and ranks {list(members)}",
            where="the order of ranks",
            ways_out=("install a newer torch", "number ranks host by host, as torchrun does"),
        )
    return {}


def let_gloo_speak_first(group: dist.ProcessGroup) -> None:
    """Give NCCL twice the time of gloo, which can say who is silent."""
    if not {_CPU, _CUDA} <= set(group._device_types):
        return
    on_gpus = group._get_backend(_CUDA)
    if on_gpus.name() == "nccl":  # gloo, too, says that it takes tensors of GPUs
        on_gpus._set_default_timeout(timedelta(seconds=_NCCL_PATIENCE * time_limit_s(group)))


def host_number(rank: int, ranks_per_host: int, hosts: Sequence[int]) -> int:
    """A number for the host of this rank, the same for all its ranks."""
    if hosts:
        # −1: too short a list, which is refused once all ranks have told theirs.
        return hosts[rank] if rank < len(hosts) else -1
    if ranks_per_host:
        return rank // ranks_per_host
    # torchrun's number of the host, also where two hosts have one name.
    agent = os.environ.get("GROUP_RANK")
    if agent is None and "LOCAL_WORLD_SIZE" in os.environ:
        return rank // int(os.environ["LOCAL_WORLD_SIZE"])
    # Host names as numbers, since a tensor carries them.
    digest = hashlib.sha256(f"{socket.gethostname()}/{agent or 0}".encode()).digest()
    # 56 bits: a positive number in int64.
    return int.from_bytes(digest[:7], "little")
