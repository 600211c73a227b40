"""Worker: one contestant in a process of its own, commanded through pipes, so that rounds of several can interleave.

    harness ── {"op": "run", "steps": 20} ──► worker          one JSON object a line; only one worker runs at a time,
            ◄── {"seconds": 1.3, …} ────────                  the others sleep in `readline`

A contestant is any object with `info` and `run(steps)`; its module ends in `serve(build)`. Whatever a library prints
goes to stderr: the real stdout is kept for the protocol.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from benchmarks.workload import Workload


class Contestant(Protocol):
    """What a worker module builds.

    `info` names settings and sizes (JSON); `num_dense_parameters` in it is compared over all contestants.
    """

    info: dict[str, object]

    def run(self, steps: int) -> float:
        """Do so many steps and return the last loss (or any number that depends on the work)."""
        ...


def serve(build: Callable[[Workload, dict[str, object]], Contestant]) -> None:
    """Build the contestant that the first line asks for and answer commands until stdin ends.

    Args:
        build: makes the contestant from the workload and its settings.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contestant: Contestant | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "build":
                begin = time.perf_counter()
                contestant = build(Workload.from_json(command["workload"]), command["settings"])
                built_s = time.perf_counter() - begin
                begin = time.perf_counter()
                contestant.run(int(command["first_steps"]))
                reply = {"info": contestant.info, "build_s": built_s, "first_step_s": time.perf_counter() - begin}
            elif command["op"] == "losses":
                reply = {"losses": contestant.losses(int(command["steps"]))}  # type: ignore[union-attr]
            else:
                assert contestant is not None
                reply = _timed_run(contestant, int(command["steps"]))
        except Exception as error:  # the harness decides whether a contestant may be missing
            reply = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")


def _timed_run(contestant: Contestant, steps: int) -> dict[str, float]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    value = contestant.run(steps)
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
        "value": float(value),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
