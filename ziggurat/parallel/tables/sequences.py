"""SequenceExchange: the vectors of a list, one for each row and not pooled, from whoever holds the rows.

Pooled lookups send sums; a sequence model wants every vector of a user's history, where the sample is. So rows go out
and vectors come back, for one feature at a time:

    rows of this rank's lists ──► to the rank(s) that hold them ──► looked up ──► vectors back, in the order of the rows

    table_wise                    all rows to one rank
    row_wise, table_row_wise      each row to the rank of its block (`buckets.py`); vectors are put back in order
    column_wise                   all rows to every rank that has some columns; pieces side by side
    data_parallel                 nowhere; with towers to the rank at the same place in the group that has the table

Nothing is summed on the way, so the vectors are those of one device, bit for bit (with an FP32 wire). Gradients of
vectors go the same way back and are recorded there like any other lookup's.

    bytes out ≈ 4·N for the rows, and N·D·e there and back, N rows of this rank, e bytes a number of the wire

Of a deduplicated batch N counts the rows of slices: each distinct list travels once, there and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.ops.function_ctx import Ctx
from ziggurat.parallel.exchange.collectives import Pending, all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import Wire, WireConfig, decode_pieces, encode_pieces
from ziggurat.parallel.tables.buckets import check_bounds, local_rows, owners, rows_by_owner
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.tables.shards import Shard
from ziggurat.parallel.topology import Axis, Lane, Topology, sizes_device


@dataclass(frozen=True)
class Route:
    """Rows on their way: how many go to and come from each rank."""

    rows: Tensor
    sent: list[int]
    received: list[int]


@dataclass
class PendingRows:
    """Requested rows, of which the sizes are in flight, and once they are sent, the rows."""

    message: Tensor
    sent: list[int]
    pending_sizes: Pending
    received: list[int] = field(default_factory=list)
    rows: Pending | None = None


class SequenceExchange:
    """Brings the vectors of un-pooled lists from the ranks that hold their rows.

    All ranks ask for the same features in the same order.

    Args:
        tables: this rank's part of the tables.
        topology: the ranks.
        wire: vectors travel in the format `between_towers`.
        traffic: counts messages.
    """

    def __init__(self, tables: ShardedTables, *, topology: Topology, wire: WireConfig, traffic: Traffic) -> None:
        self._tables = tables
        self._topology = topology
        self._wire = wire
        self._traffic = traffic
        self._lane = topology.lane(Axis.WORLD, Lane.IDS)
        self._anchor = torch.zeros((), requires_grad=True)
        largest = max((table.num_rows for table in tables.inputs.tables), default=0)
        # One more, for the padding row that a block of rows gets in front.
        self._row_dtype = torch.int32 if largest + 1 < 1 << 31 else torch.int64

    def __call__(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "U+1"], Int64[Tensor, "B"] | None]:
        """The vectors of a list feature for this rank's samples; collective. See `EmbeddingTables.unpooled_slices`.

        Raises:
            BoundsError: a row outside the table.
        """
        inputs = self._tables.inputs
        index = inputs.list_position(name)
        table = inputs.jagged[index].table
        lists, inverse_B = batch.lists(index)
        shards = self._tables.shards[table]
        host = batch.on_host
        # Rows are checked where no device has to be waited for.
        on_host = lists if host is None or host is batch else host.lists(index)[0]
        lengths = on_host.offsets.diff()
        rows_N = on_host.values
        check_bounds(rows_N, table_rows=shards[0].table_rows, feature=name, lengths=lengths, table=table)
        host_rows_N = None if on_host is lists else rows_N
        return self._vectors(lists.values, shards, dtype=dtype, host_rows_N=host_rows_N), lists.offsets, inverse_B

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """The vectors of some rows of one table; collective, each rank asks for rows of its own.

        Raises:
            BoundsError: a row outside the table.
        """
        shards = self._tables.shards[table]
        check_bounds(rows_N, table_rows=shards[0].table_rows, feature="(rows by hand)", lengths=None, table=table)
        return self._vectors(rows_N, shards, dtype=dtype)

    def _vectors(
        self,
        rows_N: Int64[Tensor, "N"],
        shards: tuple[Shard, ...],
        *,
        dtype: torch.dtype,
        host_rows_N: Int64[Tensor, "N"] | None = None,
    ) -> Tensor:
        """(N, D) vectors of rows of one table."""
        kind = shards[0].placement
        # One tower group: every rank has the table, and nothing travels.
        if kind.is_copied and self._topology.num_groups == 1:
            return self._tables.vectors(shards[0].table, rows_N, dtype=dtype)
        wanted, order, asked = self.wanted(rows_N, shards, host_rows_N=host_rows_N)
        route = self._send_rows(wanted, device=rows_N.device)
        mine = next((shard for shard in shards if shard.rank == self._topology.rank), None)
        if mine is None:
            # A rank without a part still takes part in the exchange.
            values = torch.empty(0, shards[0].num_columns, dtype=dtype, device=rows_N.device)
        else:
            values = self._tables.vectors(mine.table, route.rows, dtype=dtype)
        flat = _Return.apply(self._anchor, values, route, self)
        parts = flat.split([number * values.shape[1] for number in route.sent])
        by_shard = [parts[shard.rank].view(-1, shard.num_columns) for shard in asked]
        if kind.cuts_columns:
            # Columns of the parts side by side; rows came in the order in which they were asked for.
            return torch.cat(by_shard, dim=1)
        vectors = torch.cat(by_shard)
        # The inverse of the sort by owner: vectors stand as they were asked for.
        return vectors if order is None else vectors[torch.argsort(order)]

    def wanted(
        self, rows_N: Int64[Tensor, "N"], shards: tuple[Shard, ...], *, host_rows_N: Int64[Tensor, "N"] | None = None
    ) -> tuple[dict[int, Tensor], Tensor | None, tuple[Shard, ...]]:
        """Return the rows to ask of each rank's part; the order in which they are asked for; and the shards asked.

        Args:
            rows_N: of one table.
            shards: its parts.
            host_rows_N: the same rows in host memory, where `rows_N` are not.
        """
        kind = shards[0].placement
        if kind.cuts_rows:
            owner, order = torch.sort(owners(rows_N, shards=shards), stable=True)
            counts = rows_by_owner(owner, shards=shards, host_rows_N=host_rows_N)
            pieces = local_rows(rows_N[order], owner, shards=shards).split(counts)
            return {shard.rank: piece for shard, piece in zip(shards, pieces, strict=True)}, order, shards
        asked = shards
        # Every rank of a tower group has a copy: each rank asks the one at its own place.
        if kind.is_copied:
            size = self._topology.tower_size
            asked = tuple(shard for shard in shards if shard.rank % size == self._topology.rank % size)
        return {shard.rank: rows_N for shard in asked}, None, asked

    def _send_rows(self, wanted: dict[int, Tensor], *, device: torch.device) -> Route:
        """Bring rows, local to the parts that the others hold, to them."""
        return self.finish_rows(self.start_rows(wanted, device=device))

    def start_rows(self, wanted: dict[int, Tensor], *, device: torch.device) -> PendingRows:
        """Send each rank the number of rows that will be requested, without waiting; collective."""
        world_size = self._topology.world_size
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        pieces = [wanted.get(rank, nothing).to(self._row_dtype) for rank in range(world_size)]
        sent = [piece.numel() for piece in pieces]
        pending_sizes = all_to_all(
            torch.tensor(sent, device=sizes_device(self._lane)),
            sent=[1] * world_size,
            received=[1] * world_size,
            group=self._lane,
            traffic=self._traffic,
            purpose="sequence sizes",
        )
        return PendingRows(torch.cat(pieces), sent, pending_sizes)

    def send_rows(self, pending: PendingRows) -> Pending:
        """Ask for the rows, unless that is done; collective."""
        if pending.rows is not None:
            return pending.rows
        pending.received = pending.pending_sizes.wait().tolist()
        rows = all_to_all(
            pending.message,
            sent=pending.sent,
            received=pending.received,
            group=self._lane,
            traffic=self._traffic,
            purpose="sequence ids",
        )
        pending.rows = rows
        return rows

    def finish_rows(self, pending: PendingRows) -> Route:
        """The rows that the others ask this rank for; collective."""
        rows = self.send_rows(pending)
        return Route(rows.wait().to(torch.int64), pending.sent, pending.received)

    def move(self, values: Tensor, *, sent: list[int], received: list[int], width: int, backward: bool) -> Tensor:
        """One exchange of vectors of `width` numbers; flat."""
        wire = Wire(self._wire.between_towers, (width,))
        if backward:
            wire = Wire(self._wire.between_towers, (width,), self._wire.backward_rounding)
        sizes = [number * width for number in sent]
        buffer = all_to_all(
            encode_pieces([wire] * len(sizes), values.reshape(-1), sizes=sizes),
            sent=[wire.num_items(number * width) for number in sent],
            received=[wire.num_items(number * width) for number in received],
            group=self._topology.world,
            traffic=self._traffic,
            purpose="sequence backward" if backward else "sequence forward",
        )
        sizes = [number * width for number in received]
        if not wire.packs_rows:
            return wire.decode(buffer.wait(), count=sum(sizes), dtype=values.dtype)
        return torch.cat(decode_pieces([wire] * len(sizes), buffer.wait(), sizes=sizes, dtype=values.dtype))


class _ReturnCtx(Ctx, Protocol):
    saved: tuple[Route, SequenceExchange, torch.Size]


class _Return(torch.autograd.Function):
    """Vectors to the ranks that asked for them; their gradients back."""

    @staticmethod
    def forward(ctx: _ReturnCtx, anchor: Tensor, values: Tensor, route: Route, exchange: SequenceExchange) -> Tensor:
        del anchor  # requires a gradient, so that every rank takes part in the backward pass
        ctx.saved = (route, exchange, values.shape)
        return exchange.move(values, sent=route.received, received=route.sent, width=values.shape[1], backward=False)

    @staticmethod
    def backward(ctx: _ReturnCtx, gradient: Tensor) -> tuple[None, Tensor, None, None]:  # type: ignore[override]
        route, exchange, shape = ctx.saved
        received = exchange.move(gradient, sent=route.sent, received=route.received, width=shape[1], backward=True)
        return None, received.view(shape), None, None
