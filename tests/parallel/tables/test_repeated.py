"""Deduplicated batches on many ranks: the numbers of one device, and slices alone on the wire."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.features.batch import Batch
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.repeats import deduplicate
from ziggurat.features.samples import take_samples
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device, assert_same_sequences
from ziggurat.testing.ranks import run_ranks

GROUPS = (FeatureGroup(single=(0,), jagged=(0, 2)), FeatureGroup(jagged=(1,)))


def sessions(size: int = 16) -> Batch:
    """Four samples of each of some random ones."""
    return take_samples(random_batch(inputs(), size, seed=2), torch.arange(size) // 4)


def check(rank: int, plans: list[object], num_parts: int) -> None:
    del rank
    for plan_json in plans:
        plan = from_json(Plan, plan_json, where="test")
        batch = deduplicate(sessions(), GROUPS)
        assert [group.num_slices for group in batch.repeated] == [4, 4]

        def model(towers=plan.towers):
            return build(towers=towers, optimizer="rowwise_adagrad")

        assert_same_as_single_device(
            model, plan, batch=batch, tolerance=Tolerance(fields=1e-6, others=2e-6), num_parts=num_parts
        )
        if plan.towers is None:
            assert_same_sequences(model, plan, batch=batch, names=("tags", "words"))


@pytest.mark.parametrize(
    ("world_size", "num_parts"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (2, 1), pytest.param(4, 1, marks=pytest.mark.slow), (2, 2)],
)
def test_every_placement(world_size: int, num_parts: int) -> None:
    run_ranks(check, world_size, [to_json(placed(world_size, kind)) for kind in Placement], num_parts)


def test_with_towers() -> None:
    run_ranks(check, 2, [to_json(placed(2, Placement.TABLE_WISE, TOWERS, 1))], 1)


def traffic(rank: int, plan: object) -> list[int]:
    del rank
    found = []
    for batch in (sessions(64), deduplicate(sessions(64), (FeatureGroup(single=(0, 1, 2), jagged=(0, 1, 2)),))):
        model = build(towers=None, optimizer="sgd")
        parallel = parallelize(model, from_json(Plan, plan, where="test"), Topology.create())
        model.fields(batch).sum().backward()
        rows = [(str(row["purpose"]), int(row["bytes"])) for row in parallel.traffic.report()]
        found += [sum(size for name, size in rows if name.startswith(kind)) for kind in ("ids", "embeddings")]
    return found


def test_wire_bytes_fall_by_the_factor() -> None:
    ((ids, vectors, short_ids, short_vectors), _) = run_ranks(traffic, 2, to_json(placed(2, Placement.TABLE_WISE)))
    assert ids == 4 * short_ids > 0
    assert vectors == 4 * short_vectors > 0
