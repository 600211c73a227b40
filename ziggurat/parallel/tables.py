"""ShardedTables: the part of a model's tables that one rank holds, looked up for the samples of all ranks.

The local tables are ordinary `EmbeddingTables` (every kernel, exact updates); what a placement changes is described in
`shards.py`. Their weights are those that one device would draw, and their names in checkpoints those of one device:
a table that is cut is saved and loaded as parts of the whole one (`table_shard.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.storage import initialise
from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.parallel.ids import LocalIds
from ziggurat.parallel.shards import RankShare, Shard, cut_tables, share_of
from ziggurat.parallel.table_shard import TableShard, table_shard
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan


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
        local: this rank's tables, one for each of `RankShare.groups`: those with all columns, those with some, copies.
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
            for tables, batch, group in zip(self.local[:2], ids.batches[:2], self.mine.exchanged.groups, strict=True)
            if group.shards or group is self.mine.rows  # without tables an empty result, tied into the graph
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def lookup_copies(self, ids: LocalIds, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B L"] | None:
        """Columns of the tables that every rank has a copy of, for samples of the rank and its peers; None: no such."""
        return self.local[2](ids.batches[2], dtype=dtype) if self.mine.copies.shards else None

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """Vectors of rows of this rank's part of a table (rows of the part, padding in front counted)."""
        shard = self._shard(table)
        assert shard is not None, f"this rank has no part of table {table!r}"
        return self._group(shard).vectors(table, rows_N, dtype=dtype)

    def list_lengths(self, ids: LocalIds) -> Float[Tensor, "R counts"]:
        """How many rows of each list of `RankShare.counts` this rank has summed."""
        batch, group = ids.batches[0], self.mine.rows
        lengths_JR = batch.jagged.offsets.diff().view(len(group.lists), batch.batch_size)
        wanted = [index for index, share in enumerate(group.lists) if share.is_partial_mean]
        return lengths_JR[wanted].t().float()

    def load_whole(self, name: str, weight: Float[Tensor, "rows D"]) -> None:
        """Copy this rank's part of a whole table."""
        shard = self._shard(name)
        if shard is not None:
            with torch.no_grad():
                self.part(shard).copy_(weight[shard.rows, shard.columns])

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
                f"{shard.table} ({shard.placement.value}, {shard.num_rows} × {shard.num_columns})"
                for group in self.mine.groups
                for shard in group.shards
            ],
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
        return self.local[next(i for i, group in enumerate(self.mine.groups) if shard in group.shards)]

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
