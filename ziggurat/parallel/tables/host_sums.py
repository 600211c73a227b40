"""HostSums: partial pools of table-row-wise tables are added up inside a host before anything leaves it.

A table whose rows are spread over k ranks leaves k partial pools for every sample. Sent as they are, all k of them
cross to the host of the sample. If the k ranks share a host, links inside it can do the sum first (Neo's table-row-wise
placement: Mudigere et al., ISCA 2022, section 4.2.4). Each of the k ranks adds up D/k of the columns:

    before, on ranks a and b                 after
    a  [ partial 0 1 2 3 ]  ── 2 3 ──►       a  [ sum 0 1 ]     for the samples of all ranks
    b  [ partial 0 1 2 3 ]  ── 0 1 ──►       b  [ sum 2 3 ]

and from here on the table travels like a column-wise one: B·D numbers between hosts instead of k·B·D, for
R·D·(k−1)/k numbers inside the host. The backward pass brings every rank the gradient of all columns, the same way back.

Nothing of this is needed where the next hop stays in the host (towers of a host or less): it sums partial pools itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.function_ctx import Ctx
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import Wire, WireFormat, decode_pieces, encode_pieces
from ziggurat.parallel.tables.shards import FieldShare, RankShare, Shard
from ziggurat.parallel.topology import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """Columns of one field that a rank sends in the next hop.

    Args:
        field: the feature.
        first_column: of the field.
        width: number of columns.
        column: first column in what the rank sends.
    """

    field: str
    first_column: int
    width: int
    column: int


def sent_parts(share: RankShare, *, shards: dict[str, tuple[Shard, ...]], sums_in_host: bool) -> tuple[SentPart, ...]:
    """Return the parts that a rank sends after its lookup, from left to right.

    Args:
        share: of the rank.
        shards: the parts of every table.
        sums_in_host: whether `HostSums` comes in between.
    """
    parts = []
    column = 0
    for each in share.fields:
        first = each.shard.first_column
        width = each.shard.num_columns
        if sums_in_host and _is_summed(each):
            first, width = _columns_of(each.shard, rank=share.rank, shards=shards)
        parts.append(SentPart(field=each.field.name, first_column=first, width=width, column=column))
        column += width
    return tuple(parts)


class HostSums:
    """Adds up the partial pools of table-row-wise tables inside a host before anything leaves it.

    Args:
        host: the ranks of the host.
        shares: what every rank looks up, by rank.
        shards: the parts of every table.
        wire_format: what partial sums travel as.
        traffic: counts messages.
    """

    def __init__(
        self,
        host: RankGroup,
        *,
        shares: Sequence[RankShare],
        shards: dict[str, tuple[Shard, ...]],
        wire_format: WireFormat,
        traffic: Traffic,
    ) -> None:
        self._host = host
        self._traffic = traffic
        me = host.ranks[host.position]
        self._fields = shares[me].fields
        self.columns = [part.width for part in sent_parts(shares[me], shards=shards, sums_in_host=True)]
        # For each of this rank's fields that are summed: who holds the table, in the order of its rows.
        self._summed = [index for index, each in enumerate(self._fields) if _is_summed(each)]
        self._holders = {i: [s.rank for s in shards[self._fields[i].shard.table]] for i in self._summed}
        self._columns = {
            i: {rank: _columns_of(self._fields[i].shard, rank=rank, shards=shards) for rank in self._holders[i]}
            for i in self._summed
        }
        self._format = wire_format

    def __call__(self, pooled_RC: Float[Tensor, "R C"]) -> Float[Tensor, "R S"]:
        """Sums of this rank's columns of the summed fields; the other fields as they are."""
        return _Sum.apply(pooled_RC, self)

    def forward(self, pooled_RC: Float[Tensor, "R C"]) -> Float[Tensor, "R S"]:
        """Send each rank of the host its columns of what this rank has, add up what comes."""
        rows = len(pooled_RC)
        mine = [pooled_RC[:, each.column : each.column + each.shard.num_columns] for each in self._fields]
        received = self._exchange(
            {
                (rank, i): mine[i][:, first : first + width]
                for i in self._summed
                for rank, (first, width) in self._columns[i].items()
            },
            widths={(rank, i): self.columns[i] for i in self._summed for rank in self._holders[i]},
            like=pooled_RC,
            purpose="host sums forward",
        )
        for i in self._summed:
            total = pooled_RC.new_zeros(rows, self.columns[i])
            for rank in self._holders[i]:
                total = total + received[rank, i]
            mine[i] = total
        # The empty one is for ranks without fields: `cat` refuses an empty list.
        return torch.cat([*mine, pooled_RC.new_empty(rows, 0)], dim=1)

    def backward(self, gradient_RS: Float[Tensor, "R S"]) -> Float[Tensor, "R C"]:
        """Every holder of a table needs the gradient of all its columns."""
        mine = list(gradient_RS.split(self.columns, dim=1))
        received = self._exchange(
            {(rank, i): mine[i] for i in self._summed for rank in self._holders[i]},
            widths={(rank, i): width for i in self._summed for rank, (_, width) in self._columns[i].items()},
            like=gradient_RS,
            purpose="host sums backward",
        )
        for i in self._summed:
            mine[i] = torch.cat([received[rank, i] for rank in self._holders[i]], dim=1)
        return torch.cat([*mine, gradient_RS.new_empty(len(gradient_RS), 0)], dim=1)

    def _exchange(
        self,
        pieces: dict[tuple[int, int], Tensor],
        *,
        widths: dict[tuple[int, int], int],
        like: Tensor,
        purpose: str,
    ) -> dict[tuple[int, int], Tensor]:
        """Pieces by (rank, field), there; pieces of the given widths by (rank, field), back."""
        rows = len(like)
        order = [(rank, i) for rank in self._host.ranks for i in self._summed if rank in self._holders[i]]
        going = [self._wire(pieces[key].shape[1]) for key in order]
        coming = [self._wire(widths[key]) for key in order]
        numbers = torch.cat([*(pieces[key].reshape(-1) for key in order), like.new_empty(0)])
        buffer = all_to_all(
            # The first wire says how all travel, and a rank may have nothing to send: hence one of width 0.
            encode_pieces([*going, self._wire(0)], numbers, sizes=[*(rows * wire.num_columns for wire in going), 0]),
            sent=self._items(order, going, rows=rows),
            received=self._items(order, coming, rows=rows),
            group=self._host,
            traffic=self._traffic,
            purpose=purpose,
        ).wait()
        sizes = [*(rows * wire.num_columns for wire in coming), 0]
        values = decode_pieces([*coming, self._wire(0)], buffer, sizes=sizes, dtype=like.dtype)
        # One value more than keys: that of width 0.
        return {key: value.view(rows, widths[key]) for key, value in zip(order, values, strict=False)}

    def _wire(self, width: int) -> Wire:
        """Return the wire for rows of one piece of a field; nothing travels of width 0."""
        return Wire(self._format, (width,) if width else ())

    def _items(self, order: list[tuple[int, int]], wires: list[Wire], *, rows: int) -> list[int]:
        """Items of the message to or from each rank of the host."""
        items = dict.fromkeys(self._host.ranks, 0)
        for (rank, _), wire in zip(order, wires, strict=True):
            items[rank] += wire.num_items(rows * wire.num_columns)
        return list(items.values())


class _SumCtx(Ctx, Protocol):
    sums: HostSums


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SumCtx, pooled_RC: Tensor, sums: HostSums) -> Tensor:
        ctx.sums = sums
        return sums.forward(pooled_RC)

    @staticmethod
    def backward(ctx: _SumCtx, gradient_RS: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.sums.backward(gradient_RS), None


def _is_summed(share: FieldShare) -> bool:
    return share.shard.placement.sums_in_host


def _unit(columns: int) -> int:
    """Columns stay together in fours where the table allows, so that a scale of the wire serves several."""
    return math.gcd(columns, 4)


def _columns_of(shard: Shard, *, rank: int, shards: dict[str, tuple[Shard, ...]]) -> tuple[int, int]:
    """First column and number of columns that a rank adds up; the number may be 0."""
    holders = [each.rank for each in shards[shard.table]]
    unit = _unit(shard.table_columns)
    units = shard.table_columns // unit
    position = holders.index(rank)
    first = units * position // len(holders)
    last = units * (position + 1) // len(holders)
    return first * unit, (last - first) * unit
