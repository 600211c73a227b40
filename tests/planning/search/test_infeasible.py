import dataclasses

import pytest

from ziggurat.errors import PlanError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.placements import Placement
from ziggurat.planning.costs.additive import AdditiveCostModel
from ziggurat.planning.problem import PlanningProblem, TableProfile
from ziggurat.planning.search.search import SearchConfig, Strategy, search

GIB = 2**30
CONFIG = SearchConfig(max_evaluations=4000)
WHOLE = (Placement.TABLE_WISE,)


def _table(name: str, num_rows: int) -> TableProfile:
    return TableProfile(name=name, num_rows=num_rows, dim=64, optimizer_bytes_per_row=4)


def _problem(*tables: TableProfile, num_devices: int, memory: float, **changes) -> PlanningProblem:
    memory_bytes = (int(memory * GIB),)
    return PlanningProblem(
        tables=tables, num_devices=num_devices, memory_bytes=memory_bytes, reserve_bytes=GIB // 2, **changes
    )


ONE_TOO_LARGE = _problem(
    _table("user", 12_000_000), _table("item", 1_000_000), num_devices=4, memory=3.0, placements=WHOLE
)
ALL_TOO_LARGE = _problem(
    _table("a", 12_000_000), _table("b", 11_000_000), _table("c", 10_000_000), num_devices=2, memory=4.0
)
BADLY_PACKED = _problem(*(_table(name, 8_000_000) for name in "abc"), num_devices=2, memory=4.0, placements=WHOLE)


def _refusal(problem: PlanningProblem) -> PlanError:
    with pytest.raises(PlanError) as caught:
        search(problem, AdditiveCostModel(), config=CONFIG)
    return caught.value


def test_the_printed_text_of_a_table_that_fits_nowhere():
    assert str(_refusal(ONE_TOO_LARGE)) == (
        "expected: tables and their optimizer state inside the memory of every device\n"
        "found:    table 'user' has 2.91 GiB (12,000,000 rows × 64 columns, 46 MiB of them optimizer state); "
        "rank 0 has 2.50 GiB free of 2.50 GiB, more than any other\n"
        "where:    table 'user', rank 0: 3.00 GiB of memory less 512 MiB of reserve\n"
        "ways out:\n"
        "  1. 416 MiB more memory a device (or as much less reserve)\n"
        "  2. allow column_wise: 2 parts of 1.48 GiB\n"
        "  3. allow row_wise: 4 parts of 744 MiB\n"
        "  4. at most 10,324,440 rows in table 'user' (hash its ids, or drop rare ones)\n"
        "  5. --tables.by-table user=bf16: all tables then have 1.72 GiB (enough)"
    )


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        (ALL_TOO_LARGE, "all 3 tables have 7.99 GiB, and 2 devices have 7.00 GiB for them"),
        (BADLY_PACKED, "rank 0 has 1.56 GiB free of 3.50 GiB"),
        (dataclasses.replace(ONE_TOO_LARGE, reserve_bytes=4 * GIB), "no memory for tables: the reserve is 1.00 GiB"),
    ],
)
def test_the_cause_is_named(problem, found):
    assert found in _refusal(problem).found


@pytest.mark.parametrize("problem", [ONE_TOO_LARGE, ALL_TOO_LARGE, BADLY_PACKED])
def test_each_way_out_is_one(problem):
    """What the message advises is done, and the search finds a plan."""
    for way in _refusal(problem).ways_out:
        number = way.split()[0].replace(",", "")
        if "more memory" in way:
            more = float(number) * {"MiB": 2**20, "GiB": GIB}[way.split()[1]]
            changed = dataclasses.replace(problem, memory_bytes=(int(problem.memory_bytes[0] + more),))
        elif "devices of this size" in way:
            changed = dataclasses.replace(problem, num_devices=int(number))
        elif way.startswith("allow"):
            placement = Placement(way.split()[1].rstrip(":"))
            changed = dataclasses.replace(problem, placements=(*problem.placements, placement))
        elif "at most" in way:
            rows, name = int(way.split()[2].replace(",", "")), way.split("'")[1]
            tables = [dataclasses.replace(t, num_rows=rows) if t.name == name else t for t in problem.tables]
            changed = dataclasses.replace(problem, tables=tuple(tables))
        else:
            assert "(enough)" in way
            setting, value = way.split(":")[0].split()
            name, _, kept = value.rpartition("=")
            assert setting == ("--tables.by-table" if name else "--tables.weights")
            tables = [
                dataclasses.replace(t, row_format=RowFormat(kept)) if name in ("", t.name) else t
                for t in problem.tables
            ]
            changed = dataclasses.replace(problem, tables=tuple(tables))
        found = search(changed, AdditiveCostModel(), config=CONFIG)
        assert all(held <= room for held, room in zip(found.device_bytes, changed.room_bytes, strict=True)), way


def test_rules_that_pack_badly_say_so_too():
    with pytest.raises(PlanError, match="ways out"):
        search(BADLY_PACKED, AdditiveCostModel(), strategy=Strategy.LOOKUP)


def test_a_rule_that_finds_no_plan_does_not_blame_the_memory() -> None:
    tables = tuple(TableProfile(name=f"t{index}", num_rows=100, dim=16) for index in range(2))
    problem = PlanningProblem(tables=tables, num_devices=16, memory_bytes=(1 << 30,))
    with pytest.raises(PlanError, match=r"a rank 3 columns at most: table 't0' has 16") as caught:
        search(problem, AdditiveCostModel(), strategy=Strategy.GRID)
    assert "free of" not in str(caught.value)


def test_a_rule_that_places_whole_tables_says_which_is_too_large() -> None:
    tables = tuple(TableProfile(name=f"t{index}", num_rows=1000 * (1 + index), dim=16) for index in range(2))
    problem = PlanningProblem(tables=tables, num_devices=2, memory_bytes=(110_000,))
    with pytest.raises(PlanError, match=r"it places whole tables: 't1' has"):
        search(problem, AdditiveCostModel(), strategy=Strategy.SIZE)
