"""Whether keys or queries travel: the time of both ways, from who needs what and from measured rates.

    a rank's rounds      round 0 computes with what is there; round i computes with what came from i places back
    with overlap         Σ_i max(computing i, coming i + 1)     without: Σ_i (computing i + coming i)
    going home           never overlaps: gradients of keys (pass-KV), results and gradients of queries (pass-Q)
    always               what an attention with next to no events takes, measured for each way: empty messages, and
                         the cutting and joining of tensors (pass-Q has twice as many)
    time of a way        the longest of all ranks

Computing takes the same time both ways, since the same pairs of a row and a key meet. What differs is what travels, and
that is counted from the masks (`pieces.py`), not guessed from lengths: with P cached events a rank and T new ones, keys
are T + P rows and queries T. For a whole history in training both are the same rows; with many cached events and few
new ones queries are less, unless so much is computed that keys come for nothing, while the way home does not.

Sources: algorithms 1 and 5 of Yang et al., arXiv 2411.01783, decide by two inequalities (rows alone, one bandwidth, no
backward pass); the times here are the same quantities without the approximation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ziggurat.config import JSON
from ziggurat.ops.attention.partial import AttentionSettings, gather_part
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout
from ziggurat.parallel.context.pieces import Histories, Pieces, head_and_tail
from ziggurat.parallel.context.spread import Spread
from ziggurat.parallel.context.travel import spread_attention
from ziggurat.parallel.context.work import Travelling, Work

_EVENTS = 512
_SMALL, _LARGE = 1 << 10, 1 << 20
_REPEATS = 3


class Passing(StrEnum):
    """Choice of what travels between ranks: keys and values, or queries."""

    AUTO = "auto"  # whichever takes less time, by measured rates
    KEYS = "pass_kv"
    QUERIES = "pass_q"


@dataclass(frozen=True, kw_only=True)
class ContextRates:
    """Rates that a group of ranks was measured to reach.

    Args:
        flops_per_s: of attention on one rank, products alone.
        bytes_per_s: of a message to the rank i + 1 places on while all ranks send one, i = 0 … N − 2.
        always_s: of a forward pass with next to no events, by what travels.
    """

    flops_per_s: float
    bytes_per_s: tuple[float, ...]
    always_s: Mapping[Travelling, float]

    def to_json(self) -> dict[str, JSON]:
        """The rates as plain data, for a run that is resumed to choose as it did."""
        always: dict[str, JSON] = {way.value: seconds for way, seconds in self.always_s.items()}
        return {"flops_per_s": self.flops_per_s, "bytes_per_s": list(self.bytes_per_s), "always_s": always}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ContextRates:
        """The rates that `to_json` gave."""
        always = {Travelling(way): float(seconds) for way, seconds in data["always_s"].items()}
        rates = tuple(map(float, data["bytes_per_s"]))
        return ContextRates(flops_per_s=float(data["flops_per_s"]), bytes_per_s=rates, always_s=always)


@dataclass(frozen=True, kw_only=True)
class RowWidths:
    """Numbers of a row, all heads side by side, and the bytes of one of them.

    Args:
        query: of a query and a key.
        value: of a value and a result.
        num_heads: of the layer.
        number_bytes: of a number; sums travel in FP32.
        is_softmax: whether logarithms of sums travel, too.
        is_training: whether there is a backward pass.
    """

    query: int
    value: int
    num_heads: int
    number_bytes: int = 4
    is_softmax: bool = False
    is_training: bool = False

    def row_bytes(self, travelling: Travelling) -> tuple[list[int], list[int]]:
        """Bytes of a row that comes, and of what goes home for it: forward, and backward where there is one."""
        both = self.query + self.value
        size = self.number_bytes
        sums = 4
        logarithms = sums * self.num_heads if self.is_softmax else 0
        if travelling is Travelling.KEYS:
            return [size * both] * (1 + self.is_training), [0, sums * both][: 1 + self.is_training]
        comes = [size * self.query, size * (both + self.value * self.is_softmax) + logarithms]
        goes_home = [sums * self.value + logarithms, sums * self.query]
        return comes[: 1 + self.is_training], goes_home[: 1 + self.is_training]

    def pair_flops(self) -> list[int]:
        """Operations of a pair of a row and a key: forward, and backward where there is one."""
        both = [2 * (self.query + self.value), 2 * (3 * self.query + 2 * self.value)]
        return both[: 1 + self.is_training]


def choose_travelling(
    histories: Histories,
    *,
    queries: Sequence[Pieces],
    keys: Sequence[Pieces],
    widths: RowWidths,
    rates: ContextRates,
    overlaps: bool,
) -> Travelling:
    """Choose what travels; keys if both ways take the same time.

    Args:
        histories: lengths, targets, mask.
        queries: pieces of each rank.
        keys: pieces of each rank.
        widths: of rows.
        rates: the same on every rank.
        overlaps: whether messages travel while ranks compute.
    """
    # `min` takes the first of equals, and KEYS is the first member.
    given = {"queries": queries, "keys": keys, "widths": widths, "rates": rates, "overlaps": overlaps}
    return min(Travelling, key=lambda way: predicted_s(histories, travelling=way, **given))


def predicted_s(
    histories: Histories,
    *,
    travelling: Travelling,
    queries: Sequence[Pieces],
    keys: Sequence[Pieces],
    widths: RowWidths,
    rates: ContextRates,
    overlaps: bool,
) -> float:
    """Seconds of one attention, by the slowest rank; arguments as in `choose_travelling`."""
    size = len(queries)
    by_keys = travelling is Travelling.KEYS
    pairs = [[histories.pairs(rows, held) for held in keys] for rows in queries]  # of rows and holder
    needed = [
        [_needed(histories, rows, held, by_keys=by_keys) if one != other else 0 for other, held in enumerate(keys)]
        for one, rows in enumerate(queries)
    ]

    def come(to: int, shift: int) -> int:
        """Rows that a rank gets from another: keys that it needs, or queries that ask it."""
        # In round `shift` each rank gets from the one so many places before it.
        other = (to - shift) % size
        return needed[to][other] if by_keys else needed[other][to]

    longest = 0.0
    for rank in range(size):
        # What a pass costs with hardly any events: launches, and the messages' latencies.
        total = rates.always_s[travelling] * len(widths.pair_flops())
        for passed, flops in enumerate(widths.pair_flops()):
            comes, home = (each[passed] for each in widths.row_bytes(travelling))
            # Its own pieces need no message, and are computed while the first one comes.
            computing = [pairs[rank][rank] * flops / rates.flops_per_s]
            coming = [0.0]
            for shift in range(1, size):
                other = (rank - shift) % size
                met = pairs[rank][other] if by_keys else pairs[other][rank]
                rows = come(rank, shift)
                gone = come((rank + shift) % size, shift)
                rate = rates.bytes_per_s[shift - 1]
                computing.append(met * flops / rates.flops_per_s)
                # A rank sends and receives at once; the larger of both decides.
                coming.append(max(rows, gone) * comes / rate)
                total += max(rows, gone) * home / rate
            total += _joined(computing, coming, overlaps=overlaps)
        longest = max(longest, total)
    return longest


def _joined(computing: list[float], coming: list[float], *, overlaps: bool) -> float:
    if not overlaps:
        return sum(computing) + sum(coming)
    # While round i is computed the rows of round i + 1 come; the first entry is that of the rank's own pieces.
    later = [*coming[1:], 0.0]
    return sum(max(busy, wire) for busy, wire in zip(computing, later, strict=True))


def _needed(histories: Histories, rows: Pieces, keys: Pieces, *, by_keys: bool) -> int:
    found = histories.keys_needed(keys, by=rows) if by_keys else histories.rows_that_see(rows, keys)
    return found.num_rows


def measure_rates(spread: Spread) -> ContextRates:
    """Measure how fast ranks of a group compute and send; collective, the same on each; 0.3 s and 8 MB a neighbour.

    Args:
        spread: any, of the group.
    """
    flops = torch.tensor([_measure_flops()], dtype=torch.float64)
    size = spread.group.size
    # All ranks must choose alike, and they wait for the slowest one in any case.
    slowest = torch.cat(spread.everybody(flops, [1] * size, purpose="rates")).min()
    times = []
    for shift in range(1, size):
        times += [_message_s(spread, num_bytes, shift=shift) for num_bytes in (_SMALL, _LARGE)]
    mine = torch.tensor(times, dtype=torch.float64)
    of_all = torch.stack(spread.everybody(mine, [len(times)] * size, purpose="rates")).amax(dim=0).view(-1, 2)
    small_s, large_s = of_all.unbind(dim=1)
    # Two sizes: their difference has no latency in it.
    rates = (_LARGE - _SMALL) / (large_s - small_s).clamp(min=1e-6)
    always_s = torch.tensor([_attention_s(spread, way) for way in Travelling], dtype=torch.float64)
    always_s = torch.stack(spread.everybody(always_s, [len(always_s)] * size, purpose="rates")).amax(dim=0)
    return ContextRates(
        flops_per_s=float(slowest),
        bytes_per_s=tuple(rates.tolist()),
        always_s=dict(zip(Travelling, always_s.tolist(), strict=True)),
    )


def _measure_flops() -> float:
    """Measure the FLOP/s of one head of 64 numbers over a history, forward; the fastest of a few."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(_EVENTS, 1, 64, generator=generator) for _ in range(3))
    layout = JaggedLayout(offsets=torch.tensor([0, _EVENTS]))
    settings = AttentionSettings(form=AttentionForm.SILU, scale=0.125, divisor=float(_EVENTS))
    best = float("inf")
    # One more than is counted on: the first pays for what is made once.
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        gather_part(q, k, v, layout=layout, settings=settings, bias=AttentionBias())
        best = min(best, time.perf_counter() - begin)
    return 2.0 * 128 * _EVENTS * (_EVENTS + 1) / 2 / best


def _attention_s(spread: Spread, travelling: Travelling) -> float:
    """Measure the seconds of a forward pass over one history of two events a rank; the median of a few."""
    size = spread.group.size
    pieces = [head_and_tail(torch.tensor([2 * size]), rank=rank, num_ranks=size) for rank in range(size)]
    little = Spread(Histories(torch.tensor([2 * size])), pieces, pieces, spread.group, spread.traffic)
    settings = AttentionSettings(form=AttentionForm.SILU, scale=0.125, divisor=2.0 * size)
    rows = torch.zeros(pieces[spread.group.position].num_rows, 1, 64)
    times = []
    with torch.no_grad():
        for _ in range(1 + _REPEATS):
            little.everybody(rows.view(-1)[:1], [1] * size, purpose="rates")  # all begin together
            begin = time.perf_counter()
            spread_attention(rows, rows, rows, work=Work(little, settings, travelling))
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _message_s(spread: Spread, num_bytes: int, *, shift: int) -> float:
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(1 + _REPEATS):
        spread.everybody(buffer[:1], [1] * spread.group.size, purpose="rates")  # all begin together
        begin = time.perf_counter()
        spread.send_on(buffer, shift=shift, purpose="rates")
        best = min(best, time.perf_counter() - begin)
    return best
