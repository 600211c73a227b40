"""ContextDeal: the histories of the ranks of a context group are cut, and each rank gets its pieces of all of them.

    rank 0 brings a, b     a = a0 a1 a2 a3, …          rank 0 gets   a0 b0 c0   a3 b3 c3     heads, then tails
    rank 1 brings c                             ─►     rank 1 gets   a1 b1 c1   a2 b2 c2

Ids travel before anything is looked up, from whoever has read them to whoever computes with them, so a rank holds ids,
vectors and states of its pieces alone. A piece is a sample with a history, what comes next and a weight
(`models/sequence/next_item_pieces.py`); loss and gradients of the pieces add up to those of the whole histories.

Data parallelism goes on as it was: ranks read different samples, balanced or not, and groups know nothing of each
other. It all happens steps ahead, in the thread that balances (`training/balancing.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from ziggurat.features.batch import Batch
from ziggurat.features.samples import concatenate_batches, take_samples
from ziggurat.models import Model
from ziggurat.models.sequence.cut import CutsHistories
from ziggurat.parallel.context.pieces import head_and_tail
from ziggurat.parallel.exchange.samples import exchange_samples
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, Topology, own_group


class ContextDeal:
    """Deals the pieces of histories to the ranks of a context group. Constructing and calling are collective.

    Args:
        model: which can cut histories.
        topology: the ranks.
        traffic: counts the messages.
    """

    def __init__(self, model: Model, *, topology: Topology, traffic: Traffic) -> None:
        assert isinstance(model, CutsHistories)
        self._model: CutsHistories = model
        self._traffic = traffic
        self._group = own_group(topology, Axis.CONTEXT, what="divide histories", backend="gloo")

    def __call__(self, batch: Batch) -> Batch:
        """This rank's pieces of the histories of its group.

        Args:
            batch: what this rank brings, in host memory; its size may differ from rank to rank, and be 0.
        """
        pieces = self.pieces(batch)
        received = exchange_samples(pieces, group=self._group, traffic=self._traffic, purpose="context: {}")
        halves = [part.batch_size // 2 for part in received]
        begins = [0, *itertools.accumulate(part.batch_size for part in received)][:-1]
        order = [
            torch.arange(begin + half * which, begin + half * (which + 1))
            for which in (0, 1)
            for begin, half in zip(begins, halves, strict=True)
        ]
        return take_samples(concatenate_batches(received), torch.cat(order))

    def pieces(self, batch: Batch) -> list[Batch]:
        """What each rank of the group gets of a batch: heads of all histories, then tails."""
        lengths_B, size = self._model.history_lengths(batch), self._group.size
        found = []
        for rank in range(size):
            cut = head_and_tail(lengths_B, rank=rank, num_ranks=size)
            part = self._model.pieces_of(batch, starts=cut.starts, counts=cut.counts)
            # A line of the data is trained once: by whoever has the end of its history, the tail of rank 0.
            row_ids = torch.full_like(part.row_ids, -1)
            if rank == 0:
                row_ids[batch.batch_size :] = batch.row_ids
            found.append(replace(part, row_ids=row_ids))
        return found
