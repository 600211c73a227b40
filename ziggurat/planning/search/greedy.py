"""Greedy rules: one table after the other, to where it looks best now. Fast, and what everybody compares with.

    size, dim, lookup, size_lookup     the largest first, each to the device with the least so far, of bytes, columns,
                                       columns · rows read a sample, the same · log10 rows
    additive                           the same by the predicted cost of the table alone (as TorchRec's planner adds up)
    fused                              each to the device whose *predicted cost of all its tables* is then least
    grid                               `fused`, for 11 limits on the columns of a device, 1.0 to 1.5 times the mean:
                                       the cheapest plan (NeuroShard's inner search, arXiv 2305.01868)

All go around full devices. `starting_plan` never fails: what does not fit is cut into columns or rows, and what still
does not fit goes where most room is, for the search to repair. Cost: `fused` M · P evaluations of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from jaxtyping import Float

from ziggurat.placements import by_columns
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.space import ColumnParts, SearchSpace, Shard

GRID = tuple(1.0 + 0.05 * step for step in range(11))


class Rule(StrEnum):
    """The quantity that a greedy rule balances."""

    SIZE = "size"
    DIM = "dim"
    LOOKUP = "lookup"
    SIZE_LOOKUP = "size_lookup"
    ADDITIVE = "additive"
    FUSED = "fused"


class Filling:
    """Devices that are filled one shard after the other.

    Args:
        space: kinds and their encodings.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.states = np.zeros((space.num_devices, space.encodings.shape[1]), dtype=np.float32)
        self.held = np.zeros(space.num_devices)
        self.columns = np.zeros(space.num_devices)
        self.loads = np.zeros(space.num_devices)

    def add(self, kind: int, devices: Sequence[int], *, columns: float = 0.0, load: float = 0.0) -> None:
        """Put a shard of a kind on each of these devices."""
        index = list(devices)
        self.states[index] += self.space.encodings[kind]
        self.held[index] += self.space.bytes[kind]
        self.columns[index] += columns
        self.loads[index] += load

    def fits(self, table: int, kind: int) -> np.ndarray:
        """(P,) whether a device may have the table and has room for the shard."""
        return self.space.allowed[table] & (self.held + self.space.bytes[kind] <= self.space.room)

    def own_ms(self, kind: int) -> Float[np.ndarray, " P"]:
        """Return the cost of each device's own work with the shard."""
        return self.space.cost_model.local(self.states + self.space.encodings[kind])[:, 0].astype(np.float64)


def greedy(space: SearchSpace, rule: Rule, *, shards: Sequence[tuple[int, int]] | None = None) -> list[Shard] | None:
    """Place by a rule.

    Args:
        space: the problem.
        rule: what to balance.
        shards: (table, level) of every part; None: whole tables.

    Returns:
        The parts with their devices; None if one fits nowhere.
    """
    shards = shards or [(table, 0) for table in range(space.num_tables)]
    weights = _weights(space, rule, shards)
    return _fill(space, rule, shards, weights, most_columns=np.inf)


def grid(space: SearchSpace, *, shards: Sequence[tuple[int, int]] | None = None) -> tuple[list[Shard] | None, float]:
    """The cheapest of `fused` greedy plans under limits on the columns of a device; None and inf if none fits."""
    shards = shards or [(table, 0) for table in range(space.num_tables)]
    weights = _weights(space, Rule.FUSED, shards)
    total = sum(space.problem.tables[table].dim / 2**level for table, level in shards)
    plans = []
    for factor in GRID:
        plan = _fill(space, Rule.FUSED, shards, weights, most_columns=factor * total / space.num_devices)
        if plan is not None:
            plans.append(plan)
    if not plans:
        return None, np.inf
    states = np.stack([space.sum_kinds(*kinds_of(space, plan))[0] for plan in plans])
    costs = device_costs(space.cost_model, states).max(axis=1)
    return plans[int(costs.argmin())], float(costs.min())


def kinds_of(space: SearchSpace, shards: Sequence[Shard]) -> tuple[np.ndarray, np.ndarray]:
    """Kinds and devices of parts."""
    kinds = np.array([space.column_kind[shard.table, shard.level] for shard in shards])
    return kinds, np.array([shard.device for shard in shards])


def whole_tables(space: SearchSpace, shards: Sequence[Shard]) -> list[Assignment]:
    """Assignments of a plan without cuts."""
    devices = {shard.table: shard.device for shard in shards}
    return [Assignment(placement=by_columns(1), devices=(devices[table],)) for table in range(space.num_tables)]


def random_plan(space: SearchSpace, rng: np.random.Generator) -> list[Shard] | None:
    """Every table on a random device that has room; None if one fits nowhere."""
    filling = Filling(space)
    plan = []
    for table in range(space.num_tables):
        kind = int(space.column_kind[table, 0])
        free = np.flatnonzero(filling.fits(table, kind))
        if not len(free):
            return None
        device = int(rng.choice(free))
        filling.add(kind, [device])
        plan.append(Shard(table=table, level=0, device=device))
    return plan


def starting_plan(space: SearchSpace, *, largest_first: bool = False) -> list[Assignment]:
    """A plan to improve: fused greedy, with tables cut that fit nowhere whole. It may not fit; then little is missing.

    Args:
        space: the problem.
        largest_first: by bytes instead of by cost, which packs more tightly.
    """
    filling = Filling(space)
    plan = {}
    order = space.bytes[space.column_kind[:, 0]] if largest_first else space.whole_ms
    for table in np.argsort(-order, kind="stable").tolist():
        assignment = _cut_to_fit(filling, table)
        kind = space.kind_of(table, assignment)
        filling.add(kind, assignment.devices)
        plan[table] = assignment
    return [plan[table] for table in range(space.num_tables)]


def _cut_to_fit(filling: Filling, table: int) -> Assignment:
    space = filling.space
    distinct = len(space.problem.devices_of(table))
    for level in range(int(space.most_levels[table]) + 1):
        kind = int(space.column_kind[table, level])
        parts = 1 << level
        if parts > distinct:
            break
        fits = filling.fits(table, kind)
        if fits.sum() >= parts:
            cost = np.where(fits, filling.own_ms(kind), np.inf)
            devices = np.argsort(cost, kind="stable")[:parts].tolist()
            return Assignment(placement=by_columns(parts), devices=tuple(sorted(devices)))
    for option, kind in sorted(space.options[table], key=lambda each: space.bytes[each[1]] * len(each[0].devices)):
        if filling.fits(table, kind)[list(option.devices)].all():
            return option
    free = np.where(space.allowed[table], space.room - filling.held, -np.inf)
    return Assignment(placement=by_columns(1), devices=(int(free.argmax()),))


def _fill(
    space: SearchSpace, rule: Rule, shards: Sequence[tuple[int, int]], weights: np.ndarray, *, most_columns: float
) -> list[Shard] | None:
    filling = Filling(space)
    plan = []
    order = np.argsort(-weights, kind="stable").tolist()
    for index in order:
        table, level = shards[index]
        kind = int(space.column_kind[table, level])
        columns = space.problem.tables[table].dim / 2**level
        fits = filling.fits(table, kind) & (filling.columns + columns <= most_columns)
        if space.parts is ColumnParts.DISTINCT:
            fits[[shard.device for shard in plan if shard.table == table]] = False
        if not fits.any():
            return None
        load = filling.own_ms(kind) if rule is Rule.FUSED else filling.loads
        # lexsort takes its last key first: the least load, and on ties the fewest bytes.
        device = int(np.lexsort((filling.held, np.where(fits, load, np.inf)))[0])
        filling.add(kind, [device], columns=columns, load=float(weights[index]))
        plan.append(Shard(table=table, level=level, device=device))
    return plan


def _weights(space: SearchSpace, rule: Rule, shards: Sequence[tuple[int, int]]) -> np.ndarray:
    tables = space.problem.tables
    kinds = [int(space.column_kind[table, level]) for table, level in shards]
    dims = np.array([tables[table].dim / 2**level for table, level in shards])
    if rule is Rule.SIZE:
        return space.bytes[kinds]
    if rule is Rule.DIM:
        return dims
    if rule in (Rule.LOOKUP, Rule.SIZE_LOOKUP):
        reads = dims * np.array([tables[table].pooling_factor for table, _ in shards])
        # At least 1: a table of a few rows must not weigh nothing.
        rows = np.log10([max(10, tables[table].num_rows) for table, _ in shards])
        return reads * (rows if rule is Rule.SIZE_LOOKUP else 1.0)
    return space.cost_model.local(space.encodings[kinds])[:, 0].astype(np.float64)
