"""Work: one attention of one layer: what queries gather from keys, wherever both come from, and the gradients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from jaxtyping import Int64
from torch import Tensor

from ziggurat.ops.attention.partial import (
    AttentionSettings,
    Gathered,
    PartGradients,
    gather_part,
    merge,
    part_gradients,
)
from ziggurat.ops.attention.problem import AttentionBias
from ziggurat.parallel.context.pieces import Pieces
from ziggurat.parallel.context.spread import Spread


class Travelling(StrEnum):
    """The tensors that go to the rank that has the others: keys and values, or queries."""

    KEYS = "pass_kv"
    QUERIES = "pass_q"


class Times(NamedTuple):
    """The times when the queries of a rank are asked, and the times when its keys were."""

    queries: Int64[Tensor, "M"]
    keys: Int64[Tensor, "N"]


@dataclass(eq=False)
class Work:
    """One attention of one layer.

    Args:
        spread: who has what.
        settings: form, scale, divisor.
        travelling: keys or queries.
        times: of each rank; empty where no bias asks for them.
        w_pos: bias by position.
        w_time: bias by time.
    """

    spread: Spread
    settings: AttentionSettings
    travelling: Travelling
    times: Sequence[Times] = ()
    w_pos: Tensor | None = None
    w_time: Tensor | None = None

    def gather(self, queries: Side, keys: Side, whole: Gathered) -> None:
        """Add what queries gather from keys to their result."""
        (q,), (k, v) = queries.tensors, keys.tensors
        for of_rows, of_keys, layout in self.spread.histories.calls(queries.pieces, keys.pieces):
            bias = self._bias(queries, keys, of_rows, of_keys)
            part = gather_part(q[of_rows], k[of_keys], v[of_keys], layout=layout, settings=self.settings, bias=bias)
            merge(whole, part, rows=of_rows)

    def differentiate(self, queries: Side, keys: Side, found: Gradients) -> None:
        """Add the gradients of queries (q, dO, and for softmax O and l) and of keys (k, v)."""
        (q, grad, *rest), (k, v) = queries.tensors, keys.tensors
        out, lse = rest if rest else (grad, None)
        for of_rows, of_keys, layout in self.spread.histories.calls(queries.pieces, keys.pieces):
            whole = Gathered(out[of_rows].to(grad.dtype), None if lse is None else lse[of_rows])
            qkv = (q[of_rows], k[of_keys], v[of_keys])
            bias = self._bias(queries, keys, of_rows, of_keys)
            part = part_gradients(grad[of_rows], whole, qkv, layout=layout, settings=self.settings, bias=bias)
            found.add(part, of_rows, of_keys)

    def _bias(self, queries: Side, keys: Side, of_rows: slice, of_keys: slice) -> AttentionBias:
        times = (None, None) if self.w_time is None else (queries.times, keys.times)
        asked, were = (None if each is None else each[at] for each, at in zip(times, (of_rows, of_keys), strict=True))
        return AttentionBias(w_pos=self.w_pos, w_time=self.w_time, query_times=asked, key_times=were)

    def side_of_queries(self, rank: int, pieces: Pieces, tensors: Sequence[Tensor]) -> Side:
        """Some queries of a rank."""
        times = self.times[rank].queries[pieces.rows_within(self.spread.queries[rank])] if self.times else None
        return Side(pieces, tensors, times)

    def side_of_keys(self, rank: int, pieces: Pieces, tensors: Sequence[Tensor]) -> Side:
        """Some keys of a rank."""
        times = self.times[rank].keys[pieces.rows_within(self.spread.keys[rank])] if self.times else None
        return Side(pieces, tensors, times)

    def rounds(self, start: Callable[[int], Arriving]) -> Iterator[tuple[int, list[Tensor] | None]]:
        """Round 0, which needs nobody, and then each round with what has come, begun early where that pays."""
        size = self.spread.group.size
        ahead = self.spread.overlaps
        coming = start(1) if ahead and size > 1 else None
        yield 0, None
        for shift in range(1, size):
            received = (coming if coming is not None else start(shift)).wait()
            coming = start(shift + 1) if ahead and shift + 1 < size else None
            yield shift, received


class Arriving(Protocol):
    """Tensors that are on their way."""

    def wait(self) -> list[Tensor]:
        """The tensors."""
        ...


class Side(NamedTuple):
    """Queries or keys that meet: pieces, their tensors, their times."""

    pieces: Pieces
    tensors: Sequence[Tensor]
    times: Tensor | None


@dataclass(eq=False)
class Gradients:
    """Sums of gradients, FP32 or FP64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_pos: Tensor | None
    d_time: Tensor | None

    def add(self, part: PartGradients, of_rows: slice, of_keys: slice) -> None:
        """Add those of some rows and keys."""
        self.dq[of_rows] += part.dq
        self.dk[of_keys] += part.dk
        self.dv[of_keys] += part.dv
        for total, added in ((self.d_pos, part.d_pos), (self.d_time, part.d_time)):
            if total is not None and added is not None:
                total += added
