"""Evaluations, checkpoints and drains between the announcement of a batch and its step change nothing, and end nothing.

    script   step 0 (1 is announced) · 30 batches evaluated · step 1 (another than 2 is announced) · checkpoint · …

The script is drawn; all ranks follow the same one. In the end weights and losses are those of the same steps alone, bit
for bit. In between lie more exchanges than any memory between ranks has slots for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.models.sequence.test_next_item import INPUTS, batch_of
from tests.parallel.context.test_context_on_ranks import MODEL
from tests.training.rank_runs import Case, model_of, plan_of
from tests.training.tiny import tiny_inputs
from ziggurat.embeddings.storage.part import TablePart
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch
from ziggurat.models import Model, build_model
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.host_memory import HostMemory
from ziggurat.parallel.parallelize import Parallel, ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.balancing import Balancer, balancer_of
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.state import snapshot_tensors
from ziggurat.training.step.train_step import TrainStep

NUM_STEPS = 5
FSDP, HSDP = DenseParallelism.FSDP, DenseParallelism.HSDP
CASES = {
    "parts": Case(num_parts=3),
    "towers, parts, hsdp": Case(towers=True, tower_size=2, num_parts=2, dense=HSDP),
    "rows, fsdp": Case(placement=Placement.ROW_WISE, dense=FSDP),
    "rows, prioritised": Case(placement=Placement.ROW_WISE, exchange=Exchange.PRIORITISED_ALWAYS),
    "hot rows, prioritised": Case(
        placement=Placement.ROW_WISE,
        exchange=Exchange.PRIORITISED_ALWAYS,
        tables=TablesConfig(weights=RowFormat.INT8, cache=0.2),
    ),
}
CONTEXT = {"context": DenseParallelism.DDP, "context, fsdp": FSDP}


@dataclass
class _Job:
    """A model on this rank, and what it is given."""

    model: Model
    parallel: Parallel
    train: list[Batch]
    valid: Batch
    balancer: Balancer | None = None


def table_job(case: Case, world_size: int, rank: int) -> _Job:
    """A DLRM, whose tables lie as the case says."""
    model, plan = model_of(case, draw_tables=False), plan_of(case, world_size)
    topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=world_size if not case.towers else 0)
    config = ParallelConfig(dense=case.dense, num_parts=case.num_parts, exchange=case.exchange)
    parallel = parallelize(model, plan, topology, config=config, seed=3)
    train = [random_batch(tiny_inputs(), 6 + rank, seed=10 * step + rank) for step in range(NUM_STEPS)]
    return _Job(model, parallel, train, random_batch(tiny_inputs(), 5, seed=900 + rank))


def divided_job(dense: DenseParallelism, world_size: int, rank: int) -> _Job:
    """A next-item model whose histories are divided among pairs of ranks, in the thread that balances."""
    model = build_model(MODEL, INPUTS, seed=3)
    topology = Topology.create(context_size=2)
    kinds = {"item": Placement.ROW_WISE, "kind": Placement.TABLE_WISE, "action": Placement.DATA_PARALLEL}
    everybody = tuple(range(world_size))
    tables = tuple(
        TablePlacement(table=name, placement=kind, ranks=everybody[:1] if kind is Placement.TABLE_WISE else everybody)
        for name, kind in kinds.items()
    )
    # What travels is said: `auto` chooses by rates that it measures, and sums in that order.
    config = ParallelConfig(dense=dense, passing=Passing.KEYS)
    parallel = parallelize(model, Plan(world_size=world_size, tables=tables), topology, config=config, seed=3)
    balancer = balancer_of(training_config(), model=model, parallel=parallel)
    assert balancer is not None
    train = []
    for step in range(NUM_STEPS):
        balancer.start(batch_of([1 + (step + rank) % 4, 3, 5 - step % 3]))
        train.append(balancer.finish())
    return _Job(model, parallel, train, batch_of([4, 2, 1 + rank]), balancer)


def training_config() -> TrainingConfig:
    return TrainingConfig(precision=Precision.FP32, clip_norm=0.0, learning_rate=0.05, table_learning_rate=0.05)


class _Script:
    """What happens between steps, drawn; the same on every rank."""

    def __init__(self, job: _Job, step: TrainStep, *, draw: random.Random, folder: Path) -> None:
        self._job, self._step, self._draw = job, step, draw
        self._store = CheckpointStore(folder)
        self._dealing = False

    def upcoming(self, number: int) -> Batch | None:
        """Most often the next batch; now and then another one than will come, or none."""
        train, chance = self._job.train, self._draw.random()
        if chance < 0.2:
            return None
        if chance < 0.3:
            return train[0]
        return train[number + 1] if number + 1 < len(train) else None

    def between(self, number: int) -> None:
        """Some of: dealing in the background begins, evaluations, a checkpoint, a drain."""
        if self._job.balancer is not None and not self._dealing:
            self._job.balancer.start(self._job.valid)
            self._dealing = True
        for action in self._draw.sample((self._evaluate, self._save, self._drain), k=self._draw.choice((1, 2, 2, 3))):
            action(number)

    def _evaluate(self, number: int) -> None:
        del number
        self._job.model.eval()
        with torch.no_grad():
            for _ in range(self._draw.choice((2, 30, 45))):
                assert self._job.model.outputs_of(self._job.valid).logits.isfinite().all()
        self._job.model.train()

    def _save(self, number: int) -> None:
        self._store.save(number + 1, tensors=snapshot_tensors(self._step), state={"step": number})

    def _drain(self, number: int) -> None:
        del number
        if self._draw.random() < 0.7:
            return
        self._job.model.embeddings.drain()
        if self._job.balancer is not None:
            self._job.balancer.drain()
            self._dealing = False

    def end(self) -> None:
        """Nothing is on its way any more."""
        self._store.close()
        self._job.model.embeddings.drain()
        if self._job.balancer is not None:
            self._job.balancer.drain()


def here(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds of a weight."""
    if isinstance(tensor, TablePart):
        return tensor.rows.read(0, tensor.rows.num_rows).clone()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(job: _Job, *, seed: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after all steps; by a script if there is a seed."""
    step = TrainStep(job.model, training_config(), parallel=job.parallel)
    script = _Script(job, step, draw=random.Random(seed), folder=Path(folder)) if seed else None
    losses = []
    for number, batch in enumerate(job.train):
        losses.append(step(batch, upcoming=None if script is None else script.upcoming(number)).loss)
        if script is not None:
            script.between(number)
    if script is not None:
        script.end()
    step.settle()
    assert_little_memory(job)
    weights = {name: here(value) for name, value in job.model.state_dict().items()}
    job.parallel.topology.close()
    return losses, weights


def assert_little_memory(job: _Job) -> None:
    """What waited has not made the shared memory grow."""
    for group in {id(each): each for each in job.parallel.topology.axes.values()}.values():
        memory: HostMemory | None = group.memory
        if memory is not None:
            assert sum(segment.numel() for segment in memory._own.segments.values()) <= 2 << 20


def follow(rank: int, world_size: int, name: str, seeds: list[int], folder: str) -> None:
    """Runs on every rank."""

    def job() -> _Job:
        if name in CONTEXT:
            return divided_job(CONTEXT[name], world_size, rank)
        return table_job(CASES[name], world_size, rank)

    wanted_losses, wanted = trained(job(), seed=0, folder="")
    for seed in seeds:
        losses, weights = trained(job(), seed=seed, folder=f"{folder}/{seed}")
        assert losses == wanted_losses, (name, seed)
        assert weights.keys() == wanted.keys()
        assert not [each for each in wanted if not torch.equal(weights[each], wanted[each])], (name, seed)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "parts"),
        (3, "rows, prioritised"),
        (2, "hot rows, prioritised"),
        (4, "towers, parts, hsdp"),
        (2, "rows, fsdp"),
        (2, "context, fsdp"),
    ],
)
def test_steps_are_the_same_whatever_comes_between_them(tmp_path: Path, world_size: int, name: str) -> None:
    run_ranks(follow, world_size, world_size, name, [1, 4], str(tmp_path), timeout_s=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *CONTEXT])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_steps_are_the_same_in_many_orders(tmp_path: Path, world_size: int, name: str) -> None:
    if world_size == 3 and (name in CONTEXT or CASES[name].towers):
        world_size = 4
    run_ranks(follow, world_size, world_size, name, list(range(1, 13)), str(tmp_path), timeout_s=600.0)
