"""A planned step looks up what the whole batch says, and is timed on every rank."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.planned_step import PARTS, SuiteConfig, batch_of, inputs_of, measure_plans
from ziggurat.config import to_json
from ziggurat.features.batch import validate_batch
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.planning.costs.probe_tables import DrawConfig
from ziggurat.testing.ranks import run_ranks

SUITE = SuiteConfig(draw=DrawConfig(num_samples=16, num_tables=5, max_rows=100, num_batches=2))


def test_parts_of_a_batch_are_the_batch() -> None:
    tables = SUITE.tables(3)
    whole, parts = batch_of(tables, 1, slice(0, 16)), [batch_of(tables, 1, slice(i, i + 8)) for i in (0, 8)]
    validate_batch(whole, inputs_of(tables))
    assert torch.equal(torch.cat([part.single for part in parts], dim=1), whole.single)
    assert sum(part.jagged.values.numel() for part in parts) == whole.jagged.values.numel()
    assert [dim for _, dim in SUITE.tables(3)] == [dim for _, dim in tables]


def test_every_part_of_a_step_is_timed() -> None:
    tables = SUITE.tables(0)
    plans = [
        Plan(
            world_size=2,
            tables=tuple(
                TablePlacement(table=table.profile.name, placement=Placement.TABLE_WISE, ranks=((index + shift) % 2,))
                for index, (table, _) in enumerate(tables)
            ),
        )
        for shift in (0, 1)
    ]
    found = np.array(run_ranks(measure_plans, 2, to_json(SUITE), 0, [to_json(plan) for plan in plans], 1))
    assert found.shape == (2, 2, len(PARTS))
    assert (found > 0).all()
