"""Serve: the rank's side of a job. A module that ends in `serve_ranks(build)` is a contestant on many ranks.

`build(settings)` is called once the process group is there, and returns an object with `info` and `run(name, steps)`;
one object may hold several variants, by name. A turn begins and ends with a barrier, so its time is that of the slowest
rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist  # noqa: TID251

from benchmarks.worker import Clock, Pipes


class RankContestant(Protocol):
    """What `build` returns. `info` is plain data."""

    info: dict[str, Any]

    def run(self, name: str, steps: int) -> float:
        """Take so many steps with one variant; returns the last loss of this rank."""
        ...


@runtime_checkable
class Profiled(Protocol):
    """A contestant that can also tell where the time of a step goes, and what it sends."""

    def profile(self, name: str, steps: int) -> dict[str, Any]:
        """Seconds a step by phase, bytes a step by purpose and link."""
        ...


def serve_ranks(build: Callable[[dict[str, Any]], RankContestant]) -> None:
    """Answer commands until the parent closes the pipe or ends."""
    _end_with_parent()
    pipes = Pipes()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    contestant: RankContestant | None = None
    for command in pipes.commands():
        try:
            if command["op"] == "build":
                timeout = timedelta(seconds=float(command["timeout_s"]))
                dist.init_process_group("gloo", timeout=timeout)
                contestant = build(command["settings"])
                reply: dict[str, Any] = contestant.info
            else:
                assert contestant is not None
                reply = _turn(contestant, command)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "when": time.monotonic()}
        pipes.reply(reply)
    if dist.is_initialized():
        dist.destroy_process_group()


def _turn(contestant: RankContestant, command: dict[str, Any]) -> dict[str, Any]:
    name, steps = str(command["name"]), int(command["steps"])
    if command["op"] == "profile":
        assert isinstance(contestant, Profiled)
        return contestant.profile(name, steps)
    dist.barrier()
    clock = Clock()
    value = contestant.run(name, steps)
    dist.barrier()
    return clock.reply(value)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the parent has ended already")
