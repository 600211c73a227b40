"""Queues of a GPU that is none (`pretend_cuda.py`), and what makes the host wait for them.

All queues are one: what was asked for is done. Only a copy that does not wait is on its way until somebody waits.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch._ops import OpOverload

from ziggurat.ops.dispatched import OpArgs, OpKwargs

_PACKAGE = str(Path(__file__).resolve().parents[1])
_OURS = (__file__, str(Path(__file__).with_name("pretend_cuda.py")))


@dataclass(frozen=True)
class HostWait:
    """Something that made the host wait for the device.

    Args:
        what: the operation.
        where: the line of the package that did it, "ops/lookup/layout.py:12"; "" for a line of nobody's.
    """

    what: str
    where: str


class Records(Protocol):
    """A graph that can be recorded."""

    def computed(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> object:
        """Compute an operation, and keep it."""
        ...


_recorders: list[list[HostWait]] = []
recordings: list[Records] = []  # the graph that is being recorded (`pretend_graphs.py`), if one is
on_their_way: list[tuple[Tensor, Tensor]] = []  # copies that nobody has waited for: where to, and what


@contextlib.contextmanager
def record_waits() -> Iterator[list[HostWait]]:
    """Inside, everything that makes the host wait for the device joins the list; waiting for an event does not."""
    found: list[HostWait] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)


def note_wait(what: str) -> None:
    """Say to whoever records it that the host waits, and which line of the package made it.

    Raises:
        RuntimeError: a graph is being recorded, which this ends.
    """
    if recordings:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if not _recorders:
        return
    frame = sys._getframe(1)
    where = ""
    while frame is not None and not where:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and name not in _OURS:
            where = f"{name[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    for recorder in _recorders:
        recorder.append(HostWait(what, where))


def arrive() -> None:
    """Let copies arrive that are on their way."""
    while on_their_way:
        into, values = on_their_way.pop(0)
        into.copy_(values)


class Stream:
    """A queue of the device: nothing runs beside anything here, so all of them are one."""

    def __init__(self, *given: object, **options: object) -> None:
        del given, options

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        del error

    def wait_stream(self, stream: object) -> None:
        """Nothing: what was asked for before is done."""
        del stream

    def wait_event(self, event: object) -> None:
        """Nothing: what was asked for before is done."""
        del event

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all that was asked for."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return False: nothing is recorded into a graph here."""
        return False

    def synchronize(self) -> None:
        """Wait for all that was asked for."""
        note_wait("synchronize")
        arrive()


class Event:
    """A point in a queue of the device."""

    def __init__(self, **options: object) -> None:
        del options

    def record(self, stream: object = None) -> None:
        """Put it behind all that was asked for."""
        del stream

    def wait(self, stream: object = None) -> None:
        """Let a queue wait, not the host."""
        del stream

    def query(self) -> bool:
        """Return True if the device has come to this event."""
        arrive()
        return True

    def synchronize(self) -> None:
        """Let the host wait until the device has come to it."""
        arrive()

    def elapsed_time(self, other: object) -> float:
        """Milliseconds between two events."""
        del other
        return 0.0


def synchronize(device: object = None) -> None:
    """Wait for everything on the device."""
    del device
    Stream().synchronize()
