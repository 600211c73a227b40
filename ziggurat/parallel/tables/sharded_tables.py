"""ShardedTables: the part of a model's tables that one rank holds, looked up for the samples of all ranks.

The local tables are ordinary `EmbeddingTables` (every kernel, exact updates); what a placement changes is described in
`shards.py`. Their weights are those that one device would draw, and their names in checkpoints those of one device:
a table that is cut is saved and loaded as parts of the whole one (`table_shard.py`). A rank draws the rows that it
holds and no others (`ziggurat/embeddings/initial_rows.py`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.faults import SentRows
from ziggurat.embeddings.growing.new_rows import NewRows, first_vectors
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage import LowPrecisionStorage, MakeStorage, MemoryStorage, StoredRows, cache_of, format_of
from ziggurat.embeddings.storage.cached import CachedStorage
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.embeddings.storage.part import reader
from ziggurat.embeddings.weights import TableWeights
from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.row_formats import RowOrigin
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.tables.ids import LocalIds
from ziggurat.parallel.tables.room import check_room_of_ranks
from ziggurat.parallel.tables.shards import RankShare, Shard, cut_tables, share_of
from ziggurat.parallel.tables.table_shard import TableShard, table_shard
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
        make_storage: makes what holds the rows of one dim.
        device: where the tables are made.

    Raises:
        PlanError: a table has dense gradients, or cannot be cut as the plan says (rows of codes not by columns).
        ConfigError: the parts of a machine's ranks are larger than its memory; on every rank.

    Attributes:
        device: where tables are, or would be if this rank had any.
        shares: what every rank looks up, by rank.
        mine: what this rank looks up.
        local: this rank's tables, one for each of `RankShare.groups`: those with all columns, those with some, copies.
        note_rows: hears of rows that `vectors` reads: table group, storage, rows of the storage.
        check_settled: raises while an update is not complete, before weights or state are read as a whole.
    """

    note_rows: Callable[[int, int, Tensor], None] | None = None
    check_settled: Callable[[], None] | None = None

    def __init__(
        self,
        inputs: InputSpec,
        config: EmbeddingConfig,
        *,
        plan: Plan,
        topology: Topology,
        seed: int | None,
        make_storage: MakeStorage = MemoryStorage,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.optimizer.is_dense:
            raise PlanError(
                expected="a table optimizer that updates touched rows",
                found=f"{config.optimizer.value!r}, which has a gradient for every row of every table",
                where="parallel embeddings",
                ways_out=(
                    "--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)",
                    "train on one device, without torchrun: gradients of all rows are for small tables",
                ),
            )
        self.inputs = inputs
        self.config = config
        self.device = torch.device(device)
        self.shards = cut_tables(plan, inputs, dim=config.dim)
        self.shares = tuple(share_of(rank, inputs=inputs, shards=self.shards) for rank in range(topology.world_size))
        self.mine: RankShare = self.shares[topology.rank]
        _check_cuts(self.shards, config, make_storage)
        check_room_of_ranks(
            self.shares, config=config, topology=topology, device=self.device, make_storage=make_storage
        )
        # Not a ModuleList: names of tables in checkpoints do not tell where a table is.
        self.local = tuple(
            EmbeddingTables(group.inputs, config, seed=None, make_storage=make_storage).to(device)
            for group in self.mine.groups
        )
        self._topology = topology
        for tables, group in zip(self.local, self.mine.groups, strict=True):
            tables.tables.faults = _rows_sent_to(tables.tables, device=self.device)
            tables.tables.name_rows({shard.table: _origin(shard) for shard in group.shards})
            for shard in group.shards:
                # A part from the middle of a table has a padding row of its own in front, which no draw and no load
                # writes.
                rows = tables.tables.rows(shard.table)
                rows.write(PADDING_ROW, torch.zeros(1, *rows.shape[1:]))
        if seed is not None:
            self.draw(seed)

    def view(self, inputs: InputSpec) -> ShardedTables:
        """The same part of the tables, looked up for other fields."""
        other = copy.copy(self)
        ranks = range(self._topology.world_size)
        other.inputs = inputs
        other.shares = tuple(share_of(rank, inputs=inputs, shards=self.shards) for rank in ranks)
        other.mine = other.shares[self._topology.rank]
        other.local = tuple(
            tables.view(group.inputs) for tables, group in zip(self.local, other.mine.groups, strict=True)
        )
        return other

    @property
    def is_open(self) -> bool:
        """True until the tables of this rank have been drawn or loaded."""
        return any(tables.tables.is_open for tables in self.local)

    @property
    def caches(self) -> list[CachedStorage]:
        """The storages of this rank that keep hot rows in a cache."""
        return [cache for tables in self.local for cache in tables.tables.caches]

    @property
    def on_disk(self) -> list[DiskStorage]:
        """The storages of this rank whose rows lie on a disk."""
        return [storage for tables in self.local for storage in tables.tables.on_disk]

    @property
    def in_host(self) -> list[HostStorage]:
        """The storages of this rank whose rows lie in the memory of the host."""
        return [storage for tables in self.local for storage in tables.tables.in_host]

    def about_to_load(self) -> None:
        """Tell storages that all rows are about to be written."""
        for tables in self.local:
            tables.tables.about_to_load()

    def mark_filled(self) -> None:
        """The tables have been drawn or loaded: lookups may begin."""
        for tables in self.local:
            tables.tables.mark_filled()

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw the rows and columns of this rank: the numbers that one device would have there."""
        self.about_to_load()
        for shard in self._all_shards():
            initial = InitialRows(
                table=shard.table,
                shape=(shard.table_rows, shard.table_columns),
                config=self.config,
                seed=seed,
                first_row=shard.first_row,
                first_column=shard.first_column,
                num_columns=shard.num_columns,
            )
            self._rows(shard).draw(initial)
        self.mark_filled()

    @torch.no_grad()
    def share_copies(self) -> None:
        """Give all ranks the copied tables of the first one; collective.

        Each has drawn its own: processors with unlike instructions draw the same numbers to other last bits, and copies
        that begin unlike stay so. Where all are equal, 32 bytes a rank travel.
        """
        group = self._topology.tower.process_group
        # Copies are the same tables on every rank of the group, so all or none return here.
        copies = self.mine.copies.shards
        if group is None or not copies:
            return
        # NCCL sends what is on a GPU, and nothing else.
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        content = hashlib.sha256()
        for rows in map(self._rows, copies):
            # Chunk by chunk: a table may be larger than what the host has free.
            for first, count in rows.chunks():
                content.update(rows.read(first, count).cpu().contiguous().view(torch.uint8).numpy().tobytes())
        mine = torch.frombuffer(bytearray(content.digest()), dtype=torch.uint8).to(device)
        digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        with communicating("comparison of copied tables"):
            dist.all_gather(digests, mine, group=group)
        if all(torch.equal(each, digests[0]) for each in digests):
            return
        for rows in map(self._rows, copies):
            for first, count in rows.chunks():
                values = rows.read(first, count)
                sent = values.to(device).contiguous()
                with communicating("first rows of copied tables"):
                    dist.broadcast(sent, group=group, group_src=0)
                # Written on the sender as well: rounded storages then hold the same codes everywhere.
                rows.write(first, sent.to(values.device))

    def renew(self, new: NewRows, *, seed: int) -> None:
        """Draw those rows of new ids that are on this rank; see `TableWeights.renew`."""
        for shard in self._all_shards():
            if shard.table != new.table:
                continue
            # Other ranks hold the others, and draw them.
            here_N = (new.rows >= shard.first_row) & (new.rows < shard.first_row + shard.num_rows)
            here = NewRows(table=new.table, ids=new.ids[here_N.numpy()], rows=new.rows[here_N])
            shape = (shard.table_rows, shard.table_columns)
            values_ND = first_vectors(here, shape=shape, config=self.config, seed=seed)[:, shard.columns]
            # From rows of the whole table to those of the part, behind its padding in front.
            rows_N = here.rows - shard.first_row + shard.num_padding
            self._group(shard).tables.replace_rows(new.table, rows_N, values_ND)

    def lookup(self, ids: LocalIds, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "R C"]:
        """This rank's columns for the samples of all ranks, in peer order."""
        pooled = [
            tables(batch, dtype=dtype)
            # The third group, copies, is looked up in `lookup_copies`.
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
        tables = self._group(shard)
        if self.note_rows is not None:
            place = tables.tables.places[table]
            self.note_rows(self.local.index(tables), place.storage, rows_N + place.first_row)
        return tables.vectors(table, rows_N, dtype=dtype)

    def list_lengths(self, ids: LocalIds) -> Float[Tensor, "R counts"]:
        """Count the rows of each list of `RankShare.counts` that this rank has summed."""
        batch = ids.batches[0]
        group = self.mine.rows
        lengths_JR = batch.jagged.offsets.diff().view(len(group.lists), batch.batch_size)
        wanted = [index for index, share in enumerate(group.lists) if share.is_partial_mean]
        none = lengths_JR.new_zeros(batch.batch_size, 0)
        return (torch.stack([lengths_JR[index] for index in wanted], dim=1) if wanted else none).float()

    @torch.no_grad()
    def load_from(self, whole: TableWeights) -> None:
        """Copy this rank's parts of whole tables."""
        self.about_to_load()
        for shard in self._all_shards():
            self._load(shard, whole.rows(shard.table).read)
        self.mark_filled()

    def part(self, shard: Shard) -> Float[Tensor, "rows columns"]:
        """The weights of one of this rank's shards, without padding in front; shares memory if it is in memory."""
        rows = self._rows(shard)
        return rows.read(0, rows.num_rows)

    def state_shard(self, shard: Shard, rows: StoredRows) -> TableShard:
        """Optimizer state of a shard (one number a row, or one a weight) as a part of the table's."""
        return self._table_shard(shard, rows.without(shard.num_padding))

    def report(self) -> dict[str, object]:
        """Return the entries of the start-up report on this rank's tables."""
        return {
            "rank": self._topology.rank,
            "shards": [
                f"{shard.table} ({shard.placement}, {shard.num_rows} × {shard.num_columns})"
                for group in self.mine.groups
                for shard in group.shards
            ],
            "groups": [tables.report() for tables in self.local if tables.inputs.tables],
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedTables:
        super()._apply(fn, recurse)
        # Not registered as submodules, so torch does not move them.
        for tables in self.local:
            tables._apply(fn, recurse)
        return self

    def _shard(self, name: str) -> Shard | None:
        return next((shard for shard in self.shards[name] if shard.rank == self._topology.rank), None)

    def _group(self, shard: Shard) -> EmbeddingTables:
        return self.local[next(i for i, group in enumerate(self.mine.groups) if shard in group.shards)]

    def _all_shards(self) -> Iterator[Shard]:
        for group in self.mine.groups:
            yield from group.shards

    def _rows(self, shard: Shard) -> StoredRows:
        """The rows of a shard, without padding in front."""
        return self._group(shard).tables.rows(shard.table).without(shard.num_padding)

    def _load(self, shard: Shard, read: Callable[[int, int], Tensor]) -> None:
        """Copy a shard out of a whole table, chunk by chunk."""
        rows = self._rows(shard)
        for first, count in rows.chunks():
            rows.write(first, read(shard.first_row + first, count)[:, shard.columns])

    def _table_shard(self, shard: Shard, rows: StoredRows) -> TableShard:
        dims = len(rows.shape)
        return table_shard(
            rows,
            offsets=(shard.first_row, shard.first_column)[:dims],
            shape=(shard.table_rows, shard.table_columns)[:dims],
        )

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        if self.check_settled is not None:
            self.check_settled()
        for shard in self._all_shards():
            rows = self._rows(shard)
            # One rank that holds a whole table saves what one device saves.
            whole = rows.tensor() if shard.is_whole and self._topology.world_size == 1 else None
            destination[f"{prefix}{shard.table}.weight"] = self._table_shard(shard, rows) if whole is None else whole

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take whole tables, as one device saves them, or this rank's own parts."""
        # Callers may hand over lists that have entries of other modules.
        num_wrong = len(missing_keys) + len(error_msgs)
        self.about_to_load()
        for shard in self._all_shards():
            key = f"{prefix}{shard.table}.weight"
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
            elif tuple(given.shape) != (shard.table_rows, shard.table_columns):
                error_msgs.append(f"table {shard.table!r}: expected the whole table, found {tuple(given.shape)}")
            elif isinstance(given, TableShard):
                rows = self._rows(shard)
                # Shards come in the cut of this rank already; whole tables are cut in `_load`.
                for first, count in rows.chunks():
                    rows.write(first, given.rows.read(first, count))
            else:
                self._load(shard, reader(given))
        if len(missing_keys) + len(error_msgs) == num_wrong:
            self.mark_filled()


def _origin(shard: Shard) -> RowOrigin:
    """Return the row and column of the whole table that a rank's part begins with, padding in front counted."""
    row = shard.first_row - shard.num_padding
    return RowOrigin(table=shard.table, first_row=0, num_rows=0, table_row=row, table_column=shard.first_column)


def _rows_sent_to(tables: TableWeights, *, device: torch.device) -> SentRows | None:
    """Return the row check that spares a GPU a second look; None where storage checks itself which rows it holds."""
    found = [tables.storage(index) for index in range(tables.num_storages)]
    holds_all = all(isinstance(storage, MemoryStorage | LowPrecisionStorage) for storage in found)
    return SentRows() if device.type == "cuda" and holds_all else None


def _check_cuts(shards: Mapping[str, Sequence[Shard]], config: EmbeddingConfig, make_storage: MakeStorage) -> None:
    """Refuse to cut columns of rows whose format, cache or optimizer needs them whole."""
    for name, parts in shards.items():
        shard = parts[0]
        if shard.placement.cuts_columns and config.optimizer.keeps_rows_whole:
            raise PlanError(
                expected=f"a placement that keeps rows whole, for table optimizer {config.optimizer}",
                found=shard.placement.name,
                where=f"plan, table {name!r}",
                ways_out=(
                    "place the table row_wise or table_wise",
                    "--model.embedding.optimizer rowwise_adagrad, whose parts add up what they keep of a row",
                ),
            )
        share = cache_of(make_storage, table=name, dim=shard.table_columns).share
        if shard.placement.cuts_columns and share:
            raise PlanError(
                expected="a placement that keeps rows whole, for tables with a cache of hot rows",
                found=f"{shard.placement}, --tables.cache {share:g}",
                where=f"plan, table {name!r}",
                ways_out=(
                    "place the table row_wise or table_wise",
                    "leave --tables.cache out",
                ),
            )
        row_format = format_of(make_storage, table=name, dim=shard.table_columns)
        if shard.placement.cuts_columns and row_format is not None and row_format.keeps_rows_whole:
            raise PlanError(
                expected=f"a placement that keeps rows whole, for rows in {row_format.value}",
                found=shard.placement.name,
                where=f"plan, table {name!r}",
                ways_out=(
                    "place the table row_wise or table_wise",
                    f"--tables.by-table {name}=bf16 (or split_bf16), whose numbers stand alone",
                ),
            )


def tables_of(model: nn.Module) -> Iterator[TableWeights | ShardedTables]:
    """All tables of a model, on one device or spread: to be drawn (`draw`), or said to be loaded (`mark_filled`)."""
    for module in model.modules():
        if isinstance(module, TableWeights | ShardedTables):
            yield module
