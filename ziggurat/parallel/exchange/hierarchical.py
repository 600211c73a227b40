"""HierarchicalSum: gradients are added up inside each host first, so that each byte crosses hosts once a host.

    2 hosts × 2 ranks                 inside a host        between hosts        inside a host
    rank 0  [ a0 | b0 ]               [ a0+a1 |   ]        [ A |   ]            [ A | B ]
    rank 1  [ a1 | b1 ]    reduce-    [   | b0+b1 ]  all-  [   | B ]      all-  [ A | B ]
    rank 2  [ a2 | b2 ]    scatter    [ a2+a3 |   ]  reduce[ A |   ]    gather  [ A | B ]
    rank 3  [ a3 | b3 ]               [   | b2+b3 ]        [   | B ]            [ A | B ]

With L ranks a host, a rank hands 1/L of its gradients to links between hosts, where the flat all-reduce hands all of
them to a backend that knows no hosts. HSDP does the same with weights that are cut (`parallel/dense.py`). Each part is
summed on one rank of a host, then in one order between hosts, so all ranks have the same bits.

The stages of a bucket wait for each other. They are issued in an order that depends on no clock, or ranks would issue
them in different ones: when a bucket is full, all buckets before it go on by a stage, and what is left goes on in
rounds when the backward pass is over.

Reference: the flat `start_sum`. Cost: twice the bytes inside a host of which L-1 of L travel, and two more messages a
bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from ziggurat.parallel.exchange.collectives import start_gather, start_part_sum, start_sum
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, RankGroup, Topology, own_group

NUM_STAGES = 3


class ReductionRoute(StrEnum):
    """The route by which gradients of copies are summed over ranks of several hosts."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class Hierarchy:
    """The groups of a hierarchical sum, which nothing else uses.

    Args:
        inside: the ranks of this host.
        between: the ranks with the same place on every host.
    """

    inside: RankGroup
    between: RankGroup

    @staticmethod
    def of(topology: Topology) -> Hierarchy:
        """Make the groups; collective. Only where `why_flat` has no reason."""
        what = "sum dense gradients"
        return Hierarchy(own_group(topology, Axis.HOST, what=what), own_group(topology, Axis.REPLICA, what=what))


def why_flat(topology: Topology) -> str:
    """Say why these ranks have no hierarchy, or return "" if they have one."""
    if topology.num_hosts == 1:
        return "there is one host"
    return "each host has one rank" if topology.ranks_per_host == 1 else ""


class HierarchicalSum:
    """A sum over all ranks that is under way, in place; the first stage starts at once.

    Args:
        values: flat and contiguous, a multiple of the ranks of a host long; must not be read or changed before `wait`.
        hierarchy: its groups.
        purpose: what for, in counts and errors.
        traffic: counts what is handed over: inside the host there and back, and between hosts.
    """

    def __init__(self, values: Tensor, *, hierarchy: Hierarchy, purpose: str, traffic: Traffic) -> None:
        self._values = values
        self._purpose = purpose
        self._hierarchy = hierarchy
        self._traffic = traffic
        self._stages = self._run()
        self.advance()

    def advance(self) -> None:
        """Wait for the present stage, and start the next one; nothing where all are over."""
        next(self._stages, None)

    def wait(self) -> Tensor:
        """The sums; waits for them.

        Raises:
            TopologyError: another rank ended or did not answer in time.
        """
        for _ in self._stages:
            pass
        return self._values

    def _run(self) -> Iterator[None]:
        inside = self._hierarchy.inside
        between = self._hierarchy.between
        names = [self._purpose, f"{self._purpose} between hosts", f"{self._purpose}, sums"]
        self._count(names[0], self._values)
        part = start_part_sum(self._values, group=inside, purpose=names[0])
        yield
        cut = part.wait()
        self._count(names[1], cut)
        total = start_sum(cut, group=between, purpose=names[1])
        yield
        summed = total.wait()
        self._count(names[2], self._values)
        whole = start_gather(summed, into=self._values, group=inside, purpose=names[2])
        yield
        whole.wait()

    def _count(self, purpose: str, values: Tensor) -> None:
        self._traffic.count_reduction(purpose, num_bytes=values.numel() * values.element_size())
