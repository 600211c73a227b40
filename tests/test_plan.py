"""Plans are refused when they do not fit, and come back from a file as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.errors import PlanError
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement, Towers, possible_tower_sizes, show_ranks

TABLES = {"user": "user", "item": "item", "last_item": "item"}


def entry(table: str, *ranks: int, placement: Placement = Placement.TABLE_WISE) -> TablePlacement:
    return TablePlacement(table=table, placement=placement, ranks=ranks)


def test_round_trip_through_files(tmp_path: Path) -> None:
    towers = Towers(towers=(("user",), ("item", "last_item")), strategy="by hand", seed=3)
    towers.save(tmp_path / "towers.json")
    assert Towers.load(tmp_path / "towers.json") == towers
    cut = entry("item", 2, 3, placement=Placement.ROW_WISE)
    plan = Plan(world_size=4, tables=(entry("user", 0), cut), towers=towers, tower_size=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_towers_must_hold_every_feature_once() -> None:
    with pytest.raises(PlanError, match="user"):
        Towers(towers=(("user",), ("item", "user")))
    with pytest.raises(PlanError, match="missing: last_item; unknown: shop"):
        Towers(towers=(("user", "shop"), ("item",))).check(TABLES)
    with pytest.raises(PlanError, match=r"table 'item' in towers 0 and 1"):
        Towers(towers=(("user", "item"), ("last_item",))).check(TABLES)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((entry("user", 0), entry("user", 1)), "twice: user"),
        ((entry("user", 4),), "ranks from 0 to 3"),
        ((entry("user", 0, 1),), "exactly one for table_wise"),
        ((entry("user", 1, 1, placement=Placement.ROW_WISE),), "different ranks"),
    ],
)
def test_impossible_placements_are_refused(tables: tuple[TablePlacement, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(world_size=4, tables=tables)


def test_a_plan_is_checked_against_the_model_and_the_job() -> None:
    plan = Plan(world_size=2, tables=(entry("user", 0), entry("item", 1)))
    plan.check(tables=TABLES, world_size=2, names=["user", "item"])
    with pytest.raises(PlanError, match="a job of 2 ranks"):
        plan.check(tables=TABLES, world_size=4, names=["user", "item"])
    with pytest.raises(PlanError, match="missing: shop"):
        plan.check(tables=TABLES, world_size=2, names=["user", "item", "shop"])
    towers = Towers(towers=(("item", "last_item"), ("user",)))
    with pytest.raises(PlanError, match="hold tower 0"):
        Plan(world_size=2, tables=plan.tables, towers=towers).check(tables=TABLES, world_size=2, names=["user", "item"])


def test_tower_sizes() -> None:
    assert possible_tower_sizes(4, 2) == [2, 4]
    assert possible_tower_sizes(4, 8) == [1, 2, 4]
    assert possible_tower_sizes(6, 4) == [3, 6]
    towers = Towers(towers=(("a",), ("b",), ("c",), ("d",)))
    plan = Plan(world_size=4, tables=(), towers=towers, tower_size=2)
    assert [list(plan.tower_ranks(tower)) for tower in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    with pytest.raises(PlanError, match=r"possible here: \[3, 6\]"):
        Plan(world_size=6, tables=(), towers=towers, tower_size=2)


def test_a_broken_file_says_where(tmp_path: Path) -> None:
    (tmp_path / "towers.json").write_text("{")
    with pytest.raises(PlanError, match=r"towers\.json"):
        Towers.load(tmp_path / "towers.json")


def test_a_plan_prints_as_a_table() -> None:
    towers = Towers(towers=(("user", "age"), ("item",)))
    tables = (
        TablePlacement(table="user", placement=Placement.ROW_WISE, ranks=(0, 1)),
        TablePlacement(table="age", ranks=(1,)),
        TablePlacement(table="item", ranks=(3,)),
    )
    assert str(Plan(world_size=4, tables=tables, towers=towers, tower_size=2)).splitlines() == [
        "plan for 4 ranks, 2 towers in groups of 2 ranks",
        "tower 0 on ranks 0, 1: user, age",
        "tower 1 on ranks 2, 3: item",
        "",
        "table  placement   ranks",
        "user   row_wise    0, 1",
        "age    table_wise  1",
        "item   table_wise  3",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "3"), ((2, 7), "2, 7"), (tuple(range(8)), "0–7"), ((0, 2, 4, 6, 8, 10, 12), "0, 2, 4, 6, 8, 10, … (7)")],
)
def test_ranks_are_shown_shortly(ranks: tuple[int, ...], text: str) -> None:
    assert show_ranks(ranks) == text


def test_a_plan_without_towers_has_no_ranks_of_one() -> None:
    with pytest.raises(PlanError, match="towers"):
        Plan(world_size=2, tables=()).tower_ranks(0)
