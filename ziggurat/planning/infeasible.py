"""What to say when tables do not fit: which table, how many bytes, on which device, what is free, and the ways out.

The message is worth more than the search that failed: every way out names the number that it would need, found by
trying (`starting_plan` again with more memory, or more devices), not by a rule of thumb.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ziggurat.errors import PlanError
from ziggurat.plan import Placement
from ziggurat.planning.problem import PlanningProblem, TableProfile
from ziggurat.planning.search_space import SearchSpace

_GIB = 2**30


def size(num_bytes: float) -> str:
    """Bytes for people: 512 MiB, 2.30 GiB."""
    if abs(num_bytes) < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB"
    return f"{num_bytes / 2**20:.0f} MiB" if abs(num_bytes) < _GIB else f"{num_bytes / _GIB:.2f} GiB"


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


def from_overflow(space: SearchSpace, held: np.ndarray, tables_on: dict[int, list[int]]) -> PlanError:
    """The error for the nearest plan that the search found.

    Args:
        space: the problem.
        held: (P,) bytes of that plan.
        tables_on: tables of each device in it.
    """
    worst = int((held - space.room).argmax())
    table = max(tables_on[worst], key=lambda each: space.bytes[space.column_kind[each, 0]])
    return not_fitting(space.problem, table, held=held, device=worst)


def not_fitting(
    problem: PlanningProblem, table: int, *, held: np.ndarray, device: int | None = None, total: int = 0
) -> PlanError:
    """The error about one table.

    Args:
        problem: what was to be placed.
        table: that does not fit.
        held: (P,) bytes that the devices hold already, in the nearest plan.
        device: on which it does not fit; None: the one with most room.
        total: bytes of all tables, where all together are too many.
    """
    profile, devices = problem.tables[table], problem.devices_of(table)
    room = np.array(problem.room_bytes, dtype=np.float64)
    if device is None:
        device = max(devices, key=lambda each: room[each] - held[each])
    free = room[device] - held[device]
    whole = _whole(profile)
    memory = problem.memory_bytes[device if len(problem.memory_bytes) > 1 else 0]
    state = whole - profile.num_rows * profile.dim * profile.element_bytes
    found = (
        f"table {profile.name!r} has {size(whole)} ({profile.num_rows:,} rows × {profile.dim} columns"
        f"{f', {size(state)} of them optimizer state' if state else ''}); "
    )
    if total:
        found += f"all {len(problem.tables)} tables have {size(total)}, and {problem.num_devices} devices have "
        found += f"{size(room.sum())} for them"
    elif free >= 0:
        found += f"rank {device} has {size(free)} free"
    else:
        found += f"rank {device} is {size(-free)} too full with it in the nearest plan"
    return PlanError(
        expected="tables and their optimizer state inside the memory of every device",
        found=found,
        where=f"table {profile.name!r}, rank {device}: {size(memory)} of memory less {size(problem.reserve_bytes)} "
        f"of reserve",
        ways_out=_ways_out(problem, table, held=held, device=device),
    )


def _ways_out(problem: PlanningProblem, table: int, *, held: np.ndarray, device: int) -> list[str]:
    profile, room = problem.tables[table], np.array(problem.room_bytes, dtype=np.float64)
    need = sum(_whole(each) for each in problem.tables)
    least = max(_least_part(problem, index) for index in range(len(problem.tables)))
    mean_missing = max(0.0, (need - room.sum()) / problem.num_devices)
    missing = max(mean_missing, least - room.max(), (held - room).max(), 1.0)
    ways = [f"{size(_round_up(missing))} more memory a device (or as much less reserve)"]
    usable = max(float(room.mean()), 1.0)
    if least <= usable:
        more = max(int(np.ceil(need / usable)), problem.num_devices + 1)
        ways.append(f"{more} devices of this size instead of {problem.num_devices}")
    ways += _cuts(problem, table, free=room - held)
    smaller = max(missing * problem.num_devices if need > room.sum() else missing, 1.0)
    per_row = profile.bytes_of(num_rows=1, dim=profile.dim)
    rows = profile.num_rows - int(np.ceil(smaller / per_row))
    if rows > 0:
        ways.append(f"at most {rows:,} rows in table {profile.name!r} (hash its ids, or drop rare ones)")
    if profile.element_bytes > 1:
        saved = profile.num_rows * profile.dim * profile.element_bytes // 2
        verdict = "enough" if saved >= smaller else f"not enough alone: {size(smaller)} are missing"
        ways.append(f"weights of half the bytes in this table save {size(saved)} ({verdict})")
    return ways


def _cuts(problem: PlanningProblem, table: int, *, free: np.ndarray) -> list[str]:
    """Ways to cut the table that are not allowed now, and would give parts that fit into what is free."""
    ways = []
    profile, devices = problem.tables[table], list(problem.devices_of(table))
    able = dataclasses.replace(problem, placements=tuple(Placement), max_parts=0)
    if Placement.COLUMN_WISE not in problem.placements or problem.max_parts:
        for parts in able.column_parts(table)[1:]:
            part = profile.bytes_of(num_rows=profile.num_rows, dim=profile.dim // parts)
            if (free[devices] >= part).sum() >= parts:
                ways.append(f"allow column_wise: {parts} parts of {size(part)}")
                break
    if Placement.ROW_WISE not in problem.placements and len(devices) > 1:
        part = profile.bytes_of(num_rows=-(-profile.num_rows // len(devices)), dim=profile.dim)
        if (free[devices] >= part).all():
            ways.append(f"allow row_wise: {len(devices)} parts of {size(part)}")
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
