"""PlanReport: a plan as a table that a person can read, and why each table is where it is.

`next best` is one number: what the busiest rank would cost if this table alone went to its next best place, everything
else staying. The places that are tried are those of `improve.py`: whole or by columns on the ranks that now do least,
by rows, as a copy everywhere.

A small number means that the table could as well lie elsewhere; 0 that the busiest rank does not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ziggurat.ops.row_formats import RowFormat
from ziggurat.plan import show_ranks
from ziggurat.planning.cluster.cluster import Launch
from ziggurat.planning.costs.analytic import AnalyticCosts, TableCost
from ziggurat.planning.plan_model import PlannedModel
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.improve import Places

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class NextBest:
    """The best other place of a table.

    Args:
        assignment: where; None if nothing else fits.
        more_ms: what the busiest rank would cost more (less, if negative: the search was short).
    """

    assignment: Assignment | None
    more_ms: float = 0.0

    @property
    def text(self) -> str:
        """The alternative as a person reads it."""
        if self.assignment is None:
            return "nothing else fits"
        sign = "+" if self.more_ms >= 0 else "−"
        place = f"{self.assignment.placement.name} on {show_ranks(self.assignment.devices)}"
        return f"{place}: {sign}{abs(self.more_ms):.3f} ms"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One table of the report."""

    table: str
    num_rows: int
    dim: int
    row_format: RowFormat
    assignment: Assignment
    tower: int | None
    num_bytes: int
    cost: TableCost
    next_best: NextBest


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank of the report."""

    rank: int
    cost_ms: float
    num_bytes: int


class PlanReport:
    """The report to print of a planned model.

    Args:
        planned: see `plan_model`.
    """

    def __init__(self, planned: PlannedModel) -> None:
        self.planned = planned
        self.next_best = next_best(planned)
        costs = planned.simulator.costs(group_size=planned.plan.ranks_per_group)
        self.tables = tuple(self._rows(costs))

    @property
    def ranks(self) -> tuple[RankRow, ...]:
        """Milliseconds and bytes of every rank."""
        planned = self.planned
        return tuple(
            RankRow(rank=rank, cost_ms=float(cost), num_bytes=size)
            for rank, (cost, size) in enumerate(zip(planned.rank_ms, planned.rank_bytes, strict=True))
        )

    def table(self) -> list[tuple[str, ...]]:
        """Heading and one line a table, the most expensive first."""
        has_towers = self.planned.plan.towers is not None
        has_formats = any(not row.row_format.is_plain for row in self.tables)
        heading = ("table", "rows × columns", "rows in", "placement", "ranks", "tower", "MiB", "ms", "next best")
        lines = []
        for row in sorted(self.tables, key=lambda row: -row.cost.total_ms):
            line = [
                row.table,
                f"{row.num_rows:,} × {row.dim}",
                row.row_format.value,
                row.assignment.placement.name,
                show_ranks(row.assignment.devices),
                "–" if row.tower is None else str(row.tower),
                f"{row.num_bytes / _MIB:,.1f}",
                f"{row.cost.total_ms:.3f}",
                row.next_best.text,
            ]
            lines.append(tuple(line))
        found = [heading, *lines]
        # Positions in the heading: "rows in" and "tower".
        left_out = {*(() if has_formats else (2,)), *(() if has_towers else (5,))}
        return [tuple(each for index, each in enumerate(line) if index not in left_out) for line in found]

    def lines(self) -> list[str]:
        """The sum of it: step, where its time goes, memory, balance."""
        planned = self.planned
        timeline = planned.timeline
        work = planned.model.work
        step_ms = 1e3 * timeline.step_s
        costs = planned.rank_ms
        rate = timeline.samples_per_s(work.batch_size)
        parts = sorted(timeline.parts_ms().items(), key=lambda item: -item[1])
        size = planned.plan.ranks_per_group
        towers = "" if planned.plan.towers is None else f", {len(planned.plan.towers)} towers in groups of {size} ranks"
        room = planned.problem.room_bytes[0]
        fullest = max(planned.rank_bytes)
        return [
            f"cluster   {planned.cluster.describe()}{towers}",
            f"step      {step_ms:.2f} ms predicted, {rate:,.0f} samples/s at {work.batch_size:,} samples a rank",
            "of it     " + ", ".join(f"{name} {value:.2f}" for name, value in parts if value >= 0.005 * step_ms),
            f"tables    {costs.max():.3f} ms on the busiest rank, {costs.mean():.3f} ms on the mean rank "
            f"(imbalance {costs.max() / max(float(costs.mean()), 1e-9):.2f})",
            f"memory    {fullest / 2**30:.2f} GiB of tables on the fullest rank, which has room for {room / 2**30:.2f}",
            f"kept back {planned.memory.describe()}",
            *self._bound_by_program(),
        ]

    def _bound_by_program(self) -> list[str]:
        """A line if the program that starts the operations takes longer than the devices do."""
        timeline = self.planned.timeline
        device = self.planned.cluster.device
        rest_ms = timeline.parts_ms().get("rest", 0.0)
        if device.launch is not Launch.AHEAD or not rest_ms:
            return []
        return [
            f"note      the program, not the devices, sets the step: it takes {1e3 * device.step_s:g} ms "
            "(device.step_s); larger batches cost nothing until then"
        ]

    def _rows(self, costs: AnalyticCosts) -> Iterator[TableRow]:
        planned = self.planned
        towers = planned.plan.towers
        tower_of: dict[str, int] = {}
        if towers is not None:
            of_feature = {name: index for index, tower in enumerate(towers.towers) for name in tower}
            tower_of = {spec.table: of_feature[spec.name] for spec in planned.model.inputs.lookups}
        for index, (profile, each) in enumerate(zip(planned.problem.tables, planned.assignments, strict=True)):
            shards = planned.problem.shards(index, each)
            yield TableRow(
                table=profile.name,
                num_rows=profile.num_rows,
                dim=profile.dim,
                row_format=profile.row_format,
                assignment=each,
                tower=tower_of.get(profile.name),
                num_bytes=sum(shard.memory_bytes for shard in shards),
                cost=costs.table_cost(shards),
                next_best=self.next_best[index],
            )


def next_best(planned: PlannedModel) -> list[NextBest]:
    """Find, for each table, the cheapest other place that fits."""
    places = Places(planned.problem, planned.cost_model)
    for table, assignment in enumerate(planned.assignments):
        places.put(table, assignment)
    now = float(places.costs().max())
    found = []
    for table in range(len(planned.assignments)):
        own = places.take(table)
        options = [each for each in places.options(table) if each != own]
        if options:
            costs = places.costs_with(table, options).max(axis=1)
            best = int(costs.argmin())
            found.append(NextBest(assignment=options[best], more_ms=float(costs[best]) - now))
        else:
            found.append(NextBest(assignment=None))
        places.put(table, own)
    return found
