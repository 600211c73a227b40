"""IdExchange: every row id travels to the rank that holds its row. Step (a) of the tower transform.

    sizes    each rank tells each other rank: my batch has B samples, and N list rows of it are for you
    ids      to each rank  [ one row a sample, feature-major | list lengths, feature-major | list rows ]

Ids are local to the part of the table that the receiver holds, and 32 bits wide wherever that is enough (half of what
64-bit ids take). The receiver puts the samples of all ranks into *peer order* (`Topology.peer_order`), so that the
lookup's output needs no further permutation before the tower hop.

Batches may differ in size from rank to rank and from step to step, and be empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, SingleSpec
from ziggurat.parallel.collectives import Pending, all_to_all
from ziggurat.parallel.shards import FieldShare, RankShare, TableGroup
from ziggurat.parallel.topology import Topology
from ziggurat.parallel.traffic import Traffic
from ziggurat.plan import Placement


@dataclass
class PendingIds:
    """Ids that are on their way, or at least their sizes.

    Args:
        messages: to each rank; empty once they are sent.
        told: the sizes.
        sizes: samples of each rank, by rank; once the ids are sent.
        num_values: list rows that come from each rank; once the ids are sent.
        pending: the ids; None as long as only the sizes are sent.
    """

    messages: list[Tensor]
    told: Pending
    sizes: list[int] = field(default_factory=list)
    num_values: list[int] = field(default_factory=list)
    pending: Pending | None = None


@dataclass(frozen=True)
class LocalIds:
    """The rows that this rank has to look up.

    Args:
        sizes: samples of each rank, by rank.
        batches: one a table group; the samples of all ranks in peer order.
    """

    sizes: list[int]
    batches: tuple[Batch, ...]


class IdExchange:
    """See the module's docstring.

    Args:
        inputs: fields of the model.
        shares: what each rank looks up, by rank.
        topology: the ranks.
        traffic: counts messages.
    """

    def __init__(
        self, inputs: InputSpec, *, shares: tuple[RankShare, ...], topology: Topology, traffic: Traffic
    ) -> None:
        self._shares = shares
        self._mine = shares[topology.rank]
        self._topology = topology
        self._traffic = traffic
        self._single_index = {spec.name: index for index, spec in enumerate(inputs.single)}
        self._jagged_index = {spec.name: index for index, spec in enumerate(inputs.jagged)}
        largest = max((table.num_rows for table in inputs.tables), default=0)
        self._dtype = torch.int32 if largest + 1 < 1 << 31 else torch.int64
        self._single_of_rank = [
            torch.tensor([self._single_index[share.field.name] for share in each.single], dtype=torch.int64)
            for each in shares
        ]

    def start(self, batch: Batch) -> PendingIds:
        """Send the sizes of this rank's messages, without waiting for those of the others; collective.

        `send` sends the ids. With something else in between nobody waits for anybody there.
        """
        starts = _list_starts(batch, len(self._jagged_index))
        messages = [self._message(batch, share, starts) for share in self._shares]
        size = batch.batch_size
        counts = [
            message.numel() - size * (len(share.single) + len(share.lists))
            for message, share in zip(messages, self._shares, strict=True)
        ]
        world, world_size = self._topology.world, self._topology.world_size
        told = torch.tensor([[size, count] for count in counts], device=batch.single.device)
        pending = all_to_all(
            told.view(-1),
            sent=[2] * world_size,
            received=[2] * world_size,
            group=world,
            traffic=self._traffic,
            purpose="sizes",
        )
        return PendingIds(messages, pending)

    def send(self, ids: PendingIds) -> None:
        """Send the ids, unless they are sent already; collective."""
        if ids.pending is not None:
            return
        ids.sizes, ids.num_values = ids.told.wait().view(-1, 2).t().tolist()
        fixed = len(self._mine.single) + len(self._mine.lists)
        ids.pending = all_to_all(
            torch.cat(ids.messages),
            sent=[message.numel() for message in ids.messages],
            received=[size * fixed + values for size, values in zip(ids.sizes, ids.num_values, strict=True)],
            group=self._topology.world,
            traffic=self._traffic,
            purpose="ids",
        )
        ids.messages = []

    def drop(self, ids: PendingIds) -> None:
        """Receive what is under way, and forget it; collective."""
        (ids.pending or ids.told).wait()

    def finish(self, ids: PendingIds) -> LocalIds:
        """Wait, and arrange the ids in peer order for the lookup; collective if they are not sent yet."""
        self.send(ids)
        assert ids.pending is not None
        num_single, num_lists = len(self._mine.single), len(self._mine.lists)
        lengths = [
            size * (num_single + num_lists) + values for size, values in zip(ids.sizes, ids.num_values, strict=True)
        ]
        messages = ids.pending.wait().split(lengths)
        single, list_lengths, values = [], [], []
        for rank in self._topology.peer_order:
            size, message = ids.sizes[rank], messages[rank]
            single.append(message[: size * num_single].view(num_single, size))
            ends = message[size * num_single : size * (num_single + num_lists)]
            list_lengths.append(ends.view(num_lists, size))
            values.append(message[size * (num_single + num_lists) :])
        rows_SB = torch.cat(single, dim=1).to(torch.int64)
        jagged = _merge_lists(list_lengths, values) if num_lists else None
        return LocalIds(ids.sizes, self._batches(rows_SB, jagged))

    def _message(self, batch: Batch, share: RankShare, starts: list[int]) -> Tensor:
        """Everything that one rank needs to know of this batch."""
        pieces = [batch.single[self._single_of_rank[share.rank]].view(-1)] if share.single else []
        lists = [self._list(batch, each, starts) for each in share.lists]
        pieces += [lengths for lengths, _ in lists] + [values for _, values in lists]
        if not pieces:
            return batch.single.new_empty(0, dtype=self._dtype)
        return torch.cat([piece.to(self._dtype) for piece in pieces])

    def _list(self, batch: Batch, share: FieldShare, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Lengths and rows of a feature that its rank looks up as a list."""
        shard, size = share.shard, batch.batch_size
        if isinstance(share.field, SingleSpec):
            rows = batch.single[self._single_index[share.field.name]]
            lengths = None
        else:
            index = self._jagged_index[share.field.name]
            rows = batch.jagged.values[starts[index] : starts[index + 1]]
            lengths = batch.jagged.offsets[index * size : (index + 1) * size + 1].diff()
        if shard.placement is not Placement.ROW_WISE:
            assert lengths is not None
            return lengths, rows
        inside = (rows >= shard.first_row) & (rows < shard.first_row + shard.num_rows)
        local = rows[inside] - (shard.first_row - shard.num_padding)
        if lengths is None:
            return inside, local
        ends = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return ends[bounds].diff(), local

    def _batches(self, rows_SB: Tensor, jagged: JaggedRows | None) -> tuple[Batch, ...]:
        size = rows_SB.shape[1]
        batches = []
        single = lists = 0
        for group in self._mine.groups:
            rows = rows_SB[single : single + len(group.single)]
            batches.append(_batch(rows, size, _part(jagged, size, lists, group)))
            single += len(group.single)
            lists += len(group.lists)
        return tuple(batches)


def _list_starts(batch: Batch, num_jagged: int) -> list[int]:
    """Where the values of each jagged feature begin, and where the last ends."""
    return batch.jagged.offsets[:: batch.batch_size].tolist() if batch.batch_size else [0] * (num_jagged + 1)


def _merge_lists(lengths: list[Tensor], values: list[Tensor]) -> JaggedRows:
    """Lists of several ranks, each feature-major, as one batch, feature-major."""
    sums = [each.sum(dim=1).tolist() for each in lengths]
    pieces = [values[rank].split(sums[rank]) for rank in range(len(lengths))]
    num_lists = lengths[0].shape[0]
    ordered = [pieces[rank][index] for index in range(num_lists) for rank in range(len(lengths))]
    lengths_JB = torch.cat(lengths, dim=1)
    offsets = torch.zeros(lengths_JB.numel() + 1, dtype=torch.int64, device=lengths_JB.device)
    torch.cumsum(lengths_JB.reshape(-1), 0, out=offsets[1:])
    return JaggedRows(torch.cat(ordered).to(torch.int64), offsets)


def _part(jagged: JaggedRows | None, size: int, first: int, group: TableGroup) -> JaggedRows:
    """The lists of one table group."""
    if jagged is None or not group.lists:
        return JaggedRows.empty()
    offsets = jagged.offsets[first * size : (first + len(group.lists)) * size + 1]
    if first == 0 and len(offsets) == len(jagged.offsets):
        return jagged
    return JaggedRows(jagged.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def _batch(rows_SB: Tensor, size: int, jagged: JaggedRows) -> Batch:
    """A batch of rows alone."""
    nothing = torch.empty(size, 0, device=rows_SB.device)
    return Batch(
        dense=nothing,
        single=rows_SB,
        jagged=jagged,
        labels=nothing,
        row_ids=torch.empty(size, dtype=torch.int64),
    )
