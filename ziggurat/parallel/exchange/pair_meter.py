"""Meters for all pairs of ranks, and for orders of ranks: what a job's network is like, without being told.

    round 1    0─3  1─2        disjoint pairs at the same time, a there-and-back each:
    round 2    0─2  3─1        short messages (latency, a low percentile) and long ones (the fastest)
    round 3    0─1  2─3        N−1 rounds for N ranks

Messages of a round share links between racks, as those of a collective do: a pair that is parted by such a link looks
the slower, and is told from near ones the better. All messages are of the host's memory, through gloo, on GPUs too: the
network between hosts is what an order is about, and N² communicators of NCCL are no probe.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ziggurat.files.boot import boot_id
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.process_groups import end_group, make_group, meeting_group, time_limit_s

_SHORT_BYTES = 4
_LOW_PERCENTILE = 10


def pairs_by_round(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs, every pair once, as a tournament is drawn: one stays, the others move on."""
    seats: list[int | None] = list(range(size))
    if size % 2:
        seats.append(None)  # whoever meets it has a pause
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        meetings = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(one, other), max(one, other)) for one, other in meetings if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure_pairs(
    *,
    long_bytes: int = 1 << 20,
    short_repeats: int = 15,
    long_repeats: int = 4,
    on_round: Callable[[int], None] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Measure every pair of ranks of the job; collective over all of them.

    Args:
        long_bytes: of a long message.
        short_repeats: there and back, of a few bytes.
        long_repeats: there and back, of a long message.
        on_round: is told how many rounds are over.

    Returns:
        Milliseconds of a short message, and of a long one, (N, N), symmetric, the same on every rank.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    found = torch.zeros(2, size, size, dtype=torch.float64)
    with communicating("probe of all pairs of ranks"):
        group = meeting_group(timeout_s=time_limit_s())
        for number, meetings in enumerate(pairs_by_round(size), start=1):
            # Without it a pair would begin its next round beside others that are still in this one.
            dist.barrier(group)
            mine = next((pair for pair in meetings if rank in pair), None)
            if mine is not None:
                short_ms = _message_ms(mine, num_bytes=_SHORT_BYTES, repeats=short_repeats, group=group)
                long_ms = _message_ms(mine, num_bytes=long_bytes, repeats=long_repeats, group=group)
                if rank == mine[0]:
                    found[0][mine] = float(np.percentile(short_ms, _LOW_PERCENTILE))
                    found[1][mine] = min(long_ms)
            if on_round is not None:
                on_round(number)
        # Each pair was written down by one of its ranks; all others have 0 there.
        dist.all_reduce(found, group=group)
        end_group(group)
    latency_ms, long_ms_of_pairs = (found + found.transpose(1, 2)).numpy()
    return latency_ms, long_ms_of_pairs


def _message_ms(pair: tuple[int, int], *, num_bytes: int, repeats: int, group: dist.ProcessGroup) -> list[float]:
    """Return half of there and back for each repeat but the first, which connects."""
    rank = dist.get_rank()
    partner = pair[1] if rank == pair[0] else pair[0]
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    found = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        if rank == pair[0]:
            dist.send(buffer, dst=partner, group=group)
            dist.recv(buffer, src=partner, group=group)
        else:
            dist.recv(buffer, src=partner, group=group)
            dist.send(buffer, dst=partner, group=group)
        found.append(1e3 * (time.perf_counter() - start) / 2)
    return found[1:]


def measure_orders(orders: Sequence[Sequence[int]], *, num_bytes: int, repeats: int = 5) -> list[float]:
    """Time an all-reduce in several orders of all ranks, in turns; collective.

    Args:
        orders: the launcher's rank at every place.
        num_bytes: of the buffer of every rank.
        repeats: of each order.

    Returns:
        Milliseconds of each order, the median over repeats of the slowest rank; the same on every rank.

    Raises:
        ConfigError: this torch sorts the ranks of a group.
    """
    times = torch.zeros(len(orders), repeats, dtype=torch.float64)
    buffer = torch.zeros(max(1, num_bytes // 4))
    with communicating("all-reduces in several orders of ranks"):
        groups = [_group(order) for order in orders]
        for group in groups:
            # The first one of a group connects.
            dist.all_reduce(buffer, group=group)
        for repeat in range(repeats):
            for number, group in enumerate(groups):
                dist.barrier(group)
                start = time.perf_counter()
                dist.all_reduce(buffer, group=group)
                times[number, repeat] = 1e3 * (time.perf_counter() - start)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=groups[0])
        for group in groups:
            end_group(group)
    return [statistics.median(each.tolist()) for each in times]


def _group(order: Sequence[int]) -> dist.ProcessGroup:
    made = make_group(order, backend="gloo")
    assert made is not None, "an order has every rank of the job"
    return made


def where_this_rank_is(*, towards: str = "") -> tuple[str, str, str]:
    """Return the name of the host, the address that other ranks reach it by, and what a new start of it changes.

    Args:
        towards: address of another host, to ask for a way to where the way to the meeting of all ranks is a loopback.
    """
    address = _address(os.environ.get("MASTER_ADDR", ""))
    if towards and (not address or is_loopback(address)):
        address = _address(towards) or address
    return socket.gethostname(), address, boot_id()


def is_loopback(address: str) -> bool:
    """Return True for an address that leads a host to itself alone."""
    return ipaddress.ip_address(address).is_loopback


def _address(target: str) -> str:
    """Return this host's address on the way to another one; "" where no target is named or none is found."""
    if not target:
        return ""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Of a datagram socket: nothing is sent, the system only chooses a way.
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
