"""Choose a rung for each table, so that all together fit a limit of memory at the least cost. Problem in, rungs out.

    minimise  Σ_t cost(t, r_t)      Σ_t bytes(t, r_t) ≤ limit      one rung r_t for each table

This is a knapsack with a choice of items for each place. HiGHS solves it as a linear program in zeros and ones
(`scipy.optimize.milp`), exactly for some hundred tables in well under a second. Behind it stands the greedy rule: begin
with the cheapest rung of each table, and take the step down that costs least for the bytes it saves, until the limit
holds; that is at most the cost of one step from the best. It answers where the solver has no time.

One share of cached rows holds for all tables in few bits, as `--tables.cache` does, and one share of rows held for all
tables on a disk, or on the host of a device; each pair that may be chosen is a problem of its own, and the cheapest
answer wins. The rest of the limit holds rows of the disk, beside those that wait to be written, or of the host. The
cost of rungs is in `rungs.py`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from ziggurat.embeddings.storage.disk import MIN_PLACES, held_room, most_waiting, room_for
from ziggurat.errors import ConfigError
from ziggurat.ops.machine.memory import enough_text, size_text
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.planning.tiers.rungs import Rung, TieredTable

_TIME_LIMIT_S = 2.0
_SHOWN = 3
_REPRICED = 3
_SETTING = "--tables.memory-limit"
_SETTING_OF_PLANS = "--memory-limit"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rung of each table.

    Args:
        rungs: by table.
        cache_share: of the rows in few bits; 0: no cache.
        num_bytes: that all tables take.
        limit_bytes: that they may take.
        cost: of all tables, time and rounding, as `rungs.py` says.
        cost_fp32: of all tables in FP32.
        time_ratio: predicted time of lookups and updates over that of FP32.
        held_bytes: for rows of a disk or the host that are held; 0: nothing lies there.
        below_s: seconds of the disk, or of the way to the host, a sample, for rows that are not held.
    """

    rungs: dict[str, Rung]
    cache_share: float
    num_bytes: int
    limit_bytes: int
    cost: float
    cost_fp32: float
    time_ratio: float
    held_bytes: int = 0
    below_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TierProblem:
    """Tables, and the memory that they may take together.

    Args:
        tables: with different names.
        limit_bytes: for rows, optimizer state and caches.
        formats: that may be chosen.
        cache_shares: that may be chosen; 0 stands for no cache.
        held_shares: of rows on a disk or on the host, that may be chosen; 0 stands for neither.
        devices: of a plan, which share the limit evenly; 0: a run in one process.
    """

    tables: tuple[TieredTable, ...]
    limit_bytes: int
    formats: tuple[RowFormat, ...] = field(default_factory=lambda: (PLAIN, *PLAIN.less_precise()))
    cache_shares: tuple[float, ...] = (0.0,)
    held_shares: tuple[float, ...] = (0.0,)
    devices: int = 0

    def options(self, cache_share: float, held_share: float = 0.0) -> list[tuple[Rung, ...]]:
        """The rungs of each table."""
        return [table.rungs(self.formats, cache_share=cache_share, held_share=held_share) for table in self.tables]


def choose_rungs(problem: TierProblem, *, way_out: str = "") -> Choice:
    """The rungs that fit at the least cost.

    Args:
        problem: tables and limit.
        way_out: to be named first if nothing fits.

    Raises:
        ConfigError: no rungs fit; says which rung of which table would.
    """
    shares = list(itertools.product(problem.cache_shares, problem.held_shares))
    # Up to five problems have the whole time each; more share ten seconds.
    time_limit_s = _TIME_LIMIT_S / max(1.0, len(shares) / 5)
    found = [_best(problem, cache, held, time_limit_s=time_limit_s) for cache, held in shares]
    fitting = [each for each in found if each is not None]
    if not fitting:
        # The last resort: where no share that was tried fits, the smallest rungs still may.
        smallest, num_bytes = smallest_rungs(problem)
        fallback = choice_of(problem, smallest, cache_share=min(problem.cache_shares))
        if fallback is None or num_bytes > problem.limit_bytes:
            raise _not_fitting(problem, way_out=way_out)
        fitting = [fallback]
    best = min(fitting, key=lambda each: each.cost)
    for _ in range(_REPRICED):  # by the share of rows that the limit turned out to hold
        share = max((rung.held_share for rung in best.rungs.values()), default=0.0)
        # A share of 0 or 1 is priced as it is.
        again = _best(problem, best.cache_share, share, time_limit_s=time_limit_s) if 0 < share < 1 else None
        # Without a gain the next round would ask the same again.
        if again is None or again.cost >= best.cost:
            break
        best = again
    return best


def greedy_rungs(problem: TierProblem, *, cache_share: float, held_share: float = 0.0) -> dict[str, Rung] | None:
    """The rungs of the greedy rule; None if nothing fits.

    Args:
        problem: tables and limit.
        cache_share: of rows in few bits.
        held_share: of rows on a disk.
    """
    options = problem.options(cache_share, held_share)
    sizes = [[t.num_bytes(rung) for rung in each] for t, each in zip(problem.tables, options, strict=True)]
    costs = [[t.cost(rung) for rung in each] for t, each in zip(problem.tables, options, strict=True)]
    chosen: list[int] = []
    for cost, size in zip(costs, sizes, strict=True):
        prices = list(zip(cost, size, strict=True))  # of rungs that cost the same, the smallest
        chosen.append(prices.index(min(prices)))
    total = sum(size[index] for size, index in zip(sizes, chosen, strict=True))
    while total > problem.limit_bytes:
        steps = [
            ((costs[t][new] - costs[t][old]) / (sizes[t][old] - sizes[t][new]), t, new)
            for t, old in enumerate(chosen)
            for new in range(len(sizes[t]))
            if sizes[t][new] < sizes[t][old]
        ]
        if not steps:
            return None
        _, table, new = min(steps)
        total += sizes[table][new] - sizes[table][chosen[table]]
        chosen[table] = new
    return {t.name: each[index] for t, each, index in zip(problem.tables, options, chosen, strict=True)}


def solved_rungs(
    problem: TierProblem, *, cache_share: float, held_share: float = 0.0, time_limit_s: float = _TIME_LIMIT_S
) -> dict[str, Rung]:
    """The rungs of the linear program; {} if nothing fits, or it has no answer in its time.

    Args:
        problem: tables and limit.
        cache_share: of rows in few bits.
        held_share: of rows on a disk.
        time_limit_s: for the solver.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # what trains without a limit of memory needs none of it
    from scipy.sparse import csr_matrix

    options = problem.options(cache_share, held_share)
    variables = [(index, rung) for index, rungs in enumerate(options) for rung in rungs]
    tables = problem.tables
    count = len(variables)
    cost = np.array([tables[index].cost(rung) for index, rung in variables])
    bytes_ = np.array([tables[index].num_bytes(rung) for index, rung in variables], dtype=np.float64)
    # In shares of the limit and of the highest cost: numbers far from 1 cost a solver digits.
    unit = max(float(problem.limit_bytes), 1.0)
    # One row for each table: exactly one of its rungs is taken.
    one_each = csr_matrix((np.ones(count), ([index for index, _ in variables], range(count))))
    solved = milp(
        # Divided by the highest, which may be 0 where nothing costs anything.
        cost / max(float(cost.max()), 1e-30),
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(csr_matrix(bytes_ / unit), -np.inf, 1.0)],
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if solved.x is None:
        return {}
    # The solver's ones and zeros are floats.
    return {tables[index].name: rung for (index, rung), taken in zip(variables, solved.x, strict=True) if taken > 0.5}


def _best(problem: TierProblem, cache_share: float, held_share: float, *, time_limit_s: float) -> Choice | None:
    shares = {"cache_share": cache_share, "held_share": held_share}
    greedy = greedy_rungs(problem, **shares)
    if greedy is None:
        return None
    # The solver may run out of time, and the greedy answer stands anyway.
    answers = [greedy, solved_rungs(problem, **shares, time_limit_s=time_limit_s)]
    choices = [choice_of(problem, rungs, cache_share=cache_share) for rungs in answers if rungs]
    fitting = [each for each in choices if each is not None and each.num_bytes <= problem.limit_bytes]
    return min(fitting, key=lambda each: each.cost, default=None)


def choice_of(problem: TierProblem, rungs: dict[str, Rung], *, cache_share: float) -> Choice | None:
    """Return what rungs take and cost, once the rest of the limit holds rows of disk or host; None if it is too little.

    Args:
        problem: tables and limit.
        rungs: of each table.
        cache_share: of rows in few bits.
    """
    held_bytes = 0
    beside = 0
    below = [table for table in problem.tables if rungs[table.name].is_below]
    if below:
        held_bytes, beside = _held(problem, rungs, below)
        if not held_bytes:
            return None
        # Of all rows that lie below, one share is held.
        share = held_bytes / sum(table.all_held_bytes for table in below)
        rungs = rungs | {table.name: replace(rungs[table.name], held_share=share) for table in below}
    plain = Rung()
    weights = [table.lookups * (4 * table.dim + 64) for table in problem.tables]
    times = [table.time(rungs[table.name]) for table in problem.tables]
    uses_cache = any(rung.cache_share for rung in rungs.values())
    return Choice(
        rungs=rungs,
        cache_share=cache_share if uses_cache else 0.0,
        num_bytes=sum(table.num_bytes(rungs[table.name]) for table in problem.tables) + beside,
        limit_bytes=problem.limit_bytes,
        cost=sum(table.cost(rungs[table.name]) for table in problem.tables),
        cost_fp32=sum(table.cost(plain) for table in problem.tables),
        time_ratio=float(np.average(times, weights=weights)) if sum(weights) else 1.0,
        held_bytes=held_bytes,
        below_s=sum(table.below_s(rungs[table.name]) for table in problem.tables),
    )


def _held(problem: TierProblem, rungs: dict[str, Rung], below: list[TieredTable]) -> tuple[int, int]:
    """Bytes for rows of disk or host that the limit has room for, 0 if that is too little; bytes of those written."""
    taken = sum(table.num_bytes(rungs[table.name]) for table in problem.tables)
    # Rows that are held were counted in, and are what is to be found.
    taken -= sum(int(rungs[table.name].held_share * table.all_held_bytes) for table in below)
    # All tables of a dim lie in one storage.
    storages = {table.dim for table in below}
    whole = sum(table.all_held_bytes for table in below)
    room = problem.limit_bytes - taken
    in_host = below[0].link is not None
    held = min(whole, room if in_host else held_room(room, num_storages=len(storages)))
    if held < _least_held(below):
        return 0, 0
    return held, 0 if in_host else most_waiting(held, num_storages=len(storages))


def _least_held(below: list[TieredTable]) -> int:
    """Bytes of the fewest rows that may be held of tables on a disk or the host: every storage has `MIN_PLACES`."""
    rows = [sum(table.num_rows for table in below if table.dim == dim) for dim in {table.dim for table in below}]
    # The smallest storage decides, since one share holds for all.
    share = min(1.0, MIN_PLACES / min(rows))
    return math.ceil(share * sum(table.all_held_bytes for table in below))


def smallest_rungs(problem: TierProblem) -> tuple[dict[str, Rung], int]:
    """Rungs that take little memory together, and the least limit with which `choose_rungs` takes them.

    Each table has its smallest rung in memory, or on the device; all tables of a dim that may leave it do so together
    where that saves more than the rows that a storage holds at least, and those that wait to be written.

    Args:
        problem: tables; its limit does not matter.
    """
    held_share = min((share for share in problem.held_shares if share), default=0.0)
    options = problem.options(min(problem.cache_shares), held_share)
    smallest = dict[str, Rung]()
    lower = dict[int, dict[str, Rung]]()
    for table, rungs in zip(problem.tables, options, strict=True):
        kept = [rung for rung in rungs if not rung.is_below]
        smallest[table.name] = min(kept or rungs, key=table.num_bytes)
        if kept and rungs[-1].is_below:
            lower.setdefault(table.dim, {})[table.name] = rungs[-1]
    least = _needed(problem, smallest)
    for rungs in list(lower.values()) * 2:  # again: the storage with fewest rows decides what all of them hold
        tried = smallest | rungs
        needed = _needed(problem, tried)
        if needed < least:
            smallest = tried
            least = needed
    below = [table for table in problem.tables if smallest[table.name].is_below]
    share = _least_held(below) / sum(table.all_held_bytes for table in below) if below else 0.0
    return smallest | {table.name: replace(smallest[table.name], held_share=share) for table in below}, least


def _needed(problem: TierProblem, rungs: dict[str, Rung]) -> int:
    """The least limit that has room for rungs, with the fewest rows of disk or host that may be held."""
    below = [table for table in problem.tables if rungs[table.name].is_below]
    taken = sum(table.num_bytes(rungs[table.name]) for table in problem.tables)
    taken -= sum(int(rungs[table.name].held_share * table.all_held_bytes) for table in below)
    if not below:
        return taken
    held = _least_held(below)
    return taken + (held if below[0].link is not None else room_for(held, num_storages=len({t.dim for t in below})))


def _not_fitting(problem: TierProblem, *, way_out: str) -> ConfigError:
    """Return the error that says which rungs are smallest, and what would fit."""
    smallest, least = smallest_rungs(problem)
    sizes = {table.name: table.num_bytes(smallest[table.name]) for table in problem.tables}
    tables = sorted(problem.tables, key=lambda table: -sizes[table.name])
    shown = "; ".join(_least_text(problem, table, rung=smallest[table.name]) for table in tables[:_SHOWN])
    more = f"; and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    # What is needed beyond the tables themselves.
    waiting = least - sum(sizes.values())
    more += f"; and {size_text(waiting)} of rows that wait to be written" if waiting >= 1024 else ""
    devices = max(1, problem.devices)
    enough = enough_text(math.ceil(least / devices))
    limit = problem.limit_bytes / devices
    limit_text = size_text(limit) if limit >= 1024 else f"{limit:.0f} bytes"
    if problem.devices:
        of_each = f" on each of {devices} devices"
        together = f" ({size_text(least)} on all together)"
        where = f"{_SETTING_OF_PLANS}, or the memory of a device without what else it holds"
        more_devices = math.ceil(least * devices / max(problem.limit_bytes, 1))
        ways_out = [
            f"a limit above {enough}, if devices have it: not all cut evenly",
            f"{more_devices:,} devices or more: --cluster",
        ]
    else:
        of_each = ""
        together = ""
        where = f"{_SETTING}, before the first step"
        ways_out = [f"a limit of {enough} or more"]
    more_ways = _ways_out(problem, tables[0], rung=smallest[tables[0].name], least=least)
    return ConfigError(
        expected=f"tables that fit {limit_text}{of_each} on some rung each",
        found=f"{size_text(least / devices)}{of_each}{together} on the smallest rungs: {shown}{more}",
        where=where,
        ways_out=[*filter(None, (way_out,)), *ways_out, *more_ways],
    )


def _least_text(problem: TierProblem, table: TieredTable, *, rung: Rung) -> str:
    fixed = ", as --tables.by-table asks" if table.fixed is not None else ""
    state = f", {size_text(table.num_rows * table.state_bytes)} of it optimizer state" if table.state_bytes else ""
    state = "" if rung.is_below else state
    grown = f", {size_text(table.map_bytes)} of it the map of ids" if table.map_bytes else ""
    of_all = " of all devices" if problem.devices else ""
    return (
        f"table {table.name!r} as {rung.text}{fixed}: {size_text(table.num_bytes(rung))}{of_all}{state}{grown} "
        f"({table.num_rows:,} rows × {table.dim})"
    )


def _ways_out(problem: TierProblem, largest: TieredTable, *, rung: Rung, least: int) -> list[str]:
    ways = list[str]()
    missing = least - problem.limit_bytes
    # What somebody has fixed is asked about first: it is a wish that may be given up.
    for table in (table for table in problem.tables if table.fixed is not None):
        freed = tuple(replace(each, fixed=None) if each is table else each for each in problem.tables)
        # As if that table were free.
        smallest, enough = smallest_rungs(replace(problem, tables=freed))
        if enough < least:
            verdict = "enough" if least - enough >= missing else "not enough alone"
            saved = size_text(least - enough)
            ways.append(f"table {table.name!r} as {smallest[table.name].text} saves {saved} ({verdict})")
    if not problem.devices and not any(problem.held_shares):
        ways.append("--tables.disk FOLDER keeps exact rows on a disk, of which some are held in memory")
        ways.append("--tables.device-memory auto keeps exact rows on the host of a GPU, which holds some of them")
    if len(problem.formats) < len(PLAIN.less_precise()) + 1:
        ways.append("leave --tables.weights out, so that every format may be chosen")
    size = largest.num_bytes(rung)
    rows = int((size - missing) * largest.num_rows / max(size, 1))  # with its part of the map
    if rows > 0 and not rung.is_below:
        ways.append(f"at most {rows:,} rows in table {largest.name!r}: hash its ids, or drop rare ones (min_count)")
    if largest.state_bytes > 4:
        ways.append("--model.embedding.optimizer rowwise_adagrad keeps one number for each row")
    ways.append("fewer columns: --model.embedding-dim, or embedding_dim of the table in the schema")
    return ways
