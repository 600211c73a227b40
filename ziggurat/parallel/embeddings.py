"""ShardedEmbeddings: the tables of a model spread over ranks; same rows in, same vectors out.

    ids ──(a) id exchange──► local rows ──(b, c) lookup──► pooled (ΣB, C) ──(d, e) hop──► pooled (B, T)

For a flat model the hop joins all ranks, and the columns come out in the order of `inputs.fields`, whatever the
placement. With towers it joins the ranks of a tower group; a rank then has the columns of its own towers, in the order
of the towers, for the samples of all its peers, and `towers.py` goes on from there.

The local tables are ordinary `EmbeddingTables` (every kernel, exact updates), looked up for the samples of all ranks at
once; what a placement changes is described in `shards.py`.

Gradients need no scaling here: the exchange sums what arrives, and the loss is divided by the size of the global
batch (`exchange.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import BatchShape, EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.storage import initialise
from ziggurat.errors import PlanError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind
from ziggurat.parallel.exchange import Block, BlockExchange, Transfer
from ziggurat.parallel.ids import IdExchange, LocalIds, PendingIds
from ziggurat.parallel.shards import RankShare, Shard, cut_tables, share_of
from ziggurat.parallel.table_shard import TableShard, table_shard
from ziggurat.parallel.topology import Topology
from ziggurat.parallel.traffic import Traffic
from ziggurat.parallel.wire import Rounding, Wire, WireConfig, WireFormat
from ziggurat.plan import Plan


@dataclass
class Flow:
    """What the parts of a parallel model tell each other about the batch under way.

    Args:
        sizes: samples of each rank, by rank.
    """

    sizes: list[int] = field(default_factory=list)


class ShardedTables(nn.Module):
    """The part of a model's tables that one rank holds.

    Args:
        inputs: fields and tables of the whole model.
        config: dims, rule, kernel, initial weights.
        plan: placements.
        topology: the ranks.
        seed: of the initial weights, which are those that one device would draw; None leaves them open.

    Attributes:
        shares: what every rank looks up, by rank.
        mine: what this rank looks up.
        local: this rank's tables: those with all columns, and those with some.
    """

    def __init__(
        self, inputs: InputSpec, config: EmbeddingConfig, *, plan: Plan, topology: Topology, seed: int | None
    ) -> None:
        super().__init__()
        if config.optimizer is TableOptimizerKind.ADAM_DENSE:
            raise PlanError(
                expected="a table optimizer that updates touched rows",
                found=f"{config.optimizer.value!r}, which has a gradient for every row of every table",
                where="parallel embeddings",
                ways_out=(
                    "--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)",
                    "train on one device: the BARS protocol is for small tables",
                ),
            )
        self.inputs, self.config = inputs, config
        self.shards = cut_tables(plan, inputs, dim=config.dim)
        self.shares = tuple(share_of(rank, inputs=inputs, shards=self.shards) for rank in range(topology.world_size))
        self.mine: RankShare = self.shares[topology.rank]
        # Not a ModuleList: names of tables in checkpoints do not tell where a table is.
        self.local = tuple(EmbeddingTables(group.inputs, config, seed=None) for group in self.mine.groups)
        self._topology = topology
        for tables, group in zip(self.local, self.mine.groups, strict=True):
            for shard in group.shards:
                tables.tables.view(shard.table)[PADDING_ROW] = 0.0
        if seed is not None:
            self._draw(seed)

    def lookup(self, ids: LocalIds, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "R C"]:
        """This rank's columns for the samples of all ranks, in peer order."""
        pooled = [
            tables(batch, dtype=dtype)
            for tables, batch, group in zip(self.local, ids.batches, self.mine.groups, strict=True)
            if group.shards or group is self.mine.rows  # without tables an empty result, tied into the graph
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def list_lengths(self, ids: LocalIds) -> Float[Tensor, "R counts"]:
        """How many rows of each list of `RankShare.counts` this rank has summed."""
        batch, group = ids.batches[0], self.mine.rows
        lengths_JR = batch.jagged.offsets.diff().view(len(group.lists), -1)
        wanted = [index for index, share in enumerate(group.lists) if share.is_partial_mean]
        return lengths_JR[wanted].t().float()

    def load_whole(self, name: str, weight: Float[Tensor, "rows D"]) -> None:
        """Copy this rank's part of a whole table."""
        shard = self._shard(name)
        if shard is not None:
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            columns = slice(shard.first_column, shard.first_column + shard.num_columns)
            with torch.no_grad():
                self.part(shard).copy_(weight[rows, columns])

    def part(self, shard: Shard) -> Float[Tensor, "rows columns"]:
        """The weights of one of this rank's shards, without padding in front."""
        return self._group(shard).tables.view(shard.table)[shard.num_padding :]

    def state_shard(self, shard: Shard, state: Tensor) -> TableShard:
        """Optimizer state of a shard (one number a row, or one a weight) as a part of the table's."""
        part = state[shard.num_padding :]
        if state.dim() == 1:
            return table_shard(part, offsets=(shard.first_row,), shape=(shard.table_rows,))
        return self._table_shard(shard, part)

    def report(self) -> dict[str, Any]:
        """What the start-up report says about this rank's tables."""
        return {
            "rank": self._topology.rank,
            "shards": [
                f"{s.table} ({s.placement.value}, {s.num_rows} × {s.num_columns})" for s in self.mine.rows.shards
            ]
            + [f"{s.table} ({s.placement.value}, {s.num_rows} × {s.num_columns})" for s in self.mine.columns.shards],
            "groups": [tables.report() for tables in self.local if tables.inputs.tables],
        }

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedTables:
        super()._apply(fn, recurse)
        for tables in self.local:
            tables._apply(fn, recurse)
        return self

    def _draw(self, seed: int) -> None:
        """The rows and columns that one device would have; a cut table is drawn whole, one at a time."""
        for tables, group in zip(self.local, self.mine.groups, strict=True):
            for shard in group.shards:
                view = tables.tables.view(shard.table)
                if shard.is_whole:
                    initialise(view, name=shard.table, config=self.config, seed=seed)
                    continue
                whole = torch.empty(shard.table_rows, shard.table_columns)
                initialise(whole, name=shard.table, config=self.config, seed=seed)
                self.load_whole(shard.table, whole)

    def _shard(self, name: str) -> Shard | None:
        return next((shard for shard in self.shards[name] if shard.rank == self._topology.rank), None)

    def _group(self, shard: Shard) -> EmbeddingTables:
        return self.local[0] if shard in self.mine.rows.shards else self.local[1]

    def _table_shard(self, shard: Shard, part: Tensor) -> TableShard:
        return table_shard(
            part,
            offsets=(shard.first_row, shard.first_column),
            shape=(shard.table_rows, shard.table_columns),
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        for group in self.mine.groups:
            for shard in group.shards:
                name = f"{prefix}{shard.table}.weight"
                whole = shard.is_whole and self._topology.world_size == 1
                part = self.part(shard).detach()
                destination[name] = part if whole else self._table_shard(shard, part)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take whole tables, as one device saves them, or this rank's own parts."""
        for group in self.mine.groups:
            for shard in group.shards:
                key = f"{prefix}{shard.table}.weight"
                given = state_dict.get(key)
                if given is None:
                    missing_keys.append(key)
                elif tuple(given.shape) != (shard.table_rows, shard.table_columns):
                    error_msgs.append(f"table {shard.table!r}: expected the whole table, found {tuple(given.shape)}")
                elif isinstance(given, TableShard):
                    self.part(shard).copy_(given.part)
                else:
                    self.load_whole(shard.table, given)


class ShardedEmbeddings(nn.Module):
    """Takes the place of a model's `EmbeddingTables`. See the module's docstring.

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
        self.inputs, self.config = tables.inputs, tables.config
        self._topology, self._flow = topology, flow
        self._ids = IdExchange(tables.inputs, shares=tables.shares, topology=topology, traffic=traffic)
        self._ready: deque[tuple[Batch, PendingIds]] = deque()
        names = [spec.name for spec in tables.inputs.fields]
        if plan.towers is not None:
            per_group = len(plan.towers) // topology.num_groups
            own = plan.towers.towers[topology.group_index * per_group : (topology.group_index + 1) * per_group]
            names = [name for tower in own for name in tower]
        self.field_names = tuple(names)
        crosses_hosts = plan.towers is None
        group = topology.tower
        shares = [tables.shares[rank] for rank in group.ranks]
        widths = [share.shard.num_columns for each in tables.shares for share in each.fields]
        width = math.gcd(*widths) if widths else 1
        chosen = wire.between_towers if crosses_hosts else wire.in_tower
        self.field_blocks = [_blocks(name, shares) for name in names]
        self.field_dims = tuple(sum(block.width for block in blocks) for blocks in self.field_blocks)
        self.output_dim = sum(self.field_dims)
        self.hop = BlockExchange(
            group,
            columns=[share.num_columns for share in shares],
            blocks=[block for blocks in self.field_blocks for block in blocks],
            forward_wire=Wire(chosen, width),
            backward_wire=Wire(chosen, width, wire.backward_rounding),
            traffic=traffic,
            purpose="embeddings" if crosses_hosts else "tower hop",
        )
        self._count_hop, self._count_columns = self._plan_counts(shares, traffic)

    has_dense_gradients = False

    def prefetch(self, *batches: Batch) -> None:
        """Send the ids of batches that `forward` will be called with later, in this order; collective.

        What was sent ahead before and not used is received and forgotten. Other batches may be looked up in between
        (an evaluation).
        """
        self.drain()
        self.announce(*batches)
        self.send_ids()

    def announce(self, *batches: Batch) -> None:
        """The first half of `prefetch`: tell the others how much will come, and wait for nobody; collective."""
        self._ready.extend((batch, self._ids.start(batch)) for batch in batches)

    def send_ids(self) -> None:
        """The second half: send the ids of the batches that were announced; collective."""
        for _, ids in self._ready:
            self._ids.send(ids)

    def drain(self) -> None:
        """Receive and forget ids that were sent ahead for batches that will not come; collective."""
        while self._ready:
            self._ids.drop(self._ready.popleft()[1])

    def forward(self, batch: Batch) -> Float[Tensor, "B T"]:
        """Pooled embeddings.

        Returns:
            Flat: (B, T), columns in the order of `inputs.fields`. With towers: (ΣB, T of this rank's towers) for the
            samples of all peers, in the order of the tower groups.
        """
        ids = self._take_ids(batch)
        pooled_RC = self.tables.lookup(ids)
        per_place = self._rows_by_place(ids.sizes)
        num_rows = per_place[self._topology.tower.position]
        pooled_BT = self.hop(pooled_RC, rows_sent=per_place, num_rows=num_rows)
        if self._count_hop is None:
            return pooled_BT
        lengths_RJ = (
            self.tables.list_lengths(ids) if self.tables.mine.counts else pooled_RC.new_empty(len(pooled_RC), 0)
        )
        lengths_BJ = self._count_hop(lengths_RJ.detach(), rows_sent=per_place, num_rows=num_rows)
        factors_BT = torch.ones_like(pooled_BT)
        for column, columns in enumerate(self._count_columns):
            factors_BT[:, columns] = lengths_BJ[:, column : column + 1].clamp(min=1.0).reciprocal()
        return pooled_BT * factors_BT

    def start(self, batch: Batch) -> tuple[Tensor, Transfer]:
        """The first half of `forward`: look up and send; `hop` has the second. See `pipeline.py`."""
        assert self.can_start
        ids = self._take_ids(batch)
        per_place = self._rows_by_place(ids.sizes)
        num_rows = per_place[self._topology.tower.position]
        return self.hop.start(self.tables.lookup(ids), rows_sent=per_place, num_rows=num_rows)

    @property
    def can_start(self) -> bool:
        """True unless means of spread rows have to be finished after the hop."""
        return self._count_hop is None

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
            tables.config = replace(tables.config, kernel=kernel)
            tables.choose_kernel(BatchShape())

    def report(self) -> dict[str, Any]:
        """What the start-up report says about this rank's tables."""
        return self.tables.report()

    def _take_ids(self, batch: Batch) -> LocalIds:
        pending = self._ready.popleft()[1] if self._ready and self._ready[0][0] is batch else self._ids.start(batch)
        ids = self._ids.finish(pending)
        self._flow.sizes = ids.sizes
        return ids

    def _rows_by_place(self, sizes: list[int]) -> list[int]:
        """Samples that each member of the tower group wants: those of all its peers."""
        topology = self._topology
        return [
            sum(sizes[group * topology.tower_size + place] for group in range(topology.num_groups))
            for place in range(topology.tower_size)
        ]

    def _plan_counts(self, shares: list[RankShare], traffic: Traffic) -> tuple[BlockExchange | None, list[slice]]:
        """How the lengths of lists travel whose rows are spread over ranks, always exactly."""
        blocks, columns = [], []
        start = 0
        for name, dim in zip(self.field_names, self.field_dims, strict=True):
            sources = [
                (member, index)
                for member, share in enumerate(shares)
                for index, counted in enumerate(share.counts)
                if counted.field.name == name
            ]
            if sources:
                blocks.append(Block(1, tuple(sources)))
                columns.append(slice(start, start + dim))
            start += dim
        # All ranks of the group come to the same answer, because all know all shares.
        if not blocks:
            return None, []
        exact = Wire(WireFormat.FP32, 1, Rounding.NEAREST)
        hop = BlockExchange(
            self._topology.tower,
            columns=[len(share.counts) for share in shares],
            blocks=blocks,
            forward_wire=exact,
            backward_wire=exact,
            traffic=traffic,
            purpose="list lengths",
        )
        return hop, columns


def _blocks(name: str, shares: list[RankShare]) -> list[Block]:
    """Where the columns of one field come from, in the members of a group."""
    found = [(member, part) for member, share in enumerate(shares) for part in share.fields if part.field.name == name]
    assert found, f"the plan gives nobody feature {name!r}"
    by_column: dict[int, list[tuple[int, int]]] = {}
    widths: dict[int, int] = {}
    for member, part in found:
        by_column.setdefault(part.shard.first_column, []).append((member, part.column))
        widths[part.shard.first_column] = part.shard.num_columns
    return [Block(widths[first], tuple(by_column[first])) for first in sorted(by_column)]
