"""ShardedEmbeddings: the tables of a model spread over ranks; same rows in, same vectors out.

    ids ──(a) id exchange──► local rows ──(b, c) lookup──► pooled (ΣB, C) ──(d, e) hop──► pooled (B, T)

For a flat model the hop joins all ranks, and the columns come out in the order of `inputs.fields`, whatever the
placement. With towers it joins the ranks of a tower group; a rank then has the columns of its own towers, in the order
of the towers, for the samples of all its peers, and `parallel/towers.py` goes on from there.

Of a batch with slices `repeated.py` makes several batches, and `prioritised/exchange.py` sends rows ahead of their
batch: both wrap what is here. The local tables are ordinary `EmbeddingTables` (every kernel, exact updates), looked up
for the samples of all ranks at once; what a placement changes is described in `shards.py`.

Gradients need no scaling here: the exchange sums what arrives, and the loss is divided by the size of the global
batch (`exchange/blocks.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import BatchShape
from ziggurat.embeddings.contract import Embeddings, ListsOfSlices
from ziggurat.embeddings.storage.facts import StorageFacts
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.towers.layer import fields_of_towers
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.exchange.blocks import Block, BlockExchange, Transfer
from ziggurat.parallel.exchange.in_flight import InFlight, Message
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import PLAIN, WireConfig
from ziggurat.parallel.tables.host_sums import HostSums, SentPart, sent_parts
from ziggurat.parallel.tables.ids import IdExchange, LocalIds, PendingIds
from ziggurat.parallel.tables.sequences import SequenceExchange
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.tables.shards import FieldShare, RankShare
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan


class SpreadEmbeddings(Embeddings, Protocol):
    """Embeddings that are spread over ranks: what a pipeline asks beside the contract. All of it is collective."""

    def send_ids(self) -> None:
        """Send the ids of the batches that were announced."""
        ...

    def send_ahead(self, upcoming: Batch | None) -> None:
        """Send what can be sent before the backward pass; `upcoming` is the next batch, if it was announced."""
        ...

    def start(self, batch: Batch) -> InFlight:
        """Begin a lookup of a flat model: look up, and send over the last hop."""
        ...


@dataclass
class Flow:
    """The facts that the parts of a parallel model share about the batch under way.

    Args:
        sizes: samples of each rank, by rank.
    """

    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PendingLookup:
    """A lookup whose results are on their way.

    Args:
        ids: the rows that this rank looked up.
        token: ties what arrives to what was sent, in the autograd graph.
        transfer: that is under way.
    """

    ids: LocalIds
    token: Tensor
    transfer: Transfer


class ShardedEmbeddings(ListsOfSlices, nn.Module):
    """Takes the place of a model's `EmbeddingTables`, for batches without slices. See the module's docstring.

    Args:
        tables: this rank's part of the tables.
        plan: placements and towers.
        topology: the ranks.
        wire: formats of the hops.
        traffic: counts messages.
        flow: tells the towers how large the batches are.
    """

    def __init__(
        self,
        tables: ShardedTables,
        *,
        plan: Plan,
        topology: Topology,
        wire: WireConfig,
        traffic: Traffic,
        flow: Flow,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.inputs = tables.inputs
        self.config = tables.config
        self._topology = topology
        self._flow = flow
        self._is_flat = plan.towers is None
        self._ids = IdExchange(
            tables.inputs, shares=tables.shares, shards=tables.shards, topology=topology, traffic=traffic
        )
        self.list_exchange = SequenceExchange(tables, topology=topology, wire=wire, traffic=traffic)
        self._ready: deque[tuple[Batch, PendingIds]] = deque()
        self._facts = StorageFacts()
        self._make = lambda inputs: ShardedEmbeddings(
            tables.view(inputs), plan=plan, topology=topology, wire=wire, traffic=traffic, flow=Flow()
        )
        names = [spec.name for spec in tables.inputs.fields]
        if plan.towers is not None:
            own = topology.towers_of(topology.group_index, num_towers=len(plan.towers))
            pooled = fields_of_towers(plan.towers, tables.inputs)
            names = [name for tower in own for name in pooled[tower]]
        self.field_names = tuple(names)
        crosses_hosts = self._is_flat
        group = topology.tower
        shares = [tables.shares[rank] for rank in group.ranks]
        some_are_summed = any(parts[0].placement.sums_in_host for parts in tables.shards.values())
        sums_in_host = topology.groups_span_hosts and some_are_summed
        self._host_sums = None
        if sums_in_host:
            self._host_sums = HostSums(
                topology.host, shares=tables.shares, shards=tables.shards, wire_format=wire.in_tower, traffic=traffic
            )
        parts = [sent_parts(share, shards=tables.shards, sums_in_host=sums_in_host) for share in tables.shares]
        chosen = wire.between_towers if crosses_hosts else wire.in_tower
        copies = {share.field.name: share for share in tables.mine.own.fields}
        sent = [parts[rank] for rank in group.ranks]
        self.field_blocks = [_blocks(name, sent, copies=copies) for name in names]
        self.field_dims = tuple(sum(block.width for block in blocks) for blocks in self.field_blocks)
        self.output_dim = sum(self.field_dims)
        self.hop = BlockExchange(
            group,
            widths=[[part.width for part in each] for each in sent],
            num_local=tables.mine.copies.num_columns,
            blocks=[block for blocks in self.field_blocks for block in blocks],
            wire=chosen,
            backward_rounding=wire.backward_rounding,
            traffic=traffic,
            purpose="embeddings" if crosses_hosts else "intra-group all-to-all",
        )
        self._count_hop, self._count_columns = self._plan_counts(shares, traffic)

    has_dense_gradients = False
    rounds_pooled = False

    def of_fields(self, inputs: InputSpec) -> ShardedEmbeddings:
        """The exchange of some fields over the same tables."""
        return self._make(inputs)

    def announce(self, *batches: Batch) -> None:
        """Tell how many ids of batches will come, and wait for nobody; `send_ids` sends them. Collective.

        Other batches may be looked up in between (evaluations).
        """
        for batch in batches:
            self.announce_ids(batch)

    def announce_ids(self, batch: Batch) -> PendingIds:
        """Announce one batch; return its ids, which tell this announcement from others. Collective."""
        assert not batch.repeated, "slices are looked up by `Deduplicated`"
        ids = self._ids.start(batch)
        self._ready.append((batch, ids))
        return ids

    def send_ahead(self, upcoming: Batch | None) -> None:
        """Send the ids of the batches that were announced; collective."""
        del upcoming
        self.send_ids()

    def send_ids(self) -> None:
        """Send the ids of the batches that were announced; collective."""
        for _, ids in self._ready:
            self._ids.send(ids)

    def begin(self, batch: Batch) -> None:
        """Nothing: a lookup asks for ids that nobody announced itself."""

    def drain(self) -> None:
        """Receive and forget ids that were sent ahead for batches that will not come; collective."""
        while self._ready:
            self._ids.drop(self._ready.popleft()[1])

    def settle(self) -> None:
        """Complete the last update: without an exchange ahead it always is."""

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B T"]:
        """Pooled embeddings: (B, T), columns in the order of `inputs.fields`.

        With towers (ΣB, T of this rank's towers) for the samples of all peers, in the order of the tower groups.
        """
        return self.finish_lookup(self.start_lookup(batch)).to(dtype)

    def start_lookup(self, batch: Batch, pending: PendingIds | None = None) -> PendingLookup:
        """The first half of `forward`: look up and send; collective.

        Args:
            batch: without slices.
            pending: its ids, if they were taken (`take_pending`).
        """
        ids = self._take_ids(batch, pending)
        return PendingLookup(ids, *self._send(ids))

    def finish_lookup(self, lookup: PendingLookup) -> Float[Tensor, "B T"]:
        """The second half: wait, put columns in order, and finish the means of spread rows; collective."""
        transfer = lookup.transfer
        pooled_BT = self.hop.finish(lookup.token, transfer)
        return self.with_means(pooled_BT, lookup.ids, rows_sent=transfer.rows_sent, num_rows=transfer.num_rows)

    def with_means(
        self, pooled_BT: Float[Tensor, "B T"], ids: LocalIds, *, rows_sent: list[int], num_rows: int
    ) -> Float[Tensor, "B T"]:
        """Sums of spread rows become means; collective if there are any. `rows_sent`, `num_rows` as in `hop.start`."""
        if self._count_hop is None:
            return pooled_BT
        # Lengths are summed over ranks as the rows are: only all together know what a mean divides by.
        lengths_BJ = self._count_hop(self.tables.list_lengths(ids), rows_sent=rows_sent, num_rows=num_rows)
        factors_BT = torch.ones_like(pooled_BT)
        for column, columns in enumerate(self._count_columns):
            # An empty list stays the zeros that it sums to.
            factors_BT[:, columns] = lengths_BJ[:, column : column + 1].clamp(min=1.0).reciprocal()
        return pooled_BT * factors_BT

    def unpooled_slices(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "U+1"], Int64[Tensor, "B"] | None]:
        """Return the same as `EmbeddingTables.unpooled_slices`; collective."""
        return self.list_exchange(batch, name, dtype=dtype)

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """Return the same as `EmbeddingTables.vectors`; collective, each rank asks for own rows. See `sequences.py`."""
        return self.list_exchange.vectors(table, rows_N, dtype=dtype)

    def all_vectors(self, table: str) -> Float[Tensor, "rows D"]:
        """Return the same as `EmbeddingTables.all_vectors`; collective, each rank asks for all rows."""
        return self.vectors(table, torch.arange(self.inputs.table(table).num_rows, device=self.tables.device))

    def table(self, name: str) -> Tensor:
        """Refuse: a rank may hold a part of a table, or none of it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            expected="tables of one device, which are whole",
            found="a model that is spread over ranks, where each has its part",
            where=f"table {name!r}",
            ways_out=(
                "ask before parallelize",
                "model.embeddings.tables.state_dict(): the parts that this rank has",
                "model.embeddings.vectors(table, rows), on all ranks: some rows of it",
            ),
        )

    def start(self, batch: Batch) -> InFlight:
        """The first half of `forward`, of a flat model: look up and send over the last hop. See `pipeline.py`."""
        assert self._is_flat
        assert self.can_start
        lookup = self.start_lookup(batch)
        return InFlight([Message(self.hop, lookup.token, lookup.transfer)], lambda arrived: arrived[0])

    @property
    def can_start(self) -> bool:
        """True unless means of spread rows have to be finished after the last hop; the same on all ranks.

        In a flat model one group of all ranks comes to the answer together. With towers the last hop is that of the
        peers, behind everything that happens here, whatever the means of one tower group need.
        """
        return self._count_hop is None or not self._is_flat

    def choose_kernel(self, shape: BatchShape) -> None:
        """Choose the kernel of the local tables, for the batches of all ranks together."""
        whole = BatchShape(batch_size=shape.batch_size * self._topology.world_size, list_length=shape.list_length)
        for tables in self.tables.local:
            tables.choose_kernel(whole)

    @property
    def kernel_names(self) -> list[KernelChoice]:
        """The kernels of this rank's tables; none on a rank without tables."""
        return [tables.kernel_name for tables in self.tables.local if tables.inputs.tables]

    def use_kernel(self, kernel: KernelChoice) -> None:
        """Look up with this kernel, so that all ranks, and a resumed run, do the same."""
        for tables in self.tables.local:
            tables.use_kernel(kernel)

    def report(self) -> dict[str, object]:
        """Return the entries of the start-up report on this rank's tables."""
        groups = [tables.report() for tables in self.tables.local if tables.inputs.tables]
        return groups[0] if groups else {"kernel": f"rank {self._topology.rank} holds no table"}

    def facts(self) -> dict[str, float]:
        """Return what caches, a disk and the host's memory did on this rank since the last call; {} without them."""
        return self._facts.since_last(storage for tables in self.tables.local for storage in tables.tables.storages)

    def take_pending(self, batch: Batch) -> PendingIds:
        """The ids of a batch, on their way since it was announced, or from now on; collective."""
        # By identity: a batch that nobody announced (an evaluation's) may come in between.
        is_announced = bool(self._ready) and self._ready[0][0] is batch
        return self._ready.popleft()[1] if is_announced else self._ids.start(batch)

    def _take_ids(self, batch: Batch, pending: PendingIds | None = None) -> LocalIds:
        assert not batch.repeated, "slices are looked up by `Deduplicated`"
        ids = self._ids.finish(self.take_pending(batch) if pending is None else pending)
        self.set_sizes(ids)
        return ids

    def take_ahead(self, batch: Batch) -> tuple[LocalIds, PendingIds]:
        """The rows of an announced batch, before its turn, and how they were announced; collective.

        `set_sizes` is to be called at its turn.
        """
        known, pending = self._ready.popleft()
        assert known is batch
        return self._ids.finish(pending), pending

    def set_sizes(self, ids: LocalIds) -> None:
        """Set how many samples each rank has of the present batch, for the towers to read."""
        self._flow.sizes = ids.sizes

    def rows_by_member(self, ids: LocalIds) -> list[int]:
        """Count the samples that this rank looks up of each member of its tower group and that member's peers."""
        size = self._topology.tower_size
        groups = self._topology.num_groups
        return [sum(ids.sizes[group * size + place] for group in range(groups)) for place in range(size)]

    def _send(self, ids: LocalIds) -> tuple[Tensor, Transfer]:
        """Look up, and send each member of the tower group what it wants: columns for the samples of all its peers."""
        per_place = self.rows_by_member(ids)
        # Samples that this rank wants for itself and its peers: with towers they go on from here.
        num_rows = per_place[self._topology.tower.position]
        pooled = self.tables.lookup(ids)
        if self._host_sums is not None:
            pooled = self._host_sums(pooled)
        local = self.tables.lookup_copies(ids)
        return self.hop.start(pooled, rows_sent=per_place, num_rows=num_rows, local_BL=local)

    def _plan_counts(self, shares: list[RankShare], traffic: Traffic) -> tuple[BlockExchange | None, list[slice]]:
        """Plan how the lengths of lists travel whose rows are spread over ranks, always exactly."""
        blocks = []
        columns = []
        start = 0
        for name, dim in zip(self.field_names, self.field_dims, strict=True):
            sources = [
                (member, index)
                for member, share in enumerate(shares)
                for index, counted in enumerate(share.counts)
                if counted.field.name == name
            ]
            if sources:
                # One column a list: its length, from every rank that has rows of its table.
                blocks.append(Block(1, tuple(sources)))
                columns.append(slice(start, start + dim))
            start += dim
        # All ranks of the group come to the same answer, because all know all shares.
        if not blocks:
            return None, []
        hop = BlockExchange(
            self._topology.tower,
            widths=[[1] * len(share.counts) for share in shares],
            blocks=blocks,
            # Rounded lengths would make wrong means.
            wire=PLAIN,
            traffic=traffic,
            purpose="list lengths",
        )
        return hop, columns


def _blocks(name: str, sent: list[tuple[SentPart, ...]], *, copies: dict[str, FieldShare]) -> list[Block]:
    """Return the sources of the columns of one field: members of a group, or the rank's own copy."""
    if name in copies:
        share = copies[name]
        return [Block(share.shard.num_columns, ((Block.LOCAL, share.column),))]
    by_column: dict[int, list[tuple[int, int]]] = {}
    widths: dict[int, int] = {}
    for member, parts in enumerate(sent):
        for part in parts:
            # Parts with the same first column are sums of each other's rows; others stand side by side.
            if part.field == name and part.width:
                by_column.setdefault(part.first_column, []).append((member, part.column))
                widths[part.first_column] = part.width
    assert by_column, f"the plan gives nobody feature {name!r}"
    return [Block(widths[first], tuple(by_column[first])) for first in sorted(by_column)]
