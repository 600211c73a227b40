"""The size of tower groups follows the machines, and the report says why and whether it gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.clusters import round_cluster
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import Categorical, Dense, Label, Schema
from ziggurat.plan import Towers
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.planning.plan_inputs import plan_inputs
from ziggurat.runs.planning.tower_size import choose_tower_size

NAMES = tuple("abcdefgh")
SCHEMA = Schema(features=(Dense(name="x"), *(Categorical(name=each) for each in NAMES)), labels=(Label(name="y"),))
TOWERS = Towers(towers=(NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]))


def config(**parallel: object) -> RunConfig:
    found = recipe_named("table_dlrm", schema=SCHEMA)
    return replace(found, towers=TOWERS, parallel=replace(found.parallel, **parallel))


def inputs() -> InputSpec:
    return plan_inputs(config(), rows=dict.fromkeys(NAMES, 1000)).inputs


def chosen(cluster: Cluster, folder: Path, *, towers: Towers = TOWERS) -> tuple[int, str]:
    cluster.save(folder / "cluster.toml")
    run = replace(config(cluster=str(folder / "cluster.toml")), towers=towers)
    found = choose_tower_size(run, inputs(), world_size=cluster.world_size, ranks_per_host=cluster.devices_per_host)
    return found.size, found.reason


def test_the_fastest_size_on_the_cluster_is_taken_with_its_reason(tmp_path: Path) -> None:
    slow_between = round_cluster(hosts=2, devices_per_host=2)
    halves = Towers(towers=(NAMES[:4], NAMES[4:]))
    size, reason = chosen(slow_between, tmp_path, towers=halves)
    assert size == 2  # groups of four would span both hosts
    assert "2 ranks: " in reason
    assert "4: " in reason
    assert "flat " in reason
    latency = {"latency_s": 0.1}
    size, reason = chosen(round_cluster(hosts=4, devices_per_host=1, inside=latency, between=latency), tmp_path)
    assert "no size gains: a flat model takes" in reason


def test_without_a_cluster_a_host_decides_and_the_report_says_that_nothing_was_predicted() -> None:
    found = choose_tower_size(config(), inputs(), world_size=4, ranks_per_host=2)
    assert found.size == 2
    assert "the ranks of a host; no gain over a flat model was predicted: --parallel.cluster FILE" in found.reason
    assert "ziggurat plan RECIPE --cluster FILE" in found.reason
    found = choose_tower_size(config(), inputs(), world_size=12, ranks_per_host=2)
    assert found.size == 3
    assert "the smallest of [3, 6, 12]: the 2 of a host do not fit" in found.reason
    assert choose_tower_size(config(tower_size=4), inputs(), world_size=4, ranks_per_host=2).size == 4
    flat = replace(config(), towers=None)
    assert choose_tower_size(flat, inputs(), world_size=4, ranks_per_host=2).reason == ""


@pytest.mark.parametrize("asked", [0, 2])
def test_one_host_for_all_ranks_is_said_because_towers_spare_no_link_there(asked: int) -> None:
    found = choose_tower_size(config(tower_size=asked), inputs(), world_size=4, ranks_per_host=4)
    assert "towers cannot spare traffic here" in found.reason
    assert "all ranks share one host" in found.reason
    several = choose_tower_size(config(tower_size=asked), inputs(), world_size=4, ranks_per_host=2)
    assert "one host" not in several.reason


def test_a_cluster_of_other_machines_is_refused(tmp_path: Path) -> None:
    round_cluster(hosts=4).save(tmp_path / "cluster.toml")
    with pytest.raises(ConfigError, match="4 devices, 2 a host, as the ranks of this job"):
        choose_tower_size(config(cluster=str(tmp_path / "cluster.toml")), inputs(), world_size=4, ranks_per_host=2)
