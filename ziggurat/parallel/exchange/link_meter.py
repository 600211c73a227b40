"""Meters for links: what a message costs between two ranks, and an exchange of embeddings among all of them.

    latency, rate     a message there and back between a rank and one of its host, and one of another host, halved
    exchange          `BlockExchange`, the very one that models use, with any columns on each rank, there and back

The clock is the wall's where every rank has a processor or device to itself. Ranks that share cores wait for each other
at random, and the wall then says nothing; what is left to measure is the *processor time* of each rank, which is what
the exchange takes away from computing (packing, copying, the network stack). Of several repeats the fastest counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

import torch
import torch.distributed as dist

from ziggurat.parallel.exchange.blocks import Block, BlockExchange
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire_formats import PLAIN
from ziggurat.parallel.process_groups import communication_device
from ziggurat.parallel.topology import Topology


class MeterClock(StrEnum):
    """The clock that a duration is read from."""

    WALL = "wall"
    PROCESSOR = "processor"

    def now_s(self) -> float:
        """The time in seconds."""
        return time.perf_counter() if self is MeterClock.WALL else time.process_time()


def message_ms(topology: Topology, *, partner: int, num_bytes: int, repeats: int = 7) -> float:
    """Milliseconds of a message between rank 0 and `partner`, by the wall; collective over all ranks.

    Args:
        topology: the ranks.
        partner: the other rank.
        num_bytes: of the message.
        repeats: of which the fastest counts.

    Returns:
        Half of there and back on ranks 0 and `partner`; 0 on others.
    """
    device = _device()
    buffer = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
    dist.barrier()
    if topology.rank not in (0, partner):
        return 0.0
    best = float("inf")
    partner = topology.order[partner]  # the launcher's rank
    for _ in range(1 + repeats):  # the first connects
        start = time.perf_counter()
        if topology.rank == 0:
            dist.send(buffer, dst=partner)
            dist.recv(buffer, src=partner)
        else:
            dist.recv(buffer, src=0)
            dist.send(buffer, dst=0)
        _finish(device)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best / 2


class ExchangeMeter:
    """Times exchanges of embeddings among all ranks. All methods are collective.

    Args:
        topology: the ranks, flat.
        batch_size: samples of each rank.
        clock: wall or processor.
        repeats: of which the fastest counts.
    """

    def __init__(self, topology: Topology, *, batch_size: int, clock: MeterClock, repeats: int = 5) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._clock = clock
        self._repeats = repeats

    def measure(self, columns: Sequence[int], *, starts_ms: Sequence[float]) -> tuple[list[float], list[float]]:
        """Time one exchange.

        Args:
            columns: that each rank sends.
            starts_ms: how much later than the first each rank begins; only the wall knows of it.

        Returns:
            Milliseconds of every rank, forward (from its own beginning) and backward.
        """
        topology = self._topology
        size = self._batch_size
        exchange = BlockExchange(
            topology.world,
            widths=[[number] for number in columns],
            blocks=[Block(number, ((rank, 0),)) for rank, number in enumerate(columns) if number],
            wire=PLAIN,
            traffic=Traffic(topology),
            purpose="probe",
        )
        device = _device()
        values = torch.zeros(size * topology.world_size, columns[topology.rank], device=device)
        gradient = torch.zeros(size, exchange.output_dim, device=device)
        rows = [size] * topology.world_size
        best = [float("inf")] * 2
        for _ in range(1 + self._repeats):
            dist.barrier()
            if self._clock is MeterClock.WALL:
                time.sleep(1e-3 * starts_ms[topology.rank])
            start = self._clock.now_s()
            _, transfer = exchange.start(values, rows_sent=rows, num_rows=size)
            exchange.receive_values(transfer)
            _finish(device)
            best[0] = min(best[0], self._clock.now_s() - start)
            dist.barrier()
            start = self._clock.now_s()
            exchange.send_gradient(transfer, gradient)
            exchange.receive_gradient(transfer)
            _finish(device)
            best[1] = min(best[1], self._clock.now_s() - start)
        mine = torch.tensor(best, dtype=torch.float64, device=device) * 1e3
        all_ms = [torch.empty_like(mine) for _ in range(topology.world_size)]
        dist.all_gather(all_ms, mine)
        forward, backward = torch.stack(all_ms).t().tolist()
        return forward, backward


def _device() -> torch.device:
    """Return the device where messages of this job lie."""
    return communication_device()


def _finish(device: torch.device) -> None:
    """Wait for what was started."""
    if device.type == "cuda":
        torch.cuda.synchronize()
