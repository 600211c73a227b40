"""A placement from outside the package: cut, planned, saved, executed on ranks, and equal to one device."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from collections.abc import Iterator

import pytest
import torch

from tests.parallel.test_parity import TOWERS, check, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.planning.problem import PlanningProblem, TableProfile
from ziggurat.testing.ranks import run_ranks


@pytest.fixture(scope="module")
def rows_by_traffic() -> Iterator[Placement]:
    """The placement, listed while these tests run: others of this process ask for all that are listed."""
    yield importlib.import_module("examples.extensions.rows_by_traffic").ROWS_BY_TRAFFIC
    del Placement._members["rows_by_traffic"]


def check_with_extension(rank: int, plan: dict, case: dict) -> None:
    """Runs on every rank, whose process has to import the placement before it reads the plan."""
    importlib.import_module("examples.extensions.rows_by_traffic")
    check(rank, plan, case)


@pytest.mark.parametrize("world_size", [1, 4])
def test_it_equals_one_device(world_size: int, rows_by_traffic: Placement) -> None:
    plan = to_json(placed(world_size, rows_by_traffic))
    run_ranks(check_with_extension, world_size, plan, {"fields": 0.0 if world_size == 1 else 1e-6})


def test_it_equals_one_device_above_towers(rows_by_traffic: Placement) -> None:
    plan = to_json(placed(4, rows_by_traffic, TOWERS, 2))
    run_ranks(check_with_extension, 4, plan, {"tower_modules": True, "fields": 1e-6})


@pytest.mark.parametrize("num_rows", [1, 2, 7, 1000, 10**9])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 64])
def test_no_rank_has_more_than_twice_its_share(num_rows: int, num_parts: int, rows_by_traffic: Placement) -> None:
    parts = rows_by_traffic.parts(num_rows=num_rows, num_columns=4, num_parts=num_parts)
    assert sum(part.num_rows for part in parts) == num_rows
    for part in parts:
        last = part.first_row + part.num_rows
        lookups = (math.log1p(last) - math.log1p(part.first_row)) / math.log1p(num_rows)
        one_row = math.log1p(1) / math.log1p(num_rows)
        assert part.num_rows <= 2 * num_rows / num_parts + 1
        assert lookups <= 2 / num_parts + one_row


def test_every_row_has_an_owner_and_a_place_there(rows_by_traffic: Placement) -> None:
    parts = rows_by_traffic.parts(num_rows=100, num_columns=4, num_parts=4)
    rows = torch.arange(100)
    owners = rows_by_traffic.owners(rows, parts)
    places = rows_by_traffic.local_rows(rows, owners, parts)
    expected = [(position, row + (position > 0)) for position, part in enumerate(parts) for row in range(part.num_rows)]
    assert list(zip(owners.tolist(), places.tolist(), strict=True)) == expected


def test_plans_and_planners_take_it(rows_by_traffic: Placement) -> None:
    table = TableProfile(name="user", num_rows=1000, dim=16)
    problem = PlanningProblem(tables=(table,), num_devices=4, memory_bytes=(1 << 20,), placements=(*Placement,))
    option = next(each for each in problem.spread_options(0) if each.placement is rows_by_traffic)
    plan = problem.to_plan([option])
    assert from_json(Plan, to_json(plan), where="plan") == plan
    assert to_json(plan)["tables"][0]["placement"] == "rows_by_traffic"
    assert problem.shards(0, option)[0].num_rows < 1000


def test_it_stays_one_object(rows_by_traffic: Placement) -> None:
    assert pickle.loads(pickle.dumps(rows_by_traffic)) is rows_by_traffic
    assert copy.deepcopy(placed(2, rows_by_traffic)).tables[0].placement is rows_by_traffic
    assert Placement("rows_by_traffic") is rows_by_traffic
    assert Placement.add(rows_by_traffic) is rows_by_traffic


def test_a_second_placement_of_that_name_is_refused(rows_by_traffic: Placement) -> None:
    class Other(type(rows_by_traffic)):
        pass

    with pytest.raises(ConfigError, match="both named 'rows_by_traffic'"):
        Placement.add(Other())
