"""Chosen rungs fit, are the best of all on small cases, and what fits nothing says what would."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from tests.planning.tiers.test_stack_distances import zipf_trace
from ziggurat.errors import ConfigError
from ziggurat.ops.machine.memory import size_of_text
from ziggurat.ops.row_file import DiskRate
from ziggurat.ops.row_formats import RowFormat
from ziggurat.planning.tiers.choice import Choice, TierProblem, choice_of, choose_rungs, greedy_rungs, smallest_rungs
from ziggurat.planning.tiers.miss_ratio import miss_ratio_curve
from ziggurat.planning.tiers.rungs import HostLink, Place, Rung, TieredTable


def random_problem(seed: int) -> TierProblem:
    generator = np.random.default_rng(seed)
    tables = tuple(
        TieredTable(
            name=f"t{index}",
            num_rows=int(10 ** generator.uniform(1, 6)),
            dim=int(generator.choice([1, 4, 16, 64])),
            state_bytes=int(generator.choice([0, 4, 128])),
            lookups=float(generator.uniform(0.1, 20)),
            fixed=RowFormat.BF16 if generator.random() < 0.1 else None,
        )
        for index in range(generator.integers(1, 5))
    )
    whole = sum(table.num_bytes(Rung(row_format=RowFormat.FP32)) for table in tables)
    shares = (0.0,) if seed % 2 else (0.0, 0.05, 0.2)
    return TierProblem(tables=tables, limit_bytes=int(whole * generator.uniform(0.1, 1.1)), cache_shares=shares)


def best_by_trying_all(problem: TierProblem) -> float | None:
    costs = []
    for share in problem.cache_shares:
        for rungs in itertools.product(*problem.options(share)):
            pairs = list(zip(problem.tables, rungs, strict=True))
            if sum(table.num_bytes(rung) for table, rung in pairs) <= problem.limit_bytes:
                costs.append(sum(table.cost(rung) for table, rung in pairs))
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(30))
def test_choices_are_the_best_there_are(seed: int) -> None:
    problem = random_problem(seed)
    best = best_by_trying_all(problem)
    if best is None:
        with pytest.raises(ConfigError, match="memory-limit"):
            choose_rungs(problem)
        return
    found = choose_rungs(problem)
    assert found.num_bytes <= problem.limit_bytes
    assert found.cost == pytest.approx(best, rel=1e-5)
    for table in problem.tables:
        assert table.fixed in (None, found.rungs[table.name].row_format) or table.dim == 1
    greedy = greedy_rungs(problem, cache_share=0.0)
    assert greedy is None or sum(t.num_bytes(greedy[t.name]) for t in problem.tables) <= problem.limit_bytes


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_choices_with_a_disk_or_a_host_are_nearly_the_best_and_fill_the_limit(seed: int, in_host: bool) -> None:
    generator = np.random.default_rng(seed)
    trace = zipf_trace(seed=seed, num_rows=2_000, batches=20, size=100)
    tables = tuple(
        TieredTable(
            name=f"t{index}",
            num_rows=(rows := int(10 ** generator.uniform(5, 7))),
            dim=int(generator.choice([4, 16, 64])),
            lookups=float(generator.uniform(0.1, 20)),
            curve=miss_ratio_curve(dataclasses.replace(trace, num_rows=rows)),
            fixed=RowFormat.FP32 if index == 0 else None,
            disk=None if in_host else DiskRate(read_rows_per_s=70_000.0, written_rows_per_s=30_000.0),
            link=HostLink(bytes_per_s=50e9) if in_host else None,
        )
        for index in range(2)
    )
    whole = sum(table.num_bytes(Rung(row_format=RowFormat.FP32)) for table in tables)
    limit = max(30 << 20, int(whole * generator.uniform(0.05, 0.4)))
    problem = TierProblem(tables=tables, limit_bytes=limit, held_shares=(0.0, 0.01, 0.2))
    found = choose_rungs(problem)
    costs = []
    for rungs in itertools.product(*problem.options(0.0, 0.01)):
        each = choice_of(problem, {t.name: rung for t, rung in zip(tables, rungs, strict=True)}, cache_share=0.0)
        if each is not None and each.num_bytes <= limit:
            costs.append(each.cost)
    assert found.cost <= 1.01 * min(costs)
    assert found.num_bytes <= limit
    below = [table for table in tables if found.rungs[table.name].is_below]
    all_held = found.held_bytes == sum(table.all_held_bytes for table in below)
    assert bool(found.held_bytes) == bool(below)
    assert not below or all_held or found.num_bytes > 0.98 * limit
    assert (found.below_s > 0) == bool(below)
    assert {found.rungs[table.name].is_in_host for table in below} <= {in_host}


def test_rows_on_the_host_cost_less_than_on_a_disk_and_more_than_on_the_device() -> None:
    curve = miss_ratio_curve(zipf_trace(seed=0, num_rows=2_000, batches=40, size=100))
    on_disk = TieredTable(name="a", num_rows=2_000, dim=64, curve=curve, disk=DiskRate(70_000.0, 30_000.0))
    in_host = dataclasses.replace(on_disk, disk=None, link=HostLink(bytes_per_s=50e9))
    kept, lower = in_host.rungs((RowFormat.FP32,), cache_share=0.0, held_share=0.1)
    assert lower.text == "host, 10 % of the rows held"
    assert in_host.num_bytes(lower) == 200 * (256 + 4) + 4 * 2_000
    below = on_disk.rungs((RowFormat.FP32,), cache_share=0.0, held_share=0.1)[1]
    assert in_host.cost(kept) < in_host.cost(lower) < on_disk.cost(below)


def one(limit: float, **changes: object) -> Choice:
    settings = {"name": "item", "num_rows": 1000, "dim": 64, **changes}
    return choose_rungs(TierProblem(tables=(TieredTable(**settings),), limit_bytes=int(limit)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "rung"), [(260_000, "fp32"), (259_000, "bf16"), (132_000, "bf16"), (131_000, "int8"), (60_000, "int4")]
)
def test_a_smaller_limit_takes_a_lower_rung(limit: int, rung: str) -> None:
    found = one(limit)
    assert found.rungs["item"].text == rung
    assert found.num_bytes <= limit


def test_the_table_that_is_looked_up_least_goes_first() -> None:
    tables = tuple(
        TieredTable(name=name, num_rows=1000, dim=64, lookups=n) for name, n in (("hot", 9.0), ("cold", 0.1))
    )
    found = choose_rungs(TierProblem(tables=tables, limit_bytes=333_000))
    assert (found.rungs["hot"].text, found.rungs["cold"].text) == ("fp32", "int8")
    assert 1.0 < found.time_ratio < 1.01


def test_a_cache_is_taken_where_it_hits() -> None:
    curve = miss_ratio_curve(zipf_trace(seed=0, num_rows=2_000, batches=400, size=20))
    plain = Rung(row_format=RowFormat.INT4)
    for share, pays in ((0.1, False), (0.6, True)):
        cached = Rung(row_format=RowFormat.INT4, cache_share=share)
        for table, is_better in (
            (TieredTable(name="item", num_rows=2_000, dim=64, curve=curve), pays),
            (TieredTable(name="item", num_rows=2_000, dim=64), False),  # nobody has counted what a cache hits
        ):
            problem = TierProblem(
                tables=(table,),
                limit_bytes=table.num_bytes(cached),
                formats=(RowFormat.INT4,),
                cache_shares=(0.0, share),
            )
            assert (table.cost(cached) < table.cost(plain)) == is_better
            assert choose_rungs(problem).cache_share == (share if is_better else 0.0)
            assert choose_rungs(dataclasses.replace(problem, limit_bytes=table.num_bytes(plain))).cache_share == 0.0


def named_limit(problem: TierProblem) -> int:
    """The limit that the error names; 0 where the problem has an answer."""
    try:
        choice = choose_rungs(problem)
    except ConfigError as error:
        named = re.findall(r"a limit (?:of|above) (.*?)(?: or more|, if devices)", str(error))
        return size_of_text(named[0], where="--tables.memory-limit") * max(1, problem.devices)
    assert choice.num_bytes <= problem.limit_bytes
    return 0


@pytest.mark.parametrize("below", ["disk", "host", "devices"])
@pytest.mark.parametrize("seed", range(25))
def test_the_limit_that_a_refusal_names_is_accepted(seed: int, below: str) -> None:
    generator = np.random.default_rng(seed)
    tables = tuple(
        TieredTable(
            name=f"t{index}",
            num_rows=int(10 ** generator.uniform(0, 7 if seed % 3 else 3)),
            dim=int(generator.choice([1, 4, 16, 64])),
            state_bytes=int(generator.choice([0, 4, 128])),
            fixed=(RowFormat.FP32, RowFormat.BF16, None)[generator.integers(3)],
            map_bytes=int(generator.choice([0, 5_000])),
            disk=DiskRate(70_000.0, 30_000.0) if below == "disk" else None,
            link=HostLink(bytes_per_s=50e9) if below == "host" else None,
            place=(Place.ANYWHERE, Place.MEMORY, Place.BELOW)[generator.integers(3)],
        )
        for index in range(generator.integers(1, 5))
    )
    whole = sum(table.num_bytes(Rung(row_format=RowFormat.FP32)) for table in tables)
    devices = int(generator.integers(1, 9)) if below == "devices" else 0
    problem = TierProblem(
        tables=tables,
        limit_bytes=1,
        cache_shares=((0.0, 0.05), (0.2,))[generator.integers(2)],
        held_shares=(0.0,) if devices else (0.0, 0.01, 0.2),
        devices=devices,
    )
    num_refused = 0
    for limit in [1, *np.geomspace(1_000, max(2_000, 2 * whole), 8)]:
        named = named_limit(dataclasses.replace(problem, limit_bytes=int(limit)))
        if named:
            num_refused += 1
            assert named > limit
            assert named_limit(dataclasses.replace(problem, limit_bytes=named)) == 0
    assert num_refused


@pytest.mark.parametrize("below", ["disk", "host"])
def test_tables_leave_memory_only_where_that_saves_more_than_what_waits_and_is_held(below: str) -> None:
    def needed(*num_rows: int) -> tuple[int, list[bool]]:
        tables = tuple(
            TieredTable(
                name=f"t{index}",
                num_rows=rows,
                dim=(64, 16)[index],
                fixed=RowFormat.FP32,
                disk=DiskRate(70_000.0, 30_000.0) if below == "disk" else None,
                link=HostLink(bytes_per_s=50e9) if below == "host" else None,
            )
            for index, rows in enumerate(num_rows)
        )
        rungs, least = smallest_rungs(TierProblem(tables=tables, limit_bytes=1, held_shares=(0.0, 0.01)))
        return least, [rungs[table.name].is_below for table in tables]

    assert needed(900, 900) == (900 * (260 + 68), [False, False])
    one, two = needed(10_000_000, 900), needed(10_000_000, 10_000_000)
    assert (one[1], two[1]) == ([True, False], [True, True])
    waiting = 8 << 20 if below == "disk" else 0
    assert waiting < one[0] < waiting + 45_000_000  # marks or places of all rows, and some that are held
    assert one[0] < two[0] < 2 * (waiting + 45_000_000)


def test_what_fits_nothing_says_which_rung_of_which_table_would() -> None:
    tables = (
        TieredTable(name="user", num_rows=100_000, dim=64, fixed=RowFormat.FP32),
        TieredTable(name="item", num_rows=1_000, dim=64),
    )
    with pytest.raises(ConfigError) as caught:
        choose_rungs(TierProblem(tables=tables, limit_bytes=5_000_000))
    error = str(caught.value)
    assert "table 'user' as fp32, as --tables.by-table asks: 25 MiB" in error
    assert "table 'user' as int4 saves 21 MiB (enough)" in error
    assert "a limit of 25 MiB or more" in error
