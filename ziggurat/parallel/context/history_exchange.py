"""HistoryExchange: the histories of the ranks of a context group are cut, and each rank gets its pieces of all of them.

    rank 0 brings a, b     a = a0 a1 a2 a3, …          rank 0 gets   a0 b0 c0   a3 b3 c3     heads, then tails
    rank 1 brings c                             ─►     rank 1 gets   a1 b1 c1   a2 b2 c2

Ids travel before anything is looked up, from the rank that has read them to the rank that computes with them, so a rank
stores ids, vectors and states of its pieces alone. A piece is a sample, or for a ranker one sample or more
(`models/sequence/next_item_pieces.py`, `ranker_pieces.py`); loss and gradients of the pieces add up to those of the
whole histories.

Data parallelism goes on as it was: ranks read different samples, balanced or not, and groups know nothing of each
other. In training it all happens steps ahead, in the thread that balances (`training/balancing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ziggurat.features.batch import Batch
from ziggurat.features.batches.samples import concatenate_batches, take_samples
from ziggurat.features.events import PIECE_HOMES, PIECE_SETS
from ziggurat.models import Model
from ziggurat.models.sequence.cut import Chunks, CutsHistories
from ziggurat.parallel.context.attention import that_cuts
from ziggurat.parallel.context.pieces import head_and_tail
from ziggurat.parallel.exchange.samples import samples_of_ranks
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, Topology, own_group


class HistoryExchange:
    """Distributes the pieces of histories to the ranks of a context group. Constructing and calling are collective.

    Args:
        model: which can cut histories.
        topology: the ranks.
        traffic: counts the messages.

    Attributes:
        model: the model.
        group: the ranks, which meet for this alone.
    """

    def __init__(self, model: Model, *, topology: Topology, traffic: Traffic) -> None:
        self.model: CutsHistories = that_cuts(model, size=topology.context.size)
        self._traffic = traffic
        self.group = own_group(topology, Axis.CONTEXT, what="divide histories", backend="gloo")

    def __call__(self, batch: Batch) -> Batch:
        """This rank's pieces of the histories of its group: heads of all, then tails.

        Args:
            batch: what this rank brings, in host memory; its size may differ from rank to rank, and be 0.
        """
        return set_by_set([part for part in self.exchanged(self.pieces(batch)) if part is not None])

    def exchanged(self, pieces: Sequence[Batch]) -> list[Batch | None]:
        """This rank's pieces of what each rank of the group brings; None where that one brings nothing."""
        how = {"group": self.group, "traffic": self._traffic, "purpose": "context: {}"}
        return samples_of_ranks(list(pieces), **how)

    def pieces(self, batch: Batch) -> list[Batch]:
        """Cut a batch into the part of each rank of the group: heads of all histories, then tails."""
        cutting = self.model.cutting(batch)
        size = self.group.size
        found = []
        for rank in range(size):
            cut = head_and_tail(cutting.lengths, rank=rank, num_ranks=size)
            part = cutting.pieces(Chunks(starts=cut.starts, counts=cut.counts, are_last=(False, rank == 0)))
            # A sample of the data is trained once: by the rank that answers it.
            homes = part.extras[PIECE_HOMES]
            row_ids = torch.full_like(part.row_ids, -1)
            row_ids[homes >= 0] = batch.row_ids[homes[homes >= 0]]
            found.append(replace(part, row_ids=row_ids))
        return found


def set_by_set(parts: Sequence[Batch]) -> Batch:
    """Pieces of several batches as one batch: heads of all, then tails.

    Args:
        parts: at least one.
    """
    joined = concatenate_batches(parts)
    return take_samples(joined, torch.argsort(joined.extras[PIECE_SETS], stable=True))
