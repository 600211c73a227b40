"""PlanningProblem: what has to be placed, on what, and what an answer looks like. Plain data, no tensors, no ranks.

A *table* may be cut in several ways; each way gives *shards*, and a shard lives on one device:

    table_wise       rows ████████   one shard, one device
    column_wise      rows ██|██|██   shards with some of the columns and all of the rows, on different devices
    row_wise         rows ████████   shards with some of the rows, on all devices that the table may go to
                          ────────   (table_row_wise: on the devices of one host)
    data_parallel    a copy on every device that the table may go to

A *cost model* (`cost_model.py`) prices the shards of a device; the search (`search.py`) looks for the assignment whose
most expensive device is cheapest, among those that fit:

    Σ over shards on d of (rows · (bytes of a row in its format + optimizer bytes))  +  reserve  ≤  memory of d

Placements follow Mudigere et al., *Software-Hardware Co-design* (arXiv 2104.05158, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ziggurat.errors import PlanError
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement, Towers


@dataclass(frozen=True, kw_only=True)
class TableProfile:
    """The properties that decide the cost and the memory of a table.

    Args:
        name: of the table.
        num_rows: rows.
        dim: columns.
        pooling_factor: mean number of rows that one sample looks up, over all features of the table.
        reuse: share of the distinct rows of a batch that occur 1, 2, 3 to 4, 5 to 8, … times; () where unknown.
        num_features: features that look the table up, each of which gets `dim` columns of the result.
        row_format: what its rows are kept as; rows of codes are not cut by columns.
        keeps_rows_whole: its optimizer needs all columns of a row in one place.
        optimizer_bytes_per_row: state for each row of each shard (4 for row-wise Adagrad in FP32).
        optimizer_bytes_per_element: state for each weight (8 for Adam in FP32).
    """

    name: str
    num_rows: int
    dim: int
    pooling_factor: float = 1.0
    reuse: tuple[float, ...] = ()
    num_features: int = 1
    row_format: RowFormat = PLAIN
    keeps_rows_whole: bool = False
    optimizer_bytes_per_row: int = 0
    optimizer_bytes_per_element: int = 0

    def bytes_of(self, *, num_rows: int, dim: int) -> int:
        """Weights and optimizer state of a shard of this table, lower halves of split numbers with the state."""
        return num_rows * (self.row_format.row_bytes(dim) + self.state_bytes_per_row(dim))

    def state_bytes_per_row(self, dim: int) -> int:
        """Count the bytes beside so many columns of a row: the optimizer's, and the lower halves of split numbers."""
        beside = self.row_format.beside_bytes(dim)
        return self.optimizer_bytes_per_row + dim * self.optimizer_bytes_per_element + beside

    def shard(self, placement: Placement, *, num_parts: int) -> ShardProfile:
        """Return the largest of the parts that a placement cuts this table into."""
        rows, dim = placement.largest_part(num_rows=self.num_rows, num_columns=self.dim, num_parts=num_parts)
        return ShardProfile(table=self, placement=placement, num_rows=rows, dim=dim, num_parts=num_parts)


@dataclass(frozen=True, kw_only=True)
class ShardProfile:
    """One part of one table, wherever it goes.

    Args:
        table: the whole table.
        placement: how the table is cut.
        num_rows: rows of this part.
        dim: columns of this part.
        num_parts: parts that the table is cut into (1 for table_wise; devices for data_parallel).
    """

    table: TableProfile
    placement: Placement
    num_rows: int
    dim: int
    num_parts: int = 1

    @property
    def memory_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.table.bytes_of(num_rows=self.num_rows, dim=self.dim)

    @property
    def pooling_factor(self) -> float:
        """Mean rows that this shard reads for one sample of the global batch."""
        return self.table.pooling_factor * self.placement.lookups_share(self.num_parts)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The place of one table: the answer for one table.

    Args:
        placement: how it is cut.
        devices: of its shards, in the order of the columns or rows; all different.
    """

    placement: Placement
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """Tables, devices, and what is allowed.

    Args:
        tables: with different names.
        num_devices: P.
        memory_bytes: of each device; one number stands for all.
        reserve_bytes: of each device, kept for the dense model, activations and exchange buffers.
        allowed: devices that each table may go to, None: all; () for no restriction at all. Towers pin their tables
            to the devices of their group.
        devices_per_host: consecutive devices that form a host; 0: all of them.
        placements: ways to cut that may be used.
        column_multiple: columns of a shard are a multiple of this.
        max_parts: most parts of a table that is cut by columns; 0: as many as columns and devices allow.
        has_limit: what is left beside the reserve is a limit that the user gave, `--memory-limit`.
    """

    tables: tuple[TableProfile, ...]
    num_devices: int
    memory_bytes: tuple[int, ...]
    reserve_bytes: int = 0
    allowed: tuple[tuple[int, ...] | None, ...] = ()
    devices_per_host: int = 0
    placements: tuple[Placement, ...] = tuple(each for each in Placement if each.is_searched)
    column_multiple: int = 4
    max_parts: int = 0
    has_limit: bool = False

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        # Counting is quadratic in the tables: only where a name is twice.
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        _expect(not twice and bool(names), "tables with different names", f"twice: {', '.join(twice)}", "tables")
        _expect(self.num_devices >= 1, "one device or more", f"{self.num_devices}", "num_devices")
        found = f"{len(self.memory_bytes)} numbers for {self.num_devices} devices"
        _expect(len(self.memory_bytes) in (1, self.num_devices), "one number, or one a device", found, "memory_bytes")
        found = f"{len(self.allowed)} entries for {len(self.tables)} tables"
        _expect(len(self.allowed) in (0, len(self.tables)), "nothing, or one entry a table", found, "allowed")
        for table, devices in zip(self.tables, self.allowed, strict=False):  # () allows everything
            fits = devices is None or (bool(devices) and all(0 <= d < self.num_devices for d in devices))
            expected = f"devices from 0 to {self.num_devices - 1}"
            _expect(fits, expected, f"{devices}", f"allowed, table {table.name!r}")
        for table in self.tables:
            fits = table.num_rows >= 1 and table.dim >= 1
            _expect(fits, "rows and columns", f"{table.num_rows} × {table.dim}", f"table {table.name!r}")

    @cached_property
    def room_bytes(self) -> tuple[int, ...]:
        """The bytes of each device for tables and their optimizer state: memory less the reserve."""
        memory = self.memory_bytes * (self.num_devices if len(self.memory_bytes) == 1 else 1)
        return tuple(bytes_ - self.reserve_bytes for bytes_ in memory)

    def devices_of(self, table: int) -> tuple[int, ...]:
        """Devices that a table may go to, sorted."""
        allowed = self.allowed[table] if self.allowed else None
        return tuple(range(self.num_devices)) if allowed is None else tuple(sorted(set(allowed)))

    def column_parts(self, table: int) -> tuple[int, ...]:
        """Numbers of equal parts that a table may be cut into by columns: 1, 2, 4, …; (1,) if it may not be cut.

        Rows of codes are not: their two ends belong to all columns. Nor are rows whose optimizer needs them whole.
        """
        most = len(self.devices_of(table))
        most = min(most, self.max_parts) if self.max_parts else most
        profile = self.tables[table]
        parts = [1]
        dim = profile.dim
        may_cut = any(each.cuts_columns for each in self.placements)
        if may_cut and not profile.row_format.keeps_rows_whole and not profile.keeps_rows_whole:
            while parts[-1] * 2 <= most and dim % (parts[-1] * 2 * self.column_multiple) == 0:
                parts.append(parts[-1] * 2)
        return tuple(parts)

    def spread_options(self, table: int) -> tuple[Assignment, ...]:
        """Return the ways to place a table that fix its devices: row_wise, table_row_wise a host, data_parallel."""
        devices = self.devices_of(table)
        devices_per_host = self.devices_per_host or self.num_devices
        options = []
        for placement in self.placements:
            sets = placement.device_sets(devices, devices_per_host=devices_per_host)
            options += [Assignment(placement=placement, devices=each) for each in sets]
        return tuple(options)

    def shards(self, table: int, assignment: Assignment) -> tuple[ShardProfile, ...]:
        """The shards of an assignment, in the order of its devices."""
        parts = len(assignment.devices)
        # The largest part stands for each, so that memory is never counted too low.
        return (self.tables[table].shard(assignment.placement, num_parts=parts),) * parts

    def to_plan(self, assignments: Sequence[Assignment], *, towers: Towers | None = None, tower_size: int = 0) -> Plan:
        """The plan that `parallel/` executes; one assignment a table, in the order of the tables."""
        entries = tuple(
            TablePlacement(table=table.name, placement=each.placement, ranks=each.devices)
            for table, each in zip(self.tables, assignments, strict=True)
        )
        return Plan(world_size=self.num_devices, tables=entries, towers=towers, tower_size=tower_size)


def _expect(fits: bool, expected: str, found: str, where: str) -> None:
    if not fits:
        raise PlanError(
            expected=expected, found=found, where=f"planning problem, {where}", ways_out="correct the description"
        )
