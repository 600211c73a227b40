"""Histories divided between ranks: attention of new behind cached events, and whole steps of a stack of layers.

Settings: `heads` and `dim` of attention, and the sizes of the stack. Commands name a turn:

    {"op": "run", "name": "attention/pass_kv/T/P", "steps": 3}      T new events behind P cached ones, of one user
    {"op": "profile", "name": "memory/L", …}                        peak memory of a step on one history of L events
    {"op": "profile", "name": "rates/", …}                          measures the rates that the rule goes by
    {"op": "profile", "name": "predict/T/P", …}                     what the rule takes
    {"op": "run", "name": "step/L", "steps": 3}                     the same step, for its time
"""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.datacentre.serve import serve_ranks
from ziggurat.features.jagged import offsets_of
from ziggurat.models.sequence.layers.hstu import HSTULayer, hstu_research
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.partial import AttentionSettings
from ziggurat.ops.attention.problem import AttentionForm, Spans
from ziggurat.parallel.context.attention import ContextAttention
from ziggurat.parallel.context.choice import (
    ContextRates,
    Passing,
    RowWidths,
    choose_travelling,
    measure_rates,
    predicted_s,
)
from ziggurat.parallel.context.pieces import Histories, Pieces, head_and_tail
from ziggurat.parallel.context.spread import Spread
from ziggurat.parallel.context.travel import spread_attention
from ziggurat.parallel.context.work import Travelling, Work
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Topology


class ContextRanks:
    """One rank of the job."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.heads, self.dim = int(settings["heads"]), int(settings["dim"])
        self.layers, self.width = int(settings["layers"]), int(settings["width"])
        hosts = int(settings["ranks_per_host"])
        world = int(os.environ["WORLD_SIZE"])
        topology = Topology.create(ranks_per_host=hosts, context_size=world)
        self.group, self.traffic = topology.context, Traffic(topology)
        self.info: dict[str, Any] = {"rank": self.group.position}
        self._made: dict[str, Any] = {}
        self._rates: ContextRates | None = None

    # ------------------------------------------------------------------------------------------------- attention

    def _case(self, name: str) -> tuple[Spread, tuple[Tensor, Tensor, Tensor]]:
        """New events behind cached ones; each rank has heads and tails of both."""
        if name not in self._made:
            new, cached = (int(part) for part in name.split("/"))
            size, me = self.group.size, self.group.position
            rows, keys = [], []
            for rank in range(size):
                old = head_and_tail(torch.tensor([cached]), rank=rank, num_ranks=size)
                own = head_and_tail(torch.tensor([new]), rank=rank, num_ranks=size)
                own = Pieces(own.starts + cached, own.counts)
                rows.append(own)
                keys.append(Pieces(torch.cat([old.starts, own.starts]), torch.cat([old.counts, own.counts])))
            spread = Spread(Histories(torch.tensor([cached + new])), rows, keys, self.group, self.traffic)
            generator = torch.Generator().manual_seed(me)
            counts = rows[me].num_rows, keys[me].num_rows, keys[me].num_rows
            q, k, v = (torch.randn(count, self.heads, self.dim, generator=generator) for count in counts)
            self._made = {name: (spread, (q, k, v))}  # one at a time
        return self._made[name]

    def _attend(self, name: str, way: str) -> None:
        spread, (q, k, v) = self._case(name)
        settings = AttentionSettings(form=AttentionForm.SILU, scale=self.dim**-0.5, divisor=1e4)
        with torch.no_grad():
            spread_attention(q, k, v, work=Work(spread, settings, Travelling(way)))

    def _predict(self, name: str) -> dict[str, Any]:
        spread, _ = self._case(name)
        widths = RowWidths(query=self.heads * self.dim, value=self.heads * self.dim, num_heads=self.heads)
        given = {"queries": spread.queries, "keys": spread.keys, "widths": widths}
        assert self._rates is not None, "measured first"
        given |= {"rates": self._rates, "overlaps": spread.overlaps}
        taken = choose_travelling(spread.histories, **given)
        ways = {way.value: predicted_s(spread.histories, travelling=way, **given) for way in Travelling}
        return {"chosen": taken.value, "predicted_s": ways}

    def _measure(self) -> dict[str, Any]:
        self._rates = measure_rates(self._case("16/0")[0])
        return asdict(self._rates)

    # ----------------------------------------------------------------------------------------------------- a step

    def _step(self, length: int) -> None:
        """Forward and backward passes of a stack of HSTU layers on one history."""
        key = f"stack/{length}"
        if key not in self._made:
            torch.manual_seed(0)
            config = hstu_research(dim=self.width, max_length=length, num_heads=self.heads, dropout=0.0)
            stack = SequenceStack([HSTULayer(config) for _ in range(self.layers)])
            stack.attention = ContextAttention(self.group, traffic=self.traffic, passing=Passing.QUERIES)
            self._made = {key: stack}
        stack: SequenceStack = self._made[key]
        mine = head_and_tail(torch.tensor([length]), rank=self.group.position, num_ranks=self.group.size)
        starts, times = mine.starts.reshape(-1), torch.arange(mine.num_rows)
        spans = Spans(query_starts=starts, key_starts=starts, lengths=torch.tensor([length, length]))
        places = stack.places_of(offsets_of(mine.counts.reshape(-1)), times=times, spans=spans)
        events = torch.randn(mine.num_rows, self.width).requires_grad_()
        stack(events, places=places).square().mean().backward()

    def _memory(self, length: int) -> dict[str, Any]:
        """Peak memory of a step beyond what the process had before it, by the kernel's count."""
        self._made = {}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        before = _status("VmRSS")
        self._step(length)
        return {"before": before, "peak": _status("VmHWM"), "bytes": _status("VmHWM") - before}

    # ------------------------------------------------------------------------------------------------- the commands

    def run(self, name: str, steps: int) -> float:
        """Turns of attention or of a step."""
        kind, _, rest = name.partition("/")
        for _ in range(steps):
            if kind == "attention":
                way, _, case = rest.partition("/")
                self._attend(case, way)
            else:
                self._step(int(rest))
        return 0.0

    def profile(self, name: str, steps: int) -> dict[str, Any]:
        """Peak memory, or what the rule says."""
        del steps
        kind, _, rest = name.partition("/")
        if kind == "rates":
            return self._measure()
        return self._memory(int(rest)) if kind == "memory" else self._predict(rest)


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {name} in /proc/self/status")


if __name__ == "__main__":
    serve_ranks(ContextRanks)
