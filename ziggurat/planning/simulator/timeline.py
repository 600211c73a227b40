"""Timeline: tasks on three resources, when each runs, and where the time of a step goes.

    compute   lookup ─ ░░░ ─ dense network ─ ░░ ─ update ─ optimizers         ░ waits: exposed communication
    inside                                                                    links inside a host
    between          exchange             exchange ─ dense gradients          links between hosts

A task starts when its resource is free and what it needs is done; tasks of one resource keep their order. Which tasks
a step has is `simulator.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.planning.cluster.cluster import Cluster


class Resource(StrEnum):
    """The resource that a task keeps busy."""

    COMPUTE = "compute"
    INSIDE = "inside"
    BETWEEN = "between"


@dataclass(frozen=True)
class SimulatedTask:
    """A piece of a step.

    Args:
        name: of its kind; several may share one.
        resource: what it keeps busy.
        seconds: how long.
        after: indices of tasks that must be done before.
    """

    name: str
    resource: Resource
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """The time span in which a task ran."""

    task: SimulatedTask
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step as it ran.

    Args:
        spans: in the order of the tasks.
        cluster: where.
    """

    spans: tuple[Span, ...]
    cluster: Cluster

    @property
    def step_s(self) -> float:
        """The seconds from the first start to the last end."""
        return max((span.end_s for span in self.spans), default=0.0)

    def samples_per_s(self, batch_size: int) -> float:
        """Return the samples per second of all ranks, for B samples a rank."""
        return batch_size * self.cluster.world_size / self.step_s

    def parts_ms(self) -> dict[str, float]:
        """Return the parts of the step's time: compute tasks, and waits, named "wait: …". They add up to the step."""
        parts: dict[str, float] = {}
        clock = 0.0
        for span in sorted(self._compute(), key=lambda span: span.start_s):
            clock = self._add_wait(parts, clock, span.start_s)
            parts[span.task.name] = parts.get(span.task.name, 0.0) + 1e3 * (span.end_s - span.start_s)
            clock = max(clock, span.end_s)
        self._add_wait(parts, clock, self.step_s)
        return parts

    def busy_s(self, resource: Resource) -> float:
        """Seconds in which a resource is used."""
        return sum(span.task.seconds for span in self.spans if span.task.resource is resource)

    def _compute(self) -> list[Span]:
        return [span for span in self.spans if span.task.resource is Resource.COMPUTE]

    def _add_wait(self, parts: dict[str, float], start_s: float, end_s: float) -> float:
        """Give the time of a gap to the transfers that run in it, the last to end first."""
        hops = [s for s in self.spans if s.task.resource is not Resource.COMPUTE and s.end_s > start_s]
        for span in sorted(hops, key=lambda span: -span.end_s):
            if span.start_s < end_s <= span.end_s + 1e-12 and end_s > start_s:
                name = f"wait: {span.task.name}"
                begin = max(start_s, span.start_s)
                parts[name] = parts.get(name, 0.0) + 1e3 * (end_s - begin)
                end_s = begin
        assert end_s - start_s < 1e-9, "a gap that no transfer explains"
        return end_s


def run_tasks(tasks: Sequence[SimulatedTask]) -> tuple[Span, ...]:
    """Start every task as early as its resource and what it needs allow; tasks of one resource keep their order."""
    free = dict.fromkeys(Resource, 0.0)
    spans: list[Span] = []
    for task in tasks:
        start = max([free[task.resource], *(spans[index].end_s for index in task.after)])
        free[task.resource] = start + task.seconds
        spans.append(Span(task, start, start + task.seconds))
    return tuple(spans)
