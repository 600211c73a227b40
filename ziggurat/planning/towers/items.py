"""What the tower partitioner places, and what limits it.

A *feature* is what models see; an *item* is what cannot be split: all features that share a table, since a table lives
in one tower. Items have loads, and towers have room:

    resource     load of an item                       most that a tower may hold
    balance      features, bytes or numbers read       (1 + tolerance) · mean, or what balancing alone can reach
    memory       bytes of the table and its state      memory_limit_bytes, if set

Sometimes the first limit cannot be kept. An item heavier than a tower's share gets a tower of its own, and the others
are balanced among themselves. Where they do not fit evenly either, the limit is raised to the heaviest tower of the
*longest first* rule (each item, heaviest first, to the lightest tower; at most 4/3 − 1/(3T) of the best possible:
Graham, 1969). The report says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ziggurat.errors import PlanError

Floats = NDArray[np.float64]
Indexes = NDArray[np.int64]


class BalanceBy(StrEnum):
    """The quantity of which towers should hold the same amount."""

    COUNT = "count"  # features: what travels between hosts, and the work of the tower modules
    BYTES = "bytes"  # tables with their optimizer state: memory
    LOOKUPS = "lookups"  # numbers read for a sample (rows · width): the work of the lookup


@dataclass(frozen=True, kw_only=True)
class FeatureLoad:
    """The cost of one feature.

    Args:
        name: of the feature.
        table: that it looks up; features of one table stay together.
        table_bytes: of the whole table with its optimizer state; equal for all features of a table.
        lookups: mean rows read a sample.
        dim: columns of the table.
    """

    name: str
    table: str
    table_bytes: int = 0
    lookups: float = 1.0
    dim: int = 1


@dataclass(frozen=True, kw_only=True)
class Items:
    """Features merged by table, in the order of their first features.

    Args:
        tables: the table of each item.
        members: indexes of the features of each item.
        num_bytes: of each item.
        reads: numbers read for a sample, of each item.
    """

    tables: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    num_bytes: Floats
    reads: Floats

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def counts(self) -> Floats:
        """Features of each item."""
        return np.array([len(members) for members in self.members], dtype=np.float64)

    def subset(self, indexes: Indexes) -> Items:
        """Some of the items."""
        return Items(
            tables=tuple(self.tables[index] for index in indexes),
            members=tuple(self.members[index] for index in indexes),
            num_bytes=self.num_bytes[indexes],
            reads=self.reads[indexes],
        )

    def membership(self, num_features: int) -> Floats:
        """(F, M): 1 where a feature belongs to an item."""
        matrix = np.zeros((num_features, len(self)))
        for item, members in enumerate(self.members):
            matrix[list(members), item] = 1.0
        return matrix

    def load(self, by: BalanceBy) -> Floats:
        """Return the weight of each item."""
        return {BalanceBy.COUNT: self.counts, BalanceBy.BYTES: self.num_bytes, BalanceBy.LOOKUPS: self.reads}[by]


def merge_by_table(features: Sequence[FeatureLoad]) -> Items:
    """One item for each table.

    Raises:
        PlanError: features of one table disagree about its bytes, or a load is negative or not finite.
    """
    members: dict[str, list[int]] = {}
    for index, feature in enumerate(features):
        members.setdefault(feature.table, []).append(index)
        first = features[members[feature.table][0]]
        fits = feature.table_bytes >= 0 and feature.lookups >= 0 and math.isfinite(feature.lookups)
        if not fits or feature.table_bytes != first.table_bytes:
            raise PlanError(
                expected="finite loads >= 0, and the same table_bytes for all features of a table",
                found=f"table_bytes = {feature.table_bytes} ({first.name!r}: {first.table_bytes}), "
                f"lookups = {feature.lookups}",
                where=f"feature {feature.name!r}, table {feature.table!r}",
                ways_out="give the size of the whole table, optimizer state included, with each of its features",
            )
    return Items(
        tables=tuple(members),
        members=tuple(tuple(each) for each in members.values()),
        num_bytes=np.array([features[each[0]].table_bytes for each in members.values()], dtype=np.float64),
        reads=np.array([sum(features[i].lookups * features[i].dim for i in each) for each in members.values()]),
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Room in every tower, for one or two resources.

    Args:
        loads: (M, K) of each item.
        lower: (K,) least of a tower; kept where that is possible.
        upper: (K,) most of a tower; a partition that exceeds it is refused.
        is_relaxed: the tolerance cannot be kept, so `upper[0]` is more than was asked for.
    """

    loads: Floats
    lower: Floats
    upper: Floats
    is_relaxed: bool = False

    @property
    def sizes_alone(self) -> bool:
        """True if only the number of items is limited, so that an exact assignment is a flow."""
        return self.loads.shape[1] == 1 and bool((self.loads == 1).all())

    def violation(self, held: Floats) -> Floats:
        """Return the share by which a tower that holds `held` (…, K) is too full or too empty; 0 where it fits."""
        over = np.maximum(held - self.upper, 0.0) / self.upper
        under = np.maximum(self.lower - held, 0.0) / self.upper
        return (over + under).sum(axis=-1)

    def overflows(self, held: Floats) -> bool:
        """True if any tower of `held` (T, K) is too full."""
        return bool((held > self.upper * (1 + 1e-9)).any())


def limits_of(
    items: Items, *, num_towers: int, balance: BalanceBy, tolerance: float, memory_limit_bytes: int
) -> Limits:
    """Room in the towers; see the module.

    Raises:
        PlanError: more towers than items, or tables that cannot fit into memory.
    """
    check_fits(items, num_towers=num_towers, memory_limit_bytes=memory_limit_bytes)
    load = items.load(balance)
    mean = float(load.sum()) / num_towers
    asked = mean * (1 + tolerance)
    lower = 0.0
    if balance is BalanceBy.COUNT:
        # 1e-9: (1 + tolerance) · mean may round to just below a whole number.
        asked = max(math.ceil(mean), math.floor(asked + 1e-9))
        lower = min(math.floor(mean), math.ceil(mean * (1 - tolerance) - 1e-9))
    heaviest = float(np.bincount(longest_first(load, num_towers=num_towers), weights=load, minlength=num_towers).max())
    upper = max(asked, heaviest, 1e-12)  # not 0: `violation` divides by it
    columns = [(load, lower, upper)]
    if memory_limit_bytes:
        columns.append((items.num_bytes, 0.0, float(memory_limit_bytes)))
    return Limits(
        loads=np.stack([column[0] for column in columns], axis=1),
        lower=np.array([column[1] for column in columns]),
        upper=np.array([column[2] for column in columns]),
        is_relaxed=heaviest > asked * (1 + 1e-9),
    )


def too_heavy(load: Floats, *, num_towers: int, tolerance: float) -> Indexes:
    """Items that need a tower of their own: above (1 + tolerance) · mean, first of all, then of those that are left."""
    alone = np.zeros(len(load), dtype=np.bool_)
    while True:
        left = num_towers - int(alone.sum())
        more = ~alone & (load > (1 + tolerance) * load[~alone].sum() / left * (1 + 1e-9))
        if left == 1 or not bool(more.any()):
            return np.flatnonzero(alone)
        alone |= more


def longest_first(load: Floats, *, num_towers: int) -> Indexes:
    """Give each item, heaviest first, to the lightest tower (Graham's rule; on ties: fewest items)."""
    held = np.zeros(num_towers)
    counts = np.zeros(num_towers)
    assignment = np.zeros(len(load), dtype=np.int64)
    for item in np.argsort(-load, kind="stable"):
        tower = int(np.lexsort((counts, held))[0])
        assignment[item] = tower
        held[tower] += load[item]
        counts[tower] += 1
    return assignment


def check_fits(items: Items, *, num_towers: int, memory_limit_bytes: int) -> None:
    """Refuse what no partition can satisfy.

    Raises:
        PlanError: more towers than tables, a table larger than a tower, or tables larger than all towers together.
    """
    if not 1 <= num_towers <= len(items):
        shared = sum(map(len, items.members)) - len(items)
        note = f"; {shared} features share the table of another and cannot be parted from it" if shared else ""
        raise PlanError(
            expected=f"1 to {len(items)} towers: each needs a table of its own, and there are {len(items)}{note}",
            found=f"{num_towers} towers",
            where="num_towers",
            ways_out=(
                f"ask for {len(items)} towers or fewer",
                "let a tower span several hosts: give the plan a larger tower_size",
            ),
        )
    if not memory_limit_bytes:
        return
    largest = int(items.num_bytes.argmax())
    if items.num_bytes[largest] > memory_limit_bytes:
        raise PlanError(
            expected=f"every table within a tower's {memory_limit_bytes:,} bytes, optimizer state included",
            found=f"table {items.tables[largest]!r} of {int(items.num_bytes[largest]):,} bytes",
            where=f"table {items.tables[largest]!r}, memory limit of a tower",
            ways_out=(
                "let a tower span more ranks or hosts, and raise the limit accordingly",
                "make the table smaller: fewer rows (max_rows, hashing) or columns (embedding_dim) in the schema",
                "use an optimizer with less state: rowwise_adagrad keeps one number a row, sgd none",
            ),
        )
    total = int(items.num_bytes.sum())
    if total > num_towers * memory_limit_bytes:
        raise no_room(items, num_towers=num_towers, memory_limit_bytes=memory_limit_bytes)


def no_room(items: Items, *, num_towers: int, memory_limit_bytes: int) -> PlanError:
    """The error for tables that do not fit into the towers together."""
    heavy = np.argsort(-items.num_bytes, kind="stable")[:3]
    names = ", ".join(f"{items.tables[i]!r} {int(items.num_bytes[i]):,}" for i in heavy)
    total = int(items.num_bytes.sum())
    return PlanError(
        expected=f"tables that fit into {num_towers} towers of {memory_limit_bytes:,} bytes each",
        found=f"{total:,} bytes in {len(items)} tables, optimizer state included; the largest: {names}",
        where="memory limit of a tower",
        ways_out=(
            f"raise the limit; perfectly balanced towers would need {-(-total // num_towers):,} bytes",
            "more towers",
            "balance by bytes",
            "smaller tables: fewer rows or columns in the schema",
        ),
    )
