"""Worker: one contestant in a process of its own, commanded through pipes, so that rounds of several can interleave.

    harness ── {"op": "run", "steps": 20} ──► worker          one JSON object a line; only one worker runs at a time,
            ◄── {"seconds": 1.3, …} ────────                  the others sleep in `readline`

A contestant is any object with `info` and `run(steps)`; its module ends in `serve(build)`. One that cannot be called
step by step (a whole training loop) is a `LoopContestant`: it is given the turns, and asks for the next one from inside
its loop. Everything runs in the main thread, because a second set of OpenMP threads would change the timing.

Whatever a library prints goes to stderr: the real stdout is kept for the protocol.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from benchmarks.workload import Workload


class Contestant(Protocol):
    """What a worker module builds.

    `info` names settings and sizes (JSON); `num_dense_parameters` in it is compared over all contestants.
    """

    info: dict[str, object]

    def run(self, steps: int) -> float:
        """Do so many steps and return the last loss (or any number that depends on the work)."""
        ...


@runtime_checkable
class RecordsLosses(Protocol):
    """A contestant that can also return every loss."""

    def losses(self, steps: int) -> list[float]:
        """Train on so many batches and keep every loss."""
        ...


@runtime_checkable
class LoopContestant(Protocol):
    """A contestant with a loop of its own, which calls `turns.next_step()` before every step."""

    info: dict[str, object]

    def loop(self, turns: Turns) -> None:
        """Run until `next_step` raises SystemExit."""
        ...


# Packages whose version decides how fast a contestant is, by the name they are imported by.
VERSIONED = ("torchrec", "fbgemm_gpu", "fuxictr", "rectools", "torch")


def loaded_versions() -> dict[str, str]:
    """Return versions of what this process has imported of `VERSIONED`; "unknown" where a package has none."""
    loaded = {name: sys.modules[name] for name in VERSIONED if sys.modules.get(name) is not None}
    return {name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()}


class Pipes:
    """The worker's end of the pipes."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def commands(self) -> Iterator[dict[str, Any]]:
        """Commands as they come, until the harness closes its end."""
        for line in sys.stdin:
            yield json.loads(line)

    def reply(self, reply: dict[str, object]) -> None:
        """Answer the last command."""
        self._replies.write(json.dumps(reply) + "\n")


class Clock:
    """Wall and CPU time of one turn."""

    def __init__(self) -> None:
        self._begin, self._begin_cpu = time.perf_counter(), time.process_time()

    def reply(self, value: float) -> dict[str, object]:
        """What the harness wants to know of the turn."""
        return {
            "seconds": time.perf_counter() - self._begin,
            "cpu_seconds": time.process_time() - self._begin_cpu,
            "value": float(value),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


class Turns:
    """Turns for a contestant with its own loop: blocks between them, times them, answers.

    Args:
        pipes: where commands come from.
        first_steps: steps of the first turn, whose reply is that to "build".
        built: what that reply says besides.
    """

    def __init__(self, pipes: Pipes, *, first_steps: int, built: dict[str, object]) -> None:
        self._pipes, self._commands = pipes, pipes.commands()
        self._built: dict[str, object] | None = built
        self._left, self._clock = first_steps, Clock()

    def next_step(self, value: float = 0.0) -> None:
        """Return when the next step may be taken; the step before it is done by then.

        Raises:
            SystemExit: the harness wants no more.
        """
        if self._left == 0:
            reply = self._clock.reply(value)
            if self._built is not None:
                reply = {**self._built, "first_step_s": reply["seconds"]}
                self._built = None
            self._pipes.reply(reply)
            command = next(self._commands, None)
            if command is None:
                raise SystemExit
            self._left, self._clock = int(command["steps"]), Clock()
        self._left -= 1


def serve(build: Callable[[Workload, dict[str, object]], Contestant | LoopContestant]) -> None:
    """Build the contestant that the first line asks for and answer commands until stdin ends.

    Args:
        build: makes the contestant from the workload and its settings.
    """
    pipes = Pipes()
    contestant: Any = None
    for command in pipes.commands():
        try:
            if command["op"] == "build":
                clock = Clock()
                contestant = build(Workload.from_json(command["workload"]), command["settings"])
                reply: dict[str, object] = {"info": contestant.info, "build_s": clock.reply(0.0)["seconds"]}
                reply["versions"] = loaded_versions()
                first_steps = int(command["first_steps"])
                if isinstance(contestant, LoopContestant):
                    contestant.loop(Turns(pipes, first_steps=first_steps, built=reply))
                    return
                clock = Clock()
                _run(contestant, first_steps)
                reply["first_step_s"] = clock.reply(0.0)["seconds"]
            elif command["op"] == "losses":
                assert isinstance(contestant, RecordsLosses)
                reply = {"losses": contestant.losses(int(command["steps"]))}
            else:
                clock = Clock()
                reply = clock.reply(_run(contestant, int(command["steps"])))
        except Exception as error:  # the harness decides whether a contestant may be missing
            reply = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        pipes.reply(reply)


def _run(contestant: Contestant, steps: int) -> float:
    return contestant.run(steps) if steps else 0.0
