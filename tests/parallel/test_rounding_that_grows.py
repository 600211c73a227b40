"""Deep products with adaptive optimizers part from one device on ranks as they do from themselves, shaken by rounding.

Adam and Adagrad divide a gradient by its own size. Where one is small because large parts cancel, rounding is much of
it, or all, and makes steps of full size: Wukong and DHEN end elsewhere after a dozen steps. Two things show that the
sums over ranks are right: by SGD, which divides by nothing, ranks and one device agree to rounding; and one device
whose dense gradients are shaken by half a last bit of their tensor's largest number parts from itself as far.
The format of rows has no part in it: it is so in FP32 as in INT4.

A single ReLU near zero is enough, and needs no adaptive rule: one sample is on the other side of it, and a unit gets a
gradient that it had not. That shows as a jump, of one size on 2 ranks, on 4, and on one device that is given the same
samples of each batch in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizerKind
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import BuiltInConfig, DHENConfig, DLRMConfig, Model, WukongConfig, build_model
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

ROWS = {"a": 60, "b": 200, "c": 30, "d": 500, "e": 90, "f": 40}
INPUTS = InputSpec(
    dense=("x", "y"),
    single=tuple(SingleSpec(name=name, table=name) for name in ROWS),
    tables=tuple(TableSpec(name=name, num_rows=rows) for name, rows in ROWS.items()),
    labels=(LabelSpec(name="click"),),
)
NUM_STEPS, BATCH_SIZE, DATA_SEED = 12, 48, 4000
HALF_A_BIT = 6e-8  # of FP32
CASES = {
    "wukong, int4": (WukongConfig, RowFormat.INT4, DenseOptimizer.ADAGRAD),
    "wukong, fp32": (WukongConfig, RowFormat.FP32, DenseOptimizer.ADAM),
    "dhen, fp32": (DHENConfig, RowFormat.FP32, DenseOptimizer.ADAM),
}


def model_of(kind: type[BuiltInConfig], row_format: RowFormat) -> Model:
    """A model on tables of a format."""
    rule = TableOptimizerKind.ROWWISE_ADAGRAD
    tables = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=rule, eps=1e-3)
    made = TablesConfig(weights=row_format).make_storage(seed=4)
    return build_model(kind(embedding_dim=8, embedding=tables), INPUTS, seed=3, make_storage=made)  # type: ignore[call-arg]


def losses(
    name: str,
    *,
    optimizer: DenseOptimizer,
    world_size: int = 1,
    rank: int = 0,
    noise: float = 0.0,
    order: int = 0,
    learning_rate: float = 0.01,
    num_steps: int = NUM_STEPS,
) -> list[float]:
    """The losses of a few steps; the same samples on any number of ranks, with an `order` in another order."""
    kind, row_format, _ = (CASES | BF16)[name]
    model, parallel = model_of(kind, row_format), None
    if world_size > 1:
        tables = [
            TablePlacement(table=table, placement=Placement.TABLE_WISE, ranks=(number % world_size,))
            for number, table in enumerate(ROWS)
        ]
        parallel = parallelize(model, Plan(world_size=world_size, tables=tuple(tables)), Topology.create())
    generator = torch.Generator().manual_seed(7)

    def shaken(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + noise * gradient.abs().max() * torch.randn(gradient.shape, generator=generator)

    for weight in model.parameters() if noise else ():
        if weight.requires_grad:
            weight.register_hook(shaken)
    config = TrainingConfig(
        precision=Precision.BF16 if name in BF16 else Precision.FP32,
        optimizer=optimizer,
        learning_rate=learning_rate,
        table_learning_rate=0.05,
        clip_norm=0.05,
    )
    step, found = TrainStep(model, config, parallel=parallel), []
    first, last = rank * BATCH_SIZE // world_size, (rank + 1) * BATCH_SIZE // world_size
    orders = torch.Generator().manual_seed(order)
    for number in range(num_steps):
        batch = random_batch(INPUTS, BATCH_SIZE, seed=DATA_SEED + number)
        batch = batch.take(torch.randperm(BATCH_SIZE, generator=orders)) if order else batch
        found.append(step(batch.rows(first, last)).loss)
    return found


def on_ranks(rank: int, world_size: int, cases: list[Any]) -> list[list[float]]:
    """Runs on every rank."""
    return [
        losses(name, optimizer=DenseOptimizer(optimizer), world_size=world_size, rank=rank) for name, optimizer in cases
    ]


BF16 = {"dlrm, bf16": (DLRMConfig, RowFormat.FP32, DenseOptimizer.ADAM)}
JUMPS = {
    "wukong, int4": (DenseOptimizer.ADAGRAD, 0.01, 20),
    "dhen, fp32": (DenseOptimizer.SGD, 1.0, 20),
    "dlrm, bf16": (DenseOptimizer.ADAM, 0.001, 152),
}


def long_on_ranks(rank: int, world_size: int, name: str) -> list[float]:
    """Runs on every rank."""
    optimizer, rate, steps = JUMPS[name]
    return losses(name, optimizer=optimizer, world_size=world_size, rank=rank, learning_rate=rate, num_steps=steps)


def apart(left: list[float], right: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_part_from_one_device_no_further_than_rounding_parts_it_from_itself(name: str) -> None:
    adaptive = CASES[name][2]
    ways = [(name, DenseOptimizer.SGD.value), (name, adaptive.value)]
    by_sgd, by_adaptive = run_ranks(on_ranks, 2, 2, ways, timeout_s=240.0)[0]
    assert apart(by_sgd, losses(name, optimizer=DenseOptimizer.SGD)) < 2e-5
    alone = losses(name, optimizer=adaptive)
    shaken = apart(alone, losses(name, optimizer=adaptive, noise=HALF_A_BIT))
    assert apart(by_adaptive, alone) < 3 * shaken
    assert shaken > 1e-4  # or this model has become one that adaptive steps do not shake: compare it exactly


@pytest.mark.slow
@pytest.mark.parametrize("name", JUMPS)
def test_ranks_jump_away_where_the_samples_of_one_device_in_another_order_do(name: str) -> None:
    optimizer, rate, steps = JUMPS[name]
    alone = losses(name, optimizer=optimizer, learning_rate=rate, num_steps=steps)
    others = [losses(name, optimizer=optimizer, learning_rate=rate, num_steps=steps, order=each) for each in (1, 2, 3)]
    furthest = max(apart(alone, each) for each in others)
    assert furthest > 1e-3  # or nothing jumps any more: compare exactly
    for world_size in (2, 4):
        found = run_ranks(long_on_ranks, world_size, world_size, name, timeout_s=240.0)[0]
        assert apart(found, alone) < 2 * furthest
