"""A probe of a few seconds: alone, on two ranks, interrupted and taken up again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.ops.lookup.cpp import CppKernel
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.learned_training import LearningConfig
from ziggurat.planning.costs.measurements import Measurements
from ziggurat.planning.costs.probe_tables import DrawConfig
from ziggurat.runs.planning.probe import ProbeConfig, cost_model_path, probe
from ziggurat.testing.ranks import run_ranks

DRAW = DrawConfig(num_samples=32, num_tables=10, max_rows=300, max_tables=4, group_mib=2)
CONFIG = ProbeConfig(
    minutes=0.5,
    max_groups=20,
    max_exchanges=6,
    rounds=1,
    draw=DRAW,
    learning=LearningConfig(steps=20, width=8, group_width=8, exchange_steps=20),
)


@pytest.fixture(autouse=True, scope="module")
def _needs_the_kernel() -> None:
    try:
        CppKernel()
    except MissingDependencyError as error:
        pytest.skip(f"the C++ kernel cannot be built here: {error.found}")


def test_it_goes_on_where_it_stopped_and_learns_when_there_is_enough(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    first = probe(CONFIG, out)
    assert len(first.measurements.lookups) == 20
    assert first.cost_model is None
    assert first.measurements.memory is not None
    second = probe(dataclasses.replace(CONFIG, max_groups=60), out)
    assert second.measurements.lookups[:20] == first.measurements.lookups
    assert len(second.measurements.lookups) == 60
    assert second.cost_model is not None
    assert LearnedCostModel.load(cost_model_path(out)).card == second.cost_model.card
    assert second.cost_model.card.num_exchanges == 0
    third = probe(dataclasses.replace(CONFIG, minutes=0.0), out)  # only learns
    assert third.measurements == second.measurements
    with pytest.raises(ConfigError, match="draw"):
        probe(dataclasses.replace(CONFIG, draw=dataclasses.replace(DRAW, seed=1)), out)
    dataclasses.replace(third.measurements, machine="another").save(out)
    with pytest.raises(ConfigError, match="machine = another"):
        probe(CONFIG, out)


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    result = probe(dataclasses.replace(CONFIG, max_groups=50), Path(folder) / "probe.json")
    found = result.measurements
    return {
        "rank": rank,
        "is_first": result.is_first,
        "exchanges": len(found.exchanges),
        "cost_model": bool(result.cost_model),
    }


def test_two_ranks_measure_links_and_exchanges(tmp_path: Path) -> None:
    results = run_ranks(on_ranks, 2, str(tmp_path), timeout_s=120.0)
    assert [each["is_first"] for each in results] == [True, False]
    assert [each["cost_model"] for each in results] == [True, False]
    found = Measurements.load(tmp_path / "probe.json")
    assert len(found.exchanges) == 6
    assert found.ranks == 2
    assert {each.link for each in found.links} == {"host"}
    assert all(len(each.columns) == len(each.forward_ms) == 2 and min(each.forward_ms) > 0 for each in found.exchanges)
    card = LearnedCostModel.load(cost_model_path(tmp_path / "probe.json")).card
    assert card.forward is not None
    assert card.num_exchanges == 6
