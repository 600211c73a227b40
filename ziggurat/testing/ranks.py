"""run_ranks: call a function on N processes of this machine, joined in a gloo group, and collect what each returns.

    def average(rank: int, value: float) -> float:                # at the top level of a module: it travels by name
        tensor = torch.tensor([value * rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return float(tensor)

    assert run_ranks(average, 4, 2.0) == [3.0] * 4

The first call starts a fork server that has torch (and pytest) loaded, seconds once; from it four ranks take about
0.2 s, eight 0.4 s, where spawning takes seconds a rank. A process has one fork server, and whoever starts it first says
what it loads: call `preload` before anything else may start it, or every rank imports for itself what is missing, 1 to
2 s each. Ranks meet through a file, so parallel test runs never fight over a port.

Nothing waits in vain: every rank has a pipe of its own, and the parent waits for pipes and processes together. A rank
that raises is reported with its traceback, one that dies without a word (killed, `os._exit`, out of memory) with its
exit code, at once; one that hangs with the stack it hangs in, after `timeout_s`. In all three cases the others are
killed and `RankFailure` is raised. Ranks that compile a kernel, in a new cache, are given the time that this takes:
`timeout_s` begins anew at the end of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ziggurat.ops.cpp_build import telling_of_builds

# What every rank would import by itself otherwise: 3.5 s for pytest, 3 s for what torch loads late, 2 s for a trainer.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "ziggurat.testing.parity",
    "hypothesis",
    "pandas",  # which pyarrow loads when it first sees an array
    "ziggurat.runs.execute",
    __name__,
]
_FREEZE = "ziggurat.testing.frozen_imports"  # loaded last, behind everything that is worth freezing

T = TypeVar("T")


class RankFailure(AssertionError):  # noqa: N818  # a failed test, not an error of the library
    """A rank raised, died or hung; the message says which, and holds its traceback."""


def preload(*also: str) -> None:
    """Say what the fork server loads, once, instead of every process that it starts; no effect once it runs.

    Args:
        also: modules beside those that most ranks need; one that is not installed is left out.
    """
    _PRELOAD.extend(name for name in also if name not in _PRELOAD)
    mp.get_context("forkserver").set_forkserver_preload([*_PRELOAD, _FREEZE])


def run_ranks(function: Callable[..., T], world_size: int, *arguments: object, timeout_s: float = 60.0) -> list[T]:
    """Call `function(rank, *arguments)` on every rank of a gloo group.

    Args:
        function: at the top level of an importable module. The default process group is ready when it is called, torch
            has one thread, and RANK, WORLD_SIZE and LOCAL_RANK are set as torchrun does.
        world_size: number of ranks.
        arguments: sent to every rank; plain data or NumPy arrays.
        timeout_s: for everything but kernels that are compiled, and for each collective inside.

    Returns:
        What each rank returned, in rank order. Return plain data or NumPy arrays: a tensor would be shared memory of a
        process that is gone.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    context = mp.get_context("forkserver")
    preload()
    with tempfile.TemporaryDirectory(prefix="ziggurat-ranks-") as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, folder, timeout_s, theirs, function, arguments)
                )
                process.start()
                theirs.close()  # so that the pipe ends when the rank does
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes, folder=Path(folder), timeout_s=timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], processes: list[BaseProcess], *, folder: Path, timeout_s: float) -> list[Any]:
    """One result from each pipe, then the end of every process."""
    deadline = time.monotonic() + timeout_s
    num_builds = [0] * len(pipes)  # that each rank has under way
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    world_size = len(pipes)
    while len(results) + len(failures) < world_size:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
        # One failure soon makes others fail, by the connection it closes: give them a moment, then name the first.
        patience = 0.1 if failures else max(0.0, deadline - time.monotonic())
        if not failures and any(num_builds[rank] for rank in waiting.values()):
            patience = None  # a build has a limit of its own
        ready = [pipe for pipe in wait(list(waiting), timeout=patience) if isinstance(pipe, Connection)]
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                message = (0.0, None, _death(processes[rank]))
            if isinstance(message, bool):
                num_builds[rank] += 1 if message else -1
                deadline = time.monotonic() + timeout_s
                continue
            when, value, failure = message
            if failure is None:
                results[rank] = value
            else:
                failures[rank] = (when, failure)
    if failures:
        first = min(failures, key=lambda rank: failures[rank][0])
        others = f"\n(after it ranks {sorted(set(failures) - {first})} failed too)" if len(failures) > 1 else ""
        raise RankFailure(f"rank {first} of {world_size} {failures[first][1]}{others}")
    if len(results) < world_size:
        missing = [rank for rank in range(world_size) if rank not in results]
        raise RankFailure(_hung(missing, processes, folder=folder, world_size=world_size))
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    return [results[rank] for rank in range(world_size)]


def _death(process: BaseProcess) -> str:
    process.join(timeout=1.0)
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit {code}"
    return f"died without an exception: {how}"


def _hung(missing: list[int], processes: list[BaseProcess], *, folder: Path, world_size: int) -> str:
    """Say which ranks have not answered, and where each of them is."""
    lines = [f"ranks {missing} of {world_size} did not return in time"]
    for rank in missing:
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    for rank in missing:
        trace = folder / f"rank{rank}.trace"
        lines.append(f"rank {rank}:\n{trace.read_text() if trace.exists() else '(had not started)'}")
    return "\n".join(lines)


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending:
            pipe.send(message)

    with (Path(folder) / f"rank{rank}.trace").open("w") as trace, telling_of_builds(send):
        faulthandler.register(signal.SIGUSR1, file=trace)
        try:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            send((0.0, function(rank, *arguments), None))
            dist.barrier()  # nobody leaves while another still communicates
            dist.destroy_process_group()
        except BaseException:
            send((time.monotonic(), None, f"failed:\n{traceback.format_exc()}"))
        finally:
            pipe.close()
            faulthandler.unregister(signal.SIGUSR1)
