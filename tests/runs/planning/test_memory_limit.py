"""`ziggurat plan --memory-limit`: formats for which a plan fits every device, or an error that says what would."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, PlanError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.planning.cluster.catalogue import find_cluster
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.planning.plan_inputs import plan_inputs
from ziggurat.runs.planning.plan_run import PlannedRun, PlanRequest, neighbours, plan_run

ROWS = {"user_id": 3_000_000, "movie_id": 1_000_000, "zip_code": 3_000, "year": 80}  # others: as published


def planned(limit: str) -> PlannedRun:
    request = PlanRequest(budget_s=0.1, rows=ROWS, memory_limit=limit)
    return plan_run(recipe_named("movielens_dlrm"), find_cluster("a100x8"), request=request)


@pytest.mark.parametrize("limit", ["64MB", "20MB", "14MB"])
def test_every_device_stays_below_the_limit(limit: str) -> None:
    found = planned(limit).planned
    formats = found.model.tables.by_table
    assert max(found.rank_bytes) <= int(limit[:-2]) * 1_000_000
    assert {profile.name: profile.row_format for profile in found.problem.tables} == formats
    assert (set(formats.values()) == {RowFormat.FP32}) == (limit == "64MB")


def test_a_limit_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match="table 'user_id' as int4") as refused:
        planned("5MB")
    assert "fit 5 MiB on each of 8 devices" in refused.value.expected
    assert "8 MiB on each of 8 devices (61 MiB on all together) on the smallest rungs" in refused.value.found
    assert "table 'user_id' as int4: 46 MiB of all devices, " in refused.value.found
    enough = re.match(r"a limit above ([\d.]+) MiB, if devices have it", refused.value.ways_out[0])
    assert enough is not None
    assert 8 * float(enough[1]) == pytest.approx(61, abs=0.6)
    planned(f"{float(enough[1]) * 1.2:.1f}MiB")  # tables are not cut evenly
    assert "--tables.disk" not in " ".join(refused.value.ways_out), "plans put nothing on a disk"
    with pytest.raises(ConfigError, match=r"--memory-limit 4GiB"):
        planned("a lot")


def test_what_the_verb_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name, rows in ROWS.items() for word in ("--rows", f"{name}={rows}")]
    words += ["--budget-s", "0.1", "--memory-limit", "20MB", "--save", str(tmp_path / "plan.json")]
    assert main(["plan", "movielens_dlrm", "--cluster", "a100x8", *words]) == 0
    shown = capsys.readouterr().out
    assert "formats   user_id: " in shown
    assert "--tables.by-table user_id=" in shown
    assert "formats alone are chosen" in shown
    assert "formats   limit: 19 MiB on each of 8 devices, 153 MiB together" in shown


def test_a_device_that_breaks_the_limit_is_named_with_what_the_limit_counts() -> None:
    recipe, request = recipe_named("movielens_dlrm"), PlanRequest(budget_s=0.1, rows=ROWS, memory_limit="9MB")
    towers = neighbours(plan_inputs(recipe, folder=None, rows=ROWS, list_lengths=None).inputs, most=4)
    config = replace(recipe, towers=towers, parallel=replace(recipe.parallel, tower_size=2))
    with pytest.raises(PlanError, match="rank 0 has 9 MiB free") as refused:
        plan_run(config, find_cluster("a100x8"), request=request)
    assert refused.value.expected.startswith("9 MiB or less of tables and their optimizer state on every device")
    assert refused.value.where == "table 'user_id', rank 0: --memory-limit"
    enough = re.match(r"a limit of (\d+ MiB) or more", refused.value.ways_out[0])
    assert enough is not None
    wider = replace(request, memory_limit=enough[1])
    assert max(plan_run(config, find_cluster("a100x8"), request=wider).planned.rank_bytes) > 9_000_000
