"""Spread: who has which queries and keys of a batch's histories, and how tensors get from rank to rank.

Messages of several tensors travel as bytes, one all-to-all in which each rank sends to one other and gets from one, so
that only one neighbour's message is there at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.parallel.context.pieces import Histories, Pieces
from ziggurat.parallel.exchange.collectives import Pending, all_to_all, memory_of
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import RankGroup


@dataclass(frozen=True, eq=False)
class Spread:
    """The queries and keys that each rank has; the same on every rank.

    Args:
        histories: lengths, targets, mask.
        queries: pieces of each rank.
        keys: pieces of each rank.
        group: the ranks.
        traffic: counts the messages.
    """

    histories: Histories
    queries: Sequence[Pieces]
    keys: Sequence[Pieces]
    group: RankGroup
    traffic: Traffic

    def exchange(self, tensors: Sequence[Tensor], wanted: Sequence[Shape], *, shift: int, purpose: str) -> Coming:
        """Send tensors to the rank `shift` places on, and get those of the rank as many places back.

        Args:
            tensors: to send; those of the widest numbers first.
            wanted: shapes of what comes.
            shift: 1 … N − 1, or below 0 for the opposite direction.
            purpose: for counts and errors.
        """
        size = self.group.size
        position = self.group.position
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        letter = torch.cat(flat) if len(flat) > 1 else flat[0]
        sent = [0] * size
        received = [0] * size
        sent[(position + shift) % size] = letter.numel()
        received[(position - shift) % size] = sum(each.num_bytes for each in wanted)
        how = {"sent": sent, "received": received, "group": self.group, "traffic": self.traffic}
        return Coming(all_to_all(letter, purpose=f"context {purpose}", **how), wanted)

    @property
    def overlaps(self) -> bool:
        """True if messages travel while ranks compute."""
        return memory_of(self.group, torch.empty(0)) is None

    def send_on(self, letter: Tensor, *, shift: int, purpose: str) -> Tensor:
        """Send bytes to the rank `shift` places on; as many come from the rank as many places back."""
        return self.exchange(
            (letter,), (Shape(tuple(letter.shape), letter.dtype),), shift=shift, purpose=purpose
        ).wait()[0]

    def everybody(self, mine: Tensor, sizes: Sequence[int], *, purpose: str) -> list[Tensor]:
        """A tensor of each rank, on all ranks; for small ones."""
        size = self.group.size
        if size == 1:
            return [mine]
        how = {"sent": [mine.numel()] * size, "received": list(sizes), "group": self.group, "traffic": self.traffic}
        return list(all_to_all(mine.repeat(size), purpose=f"context {purpose}", **how).wait().split(list(sizes)))


class Shape(NamedTuple):
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Coming(NamedTuple):
    """Tensors that are on their way."""

    pending: Pending
    wanted: Sequence[Shape]

    def wait(self) -> list[Tensor]:
        """The tensors, in the order in which they were sent."""
        letter = self.pending.wait()
        parts = letter.split([each.num_bytes for each in self.wanted])
        return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, self.wanted, strict=True)]
