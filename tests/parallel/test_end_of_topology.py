"""A topology that is closed takes its process groups, their threads and its shared memory with it."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.rank_runs import Case, model_of, plan_of, trainer_of
from tests.training.tiny import tiny_inputs
from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.errors import TopologyError
from ziggurat.models import LogisticRegressionConfig
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.hierarchical import ReductionRoute
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import open_run
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep

CASES = {
    "copies": Case(),
    "towers, hsdp": Case(towers=True, tower_size=1, num_parts=2, dense=DenseParallelism.HSDP),
    "rows, fsdp": Case(placement=Placement.ROW_WISE, dense=DenseParallelism.FSDP),
    "rows, prioritised": Case(placement=Placement.ROW_WISE, exchange=Exchange.PRIORITISED_ALWAYS),
}


def threads_and_files() -> tuple[int, int]:
    """Return the numbers of threads and of open files of this process, once collected objects have let go of theirs."""
    gc.collect()
    time.sleep(0.05)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def one_step(case: Case, rank: int) -> None:
    """Make a model parallel, take two steps, and close what they communicated over."""
    model = model_of(case, draw_tables=False)
    plan = plan_of(case, 2)
    with Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=1 if case.towers else 2) as topology:
        config = ParallelConfig(
            dense=case.dense,
            num_parts=case.num_parts,
            exchange=case.exchange,
            reduction_route=ReductionRoute.HIERARCHICAL,
        )
        parallel = parallelize(model, plan, topology, config=config, seed=3)
        step = TrainStep(model, TrainingConfig(), parallel=parallel)
        for seed in range(2):
            assert step(random_batch(tiny_inputs(), 6 + rank, seed=10 * seed + rank)).finite
        step.settle()


def counts(rank: int, name: str) -> list[tuple[int, int]]:
    """Runs on every rank."""
    return counted(lambda _: one_step(CASES[name], rank))


def counted(make: Callable[[int], None]) -> list[tuple[int, int]]:
    """Return threads and files after each of three jobs, beside a first one that loads libraries."""
    found = []
    for number in range(4):
        make(number)
        found.append(threads_and_files())
    return found[1:]


@pytest.mark.parametrize("name", list(CASES))
def test_many_topologies_leave_no_thread_and_no_file(name: str) -> None:
    for first, second, third in run_ranks(counts, 2, name):
        assert first == second == third


def trainings(rank: int, folder: str) -> list[tuple[int, int]]:
    """Runs on every rank."""
    del rank

    def train(number: int) -> None:
        trainer = trainer_of(Case(), Path(folder) / str(number), world_size=2, max_steps=3, checkpoint_every=2)
        trainer.fit()
        assert trainer.team.parallel is not None
        trainer.team.parallel.topology.close()

    return counted(train)


def test_a_closed_topology_ends_the_groups_of_its_trainer(tmp_path: Path) -> None:
    for first, second, third in run_ranks(trainings, 2, str(tmp_path)):
        assert first == second == third


def runs(rank: int, folder: str) -> list[tuple[int, int]]:
    """Runs on every rank."""
    del rank
    frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
    config = table_run(LogisticRegressionConfig(), inspect_file(frame).schema)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, max_steps=2))

    def run(number: int) -> None:
        train_run(config, folder=f"{folder}/{number}", data=frame)
        with open_run(f"{folder}/{number}") as opened:
            opened.predict(frame)

    return counted(run)


def test_one_run_after_the_other_in_one_job_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    for first, second, third in run_ranks(runs, 2, str(tmp_path), timeout_s=120.0):
        # Libraries that read and write files start threads when they like; one forgotten group would leave three a run.
        assert third[0] - first[0] < 3
        assert first[1] == second[1] == third[1]


def misuse(rank: int) -> list[str]:
    """Runs on every rank."""
    case = Case()
    topology = Topology.create()
    model = model_of(case, draw_tables=False)
    parallel = parallelize(model, plan_of(case, 2), topology, seed=3)
    step = TrainStep(model, TrainingConfig(), parallel=parallel)
    topology.close()
    topology.close()
    errors = []
    for use in (
        lambda: step(random_batch(tiny_inputs(), 6, seed=rank)),
        lambda: parallelize(model_of(case, draw_tables=False), plan_of(case, 2), topology, seed=3),
    ):
        with pytest.raises(TopologyError, match="a topology that is open") as raised:
            use()
        errors.append(str(raised.value))
    with Topology.create() as another:  # a way out of both
        model = model_of(case, draw_tables=False)
        parallel = parallelize(model, plan_of(case, 2), another, seed=3)
        assert TrainStep(model, TrainingConfig(), parallel=parallel)(random_batch(tiny_inputs(), 6, seed=rank)).finite
    return errors


def test_a_closed_topology_is_refused() -> None:
    for errors in run_ranks(misuse, 2):
        assert all("Topology.create" in each for each in errors)
