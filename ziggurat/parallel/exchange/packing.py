"""HopPacking: the messages of a hop by one kernel each on GPUs, where columns move and numbers change their format.

`blocks.py` says what a message holds, with torch's operations; this gives the same bits by `ops/wire`. It gives None
where it does not serve: on CPUs, without triton, for FP64, for stochastic rounding, and for fields that do not stay
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.columns import Columns, join_reference, split_reference
from ziggurat.ops.wire import FieldPlace, WireCode, WirePlaces, pack, unpack, why_not_places, why_not_triton
from ziggurat.parallel.exchange.wire import Rounding, Wire
from ziggurat.parallel.exchange.wire_formats.packed_rows import aligned
from ziggurat.parallel.exchange.wire_formats.scaled import SCALE_BYTES

_MAX_KEPT = 64


@dataclass(frozen=True)
class RowsForRank:
    """Rows of a matrix that one rank gets, or sent.

    Args:
        wire: how they travel.
        first_row: of the matrix.
        num_rows: how many.
        columns: of the matrix, where each field of the wire begins.
    """

    wire: Wire
    first_row: int
    num_rows: int
    columns: tuple[int, ...]


def places_of(parts: Sequence[RowsForRank], *, device: torch.device) -> WirePlaces:
    """Return the places of fields in messages for some ranks, one after the other.

    Rows are packed as `wire_formats/scaled.py` does, whose codes and scales the kernels know.
    """
    fields = []
    pads = []
    begin = 0
    for part in parts:
        wire = part.wire
        number = 0
        count = part.num_rows * part.wire.num_columns
        end = begin + wire.num_items(count)
        # Scales lie behind all codes of a rank's rows, at the next multiple of 16 bytes.
        first_scale = begin + aligned(count)
        scale_pitch = SCALE_BYTES * len(wire.widths) if wire.packs_rows else 0
        for index, (column, width) in enumerate(zip(part.columns, wire.widths, strict=True)):
            # −1: a plain wire has no scales, and the kernels read none.
            scale = first_scale + SCALE_BYTES * index if wire.packs_rows else -1
            place = begin + number, wire.num_columns, scale, scale_pitch
            fields.append(FieldPlace(part.first_row, part.num_rows, column, width, *place))
            number += width
        if wire.packs_rows and count:
            last = first_scale + part.num_rows * scale_pitch
            # Written as zeros: bytes that nobody writes would make equal messages unequal.
            pads += [(begin + count, first_scale - begin - count), (last, end - last)]
        begin = end
    return WirePlaces.of(fields, pads=pads, num_items=begin, device=device)


class HopPacking:
    """Packs and unpacks what one rank sends and gets in a hop.

    Args:
        forward: wires of the values that each member sends.
        backward: wires of the gradients that each member gets.
        position: of this rank among the members.
        moves: where columns of the output are in what each member sends; part `len(forward)` stays on the rank.
        has_sums: whether some columns of the output are sums over members, which torch adds.
    """

    def __init__(
        self,
        forward: Sequence[Wire],
        backward: Sequence[Wire],
        *,
        position: int,
        moves: Sequence[Columns],
        has_sums: bool,
    ) -> None:
        self._forward = forward
        self._backward = backward
        self._position = position
        self._local = [replace(each, part=0) for each in moves if each.part == len(forward)]
        self._wide = [_wide_columns(moves, part=part, widths=wire.widths) for part, wire in enumerate(forward)]
        # Where each field begins; the last sum is where all end.
        self._own = tuple(itertools.accumulate(forward[position].widths, initial=0))[:-1]
        self._is_whole = all(columns is not None for columns in self._wide)
        self._has_sums = has_sums
        self._kept: dict[tuple[object, ...], WirePlaces] = {}

    def pack_values(self, values_RC: Float[Tensor, "R C"], rows_sent: Sequence[int]) -> Tensor | None:
        """Encode the rows of all members as `encode_pieces` does; None: torch does it (a plain wire is one copy)."""
        wire = self._forward[self._position]
        code = _code(wire, values_RC)
        # Without scales a wire is one copy of the rows as they lie, and torch is as fast.
        if code is None or not code.has_scales:
            return None
        places = self._by_rows("values", wire, rows_sent, device=values_RC.device)
        return None if why_not_places(places) else pack(values_RC, code, places=places)

    def unpack_values(
        self, receive: Callable[[], Tensor], *, like: Tensor, num_rows: int, width: int
    ) -> Float[Tensor, "B T"] | None:
        """The output of the hop; None: torch does it, and nothing was received.

        Args:
            receive: waits for the messages of all members.
            like: the columns that stay on this rank, in the dtype of the output.
            num_rows: B.
            width: T.
        """
        # All members have one format; only their fields differ.
        code = _code(self._forward[0], like)
        if code is None or self._has_sums or not self._is_whole:
            return None
        places = self._by_columns("output", self._forward, num_rows, device=like.device)
        # Asked before `receive`: whoever gets None receives the messages itself.
        if why_not_places(places):
            return None
        out = like.new_empty(num_rows, width)
        # The rank's own columns never were in a message.
        join_reference(self._local, wide=out, parts=[like])
        return unpack(receive(), code, places=places, out=out)

    def pack_gradient(self, gradient_BT: Float[Tensor, "B T"]) -> tuple[Tensor, Float[Tensor, "B L"]] | None:
        """The message to all members, and the gradient of the columns that stay here; None: torch does it."""
        code = _code(self._backward[0], gradient_BT)
        if code is None or not self._is_whole:
            return None
        places = self._by_columns("gradient", self._backward, len(gradient_BT), device=gradient_BT.device)
        if why_not_places(places):
            return None
        local = gradient_BT.new_empty(len(gradient_BT), sum(each.width for each in self._local))
        split_reference(self._local, wide=gradient_BT, parts=[local])
        return pack(gradient_BT, code, places=places), local

    def unpack_gradient(
        self, message: Tensor, rows_sent: Sequence[int], *, dtype: torch.dtype
    ) -> Float[Tensor, "R C"] | None:
        """The gradient of the values of this rank; None: torch does it (a plain wire is one copy)."""
        wire = self._backward[self._position]
        out = torch.empty(sum(rows_sent), wire.num_columns, dtype=dtype, device=message.device)
        code = _code(wire, out)
        if code is None or not code.has_scales:
            return None
        places = self._by_rows("values", wire, rows_sent, device=message.device)
        return None if why_not_places(places) else unpack(message, code, places=places, out=out)

    def _by_rows(self, what: str, wire: Wire, rows_sent: Sequence[int], *, device: torch.device) -> WirePlaces:
        """Return the places of rows, member after member, with the columns of this rank."""

        def make() -> list[RowsForRank]:
            firsts = itertools.accumulate(rows_sent, initial=0)
            return [RowsForRank(wire, first, rows, self._own) for first, rows in zip(firsts, rows_sent, strict=False)]

        return self._keep((what, tuple(rows_sent), device), make, device=device)

    def _by_columns(self, what: str, wires: Sequence[Wire], num_rows: int, *, device: torch.device) -> WirePlaces:
        """Return the places of all rows, with the columns of each member in their places of the output."""

        def make() -> list[RowsForRank]:
            pairs = zip(wires, self._wide, strict=True)
            return [RowsForRank(wire, 0, num_rows, columns) for wire, columns in pairs if columns is not None]

        return self._keep((what, num_rows, device), make, device=device)

    def _keep(
        self, key: tuple[object, ...], make: Callable[[], list[RowsForRank]], *, device: torch.device
    ) -> WirePlaces:
        """Places of the batch sizes of late; a table is copied to the device once."""
        if key not in self._kept:
            # All at once: sizes of batches change together, and a step has few of them.
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = places_of(make(), device=device)
        return self._kept[key]


def _code(wire: Wire, matrix: Tensor) -> WireCode | None:
    """Return the code that the kernels read or write for a wire beside a matrix; None where torch does it."""
    # The kernels have no random numbers, which stochastic rounding draws on each rank.
    if why_not_triton(matrix) or (not wire.is_exact(matrix.dtype) and wire.rounding is Rounding.STOCHASTIC):
        return None
    code = wire.format.kernel_code(matrix.dtype)
    return WireCode(code) if code else None


def _wide_columns(moves: Sequence[Columns], *, part: int, widths: Sequence[int]) -> tuple[int, ...] | None:
    """Return where the fields of one member's message begin in the output; None if a field does not stay together."""
    places = {
        each.part_begin + offset: each.begin + offset
        for each in moves
        if each.part == part
        # Column by column: fields may be cut and joined by `_merge` in `blocks.py`.
        for offset in range(each.width)
    }
    found = []
    begin = 0
    for width in widths:
        first = places.get(begin, -1)
        if any(places.get(begin + offset) != first + offset for offset in range(width)):
            return None
        found.append(first)
        begin += width
    return tuple(found)
