"""Tensors of a GPU into host memory, block by block: while one block is on its way, the one before is put in its place.

    GPU   piece 1 ─► block A ─► host memory            a copy engine fills blocks, on a stream of its own;
          piece 2 ──────────► block B ─► host memory   the processor empties them

A GPU copies at full speed only from and to memory that the system never pages out, and that memory is scarce: locking
as much as the tables take would take minutes, and starve the machine. So two blocks are locked, whatever is copied, and
kept from save to save; of contiguous tensors nothing is allocated on the GPU. The copies wait for what the GPU was
given before, and the caller for the copies: what is trained afterwards is not seen.

Cost: bytes / rate of the bus; the processor's copy runs beside it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 32 << 20
_NUM_BLOCKS = 2


def to_host(source: Tensor, *, block_bytes: int = BLOCK_BYTES) -> Tensor:
    """A copy in host memory, contiguous.

    Args:
        source: on any device.
        block_bytes: of each of the two blocks that tensors on a GPU pass through.
    """
    target = torch.empty(source.shape, dtype=source.dtype)
    if source.device.type != "cuda":
        return target.copy_(source)
    blocks = _blocks(block_bytes, is_locked=torch.cuda.is_available())
    copies = _Copies()
    under_way: deque[tuple[torch.Event | torch.cuda.Event | None, Tensor, Tensor]] = deque()
    for number, (piece, place) in enumerate(_pieces(source, target, block_bytes=block_bytes)):
        if len(under_way) == _NUM_BLOCKS:
            _settle(under_way.popleft())
        block = blocks[number % _NUM_BLOCKS][: piece.numel() * piece.element_size()].view(piece.dtype)
        under_way.append((copies.start(block.view(piece.shape), piece), block.view(piece.shape), place))
    while under_way:
        _settle(under_way.popleft())
    return target


def _settle(copy: tuple[torch.Event | torch.cuda.Event | None, Tensor, Tensor]) -> None:
    done, block, place = copy
    if done is not None:
        done.synchronize()
    place.copy_(block)


def _pieces(source: Tensor, target: Tensor, *, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both that fit a block: whole rows, or parts of a row that is longer than a block."""
    if not source.numel():
        return
    if source.dim() == 0:
        yield source.view(1), target.view(1)
        return
    row_bytes = source[0].numel() * source.element_size()
    if row_bytes > block_bytes:
        for row, place in zip(source, target, strict=True):
            yield from _pieces(row, place, block_bytes=block_bytes)
        return
    num_rows = max(1, block_bytes // row_bytes)
    yield from zip(source.split(num_rows), target.split(num_rows), strict=True)


@functools.lru_cache(maxsize=1)
def _blocks(block_bytes: int, *, is_locked: bool) -> list[Tensor]:
    """The blocks; kept from save to save, because locking takes time."""
    return [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=is_locked) for _ in range(_NUM_BLOCKS)]


class _Copies:
    """Copies on a stream of their own; on the caller's where there is no GPU, whose copies are done when they start."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # what the GPU was given before comes first

    def start(self, block: Tensor, piece: Tensor) -> torch.Event | torch.cuda.Event | None:
        """Start one; what tells when it is done."""
        if self._stream is None:
            block.copy_(piece)
            return None
        with torch.cuda.stream(self._stream):
            block.copy_(piece, non_blocking=True)
            return self._stream.record_event()
