"""Tables go round the ranks evenly, and stay in their tower."""

from __future__ import annotations

from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.plan import Towers
from ziggurat.planning.placement import place_tables


def inputs(*, num_tables: int) -> InputSpec:
    return InputSpec(
        single=tuple(SingleSpec(name=f"f{i}", table=f"t{i}") for i in range(num_tables)),
        jagged=(JaggedSpec(name="long", table="t_long"),),
        tables=(
            *(TableSpec(name=f"t{i}", num_rows=10 * i + 5) for i in range(num_tables)),
            TableSpec(name="t_long", num_rows=9),
        ),
    )


def test_loads_are_even_and_long_lists_count_more() -> None:
    plan = place_tables(inputs(num_tables=26), dim=8, world_size=4, list_lengths={"long": 9.0})
    tables_of = [[e.table for e in plan.tables if e.ranks == (rank,)] for rank in range(4)]
    with_list = next(rank for rank in range(4) if "t_long" in tables_of[rank])
    loads = [2.0 * len(tables) + (8.0 if rank == with_list else 0.0) for rank, tables in enumerate(tables_of)]
    assert max(loads) - min(loads) <= 2.0
    assert len(tables_of[with_list]) < 6
    assert plan == place_tables(inputs(num_tables=26), dim=8, world_size=4, list_lengths={"long": 9.0})


def test_tables_stay_in_the_group_of_their_tower() -> None:
    towers = Towers(towers=(("f0", "f3"), ("f1", "f2", "long")))
    plan = place_tables(inputs(num_tables=4), dim=8, world_size=4, towers=towers, tower_size=2)
    ranks = {e.table: e.ranks[0] for e in plan.tables}
    assert {ranks["t0"], ranks["t3"]} == {0, 1}
    assert {ranks["t1"], ranks["t2"], ranks["t_long"]} == {2, 3}
    plan.check(
        tables={field.name: field.table for field in inputs(num_tables=4).fields},
        world_size=4,
        names=[table.name for table in inputs(num_tables=4).tables],
    )
