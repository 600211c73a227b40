"""Rankers of a history on several ranks as on one device: events, candidates, times, and what did not happen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.models.sequence.rankers.histories import BST, DIEN, INPUTS, MODELS, RANKMIXER, ROWS, histories
from ziggurat.config import from_json, to_json
from ziggurat.models import build_model
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

# What did not happen stands in lists: drawn events depend on the rank that draws.
CONFIGS = {
    each.kind: each
    for each in (
        *MODELS,
        dataclasses.replace(DIEN, negatives=("others", "other_brands")),
        dataclasses.replace(RANKMIXER, num_experts=2),
    )
}
PLAN = Plan(
    world_size=2,
    tables=tuple(
        TablePlacement(table="item", placement=Placement.ROW_WISE, ranks=(0, 1))
        if name == "item"
        else TablePlacement(table=name, placement=Placement.TABLE_WISE, ranks=(number % 2,))
        for number, name in enumerate(ROWS)
    ),
)


def check(rank: int, plan_json: Any, configs: dict[str, Any], dense: str) -> None:
    """Every model, one after the other, in one group of processes."""
    del rank
    plan, batch = from_json(Plan, plan_json, where="test"), histories([4, 6, 0, 1, 2, 5, 3])
    for kind, given in configs.items():
        model = from_json(type(CONFIGS[kind]), given, where="test")
        try:
            assert_same_as_single_device(
                lambda model=model: build_model(model, INPUTS, seed=3),
                plan,
                batch=batch,
                config=ParallelConfig(dense=DenseParallelism(dense)),
                num_parts=2 if dense == DenseParallelism.DDP else 1,
                tolerance=Tolerance(fields=1e-6, others=1e-5),
            )
        except Exception as error:
            raise AssertionError(f"{kind}: {error}") from error


@pytest.mark.parametrize("dense", [DenseParallelism.DDP, pytest.param(DenseParallelism.FSDP, marks=pytest.mark.slow)])
def test_rankers_of_a_history_equal_one_device(dense: DenseParallelism) -> None:
    assert BST.history.times
    run_ranks(
        check,
        2,
        to_json(PLAN),
        {kind: to_json(config) for kind, config in CONFIGS.items()},
        dense.value,
        timeout_s=240.0,
    )
