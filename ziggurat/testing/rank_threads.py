"""run_ranks_as_threads: ranks that are threads of one process, joined in gloo groups, with tensors on one device.

    run_ranks_as_threads(check, 4, …)        as `run_ranks`, but nothing travels between processes

Processes that share one GPU each take a context and an allocator of it, and NCCL refuses two ranks on one device.
Threads share the device, so that placements, wires and towers can be compared with one device on the device that there
is. What travels goes through gloo, which takes tensors of GPUs, too: numbers are tested, not NCCL.

Three things of a process are made those of a thread: torch's record of process groups (the one that torch's own tests
use), the pass backward, which autograd otherwise gives to one thread of the device for all ranks, where they would
wait for each other, and the memory that ranks of a host share, which is left out. The generators of random numbers and
the environment stay those of the process: build models under `building()`, and draw nothing.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from ziggurat.testing.ranks import RankFailure

_BUILDING = threading.Lock()


class _GroupsOfThreads(ThreadLocalWorld):
    """Keep torch's record of process groups for each thread.

    torch 2.11's own class for it lacks `comms`, which its `destroy_process_group` reads; later ones have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    @property
    def comms(self) -> list[object]:
        """Return the calling thread's communicators, which its groups share."""
        if not hasattr(self._of_thread, "comms"):
            self._of_thread.comms = []
        return self._of_thread.comms


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Inside, no other rank draws from the generators of the process."""
    with _BUILDING:
        yield


def run_ranks_as_threads(
    function: Callable[..., object], world_size: int, *arguments: object, timeout_s: float = 60.0
) -> list[object]:
    """Call `function(rank, *arguments)` on every rank of a gloo group of threads.

    Args:
        function: the default process group is ready when it is called.
        world_size: number of ranks.
        arguments: the same objects for every rank.
        timeout_s: of each collective: a rank that raises makes the others fail after so long at most.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: a rank raised; with its traceback, the first one's.
    """
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)
    failures: list[tuple[int, str]] = []

    def rank_main(rank: int) -> object:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
                result = function(rank, *arguments)
                dist.barrier()  # nobody leaves while another still communicates
                dist.destroy_process_group()
                return result
        except BaseException:
            failures.append((rank, traceback.format_exc()))
            return None

    own_world = mock.patch.object(dist.distributed_c10d, "_world", _GroupsOfThreads())
    no_memory = mock.patch("ziggurat.parallel.topology.open_host_memory", return_value=(None, "ranks are threads"))
    with own_world, no_memory, ThreadPoolExecutor(world_size, thread_name_prefix="rank") as threads:
        _set_thread_isolation_mode(True)
        try:
            results = list(threads.map(rank_main, range(world_size)))
        finally:
            _set_thread_isolation_mode(False)
    if failures:
        rank, trace = failures[0]
        others = sorted({each for each, _ in failures} - {rank})
        raise RankFailure(
            f"rank {rank} of {world_size} failed:\n{trace}" + (f"\n(and after it {others})" if others else "")
        )
    return results
