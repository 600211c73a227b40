"""BlockExchange: one hop of embeddings between the ranks of a group, forward and backward.

A rank has some columns for everybody's samples, and wants all columns for its own samples:

    before, on rank 1          after, on rank 1
    samples of  columns        samples of  columns
    rank 0    [ b b ]          rank 1    [ a a a | b b | c ]
    rank 1    [ b b ]  ─►                  └ from 0, 1, 2
    rank 2    [ b b ]

`blocks` says where received columns go: the output has its canonical order whatever the placement. A block with
several sources is their sum: partial pools of a table whose rows are spread over the ranks (the reduce-scatter of
row-wise tables is that sum). The backward pass sends each block's gradient to all its sources.

Some columns need not travel: each rank has looked them up for its own samples (`Block.LOCAL`). They take their places
in the output, untouched by the wire's format, and their gradient goes straight back.

Gradients are summed, never averaged: the loss is divided by the size of the *global* batch before the backward pass, so
what arrives is the gradient of the global mean, exactly as on one device.

Both directions start without waiting and finish where the result is needed:

    state = exchange.start(x)          # sends
    …                                  # anything that does not need it
    y = exchange.finish(state)         # waits, arranges columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.columns import ColumnMoves, Columns
from ziggurat.ops.function_ctx import Ctx
from ziggurat.parallel.exchange.collectives import Pending, all_to_all, outbox
from ziggurat.parallel.exchange.packing import HopPacking
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import Rounding, Wire, WireFormat, decode_pieces, encode_pieces
from ziggurat.parallel.topology import RankGroup


@dataclass(frozen=True, slots=True)
class Block:
    """Columns of the output and where they come from.

    Args:
        width: number of columns.
        sources: (member of the group, first column in what it sends); several are summed. The member `LOCAL` stands
            for columns that are here already.
    """

    LOCAL: ClassVar[int] = -1

    width: int
    sources: tuple[tuple[int, int], ...]


@dataclass
class Transfer:
    """One exchange that is under way, or done and waiting for its backward pass."""

    exchange: BlockExchange
    rows_sent: list[int]  # samples of each member, in what this rank sends
    num_rows: int  # samples of this rank
    dtype: torch.dtype
    device: torch.device
    local: Tensor  # (num_rows, local columns) values that stay here; in the backward pass their gradient
    forward: Pending | None = field(default=None, repr=False)
    backward: Pending | None = field(default=None, repr=False)


class BlockExchange:
    """One hop of embeddings between the ranks of a group, forward and backward.

    Args:
        group: who takes part.
        widths: what each member sends: the columns of each field, from left to right.
        num_local: how many columns stay on each rank.
        blocks: the output, from left to right.
        wire: format of the values and of their gradients; fields share no scale.
        backward_rounding: of gradients.
        traffic: counts messages.
        purpose: name of the hop, for counts and errors.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        widths: Sequence[Sequence[int]],
        blocks: Sequence[Block],
        wire: WireFormat,
        traffic: Traffic,
        purpose: str,
        backward_rounding: Rounding = Rounding.NEAREST,
        num_local: int = 0,
    ) -> None:
        self.group = group
        self.columns = [sum(each) for each in widths]
        self.num_local = num_local
        self.blocks = _merge(blocks)
        self.output_dim = sum(block.width for block in self.blocks)
        # A wire scales columns field by field, and a field of no columns has none.
        layouts = [tuple(width for width in each if width) for each in widths]
        self._forward_wires = [Wire(wire, layout) for layout in layouts]
        self._backward_wires = [Wire(wire, layout, backward_rounding) for layout in layouts]
        self._traffic = traffic
        self._purpose = purpose
        # Every source of every block: what the backward pass sends, and without sums also what comes forward.
        moves = _columns_of(self.blocks, local=len(layouts))
        self._moves = ColumnMoves(moves)
        self._has_sums = any(len(block.sources) > 1 for block in self.blocks)
        self._packing = HopPacking(
            self._forward_wires, self._backward_wires, position=group.position, moves=moves, has_sums=self._has_sums
        )

    def describe(self, dtype: torch.dtype) -> str:
        """Describe what values of type `dtype` and their gradients travel as; see `Wire.describe`."""
        layout = tuple(width for wire in self._forward_wires for width in wire.widths)
        rounding = self._backward_wires[0].rounding
        text = Wire(self._forward_wires[0].format, layout).describe(dtype)
        return f"{text}, gradients {rounding.value}" if text.endswith("rounded") else f"{text}, gradients too"

    def __call__(self, values_RC: Float[Tensor, "R C"], *, rows_sent: list[int], num_rows: int) -> Tensor:
        """Start and finish, as part of the autograd graph."""
        token, transfer = self.start(values_RC, rows_sent=rows_sent, num_rows=num_rows)
        return self.finish(token, transfer)

    def start(
        self,
        values_RC: Float[Tensor, "R C"],
        *,
        rows_sent: list[int],
        num_rows: int,
        local_BL: Float[Tensor, "B L"] | None = None,
    ) -> tuple[Tensor, Transfer]:
        """Send; the token ties `finish` to the values in the autograd graph.

        Args:
            values_RC: this rank's columns for the samples of all members, member after member.
            rows_sent: how many rows belong to each member.
            num_rows: samples of this rank.
            local_BL: columns that stay here, for this rank's samples.
        """
        local = values_RC.new_empty(num_rows, 0) if local_BL is None else local_BL
        assert local.shape == (num_rows, self.num_local), (local.shape, num_rows, self.num_local)
        # Detached: its gradient goes back through `_Start`, whose input it is as well.
        transfer = Transfer(self, rows_sent, num_rows, values_RC.dtype, values_RC.device, local.detach())
        return _Start.apply(values_RC, local_BL, transfer), transfer

    def finish(self, token: Tensor, transfer: Transfer) -> Float[Tensor, "B T"]:
        """Wait, and put the columns in their order."""
        return _Finish.apply(token, transfer)

    # --------------------------------------------------------------------------- the four moves, without autograd

    def send_values(self, transfer: Transfer, values_RC: Tensor) -> None:
        """Forward, first half."""
        wire = self._forward_wires[self.group.position]
        mine = self.columns[self.group.position]
        assert values_RC.shape == (sum(transfer.rows_sent), mine), (values_RC.shape, transfer.rows_sent, mine)
        message = self._packing.pack_values(values_RC, transfer.rows_sent)
        # None from compiled code that does not serve this format: torch does it.
        message = self._packed_values(transfer, values_RC) if message is None else message
        transfer.forward = all_to_all(
            message,
            sent=[wire.num_items(rows * mine) for rows in transfer.rows_sent],
            received=self._items(transfer),
            group=self.group,
            traffic=self._traffic,
            purpose=f"{self._purpose} forward",
        )

    def _packed_values(self, transfer: Transfer, values_RC: Tensor) -> Tensor:
        """The message to all members, by torch; in memory that they share, where numbers travel each by itself."""
        wire = self._forward_wires[self.group.position]
        mine = self.columns[self.group.position]
        # A plain format that rounds can be written into the memory that the others read, without a copy in between.
        if wire.is_plain(values_RC.dtype) and not wire.is_exact(values_RC.dtype):
            message = outbox(values_RC.numel(), like=values_RC, dtype=wire.carried(values_RC.dtype), group=self.group)
            message.view_as(values_RC).copy_(values_RC)
            return message
        sizes = [rows * mine for rows in transfer.rows_sent]
        return encode_pieces([wire] * len(sizes), values_RC.reshape(-1), sizes=sizes)

    def receive_values(self, transfer: Transfer) -> Float[Tensor, "B T"]:
        """Forward, second half."""
        assert transfer.forward is not None
        sizes = {"num_rows": transfer.num_rows, "width": self.output_dim}
        arranged = self._packing.unpack_values(transfer.forward.wait, like=transfer.local, **sizes)
        if arranged is None:
            # Read inside: the senders may use their memory again once the context is left.
            with transfer.forward.pieces(self._items(transfer)) as came:
                arranged = self._arranged(came, transfer)
        # Drops the buffer that was sent; the transfer itself lives until the backward pass.
        transfer.forward = None
        return arranged

    def send_gradient(self, transfer: Transfer, gradient_BT: Tensor) -> None:
        """Backward, first half."""
        rows = transfer.num_rows
        sizes = [rows * number for number in self.columns]
        mine = self.columns[self.group.position]
        wires = self._backward_wires
        packed = self._packing.pack_gradient(gradient_BT)
        message, transfer.local = packed or self._packed_gradient(transfer, gradient_BT, sizes=sizes)
        transfer.backward = all_to_all(
            message,
            sent=[wire.num_items(size) for wire, size in zip(wires, sizes, strict=True)],
            # What comes back is the gradient of this rank's own columns, so in this rank's format.
            received=[wires[self.group.position].num_items(number * mine) for number in transfer.rows_sent],
            group=self.group,
            traffic=self._traffic,
            purpose=f"{self._purpose} backward",
        )

    def _packed_gradient(
        self, transfer: Transfer, gradient_BT: Tensor, *, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The message to all members, and the gradient of the columns that stay here, by torch."""
        rows = transfer.num_rows
        wires = self._backward_wires
        is_direct = self._is_direct(wires[0], gradient_BT.dtype)
        carried = wires[0].carried(gradient_BT.dtype) if is_direct else gradient_BT.dtype
        if is_direct:
            packed = outbox(sum(sizes), like=gradient_BT, dtype=carried, group=self.group)
        else:
            packed = gradient_BT.new_empty(sum(sizes))
        pieces = [piece.view(rows, number) for piece, number in zip(packed.split(sizes), self.columns, strict=True)]
        local = gradient_BT.new_empty(rows, self.num_local, dtype=carried)
        self._moves.split(gradient_BT.to(carried).contiguous(), out=[*pieces, local])
        message = packed if is_direct else encode_pieces(wires, packed, sizes=sizes)
        return message, local.to(gradient_BT.dtype)

    def receive_gradient(self, transfer: Transfer) -> Float[Tensor, "R C"]:
        """Backward, second half."""
        assert transfer.backward is not None
        wire = self._backward_wires[self.group.position]
        mine = self.columns[self.group.position]
        sizes = [rows * mine for rows in transfer.rows_sent]
        came = transfer.backward.wait()
        transfer.backward = None
        unpacked = self._packing.unpack_gradient(came, transfer.rows_sent, dtype=transfer.dtype)
        if unpacked is not None:
            return unpacked
        if not wire.packs_rows:
            return wire.decode(came, count=sum(sizes), dtype=transfer.dtype).view(sum(transfer.rows_sent), mine)
        pieces = decode_pieces([wire] * len(sizes), came, sizes=sizes, dtype=transfer.dtype)
        return torch.cat(pieces).view(sum(transfer.rows_sent), mine)

    def _items(self, transfer: Transfer) -> list[int]:
        """Items that come from each member, of values for this rank's samples."""
        wires = zip(self._forward_wires, self.columns, strict=True)
        return [wire.num_items(transfer.num_rows * number) for wire, number in wires]

    def _is_direct(self, wire: Wire, dtype: torch.dtype) -> bool:
        """True if columns can be moved as they travel: those that stay on the rank are not rounded with them."""
        return wire.is_exact(dtype) or (wire.is_plain(dtype) and self.num_local == 0)

    def _arranged(self, came: Sequence[Tensor], transfer: Transfer) -> Tensor:
        """The columns of all members in the order of the output, in memory of its own."""
        rows = transfer.num_rows
        dtype = transfer.dtype
        wires = self._forward_wires
        if not self._is_direct(wires[0], dtype) or self._has_sums:
            triples = zip(wires, came, self.columns, strict=True)
            # Sums are formed in the dtype of the values, not of the wire.
            came = [wire.decode(piece, count=rows * columns, dtype=dtype) for wire, piece, columns in triples]
        pieces = [piece.view(rows, number) for piece, number in zip(came, self.columns, strict=True)]
        local = transfer.local.to(pieces[0].dtype)
        pieces.append(local)  # LOCAL is the last
        if not self._has_sums:
            arranged = local.new_empty(rows, self.output_dim)
            self._moves.join(pieces, out=arranged)
            return arranged.to(dtype)
        parts = []
        for block in self.blocks:
            (member, first), *others = block.sources
            # From the first source on, in the order of the ranks: the same bits on every repeat.
            part = pieces[member][:, first : first + block.width]
            for member, first in others:
                part = part + pieces[member][:, first : first + block.width]
            parts.append(part)
        return torch.cat(parts, dim=1)


class _StartCtx(Ctx, Protocol):
    transfer: Transfer
    has_local: bool


class _Start(torch.autograd.Function):
    """Sends values; in the backward pass takes the gradient that `_Finish` has sent for."""

    @staticmethod
    def forward(ctx: _StartCtx, values_RC: Tensor, local_BL: Tensor | None, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        ctx.has_local = local_BL is not None
        transfer.exchange.send_values(transfer, values_RC)
        return values_RC.new_empty(0)  # what autograd follows; the values are still on their way

    @staticmethod
    def backward(ctx: _StartCtx, token: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        del token
        # `_Finish`'s backward ran before, and has put the gradient there.
        local = ctx.transfer.local if ctx.has_local else None
        return ctx.transfer.exchange.receive_gradient(ctx.transfer), local, None


class _FinishCtx(Ctx, Protocol):
    transfer: Transfer


class _Finish(torch.autograd.Function):
    """Receives values; in the backward pass sends their gradient."""

    @staticmethod
    def forward(ctx: _FinishCtx, token: Tensor, transfer: Transfer) -> Tensor:
        del token
        ctx.transfer = transfer
        return transfer.exchange.receive_values(transfer)

    @staticmethod
    def backward(ctx: _FinishCtx, gradient_BT: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.transfer.exchange.send_gradient(ctx.transfer, gradient_BT)
        # Of the token, which is empty, too: autograd needs a gradient to call `_Start`'s backward.
        return gradient_BT.new_empty(0), None


def _merge(blocks: Sequence[Block]) -> list[Block]:
    """Neighbours that come from neighbouring columns of the same sources become one block."""
    merged: list[Block] = []
    for block in blocks:
        if block.width == 0:
            continue
        if merged:
            last = merged[-1]
            follows = tuple((member, first + last.width) for member, first in last.sources)
            if follows == block.sources:
                merged[-1] = Block(last.width + block.width, last.sources)
                continue
        merged.append(block)
    return merged


def _columns_of(blocks: Sequence[Block], *, local: int) -> list[Columns]:
    """Return where the output's columns are in what each member sends; those that stay are in part `local`."""
    found = []
    begin = 0
    for block in blocks:
        for member, first in block.sources:
            found.append(Columns(local if member == Block.LOCAL else member, first, begin, block.width))
        begin += block.width
    return found
