"""How often a step on many ranks makes the host wait for its GPU: the table of `docs/guides/gpus.md`, counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ziggurat.config import from_json, to_json
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import take_samples
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.collectives import on_gpus, recorded_collectives
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import HostWait, record_waits
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

from .tables.test_repeated import GROUPS
from .test_parity import TOWERS, build, inputs, placed

STEPS, WARM_UP, TIMEOUT_S = 4, 2, 120.0


def made(case: dict[str, Any], *, seed: int) -> Batch:
    """A batch of 24 samples, more than any copied table here has rows in a step."""
    size = case.get("batch_size", 24)
    batch = random_batch(inputs(), size, seed=seed)
    return deduplicate(take_samples(batch, torch.arange(size) // 2), GROUPS) if case.get("repeats") else batch


def steps_of(plan: Plan, case: dict[str, Any], *, rank: int, on_cpu: bool) -> tuple[list[list[HostWait]], list[float]]:
    """What made the host wait in each step after the first two, and the losses of all."""
    with contextlib.ExitStack() as around:
        device = torch.device("cpu") if on_cpu else around.enter_context(pretend_cuda())
        around.enter_context(recorded_collectives())
        around.enter_context(on_gpus())
        topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=2)
        towers = plan.towers if case.get("modules") else None
        model = build(towers=towers, optimizer="rowwise_adagrad").to(device)
        parallel = parallelize(model, plan, topology, config=ParallelConfig(num_parts=case.get("num_parts", 1)))
        settings = TrainingConfig(precision=Precision.FP32, clip_norm=case.get("clip_norm", 0.0))
        step = TrainStep(model, settings, parallel=parallel)
        batches = [made(case, seed=10 * number + rank).to(device) for number in range(STEPS)]
        waits, losses = [], []
        with record_waits() as found:
            for batch, upcoming in zip(batches, [*batches[1:], None], strict=True):
                found.clear()
                losses.append(step(batch, upcoming=upcoming).loss)
                waits.append(list(found))
        step.settle()
        return waits[WARM_UP:], losses


def count(rank: int, cases: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, tuple[list[list[HostWait]], Any]]:
    """Runs on every rank."""
    found = {}
    for name, plan_json, case in cases:
        plan = from_json(Plan, plan_json, where="test")
        waits, losses = steps_of(plan, case, rank=rank, on_cpu=False)
        found[name] = waits, (losses, steps_of(plan, case, rank=rank, on_cpu=True)[1])
    return found


CASES: dict[str, tuple[int, Plan, dict[str, Any]]] = {  # waits of the rank that waits most, plan, case
    "table-wise": (3, placed(4, Placement.TABLE_WISE), {}),
    "row-wise": (3, placed(4, Placement.ROW_WISE), {}),
    "column-wise": (3, placed(4, Placement.COLUMN_WISE), {}),
    "copied": (3, placed(4, Placement.DATA_PARALLEL), {}),
    "copied, of more rows than are looked up": (9, placed(4, Placement.DATA_PARALLEL), {"batch_size": 4}),
    "table-wise, clipped": (3, placed(4, Placement.TABLE_WISE), {"clip_norm": 0.1}),
    "row-wise, clipped": (3, placed(4, Placement.ROW_WISE), {"clip_norm": 0.1}),
    "column-wise, clipped": (3, placed(4, Placement.COLUMN_WISE), {"clip_norm": 0.1}),
    "copied, clipped": (3, placed(4, Placement.DATA_PARALLEL), {"clip_norm": 0.1}),
    "towers": (3, placed(4, Placement.TABLE_WISE, TOWERS, 2), {"modules": True}),
    "towers, row-wise": (3, placed(4, Placement.ROW_WISE, TOWERS, 2), {"modules": True}),
    "towers, copied": (3, placed(4, Placement.DATA_PARALLEL, TOWERS, 2), {"modules": True}),
    "two parts": (3, placed(4, Placement.TABLE_WISE), {"num_parts": 2}),
    "two parts, column-wise": (3, placed(4, Placement.COLUMN_WISE), {"num_parts": 2}),
    "shared lists": (3, placed(4, Placement.TABLE_WISE), {"repeats": True}),
    "shared lists, row-wise": (3, placed(4, Placement.ROW_WISE), {"repeats": True}),
    "shared lists, column-wise": (3, placed(4, Placement.COLUMN_WISE), {"repeats": True}),
    "shared lists, copied": (3, placed(4, Placement.DATA_PARALLEL), {"repeats": True}),
    "shared lists, towers": (3, placed(4, Placement.TABLE_WISE, TOWERS, 2), {"repeats": True, "modules": True}),
}
FEW = ("column-wise, clipped", "copied", "shared lists, towers")


def check(names: Iterable[str]) -> None:
    """As many waits as the table says, and the losses of the CPU."""
    given = [(name, to_json(plan), case) for name in names for _, plan, case in [CASES[name]]]
    found = run_ranks(count, 4, given, timeout_s=TIMEOUT_S)
    for name, _, _ in given:
        most = max((waits for each in found for waits in each[name][0]), key=len)
        assert len(most) == CASES[name][0], f"{name}: {most}"
        for each in found:
            on_gpu, on_cpu = each[name][1]
            assert on_gpu == pytest.approx(on_cpu, rel=1e-5), name


def test_a_step_on_many_ranks_waits_three_times_at_most() -> None:
    check(FEW)


@pytest.mark.slow
def test_steps_of_every_kind_wait_as_often_as_the_guide_says() -> None:
    check(CASES.keys() - FEW)
