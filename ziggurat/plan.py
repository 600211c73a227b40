"""Plan: which features form a tower, and where every table lives. Plain data, written by people or by `planning/`.

    towers.json    {"towers": [["user", "age"], ["item", "genres"]], "strategy": "coherent", "seed": 0}
    plan.json      {"world_size": 4, "tower_size": 2, "towers": {…},
                    "tables": [{"table": "user", "placement": "table_wise", "ranks": [1]}, …]}

A plan is immutable and computed without a process group; `parallel/` executes it and never searches. The order of
towers, and of the features inside a tower, is part of a model's meaning (it is the order of the columns that the
layers above a tower module see), so it is kept as written, wherever the tables go.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.errors import PlanError
from ziggurat.files import Format, Seal
from ziggurat.placements import TABLE_WISE, Placement
from ziggurat.typed import Rank, Ranks, checked

_MAX_RANKS_SHOWN = 6
_checked = functools.partial(checked, error=PlanError)
_WAYS_OUT = ("check the path and the file's syntax", "plan again: ziggurat plan, ziggurat towers partition")
TOWERS = Format(name="ziggurat.towers", what="towers", seal=Seal.EDITABLE, error=PlanError, ways_out=_WAYS_OUT)
PLAN = Format(name="ziggurat.plan", what="a plan", seal=Seal.EDITABLE, error=PlanError, ways_out=_WAYS_OUT)


@dataclass(frozen=True, kw_only=True)
@_checked
class Towers:
    """Features grouped into towers (the paper's TP result: Luo et al., arXiv 2403.00877).

    Args:
        towers: names of the features of each tower, in order; features are those with an embedding.
        strategy: where the grouping comes from, for people ("coherent", "by hand", …).
        seed: of the partitioner.

    Example:
        >>> zg.Towers(towers=(("user", "age"), ("item", "tags"))).towers[1]
        ('item', 'tags')
    """

    towers: tuple[tuple[str, ...], ...]
    strategy: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = Counter(name for tower in self.towers for name in tower)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if not self.towers or not all(self.towers) or twice:
            raise PlanError(
                expected="at least one tower, a feature or more in each, every feature once",
                found=f"features in two places: {', '.join(twice)}" if twice else f"{[len(t) for t in self.towers]}",
                where="towers",
                ways_out="`ziggurat towers partition RUN` writes a valid file",
            )

    def __len__(self) -> int:
        return len(self.towers)

    @property
    def features(self) -> tuple[str, ...]:
        """All features, tower after tower."""
        return tuple(name for tower in self.towers for name in tower)

    def check(self, tables: Mapping[str, str]) -> None:
        """Check against a model's features.

        Args:
            tables: the table that each feature looks up, for every feature with an embedding.

        Raises:
            PlanError: a feature is missing or unknown, or features that share a table are in different towers.
        """
        missing = sorted(tables.keys() - set(self.features))
        unknown = sorted(set(self.features) - tables.keys())
        if missing or unknown:
            raise PlanError(
                expected="every feature with an embedding in exactly one tower",
                found=f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}",
                where="towers",
                ways_out=("add or remove these names in the file", "partition again: `ziggurat towers partition RUN`"),
            )
        home: dict[str, int] = {}
        for index, tower in enumerate(self.towers):
            for name in tower:
                if home.setdefault(tables[name], index) != index:
                    raise PlanError(
                        expected="features that share a table in one tower",
                        found=f"table {tables[name]!r} in towers {home[tables[name]]} and {index}",
                        where=f"towers, feature {name!r}",
                        ways_out=("move the feature to the other tower", "give it a table of its own in the schema"),
                    )

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        TOWERS.write(path, to_json(self))

    @staticmethod
    def load(path: str | Path) -> Towers:
        """Read what `save` wrote, or a file written by hand.

        Raises:
            PlanError: not readable as towers.
        """
        return from_json(Towers, TOWERS.read(path), where=str(path), error=PlanError)


@dataclass(frozen=True, kw_only=True)
@_checked
class TablePlacement:
    """The place of one table.

    Args:
        table: its name.
        placement: how it is cut.
        ranks: who holds the parts, in the order of the rows or columns.
    """

    table: str
    placement: Placement = TABLE_WISE
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, kw_only=True)
@_checked
class Plan:
    """Placement of all tables, and the towers if there are any.

    Args:
        world_size: ranks that the plan is for.
        tables: one entry a table.
        towers: which features form a tower; None: a flat model.
        tower_size: S, consecutive ranks that hold the same towers together. S must divide the world, and the
            world_size / S groups must share the towers evenly; 0: as few ranks a tower as that allows.
    """

    world_size: Ranks
    tables: tuple[TablePlacement, ...]
    towers: Towers | None = None
    tower_size: Rank = 0

    def __post_init__(self) -> None:
        counts = Counter(entry.table for entry in self.tables)
        twice = sorted(name for name, count in counts.items() if count > 1)
        _expect(not twice, "each table once", f"twice: {', '.join(twice)}", "plan")
        for entry in self.tables:
            found = f"ranks {list(entry.ranks)}, {entry.placement}"
            are_ranks = all(0 <= rank < self.world_size for rank in entry.ranks)
            _expect(
                are_ranks and len(set(entry.ranks)) == len(entry.ranks),
                f"different ranks from 0 to {self.world_size - 1}",
                found,
                f"plan, table {entry.table!r}",
            )
        if self.towers is not None:
            size = self.tower_size
            num_towers = len(self.towers)
            _expect(
                size >= 0
                and (size == 0 or (self.world_size % size == 0 and num_towers % (self.world_size // size) == 0)),
                f"tower_size S that divides {self.world_size} ranks, and {self.world_size} / S groups that share "
                f"{num_towers} towers evenly; possible here: {possible_tower_sizes(self.world_size, num_towers)}",
                f"S = {size}",
                "plan, tower_size",
            )
        size = self.ranks_per_group
        for entry in self.tables:
            first = min(entry.ranks, default=0) // size * size
            expected = entry.placement.check_ranks(entry.ranks, group=range(first, first + size))
            found = f"ranks {list(entry.ranks)}, {entry.placement}"
            _expect(not expected, expected, found, f"plan, table {entry.table!r}")

    @property
    def ranks_per_group(self) -> int:
        """S: consecutive ranks that hold the same towers; the whole world for a flat plan."""
        if self.towers is None:
            return self.world_size
        return self.tower_size or possible_tower_sizes(self.world_size, len(self.towers))[0]

    def tower_ranks(self, tower: int) -> range:
        """The consecutive ranks that hold a tower."""
        if self.towers is None:
            raise PlanError(
                expected="a plan with towers",
                found="one without",
                where=f"tower {tower}",
                ways_out="make the plan with them: Plan(…, towers=…)",
            )
        size = self.ranks_per_group
        group = tower * (self.world_size // size) // len(self.towers)
        return range(group * size, (group + 1) * size)

    def check(self, *, tables: Mapping[str, str], world_size: int, names: Sequence[str]) -> None:
        """Check against a model and a job.

        Args:
            tables: the table of each feature.
            world_size: ranks of the job.
            names: all tables of the model.

        Raises:
            PlanError: another number of ranks, tables missing, unknown, or outside of their tower.
        """
        _expect(
            world_size == self.world_size,
            f"a job of {self.world_size} ranks",
            f"{world_size} ranks",
            "plan, world_size",
        )
        placed = {entry.table: entry for entry in self.tables}
        missing = sorted(set(names) - placed.keys())
        unknown = sorted(placed.keys() - set(names))
        found = f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        _expect(not missing and not unknown, "every table of the model exactly once", found, "plan, tables")
        if self.towers is None:
            return
        self.towers.check(tables)
        for index, tower in enumerate(self.towers.towers):
            for name in tower:
                ranks = placed[tables[name]].ranks
                _expect(
                    set(ranks) <= set(self.tower_ranks(index)),
                    f"ranks {list(self.tower_ranks(index))}, which hold tower {index}",
                    f"ranks {list(ranks)}",
                    f"plan, table {tables[name]!r} of feature {name!r}",
                )

    def __str__(self) -> str:
        """A table for people: where every table goes."""
        lines = [("table", "placement", "ranks")]
        lines += [(entry.table, entry.placement.name, show_ranks(entry.ranks)) for entry in self.tables]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        heading = f"plan for {self.world_size} ranks"
        if self.towers is not None:
            heading += f", {len(self.towers)} towers in groups of {self.ranks_per_group} ranks"
            places = (f"tower {index} on ranks {show_ranks(self.tower_ranks(index))}: {', '.join(tower)}"
                      for index, tower in enumerate(self.towers.towers))  # fmt: skip
            heading = "\n".join([heading, *places])
        rows = (f"{name:<{widths[0]}}  {placement:<{widths[1]}}  {ranks}" for name, placement, ranks in lines)
        return "\n".join([heading, "", *rows])

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        PLAN.write(path, to_json(self))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` wrote, or a file written by hand."""
        return from_json(Plan, PLAN.read(path), where=str(path), error=PlanError)


def possible_tower_sizes(world_size: int, num_towers: int) -> list[int]:
    """Every S for which groups of S consecutive ranks share the towers evenly, smallest first; never empty."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [size for size in sizes if num_towers % (world_size // size) == 0]


def show_ranks(ranks: Sequence[int]) -> str:
    """Write ranks for people: "3", "2, 7", "0–7", "0, 3, 5, … (12)"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > _MAX_RANKS_SHOWN:
        return ", ".join(str(rank) for rank in ranks[:_MAX_RANKS_SHOWN]) + f", … ({len(ranks)})"
    return ", ".join(str(rank) for rank in ranks)


def _expect(fits: bool, expected: str, found: str, where: str) -> None:
    if not fits:
        raise PlanError(expected=expected, found=found, where=where, ways_out="correct the plan, or plan again")
