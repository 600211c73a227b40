"""Small training runs on several ranks, as functions that run on every rank."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.training.tiny import tiny_dataset
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch
from ziggurat.models import DLRMConfig, MLPConfig, Model, RankingModel, build_model
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import Parallel, ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement, Towers
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore
from ziggurat.training.config import DenseOptimizer, EarlyStopConfig, Precision, TrainingConfig
from ziggurat.training.step.own_loss import LossFunction
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

TOWERS = Towers(towers=(("item", "tags"), ("user",)))
GLOBAL_BATCH = 64
NUM_ROWS = GLOBAL_BATCH * 6 + 13
TABLES = ("user", "item", "tags")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A way to run."""

    placement: Placement = Placement.TABLE_WISE
    tower_size: int = 0  # 0: a flat model
    towers: bool = False
    dense: DenseParallelism = DenseParallelism.DDP
    optimizer: TableOptimizerKind = TableOptimizerKind.ROWWISE_ADAGRAD
    dropout: float = 0.0
    nan_row: int = -1
    num_parts: int = 1
    exchange: Exchange = Exchange.PLAIN
    tables: TablesConfig = dataclasses.field(default_factory=TablesConfig)


def dense_weights_after(
    model: Model,
    *,
    loss: LossFunction,
    batches: Sequence[Batch],
    rank: int,
    world_size: int,
    dense: DenseParallelism,
) -> dict[str, Tensor]:
    """Return whole dense weights after a step on each batch, of which every rank takes its share."""
    parallel = None
    if world_size > 1:
        tables = tuple(
            TablePlacement(table=table.name, placement=Placement.ROW_WISE, ranks=tuple(range(world_size)))
            for table in model.inputs.tables
        )
        plan = Plan(world_size=world_size, tables=tables)
        parallel = parallelize(model, plan, Topology.create(), config=ParallelConfig(dense=dense))
    config = TrainingConfig(optimizer=DenseOptimizer.SGD, learning_rate=0.5, precision=Precision.FP32)
    step = TrainStep(model.train(), config, parallel=parallel, loss=loss)
    for batch in batches:
        share = batch.batch_size // world_size
        assert step(batch.rows(rank * share, (rank + 1) * share)).finite
    step.settle()
    named = {name: value.detach() for name, value in step.dense_named.items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def training_config(world_size: int, **changes: Any) -> TrainingConfig:
    """The same global batch on any number of ranks."""
    config = TrainingConfig(
        epochs=2,
        learning_rate=0.01,
        table_learning_rate=0.1,
        precision=Precision.FP32,
        clip_norm=0.5,
        log_every=1,
        threads=1,
        early_stop=EarlyStopConfig(patience=0),
        loader=LoaderConfig(batch_size=GLOBAL_BATCH // world_size, shuffle_buffer_rows=200),
        checkpoint=CheckpointConfig(keep=0),
    )
    return dataclasses.replace(config, **changes)


def plan_of(case: Case, world_size: int) -> Plan:
    """Tables round the ranks that may hold them, or cut over all of those."""
    towers = TOWERS if case.towers else None
    shell = Plan(world_size=world_size, tables=(), towers=towers, tower_size=case.tower_size if case.towers else 0)
    tables = []
    for index, name in enumerate(TABLES):
        ranks = tuple(range(world_size))
        if towers is not None:
            ranks = tuple(shell.tower_ranks(next(t for t, tower in enumerate(towers.towers) if name in tower)))
        if case.placement is Placement.TABLE_WISE:
            ranks = (ranks[index % len(ranks)],)
        if case.placement is Placement.TABLE_ROW_WISE and towers is None:  # of one host of two
            ranks = ranks[: max(world_size // 2, 1)]
        tables.append(TablePlacement(table=name, placement=case.placement, ranks=ranks))
    return dataclasses.replace(shell, tables=tuple(tables))


def model_of(case: Case, *, draw_tables: bool = True) -> RankingModel:
    """A small DLRM."""
    config = DLRMConfig(
        embedding_dim=8,
        bottom=MLPConfig(hidden_dims=(9,), dropout=case.dropout),
        top=MLPConfig(hidden_dims=(7,), dropout=case.dropout),
        embedding=EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=case.optimizer),
        tower_module=TowerModuleConfig(compression=2.0) if case.towers else TowerModuleConfig(),
    )
    towers = TOWERS if case.towers else None
    made = case.tables.make_storage(seed=3)
    inputs = tiny_dataset(4).inputs
    return build_model(config, inputs, seed=3, towers=towers, make_storage=made, draw_tables=draw_tables)


def trainer_of(case: Case, folder: str | Path, *, world_size: int, **changes: Any) -> Trainer:
    """A trainer on this rank of `world_size`; on one device without any parallel part."""
    config = training_config(world_size, **changes)
    model = model_of(case, draw_tables=world_size == 1)
    parallel: Parallel | None = None
    if world_size > 1:
        plan = plan_of(case, world_size)
        topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=max(world_size // 2, 1))
        parallel = parallelize(
            model,
            plan,
            topology,
            config=ParallelConfig(dense=case.dense, num_parts=case.num_parts, exchange=case.exchange),
            seed=3,
            count_costs="balance" in changes,
        )
    train = tiny_dataset(NUM_ROWS, nan_row=case.nan_row if case.nan_row >= 0 else None)
    return Trainer(model, config=config, train=train, valid=tiny_dataset(101, seed=1), folder=folder, parallel=parallel)


def train(rank: int, world_size: int, case: Any, folder: str, changes: dict[str, Any], resume: bool = False) -> Any:
    """Train to the end on every rank; metrics of the final weights."""
    del rank
    chosen = from_json(Case, case, where="test")
    trainer = trainer_of(chosen, folder, world_size=world_size, **changes)
    trainer.fit(resume=resume)
    return trainer.evaluate(trainer.valid, split="valid").metrics


def stored(folder: str | Path, step: int | None = None) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, whole."""
    checkpoint = CheckpointStore(Path(folder) / "checkpoints").load(step)
    return {name: tensor.numpy() for name, tensor in checkpoint.tensors.items() if not name.startswith("rng.")}


def as_data(case: Case) -> Any:
    """A case as plain data, to send it to ranks."""
    return to_json(case)


def die_at_step(trainer: Trainer, step: int, *, dies: bool) -> None:
    """Let this process be killed before step number `step` + 1."""
    train_one = trainer._train_on

    def dying(*arguments: Any, **named: Any) -> Any:
        if dies and trainer.position.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_one(*arguments, **named)

    trainer._train_on = dying  # type: ignore[method-assign]
