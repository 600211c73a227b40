"""A plain module under `wrap` on two ranks as on one device: copied and sharded, in one part and in two."""

from __future__ import annotations

from typing import Any

from tests.models.contract.plain_module import Plain, list_inputs
from tests.parallel.test_parity import placed
from ziggurat.config import from_json, to_json
from ziggurat.models import wrap
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

KINDS = (Placement.ROW_WISE, Placement.TABLE_WISE, Placement.COLUMN_WISE)


def check(rank: int, plans: list[Any]) -> None:
    """Runs on every rank; forward, gradients, and weights after each of two steps are compared."""
    del rank
    batch = random_batch(list_inputs(), 13, seed=1)
    cases = [(DenseParallelism.DDP, 1), (DenseParallelism.DDP, 2), (DenseParallelism.FSDP, 2)]
    for (dense, num_parts), plan in zip(cases, plans, strict=True):
        assert_same_as_single_device(
            lambda: wrap(Plain(list_inputs())),
            from_json(Plan, plan, where="test"),
            batch=batch,
            config=ParallelConfig(dense=dense),
            num_parts=num_parts,
        )


def test_a_wrapped_module_on_two_ranks_equals_one_device() -> None:
    run_ranks(check, 2, [to_json(placed(2, kind)) for kind in KINDS])
