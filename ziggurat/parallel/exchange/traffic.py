"""Traffic: bytes and messages that left this rank, counted by purpose and by the kind of link they took.

A number is added where a message is handed to the backend, with the size of the buffer that is handed over: counted,
not estimated. What stays on the rank is not traffic. Reductions, and gathers of weights that FSDP has cut into parts,
are counted by their payload, since the backend decides how often it crosses which link.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from ziggurat.parallel.topology import RankGroup, Topology


class LinkKind(StrEnum):
    """The kind of link that a message travels over."""

    HOST = "host"  # between devices of one host
    CROSS_HOST = "cross_host"  # between hosts
    REDUCED = "reduced"  # payload of a reduction or gather inside a group, whatever way it takes


@dataclass
class Volume:
    """A sum of messages."""

    num_bytes: int = 0
    num_messages: int = 0


class TrafficRow(TypedDict):
    """Line of a report: what one purpose sent over one kind of link."""

    purpose: str
    link: str
    bytes: int
    messages: int


class Traffic:
    """Counts what this rank sends.

    Args:
        topology: tells which ranks share a host.

    Attributes:
        num_steps: training steps that were counted.
        waited_s: seconds that this rank waited for messages of embeddings.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._volumes: dict[tuple[str, LinkKind], Volume] = defaultdict(Volume)
        self.num_steps = 0
        self.waited_s = 0.0
        self._thread = threading.get_ident()
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: evaluations are not part of a training step."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def count_messages(self, purpose: str, *, sizes_bytes: Iterable[int], group: RankGroup) -> None:
        """Count one all-to-all: a message of the given size to each rank of `group`."""
        my_host = self._topology.host_of(self._topology.rank)
        for rank, size in zip(group.ranks, sizes_bytes, strict=True):
            if rank == self._topology.rank or size == 0:
                continue
            link = LinkKind.HOST if self._topology.host_of(rank) == my_host else LinkKind.CROSS_HOST
            self._add(purpose, link, size)

    def count_reduction(self, purpose: str, *, num_bytes: int) -> None:
        """Count the payload of a reduction or gather."""
        self._add(purpose, LinkKind.REDUCED, num_bytes)

    def count_wait(self, seconds: float) -> None:
        """Count time in which the thread that trains waited for a message of embeddings and did nothing else."""
        if not self._is_paused and threading.get_ident() == self._thread:
            self.waited_s += seconds

    def reset(self) -> None:
        """Forget everything that was counted."""
        self._volumes.clear()
        self.waited_s = 0.0
        self.num_steps = 0

    def total(self, link: LinkKind) -> Volume:
        """Everything that took one kind of link."""
        mine = [volume for (_, kind), volume in self._volumes.items() if kind is link]
        return Volume(sum(v.num_bytes for v in mine), sum(v.num_messages for v in mine))

    def report(self) -> list[TrafficRow]:
        """One row a purpose and link, as plain data."""
        return [
            {"purpose": purpose, "link": link.value, "bytes": volume.num_bytes, "messages": volume.num_messages}
            for (purpose, link), volume in sorted(self._volumes.items())
        ]

    def _add(self, purpose: str, link: LinkKind, num_bytes: int) -> None:
        if self._is_paused:
            return
        volume = self._volumes[purpose, link]
        volume.num_bytes += num_bytes
        volume.num_messages += 1
