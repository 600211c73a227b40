"""SearchSpace: a planning problem as arrays, so that a search can price thousands of changes in one call.

Every way to cut a table gives one *kind* of shard (its parts are alike). Kinds are numbered through all tables; their
encodings by the cost model and their bytes are computed once:

    table 0:  whole │ halves │ quarters │ row_wise over 8 │ …          kind   0   1   2   3
    table 1:  whole │ halves │ …                                       kind   4   5

so that a change of a plan is a few (device, kind, +1 or −1), and its effect on the state of a device the difference of
rows of one matrix (S, H). Cost: one call of `CostModel.encode` for all kinds, some ten a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float, Float32, Int

from ziggurat.placements import by_columns
from ziggurat.planning.cost_model import CostModel, device_costs
from ziggurat.planning.problem import Assignment, PlanningProblem, ShardProfile


class ColumnParts(StrEnum):
    """The places where the parts of a table that is cut by columns may be."""

    DISTINCT = "distinct"  # equal parts on different devices: what `parallel/` executes
    ANYWHERE = "anywhere"  # halves of halves, several on one device: the rule of NeuroShard's benchmark


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard with its place: what plans consist of where a table's parts may be anywhere.

    Args:
        table: index of the table.
        level: columns have been halved so often.
        device: where it is.
    """

    table: int
    level: int
    device: int


class SearchSpace:
    """Kinds of shards of a problem, encoded.

    Args:
        problem: what to place.
        cost_model: prices.
        parts: rule for tables cut by columns.

    Attributes:
        encodings: (S, H) of each kind.
        bytes: (S,) of each kind.
        column_kind: (T, L) kind of table t after l halvings; −1 if it may not be cut so often.
        most_levels: (T,) most halvings.
        allowed: (T, P) devices that each table may go to.
        options: per table, placements that fix their devices, each with its kind.
        room: (P,) bytes.
    """

    def __init__(
        self, problem: PlanningProblem, cost_model: CostModel, *, parts: ColumnParts = ColumnParts.DISTINCT
    ) -> None:
        self.problem = problem
        self.cost_model = cost_model
        self.parts = parts
        num_tables = len(problem.tables)
        shards: list[ShardProfile] = []
        levels = [self._levels(table) for table in range(num_tables)]
        self.most_levels = np.array(levels)
        self.column_kind = np.full((num_tables, max(levels) + 1), -1)
        self.options: list[list[tuple[Assignment, int]]] = []
        for table, most in enumerate(levels):
            for level in range(most + 1):
                self.column_kind[table, level] = len(shards)
                shards.append(self._column_shard(table, level))
            mine = []
            for option in problem.spread_options(table):
                mine.append((option, len(shards)))
                shards.append(problem.shards(table, option)[0])
            self.options.append(mine)
        self.encodings: Float32[np.ndarray, "S H"] = np.ascontiguousarray(cost_model.encode(shards), dtype=np.float32)
        self.bytes: Float[np.ndarray, " S"] = np.array([shard.memory_bytes for shard in shards], dtype=np.float64)
        self.allowed = np.zeros((num_tables, problem.num_devices), dtype=bool)
        for table in range(num_tables):
            self.allowed[table, list(problem.devices_of(table))] = True
        self.room = np.array(problem.room_bytes, dtype=np.float64)
        self.whole_ms = self._single_costs()

    @property
    def num_tables(self) -> int:
        """The number of tables T."""
        return len(self.problem.tables)

    @property
    def num_devices(self) -> int:
        """The number of devices P."""
        return self.problem.num_devices

    def states(self, assignments: Sequence[Assignment]) -> tuple[Float32[np.ndarray, "P H"], Float[np.ndarray, " P"]]:
        """State and bytes of every device."""
        kinds = []
        devices = []
        for table, each in enumerate(assignments):
            kinds += [self.kind_of(table, each)] * len(each.devices)
            devices += each.devices
        return self.sum_kinds(np.array(kinds), np.array(devices))

    def sum_kinds(
        self, kinds: Int[np.ndarray, " N"], devices: Int[np.ndarray, " N"]
    ) -> tuple[Float32[np.ndarray, "P H"], Float[np.ndarray, " P"]]:
        """State and bytes of every device that has these kinds."""
        # Summed in FP64, so that the order of the shards does not show in FP32.
        states = np.zeros((self.num_devices, self.encodings.shape[1]))
        held = np.zeros(self.num_devices)
        np.add.at(states, devices, self.encodings[kinds])
        np.add.at(held, devices, self.bytes[kinds])
        return states.astype(np.float32), held

    def kind_of(self, table: int, assignment: Assignment) -> int:
        """The kind of an assignment's shards."""
        if assignment.placement.is_searched:
            return int(self.column_kind[table, len(assignment.devices).bit_length() - 1])
        return next(kind for option, kind in self.options[table] if option == assignment)

    def price(self, assignments: Sequence[Assignment]) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
        """Milliseconds and bytes of every device."""
        states, held = self.states(assignments)
        return device_costs(self.cost_model, states[None])[0].astype(np.float64), held

    def overflow(self, held: Float[np.ndarray, "... P"]) -> Float[np.ndarray, "..."]:
        """Bytes that do not fit, over all devices."""
        return np.maximum(held - self.room, 0.0).sum(axis=-1)

    def _levels(self, table: int) -> int:
        problem = self.problem
        if self.parts is ColumnParts.DISTINCT:
            return len(problem.column_parts(table)) - 1
        level = 0
        dim = problem.tables[table].dim
        if any(each.cuts_columns for each in problem.placements):
            while dim % (2 ** (level + 1) * problem.column_multiple) == 0:
                level += 1
        return level

    def _column_shard(self, table: int, level: int) -> ShardProfile:
        num_parts = 1 << level
        return self.problem.tables[table].shard(by_columns(num_parts), num_parts=num_parts)

    def _single_costs(self) -> Float[np.ndarray, " T"]:
        """Return the cost of each whole table alone on the first device: the order in which greedy rules take them."""
        states = np.zeros((self.num_tables, self.num_devices, self.encodings.shape[1]), dtype=np.float32)
        states[:, 0] = self.encodings[self.column_kind[:, 0]]
        # In parts: for all tables at once, the states are tables × devices × H numbers.
        return np.concatenate(
            [device_costs(self.cost_model, part)[:, 0] for part in np.array_split(states, 1 + len(states) // 256)]
        )
