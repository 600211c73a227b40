"""IdExchange: every row id travels to the rank that holds its row. Step (a) of the tower transform.

    sizes    each rank tells each other rank the samples B of its batch, and the rows of each list feature it will send
    ids      to each rank  [ one row a sample, feature-major | list lengths, feature-major | list rows ]

Ids are local to the part of the table that the receiver holds, and 32 bits wide wherever that is enough (half of what
64-bit ids take). Ids of a table whose rows are spread over ranks are sorted into one list a rank (`buckets.py`). The
receiver puts the samples of all ranks into *peer order* (`Topology.peer_order`), so that the lookup's output needs no
further permutation before the intra-group all-to-all.

Tables of which every rank has a copy take ids of the rank itself, and with towers of its peers: a second message of the
same form, behind the first, to these ranks alone.

Every row is checked against its table before it is sent: a row beyond 32 bits would come out as another row.

Of a batch on a GPU nothing here is asked for that the host would have to wait for: sizes are counted, and rows checked,
in the copy that the batch came from (`Batch.on_host`), and sizes travel from host to host, beside what GPUs exchange.

Batches may differ in size from rank to rank and from step to step, and be empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.samples import join_lists
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec
from ziggurat.parallel.exchange.collectives import Pending, all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.tables.buckets import Bucket, check_bounds, sort_into_buckets
from ziggurat.parallel.tables.shards import FieldShare, Lookup, RankShare, Shard, TableGroup
from ziggurat.parallel.topology import Axis, Lane, Topology, sizes_device


@dataclass
class PendingIds:
    """Ids in flight, or at least their sizes.

    Args:
        messages: to each rank; empty once they are sent.
        pending_sizes: the sizes.
        sizes: samples of each rank, by rank; once the ids are sent.
        num_rows: rows of each list that come from each rank, for what is exchanged and for copies; once ids are sent.
        pending: the ids; None as long as only the sizes are sent.
    """

    messages: list[Tensor]
    pending_sizes: Pending
    sizes: list[int] = field(default_factory=list)
    num_rows: tuple[list[list[int]], ...] = ()
    pending: Pending | None = None


@dataclass(frozen=True)
class LocalIds:
    """The rows that this rank has to look up.

    Args:
        sizes: samples of each rank, by rank.
        batches: one for each of `RankShare.groups`: samples of all ranks in peer order; for copies samples of the
            rank and its peers.
    """

    sizes: list[int]
    batches: tuple[Batch, ...]


class IdExchange:
    """Sends every row id to the rank that holds its row.

    Args:
        inputs: fields of the model.
        shares: what each rank looks up, by rank.
        shards: the parts of every table.
        topology: the ranks.
        traffic: counts messages.
    """

    def __init__(
        self,
        inputs: InputSpec,
        *,
        shares: tuple[RankShare, ...],
        shards: dict[str, tuple[Shard, ...]],
        topology: Topology,
        traffic: Traffic,
    ) -> None:
        self._inputs = inputs
        self._shards = shards
        self._num_rows = torch.tensor([inputs.table(spec.table).num_rows for spec in inputs.single], dtype=torch.int64)
        self._mine = shares[topology.rank]
        self._topology = topology
        self._lane = topology.lane(Axis.WORLD, Lane.IDS)
        self._traffic = traffic
        self._single_index = {spec.name: index for index, spec in enumerate(inputs.single)}
        self._jagged_index = {spec.name: index for index, spec in enumerate(inputs.jagged)}
        largest = max((table.num_rows for table in inputs.tables), default=0)
        # One more than the rows: parts of tables have padding in front.
        self._dtype = torch.int32 if largest + 1 < 1 << 31 else torch.int64
        nothing = Lookup(())
        self._letters = [
            (self._part(share.exchanged), self._part(share.own if share.rank in topology.peers.ranks else nothing))
            for share in shares
        ]
        # What comes: from each rank for what is exchanged, and from the rank and its peers for copies.
        self._fixed = [
            (_num_fixed(self._mine.exchanged), _num_fixed(self._mine.own) if rank in topology.peers.ranks else 0)
            for rank in range(topology.world_size)
        ]

    def start(self, batch: Batch) -> PendingIds:
        """Send the sizes of this rank's messages, without waiting for those of the others; collective.

        `send` sends the ids. With something else in between nobody waits for anybody there.

        Raises:
            BoundsError: a row outside its table.
        """
        # Slices cannot travel: a sample's list goes where its rows are.
        batch = batch.expanded()
        host = _rows_on_host(batch)
        # Before `_letter` goes to 32 bits, where a row beyond them would come out as another.
        self._check(host)
        lists = _Lists(batch, host, self._single_index, self._jagged_index, self._shards)
        messages = []
        counts_by_rank = []
        for rank, letters in enumerate(self._letters):
            pieces = []
            # In this order `send` reads them: samples, lists of what is exchanged, lists of copies.
            counts = [batch.batch_size]
            for part in letters:
                found = [lists.of(each, rank) for each in part.lookup.lists]
                counts += [each.rows.numel() for each in found]
                pieces.append(self._letter(batch, part, found))
            counts_by_rank.append(counts)
            messages.append(torch.cat(pieces))
        pending = all_to_all(
            # On the host if the group can exchange that: a GPU would make the host wait for these few numbers.
            torch.tensor([number for counts in counts_by_rank for number in counts], device=sizes_device(self._lane)),
            sent=[len(counts) for counts in counts_by_rank],
            received=[1 + exchanged + own for exchanged, own in self._num_lists()],
            group=self._lane,
            traffic=self._traffic,
            purpose="sizes",
        )
        return PendingIds(messages, pending)

    def send(self, ids: PendingIds) -> Pending:
        """Send the ids, unless they are sent already; collective."""
        # Both the pipeline and `finish` may be first.
        if ids.pending is not None:
            return ids.pending
        # In the order in which `start` counted them.
        sizes = iter(ids.pending_sizes.wait().tolist())
        exchanged = []
        own = []
        for num_exchanged, num_own in self._num_lists():
            ids.sizes.append(next(sizes))
            exchanged.append([next(sizes) for _ in range(num_exchanged)])
            own.append([next(sizes) for _ in range(num_own)])
        ids.num_rows = (exchanged, own)
        pending = all_to_all(
            torch.cat(ids.messages),
            sent=[message.numel() for message in ids.messages],
            received=[sum(lengths) for lengths in self._lengths(ids)],
            group=self._lane,
            traffic=self._traffic,
            purpose="ids",
        )
        ids.pending = pending
        # They are in the buffer that is sent now.
        ids.messages = []
        return pending

    def drop(self, ids: PendingIds) -> None:
        """Receive what is in flight, and drop it; collective."""
        # What was sent has to be received: other ranks' messages are counted.
        (ids.pending or ids.pending_sizes).wait()

    def finish(self, ids: PendingIds) -> LocalIds:
        """Wait, and arrange the ids in peer order for the lookup; collective if they are not sent yet."""
        pending = self.send(ids)
        lengths = self._lengths(ids)
        pieces = iter(pending.wait().split([number for pair in lengths for number in pair]))
        letters = [(next(pieces), next(pieces)) for _ in lengths]
        batches: list[Batch] = []
        for index, lookup in enumerate((self._mine.exchanged, self._mine.own)):
            # The second letter is of copies: those of the rank and its peers alone.
            ranks = self._topology.peers.ranks if index else self._topology.peer_order
            batches += _read(
                lookup,
                [letters[rank][index] for rank in ranks],
                sizes=[ids.sizes[rank] for rank in ranks],
                num_rows=[ids.num_rows[index][rank] for rank in ranks],
            )
        return LocalIds(ids.sizes, tuple(batches))

    def _check(self, batch: Batch) -> None:
        """Refuse rows outside of their tables, of this rank's own samples; one pass over the rows.

        Raises:
            BoundsError: names the first, with its feature and sample.
        """
        inputs = self._inputs
        size = batch.batch_size
        if inputs.single and size:
            # One pass for all features; the dear search for the sample follows only where it finds something.
            low_S, high_S = torch.aminmax(batch.single, dim=1)
            outside_S = (low_S < 0) | (high_S >= self._num_rows)
            for index in outside_S.nonzero().flatten().tolist():
                self._check_feature(batch.single[index], inputs.single[index])
        starts = _list_starts(batch, len(inputs.jagged))
        for index, spec in enumerate(inputs.jagged):
            offsets = batch.jagged.offsets[index * size : (index + 1) * size + 1]
            self._check_feature(batch.jagged.values[starts[index] : starts[index + 1]], spec, lengths=offsets.diff())

    def _check_feature(self, rows: Tensor, spec: SingleSpec | JaggedSpec, *, lengths: Tensor | None = None) -> None:
        table_rows = self._inputs.table(spec.table).num_rows
        check_bounds(rows, table_rows=table_rows, feature=spec.name, lengths=lengths, table=spec.table)

    def _num_lists(self) -> list[tuple[int, int]]:
        """Lists in the two letters of each rank to this one."""
        exchanged, own = (len(lookup.lists) for lookup in (self._mine.exchanged, self._mine.own))
        peers = self._topology.peers.ranks
        # Copies are looked up for peers alone: no other rank writes a second letter.
        return [(exchanged, own if rank in peers else 0) for rank in range(self._topology.world_size)]

    def _lengths(self, ids: PendingIds) -> list[tuple[int, int]]:
        """Numbers in the two letters of each rank to this one."""
        return [
            (size * fixed[0] + sum(exchanged), size * fixed[1] + sum(own))
            for size, fixed, exchanged, own in zip(ids.sizes, self._fixed, *ids.num_rows, strict=True)
        ]

    def _part(self, lookup: Lookup) -> _Part:
        indices = [self._single_index[share.field.name] for share in lookup.single]
        return _Part(lookup, Positions(torch.tensor(indices, dtype=torch.int64)))

    def _letter(self, batch: Batch, part: _Part, lists: list[Bucket]) -> Tensor:
        """Everything of this batch that one rank needs to know for one lookup."""
        pieces = [batch.single[part.single.on(batch.single.device)].view(-1)] if part.lookup.single else []
        # All lengths before all rows: the reader finds lengths by the batch size alone.
        pieces += [each.lengths for each in lists] + [each.rows for each in lists]
        if not pieces:
            return batch.single.new_empty(0, dtype=self._dtype)
        return torch.cat([piece.to(self._dtype) for piece in pieces])


@dataclass(frozen=True)
class Positions:
    """Positions of single features in `Batch.single`."""

    numbers: Tensor
    copies: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> Tensor:
        """The positions on a device, where they stay."""
        if device not in self.copies:
            self.copies[device] = self.numbers.to(device)
        return self.copies[device]


@dataclass
class _Part:
    """One lookup of another rank, and its single features."""

    lookup: Lookup
    single: Positions


class _Lists:
    """The lists of one batch, as each rank is to see them; sorted into buckets once a feature."""

    def __init__(
        self,
        batch: Batch,
        host: Batch,
        single_index: dict[str, int],
        jagged_index: dict[str, int],
        shards: dict[str, tuple[Shard, ...]],
    ) -> None:
        self._batch = batch
        self._host = host
        self._single_index = single_index
        self._jagged_index = jagged_index
        self._shards = shards
        self._starts = _list_starts(host, len(jagged_index))
        self._buckets: dict[str, dict[int, Bucket]] = {}

    def of(self, share: FieldShare, rank: int) -> Bucket:
        """Lengths and rows of a feature that a rank looks up as a list."""
        # The table is whole on that rank: nothing to sort.
        if not share.shard.placement.cuts_rows:
            return Bucket(*self._list(share.field.name, self._batch))
        name = share.field.name
        if name not in self._buckets:
            lengths, rows = self._whole(share, self._batch)
            shards = self._shards[share.shard.table]
            on_host = None if self._host is self._batch else self._whole(share, self._host)[1]
            self._buckets[name] = sort_into_buckets(rows, lengths, shards=shards, host_rows_N=on_host)
        return self._buckets[name][rank]

    def _whole(self, share: FieldShare, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Lengths (None: one a sample) and rows of a feature."""
        if isinstance(share.field, SingleSpec):
            return None, batch.single[self._single_index[share.field.name]]
        return self._list(share.field.name, batch)

    def _list(self, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
        """Lengths and rows of a list feature."""
        size = batch.batch_size
        index = self._jagged_index[name]
        lengths = batch.jagged.offsets[index * size : (index + 1) * size + 1].diff()
        return lengths, batch.jagged.values[self._starts[index] : self._starts[index + 1]]


def _num_fixed(lookup: Lookup) -> int:
    """Numbers a sample in a letter, beside the rows of lists."""
    return len(lookup.single) + len(lookup.lists)


def _read(lookup: Lookup, letters: list[Tensor], *, sizes: list[int], num_rows: list[list[int]]) -> list[Batch]:
    """One batch a table group, from the letters of some ranks, in their order."""
    num_single = len(lookup.single)
    num_lists = len(lookup.lists)
    single = []
    list_lengths = []
    values = []
    for letter, size in zip(letters, sizes, strict=True):
        single.append(letter[: size * num_single].view(num_single, size))
        list_lengths.append(letter[size * num_single : size * (num_single + num_lists)].view(num_lists, size))
        values.append(letter[size * (num_single + num_lists) :])
    rows_SB = torch.cat(single, dim=1).to(torch.int64)
    jagged = JaggedRows(rows_SB.new_empty(0), rows_SB.new_zeros(1))
    if num_lists:
        jagged = join_lists(list_lengths, [each.to(torch.int64) for each in values], num_rows=num_rows)
    size = rows_SB.shape[1]
    # Rows of each list over all ranks, added up: where it begins among the values.
    begins = [0, *itertools.accumulate(map(sum, zip(*num_rows, strict=True)))]
    batches = []
    next_single = 0
    next_list = 0
    for group in lookup.groups:
        rows = rows_SB[next_single : next_single + len(group.single)]
        batches.append(batch_of_rows(rows, _part(jagged, size, next_list, group, begins=begins), size=size))
        next_single += len(group.single)
        next_list += len(group.lists)
    return batches


def _rows_on_host(batch: Batch) -> Batch:
    """The rows of a batch in host memory; copied there, which waits for the device, where nobody kept them."""
    if batch.on_host is not None:
        return batch.on_host
    lists = JaggedRows(batch.jagged.values.cpu(), batch.jagged.offsets.cpu())
    return batch_of_rows(batch.single.cpu(), lists, size=batch.batch_size)


def _list_starts(batch: Batch, num_jagged: int) -> list[int]:
    """Return where the values of each jagged feature begin, and where the last ends."""
    # Every B-th offset begins a feature; a slice with steps of 0 would be refused.
    return batch.jagged.offsets[:: batch.batch_size].tolist() if batch.batch_size else [0] * (num_jagged + 1)


def _part(jagged: JaggedRows, size: int, first: int, group: TableGroup, *, begins: list[int]) -> JaggedRows:
    """The lists of one table group; `begins` says where the rows of each list are, and where the last ones end."""
    last = first + len(group.lists)
    offsets = jagged.offsets[first * size : last * size + 1]
    num_rows = tuple(end - begin for begin, end in itertools.pairwise(begins[first : last + 1]))
    # One group has all lists: nothing to shift, and no kernel for it.
    if len(offsets) == len(jagged.offsets):
        return JaggedRows(jagged.values, offsets, num_rows)
    if first == last:
        return JaggedRows(jagged.values[:0], jagged.offsets[:1], num_rows)
    return JaggedRows(jagged.values[begins[first] : begins[last]], offsets - offsets[0], num_rows)


def batch_of_rows(rows_SB: Tensor, jagged: JaggedRows, *, size: int) -> Batch:
    """A batch of rows alone: what a lookup reads, and nothing else."""
    nothing = torch.empty(size, 0, device=rows_SB.device)
    return Batch(
        dense=nothing,
        single=rows_SB,
        jagged=jagged,
        labels=nothing,
        row_ids=torch.empty(size, dtype=torch.int64),
    )
