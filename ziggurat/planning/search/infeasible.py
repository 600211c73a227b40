"""What to say when tables do not fit: which table, how many bytes, on which device, what is free, and the ways out.

The message is worth more than the search that failed, so every way out names the number that it would need, and is
tried before it is offered: greedy packing, the largest first, has to succeed with it. A better packing may need less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from ziggurat.errors import PlanError
from ziggurat.ops.machine.memory import size_text
from ziggurat.ops.row_formats import PLAIN
from ziggurat.placements import Placement
from ziggurat.planning.problem import PlanningProblem, ShardProfile, TableProfile
from ziggurat.planning.search.greedy import starting_plan
from ziggurat.planning.search.space import SearchSpace

_GIB = 2**30
_SETTING = "--memory-limit"


def check_room(problem: PlanningProblem) -> None:
    """Refuse at once what no plan can hold: all tables together, or one table however it is cut.

    Raises:
        PlanError: with the numbers.
    """
    room = np.maximum(problem.room_bytes, 0)
    for index in range(len(problem.tables)):
        devices = problem.devices_of(index)
        least = _least_part(problem, index)
        if least > max(room[list(devices)]):
            raise not_fitting(problem, index, held=np.zeros(problem.num_devices))
    need = sum(table.bytes_of(num_rows=table.num_rows, dim=table.dim) for table in problem.tables)
    if need > room.sum():
        largest = max(range(len(problem.tables)), key=lambda each: _whole(problem.tables[each]))
        raise not_fitting(problem, largest, held=np.zeros(problem.num_devices), total=need)


def from_overflow(space: SearchSpace, held: np.ndarray, tables_on: dict[int, list[tuple[int, int]]]) -> PlanError:
    """The error for the nearest plan that the search found.

    Args:
        space: the problem.
        held: (P,) bytes of that plan.
        tables_on: tables of each device in it, with the kind of their shard there.
    """
    worst = int((held - space.room).argmax())
    table, kind = max(tables_on[worst], key=lambda each: space.bytes[each[1]])
    without = held.copy()
    without[worst] -= space.bytes[kind]
    return not_fitting(space.problem, table, held=without, device=worst)


def rule_without_plan(space: SearchSpace, name: str, *, limits: Sequence[float]) -> PlanError:
    """The error of a rule that finds no plan, although tables that may be cut in any way fit.

    Args:
        space: the problem.
        name: of the rule.
        limits: on the columns of a device, as multiples of the mean; () for a rule without.
    """
    tables = space.problem.tables
    room = max(space.problem.room_bytes)
    large = max(tables, key=_whole)
    wide = max(tables, key=lambda each: each.dim)
    most = max(limits, default=np.inf) * sum(each.dim for each in tables) / space.num_devices
    if _whole(large) > room:
        why = (
            f"it places whole tables: {large.name!r} has {size_text(_whole(large))}, a rank room for {size_text(room)}"
        )
    elif wide.dim > most:
        why = f"it gives a rank {most:g} columns at most: table {wide.name!r} has {wide.dim}"
        why += ", and it tried too few cuts" if name == "beam" else ""
    else:
        why = "its order leaves a table without a rank that has room for it"
    return PlanError(
        expected=f"a plan by the rule {name}",
        found=f"none; {why}",
        where=f"{len(tables)} tables on {space.num_devices} ranks, which other rules place",
        ways_out="plan by the strategy annealing, which cuts tables and has no limit on columns",
    )


def not_fitting(
    problem: PlanningProblem, table: int, *, held: np.ndarray, device: int | None = None, total: int = 0
) -> PlanError:
    """The error about one table.

    Args:
        problem: what was to be placed.
        table: that does not fit.
        held: (P,) bytes that the devices hold beside this table, in the nearest plan.
        device: on which it does not fit; None: the one with most room.
        total: bytes of all tables, where all together are too many.
    """
    profile = problem.tables[table]
    devices = problem.devices_of(table)
    room = np.array(problem.room_bytes, dtype=np.float64)
    if device is None:
        device = max(devices, key=lambda each: room[each] - held[each])
    free = room[device] - held[device]
    whole = _whole(profile)
    memory = problem.memory_bytes[device if len(problem.memory_bytes) > 1 else 0]
    state = profile.num_rows * profile.state_bytes_per_row(profile.dim)
    found = (
        f"table {profile.name!r} has {size_text(whole)} ({profile.num_rows:,} rows × {profile.dim} columns"
        f"{f', {size_text(state)} of them optimizer state' if state else ''}); "
    )
    if total:
        found += f"all {len(problem.tables)} tables have {size_text(total)}, and {problem.num_devices} devices have "
        found += f"{size_text(room.sum())} for them"
    elif room[device] <= 0:
        found += f"rank {device} has no memory for tables: the reserve is {size_text(-room[device])} larger"
    else:
        found += f"rank {device} has {size_text(max(free, 0.0))} free of {size_text(room[device])}"
        found += ", more than any other" if free >= (room - held)[list(devices)].max() else ""
    expected = "tables and their optimizer state inside the memory of every device"
    of_memory = f"{size_text(memory)} of memory less {size_text(problem.reserve_bytes)} of reserve"
    if problem.has_limit:
        expected = (
            f"{size_text(room[device])} or less of tables and their optimizer state on every device, which is all that "
            f"{_SETTING} counts"
        )
        of_memory = _SETTING
    return PlanError(
        expected=expected,
        found=found,
        where=f"table {profile.name!r}, rank {device}: {of_memory}",
        ways_out=_ways_out(problem, table, held=held, device=device, total=total),
    )


def _ways_out(problem: PlanningProblem, table: int, *, held: np.ndarray, device: int, total: int) -> list[str]:
    profile = problem.tables[table]
    room = np.array(problem.room_bytes, dtype=np.float64)
    need = sum(_whole(each) for each in problem.tables)
    least = max(_least_part(problem, index) for index in range(len(problem.tables)))
    part = least if least > room.max() else _whole(profile)
    missing = max((need - room.sum()) / problem.num_devices, 1.0 if total else part - (room - held)[device], 1.0)
    more = _least_memory(problem, missing)
    ways = [f"{size_text(more)} more memory a device (or as much less reserve)"]
    if problem.has_limit:
        ways = [
            f"a limit of {size_text(1.001 * (room[device] + more) + 2**20)} or more, if devices have it: {_SETTING}"
        ]
    devices = _least_devices(problem, need)
    if devices:
        ways.append(f"{devices} devices of this size instead of {problem.num_devices}")
    ways += [] if total else _cuts(problem, table, free=room - held)
    smaller = missing * problem.num_devices if total else missing
    rows = int((_whole(profile) - smaller) / profile.bytes_of(num_rows=1, dim=profile.dim))
    if rows > 0 and _fits(_with_table(problem, table, num_rows=rows)):
        ways.append(f"at most {rows:,} rows in table {profile.name!r} (hash its ids, or drop rare ones)")
    return ways if problem.has_limit else [*ways, *_formats(problem, table)]  # a limit chose the formats


def _formats(problem: PlanningProblem, table: int) -> list[str]:
    """The widest rows in few bits with which greedy packing succeeds: of this table, else of all; or that none is."""
    least = sum(_whole(each) for each in problem.tables)
    text = ""
    for chosen, setting in (
        ([table], f"by-table {problem.tables[table].name}="),
        (range(len(problem.tables)), "weights "),
    ):
        for row_format in PLAIN.less_precise():
            tables = list(problem.tables)
            for index in chosen:
                tables[index] = dataclasses.replace(tables[index], row_format=row_format.for_columns(tables[index].dim))
            size = sum(_whole(each) for each in tables)
            if size >= least:
                continue
            enough = _fits(dataclasses.replace(problem, tables=tuple(tables)))
            least = size
            verdict = "enough" if enough else "not enough alone"
            text = f"--tables.{setting}{row_format.value}: all tables then have {size_text(size)} ({verdict})"
            if enough:
                return [text]
    return [text] if text else []


def _least_memory(problem: PlanningProblem, missing: float) -> float:
    """Bytes more a device with which greedy packing succeeds: from a lower bound up, then halved down to 1 %."""
    enough = _round_up(missing)
    if _fits(_with_memory(problem, enough)):
        return enough
    short = enough
    enough = 1.25 * enough
    while not _fits(_with_memory(problem, enough)):
        short = enough
        enough = 2.0 * enough
    while enough - short > max(0.01 * enough, 2**20):
        middle = 0.5 * (short + enough)
        if _fits(_with_memory(problem, middle)):
            enough = middle
        else:
            short = middle
    return _round_up(enough)


def _least_devices(problem: PlanningProblem, need: float) -> int:
    """Devices with which greedy packing succeeds; 0 if tables are pinned, or no number of devices helps."""
    if problem.allowed or len(problem.memory_bytes) > 1 or problem.room_bytes[0] <= 0:
        return 0
    first = max(int(np.ceil(need / problem.room_bytes[0])), problem.num_devices + 1)
    # Greedy packing may need more than the bytes say: some numbers from the lower bound up.
    for num_devices in sorted({first, first + 1, first + 2, -(-first * 5 // 4), -(-first * 3 // 2), 2 * first}):
        if _fits(dataclasses.replace(problem, num_devices=num_devices)):
            return num_devices
    return 0


class _BytesCostModel:
    """Prices a shard by its bytes alone, so that a search with it only packs memory."""

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S 1"]:
        """The GiB of the shards."""
        return np.array([[shard.memory_bytes / _GIB] for shard in shards], dtype=np.float32)

    def local(self, states: Float32[np.ndarray, "M 1"]) -> Float32[np.ndarray, "M 1"]:
        """The GiB of the shards."""
        return states

    def exchange(self, local: Float32[np.ndarray, "N P 1"]) -> Float32[np.ndarray, "N P"]:
        """The GiB of the shards."""
        return local[..., 0]


def _fits(problem: PlanningProblem) -> bool:
    if max(problem.room_bytes) <= 0:
        return False
    space = SearchSpace(problem, _BytesCostModel())
    plan = starting_plan(space, largest_first=True)
    return not space.overflow(space.states(plan)[1])


def _with_memory(problem: PlanningProblem, more: float) -> PlanningProblem:
    return dataclasses.replace(problem, memory_bytes=tuple(each + int(more) for each in problem.memory_bytes))


def _with_table(problem: PlanningProblem, table: int, **changes: int) -> PlanningProblem:
    tables = list(problem.tables)
    tables[table] = dataclasses.replace(tables[table], **changes)
    return dataclasses.replace(problem, tables=tuple(tables))


def _cuts(problem: PlanningProblem, table: int, *, free: np.ndarray) -> list[str]:
    """Ways to cut the table that are not allowed now, and would give parts that fit into what is free."""
    ways = []
    profile = problem.tables[table]
    devices = list(problem.devices_of(table))
    able = dataclasses.replace(problem, placements=tuple(Placement), max_parts=0)
    if not any(each.cuts_columns for each in problem.placements) or problem.max_parts:
        for parts in able.column_parts(table)[1:]:
            part = profile.bytes_of(num_rows=profile.num_rows, dim=profile.dim // parts)
            if (free[devices] >= part).sum() >= parts:
                ways.append(f"allow column_wise: {parts} parts of {size_text(part)}")
                break
    for placement in Placement:
        if (
            placement.cuts_rows
            and placement not in problem.placements
            and not placement.is_of_one_host
            and len(devices) > 1
        ):
            part = profile.shard(placement, num_parts=len(devices)).memory_bytes
            if (free[devices] >= part).all():
                ways.append(f"allow {placement}: {len(devices)} parts of {size_text(part)}")
    return ways


def _least_part(problem: PlanningProblem, table: int) -> int:
    """Bytes of the smallest part that the table may be cut into."""
    profile = problem.tables[table]
    least = profile.bytes_of(num_rows=profile.num_rows, dim=profile.dim // problem.column_parts(table)[-1])
    for option in problem.spread_options(table):
        least = min(least, problem.shards(table, option)[0].memory_bytes)
    return least


def _whole(profile: TableProfile) -> int:
    return profile.bytes_of(num_rows=profile.num_rows, dim=profile.dim)


def _round_up(num_bytes: float) -> float:
    """To the next hundredth of a GiB, or MiB below one: following the advice must be enough."""
    unit = 2**20 if num_bytes < _GIB else _GIB / 100
    return float(np.ceil(num_bytes / unit) * unit)
