"""A batch in one buffer, so that it reaches a device in one copy: 4 bytes a row and not 8.

    dense   f32  ─┐                              ┌─► dense   f32   a view of what arrived
    single  i64  ─┼─► one buffer of bytes ──copy─┼─► single  i64   widened on the device
    offsets i64  ─┘   (page-locked)              └─► offsets i64

A batch has ten tensors or more. Each by itself is a copy of its own, which the host waits for where its memory may be
paged out, and most of what travels are rows in 64 bits of which 32 are zero. Here every tensor has its place in one
buffer, from a multiple of 16 bytes on; whole numbers that fit are written as 32 bits, all of a tensor or none, and
widened on the device, whose memory is a hundred times as fast as the way to it. Rows beyond 2³¹, and hashes, stay 64
bits wide.

Memory that is locked (where there is a CUDA device) is taken from torch's pool and given back when the copy is done.
On a CPU there is nothing to copy to, so nothing is packed (`Batch.to`).

Cost: one pass to see whether whole numbers fit, one to write them; about 0.3 ns a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ziggurat.features.batch import Batch
    from ziggurat.features.jagged import JaggedRows

# Bytes. A piece is viewed as numbers only where it begins at a multiple of their size.
_ALIGNMENT = 16


@dataclass(frozen=True)
class HostCopy:
    """Source that a batch on a GPU was copied from.

    Args:
        batch: in host memory.
        single: rows of the batch on the GPU, and
        lists: its lists: a batch that was made of others has another copy, or none.
    """

    batch: Batch
    single: Tensor
    lists: JaggedRows


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in the buffer.

    Args:
        begin: first byte.
        stored: what its numbers are written as.
        dtype: what they are.
        shape: of the tensor.
    """

    begin: int
    stored: torch.dtype
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.shape.numel() * self.stored.itemsize


@dataclass(frozen=True)
class PackedBatch:
    """The tensors of a batch in one buffer.

    Args:
        buffer: (bytes,) uint8.
        places: of the tensors, in the order of `Batch.map`; None for what stays on the host (`row_ids`).
        form: the batch that it was made of; tells which tensor is what.
    """

    buffer: Tensor
    places: tuple[_Place | None, ...]
    form: Batch

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self.buffer.numel()

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device, by one copy; the host does not wait for it where the buffer is locked."""
        arrived = self.buffer.to(device, non_blocking=True)
        # `map` visits the tensors in the order in which `pack` met them.
        places = iter(self.places)

        def placed(tensor: Tensor) -> Tensor:
            place = next(places)
            if place is None:
                return tensor
            piece = arrived[place.begin : place.begin + place.num_bytes]
            return piece.view(place.stored).view(place.shape).to(place.dtype)

        moved = self.form.map(placed)
        return replace(moved, host=HostCopy(self.form, moved.single, moved.jagged))


def pack(batch: Batch, *, is_locked: bool = False) -> PackedBatch:
    """Write a batch in host memory into one buffer.

    Args:
        batch: on the CPU.
        is_locked: take memory that the system never pages out; needs a CUDA device.
    """
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    form = batch.map(seen)
    places: list[_Place | None] = []
    end = 0
    for tensor in found:
        if tensor is batch.row_ids:
            places.append(None)
            continue
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        # Half the bytes travel; the device widens the numbers again.
        stored = torch.int32 if _fits(tensor) else tensor.dtype
        place = _Place(begin, stored, tensor.dtype, tensor.shape)
        places.append(place)
        end = begin + place.num_bytes
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=is_locked)
    for tensor, place in zip(found, places, strict=True):
        if place is not None:
            buffer[place.begin : place.begin + place.num_bytes].view(place.stored).view(place.shape).copy_(tensor)
    return PackedBatch(buffer, tuple(places), form)


def _fits(tensor: Tensor) -> bool:
    """Return True if whole numbers of 64 bits are small enough for 32."""
    if tensor.dtype is not torch.int64:
        return False
    if not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)
    limit = torch.iinfo(torch.int32)
    return int(least) >= limit.min and int(most) <= limit.max
