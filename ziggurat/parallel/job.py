"""Enter and leave the job that torchrun started: no rank computes before all ranks stand on the same kind of device.

    with job(device=config.device, timeout_s=300.0):        before: the rank that finds no GPU says so to all
        …                                                    after: no rank leaves while another still communicates

Ranks meet at a store of keys and values, which needs no process group. There each says which device it has chosen, or
why it has none, and reads what the others say. `--device auto` on a host without a working GPU takes the CPU; its
ranks would then make a group of another backend, or meet on tensors that one side has on a GPU, and all would wait
until the time is up. So the comparison comes before the process group, and all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ziggurat.errors import ConfigError, TopologyError, ZigguratError
from ziggurat.parallel.agreement import ranks_text
from ziggurat.parallel.device import ChosenDevice, Device, choose_device
from ziggurat.parallel.lost_ranks import communicating, end_process_if_uncaught, end_with_launcher, is_lost_rank
from ziggurat.parallel.process_groups import has_nccl, let_gloo_speak_first

_FAREWELL_S = 5.0
_NO_DEVICE = "none"


def launched_ranks() -> int:
    """Return the ranks that a launcher has started this process among, before they have met; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_job(*, backend: str = "", device: Device | None = None, timeout_s: float = 300.0) -> bool:
    """Enter the job that torchrun started; True if there is one.

    Args:
        backend: of torch.distributed; "" takes that of the device.
        device: what every rank is to compute on; all must come to the same kind. None compares nothing, and takes gloo,
            with NCCL beside it where there are GPUs.
        timeout_s: how long a rank waits for the others in any exchange before it gives up with an error.

    Raises:
        ConfigError: ranks have chosen different kinds of device, or one has none; on every rank.
        TopologyError: the ranks did not all come within `timeout_s`, or the environment says half of what it must.
    """
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    end_with_launcher()
    try:
        store, rank, world_size = _met(timeout_s=timeout_s)
        if device is not None:
            chosen = same_device(device, store=store, rank=rank, world_size=world_size)
            backend = backend or chosen.backend
        backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        given = {"store": dist.PrefixStore("default_pg", store), "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **given)
        if has_nccl():
            let_gloo_speak_first(dist.distributed_c10d._get_default_group())
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise _not_joined(error, timeout_s=timeout_s) from error
    return True


def _met(*, timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store where all ranks meet, this one's rank, and their number."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise TopologyError(
            expected="what torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            found=str(error),
            where="environment, joining the job",
            ways_out=("start the job with torchrun", "unset RANK and WORLD_SIZE to run on one device"),
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, rank, world_size


def same_device(wanted: Device, *, store: dist.Store, rank: int, world_size: int) -> ChosenDevice:
    """The device of this rank, of the same kind as those of all others; collective, without a process group.

    Args:
        wanted: what this rank was asked to compute on.
        store: where all ranks meet.
        rank: of this process.
        world_size: number of ranks.

    Raises:
        ConfigError: this rank has no such device, or the kinds differ; every rank raises.
    """
    place = dist.PrefixStore("ziggurat/device", store)
    failure = None
    chosen = None
    try:
        chosen = choose_device(wanted)
        said = [chosen.device.type, f"--device {wanted.value}: {chosen.device.type} ({chosen.reason})"]
    except ConfigError as error:
        failure = error
        said = [_NO_DEVICE, f"--device {wanted.value}: {error.found}"]
    place.set(str(rank), json.dumps(said))
    replies = [json.loads(text) for text in place.multi_get([str(each) for each in range(world_size)])]
    if chosen is not None and all(kind == chosen.device.type for kind, _ in replies):
        return chosen
    _wait_for_readers(place, rank=rank, world_size=world_size)
    if failure is not None and all(kind == _NO_DEVICE for kind, _ in replies):
        raise failure
    raise _other_devices(replies)


def _wait_for_readers(place: dist.Store, *, rank: int, world_size: int) -> None:
    """Give the others a moment to read the same: torchrun ends all with the first, and the store goes with rank 0."""
    deadline = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(dist.DistError):  # one was too slow, or has gone
        read = place.add("read", 1)
        if rank:
            place.wait(["all have read"], timedelta(seconds=_FAREWELL_S))
            return
        while read < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            read = place.add("read", 0)
        place.set("all have read", "")
        time.sleep(0.1)  # the answers are on their way


def _other_devices(replies: list[list[str]]) -> ConfigError:
    """The error for ranks that compute on different kinds of device."""
    said: dict[str, list[int]] = {}
    for rank, (_, words) in enumerate(replies):
        said.setdefault(words, []).append(rank)
    odd = [rank for rank, (kind, _) in enumerate(replies) if kind != replies[0][0]]
    return ConfigError(
        expected="the same kind of device on every rank",
        found="\n          ".join(f"{words} on {ranks_text(ranks)}" for words, ranks in said.items()),
        where=f"{ranks_text(odd)} of {len(replies)}, unlike rank 0: --device, before the ranks are joined",
        ways_out=(
            "--device cpu on every rank",
            "ziggurat doctor on the host of the rank without a GPU shows what is missing",
            "torchrun --nproc-per-node with no more ranks than GPUs on every host",
        ),
    )


def _not_joined(error: RuntimeError, *, timeout_s: float) -> TopologyError:
    return TopologyError(
        expected=f"all {os.environ['WORLD_SIZE']} ranks to join the job within {timeout_s:g} s",
        found=(str(error).splitlines() or [type(error).__name__])[0],
        where=f"rank {os.environ['RANK']}, joining the job at {os.environ.get('MASTER_ADDR', '')}",
        ways_out=(
            "look in the log of the rank that ended first: it says why",
            "start the job again; on slow hosts with more time: --parallel.timeout-s 900",
            "check that every host reaches MASTER_ADDR and MASTER_PORT",
        ),
    )


def leave_job() -> None:
    """Leave the job; no rank leaves while another still communicates."""
    if dist.is_initialized():
        with communicating("end of the job"):
            dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def job(*, backend: str = "", device: Device | None = None, timeout_s: float = 300.0) -> Iterator[None]:
    """Take part in the job that torchrun started, if there is one; leave it at the end, unless it was joined before.

    After an error it is not left: the others may have gone, and this process is about to end. It then ends for certain
    (`lost_ranks.py`): the error is marked (`left_job`), and if nobody catches it the process ends once it was shown.

    Args:
        backend: see `join_job`.
        device: see `join_job`; one process alone must have it, too.
        timeout_s: see `join_job`.
    """
    was_in_it = dist.is_available() and dist.is_initialized()
    joined = join_job(backend=backend, device=device, timeout_s=timeout_s)
    if was_in_it or not joined:
        if device is not None and not was_in_it:
            choose_device(device)
        yield
        return
    try:
        yield
        leave_job()
    except BaseException as error:
        if isinstance(error, (ZigguratError, SystemExit)):
            error.left_job = True  # pyright: ignore[reportAttributeAccessIssue]
        end_process_if_uncaught()
        raise
