"""Shards: which part of which table is where, and what a rank's own tables and batches look like.

Every placement becomes the same thing on a rank: a few smaller tables, looked up by an ordinary `EmbeddingTables`.

    table_wise      the table                              looked up as on one device
    column_wise     D/k columns of all rows on each rank   the same rows everywhere, narrower results
    row_wise        a block of rows on each rank           every feature becomes a list of those of its rows that lie
                                                           here; partial sums add up to the pool
    table_row_wise  the same, over ranks of one host       partial sums add up inside the host (`host_sums.py`), and
                                                           only sums travel between hosts
    data_parallel   the table, on every rank               looked up for the rank's own samples; nothing of it is
                                                           exchanged but the gradients of touched rows

Placements: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning
recommendation models" (Neo and ZionEX), ISCA 2022, section 4.2.

The first row of every table is padding: it reads as zeros and is never updated. A block of rows that does not start
at row 0 gets a padding row of its own in front, so row r of the table is row r − first + 1 of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.placements import Part, Placement
from ziggurat.plan import Plan, TablePlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a table.

    Args:
        table: the table's name.
        placement: how the table is cut.
        rank: who holds this part.
        part: its box of the table.
        table_rows: rows of the whole table.
        table_columns: columns of the whole table.
    """

    table: str
    placement: Placement
    rank: int
    part: Part
    table_rows: int
    table_columns: int

    @property
    def first_row(self) -> int:
        """The first row of the part, in the table."""
        return self.part.first_row

    @property
    def num_rows(self) -> int:
        """The number of rows of the part."""
        return self.part.num_rows

    @property
    def first_column(self) -> int:
        """The first column of the part, in the table."""
        return self.part.first_column

    @property
    def num_columns(self) -> int:
        """The number of columns of the part."""
        return self.part.num_columns

    @property
    def rows(self) -> slice:
        """Its rows in the whole table."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def columns(self) -> slice:
        """Its columns in the whole table."""
        return slice(self.first_column, self.first_column + self.num_columns)

    @property
    def num_padding(self) -> int:
        """Padding rows in front of the block, on its rank: 1 unless the block starts with the table's own."""
        return 1 if self.first_row else 0

    @property
    def is_whole(self) -> bool:
        """True if the part is the table."""
        return (self.num_rows, self.num_columns) == (self.table_rows, self.table_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShare:
    """The columns that one rank looks up for one feature.

    Args:
        field: the feature, as the model knows it.
        shard: the part of its table.
        column: first column in the rank's lookup output.
    """

    field: SingleSpec | JaggedSpec
    shard: Shard
    column: int

    @property
    def is_single(self) -> bool:
        """True if the rank reads exactly one row a sample."""
        return isinstance(self.field, SingleSpec) and not self.shard.placement.cuts_rows

    @property
    def is_partial_mean(self) -> bool:
        """True if the rank sums a part of the rows of a mean, whose number only all ranks together know."""
        mean = isinstance(self.field, JaggedSpec) and self.field.pooling is Pooling.MEAN
        return mean and self.shard.placement.cuts_rows


@dataclass(frozen=True)
class TableGroup:
    """Parts of tables on one rank that are looked up and updated together.

    Args:
        shards: parts of tables.
        single: what is looked up with exactly one row a sample, in the order of the lookup output.
        lists: what is looked up with a list of rows a sample, after the single ones.
    """

    shards: tuple[Shard, ...]
    single: tuple[FieldShare, ...]
    lists: tuple[FieldShare, ...]

    @cached_property
    def inputs(self) -> InputSpec:
        """These tables and fields, for an `EmbeddingTables`."""
        tables = tuple(
            TableSpec(name=s.table, num_rows=s.num_rows + s.num_padding, embedding_dim=s.num_columns)
            for s in self.shards
        )
        single = tuple(SingleSpec(name=share.field.name, table=share.field.table) for share in self.single)
        return InputSpec(single=single, jagged=tuple(map(_list_spec, self.lists)), tables=tables)

    @cached_property
    def num_columns(self) -> int:
        """Columns of its lookup output."""
        return sum(share.shard.num_columns for share in (*self.single, *self.lists))


@dataclass(frozen=True)
class Lookup:
    """Table groups whose ids come in one message from each rank.

    Args:
        groups: in the order of the lookup output.
    """

    groups: tuple[TableGroup, ...]

    @cached_property
    def single(self) -> tuple[FieldShare, ...]:
        """The fields that need one row a sample."""
        return tuple(share for group in self.groups for share in group.single)

    @cached_property
    def lists(self) -> tuple[FieldShare, ...]:
        """The fields that need a list of rows a sample."""
        return tuple(share for group in self.groups for share in group.lists)

    @cached_property
    def fields(self) -> tuple[FieldShare, ...]:
        """Everything that is looked up, in the order of the lookup output."""
        return tuple(share for group in self.groups for share in (*group.single, *group.lists))


@dataclass(frozen=True)
class RankShare:
    """Everything that one rank holds.

    Args:
        rank: whose.
        rows: parts with all columns (table-wise, row-wise).
        columns: parts with some columns. They are kept apart, because row-wise optimizer state depends on all columns.
        copies: whole tables that every rank (of the tower group) has, looked up for the rank's own samples, and with
            towers for those of its peers.
    """

    rank: int
    rows: TableGroup
    columns: TableGroup
    copies: TableGroup

    @cached_property
    def groups(self) -> tuple[TableGroup, ...]:
        """The three groups of shards, one after the other."""
        return self.rows, self.columns, self.copies

    @cached_property
    def exchanged(self) -> Lookup:
        """The lookup for the samples of all ranks."""
        return Lookup((self.rows, self.columns))

    @cached_property
    def own(self) -> Lookup:
        """The lookup for samples of this rank and its peers."""
        return Lookup((self.copies,))

    @cached_property
    def fields(self) -> tuple[FieldShare, ...]:
        """The fields that are looked up for all ranks, in the order of the lookup output."""
        return self.exchanged.fields

    @cached_property
    def counts(self) -> tuple[FieldShare, ...]:
        """Fields whose list lengths travel too, to be added up (`FieldShare.is_partial_mean`)."""
        return tuple(share for share in self.fields if share.is_partial_mean)

    @cached_property
    def num_columns(self) -> int:
        """Columns of the lookup output."""
        return sum(share.shard.num_columns for share in self.fields)


def cut_tables(plan: Plan, inputs: InputSpec, *, dim: int) -> dict[str, tuple[Shard, ...]]:
    """The parts of every table, in the order of their rows or columns.

    Args:
        plan: placements.
        inputs: tables and their sizes.
        dim: columns of tables that name no number of their own.

    Raises:
        PlanError: a table cannot be cut into that many parts.
    """
    placed = {entry.table: entry for entry in plan.tables}
    return {table.name: _cut(table, placed[table.name], columns=table.embedding_dim or dim) for table in inputs.tables}


def share_of(rank: int, *, inputs: InputSpec, shards: dict[str, tuple[Shard, ...]]) -> RankShare:
    """Return the share that a rank holds and looks up; the same on every rank that asks."""
    # A rank has one part of a table at most.
    mine = {name: shard for name, parts in shards.items() for shard in parts if shard.rank == rank}
    columns = [shard for shard in mine.values() if shard.placement.cuts_columns]
    copies = [shard for shard in mine.values() if shard.placement.is_copied]
    rows = [shard for shard in mine.values() if shard not in columns and shard not in copies]
    by_rows = _table_group(rows, inputs, first_column=0)
    # One output for both, columns behind rows; copies have an output of their own.
    by_columns = _table_group(columns, inputs, first_column=by_rows.num_columns)
    return RankShare(rank, rows=by_rows, columns=by_columns, copies=_table_group(copies, inputs, first_column=0))


def _table_group(shards: list[Shard], inputs: InputSpec, *, first_column: int) -> TableGroup:
    """Shards with everything that looks them up, columns one after the other."""
    mine = {shard.table: shard for shard in shards}
    # Column 0 for now: places are known once single fields and lists are apart.
    shares = [FieldShare(field=f, shard=mine[f.table], column=0) for f in inputs.fields if f.table in mine]
    placed: tuple[list[FieldShare], list[FieldShare]] = ([], [])
    column = first_column
    # Single features first: columns follow the order in which a `TableGroup` lists them.
    for kind, is_single in zip(placed, (True, False), strict=True):
        for share in shares:
            if share.is_single is is_single:
                kind.append(replace(share, column=column))
                column += share.shard.num_columns
    return TableGroup(tuple(shards), tuple(placed[0]), tuple(placed[1]))


def _list_spec(share: FieldShare) -> JaggedSpec:
    # Parts of rows are added up, those of a mean as well: only all ranks together know what to divide by.
    pooling = Pooling.SUM
    if isinstance(share.field, JaggedSpec) and not share.shard.placement.cuts_rows:
        pooling = share.field.pooling
    return JaggedSpec(name=share.field.name, table=share.field.table, pooling=pooling)


def _cut(table: TableSpec, entry: TablePlacement, *, columns: int) -> tuple[Shard, ...]:
    try:
        parts = entry.placement.parts(num_rows=table.num_rows, num_columns=columns, num_parts=len(entry.ranks))
    except PlanError as error:
        where = f"plan, table {table.name!r}, {entry.placement}"
        # The placement knows no table's name, and a user needs it; `from None` keeps one message.
        raise PlanError(expected=error.expected, found=error.found, where=where, ways_out=error.ways_out) from None
    _check_parts(parts, table, entry, columns=columns)
    return tuple(
        Shard(
            table=table.name,
            placement=entry.placement,
            rank=rank,
            part=part,
            table_rows=table.num_rows,
            table_columns=columns,
        )
        for rank, part in zip(entry.ranks, parts, strict=True)
    )


def _check_parts(parts: Sequence[Part], table: TableSpec, entry: TablePlacement, *, columns: int) -> None:
    """Refuse parts that do not make the table: a placement may come from outside the package."""
    placement = entry.placement
    sizes = {"num_rows": table.num_rows, "num_columns": columns, "num_parts": len(entry.ranks)}
    expected = placement.wrong_parts(parts, **sizes)
    if expected:
        raise PlanError(
            expected=expected,
            found=", ".join(
                f"rows {part.first_row}+{part.num_rows}, columns {part.first_column}+{part.num_columns}"
                for part in parts
            ),
            where=f"placement {placement}, table {table.name!r}, {len(entry.ranks)} ranks",
            ways_out=(
                f"mend {type(placement).__name__}.parts; cuts_rows and cuts_columns say which of these it has to be",
                "place the table row_wise",
            ),
        )
