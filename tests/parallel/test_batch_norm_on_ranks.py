"""What looks at the whole batch is on ranks as on one device: batch norms, and losses weighed by its mean loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.test_parity import inputs, placed
from tests.parallel.test_parity_of_models import CONFIGS, TABLES
from ziggurat.errors import ConfigError, PlanError
from ziggurat.models import (
    Activation,
    AFNConfig,
    AttentionActivation,
    BuiltInConfig,
    DINConfig,
    DNNConfig,
    EDCNConfig,
    FCNConfig,
    FinalNetConfig,
    MLPConfig,
    Normalization,
    QNNConfig,
    Supervision,
    WukongConfig,
    build_model,
)
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.parallel.dense import DenseParallelism, check_dense
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Compile, DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

NORM = MLPConfig(hidden_dims=(7, 6), normalization=Normalization.BATCH)
DIN = next(each for each in CONFIGS if isinstance(each, DINConfig))
FINALNET = next(each for each in CONFIGS if isinstance(each, FinalNetConfig))
WUKONG = next(each for each in CONFIGS if isinstance(each, WukongConfig))
MODELS: dict[str, BuiltInConfig] = {
    "din": dataclasses.replace(DIN, attention_activation=AttentionActivation.DICE, deep=NORM),
    "finalnet": FinalNetConfig(embedding_dim=8, embedding=TABLES),
    "wukong": dataclasses.replace(WUKONG, norm=Normalization.BATCH, head=NORM),
    "dnn": DNNConfig(embedding_dim=8, deep=dataclasses.replace(NORM, activation=Activation.TANH), embedding=TABLES),
    "afn": AFNConfig(embedding_dim=8, num_neurons=5, deep=NORM, beside=NORM, embedding=TABLES),
    "edcn": EDCNConfig(embedding_dim=8, num_layers=2, norm=Normalization.BATCH, embedding=TABLES),
    # No norm, but weights of losses that depend on the whole batch.
    "fcn": FCNConfig(embedding_dim=8, exponential_layers=2, linear_layers=1, dropout=0.0, embedding=TABLES),
    "qnn": QNNConfig(
        embedding_dim=8, num_layers=1, num_rows=2, norm=Normalization.BATCH, dropout=0.0, embedding=TABLES
    ),
}
# Samples of each rank in each step: even, uneven, ranks without any, one sample in all, none at all.
SHARES = {2: ([6, 7], [12, 1], [0, 9], [1, 0], [0, 0], [3, 3]), 3: ([4, 4, 5], [0, 11, 0], [1, 1, 1], [0, 1, 0])}


def steps(config: BuiltInConfig, world_size: int, *, rank: int = 0, dense: str = "") -> dict[str, Any]:
    """Losses, and all weights and statistics after the steps; on one device without `dense`."""
    model, parallel = build_model(config, inputs(), seed=3), None
    if dense:
        topology, settings = Topology.create(), ParallelConfig(dense=DenseParallelism(dense))
        parallel = parallelize(model, placed(world_size, Placement.TABLE_WISE), topology, config=settings)
    training = TrainingConfig(
        precision=Precision.FP32, optimizer=DenseOptimizer.SGD, learning_rate=0.05, table_learning_rate=0.05
    )
    step, losses = TrainStep(model, training, parallel=parallel), []
    if parallel is not None:
        step.warm_up()
    for number, shares in enumerate(SHARES[world_size]):
        batch, begin = random_batch(inputs(), sum(shares), seed=number), sum(shares[:rank])
        losses.append(step(batch.rows(begin, begin + shares[rank]) if dense else batch).loss)
    found: dict[str, Any] = {"losses": torch.tensor(losses)}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith("embeddings."):
            found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    with torch.no_grad():
        model.eval()
        found["logits"] = model(random_batch(inputs(), 5, seed=99)).clone()
    return found


def compare(rank: int, world_size: int, names: list[str], dense: str) -> None:
    """Runs on every rank."""
    for name in names:
        wanted, found = steps(MODELS[name], world_size), steps(MODELS[name], world_size, rank=rank, dense=dense)
        assert wanted.keys() == found.keys()
        for each, value in wanted.items():
            torch.testing.assert_close(
                found[each], value, rtol=2e-4, atol=2e-5, equal_nan=True, msg=lambda text, n=f"{name} {each}": n + text
            )


@pytest.mark.parametrize(("world_size", "dense"), [(2, "ddp"), (3, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("names", [list(MODELS)[:4], list(MODELS)[4:]], ids=",".join)
def test_models_that_look_at_the_whole_batch_train_as_on_one_device(
    names: list[str], world_size: int, dense: str
) -> None:
    run_ranks(compare, world_size, world_size, names, dense)


class _Plain(torch.nn.Module):
    """A layer norm over the batch that is torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)


def test_what_would_normalise_a_part_of_the_batch_is_refused() -> None:
    model = build_model(MODELS["dnn"], inputs(), seed=0)
    check_dense(model)
    with pytest.raises(PlanError, match=r"--parallel\.num-parts 1"):
        check_dense(model, num_parts=2)
    weighed = build_model(MODELS["fcn"], inputs(), seed=0)
    check_dense(weighed)
    with pytest.raises(PlanError, match=r"--model\.supervision none"):
        check_dense(weighed, num_parts=2)
    plain = dataclasses.replace(MODELS["fcn"], supervision=Supervision.NONE)
    check_dense(build_model(plain, inputs(), seed=0), num_parts=2)
    model.add_module("own", _Plain())
    with pytest.raises(PlanError, match=r"ziggurat\.models\.blocks\.batch_norm\.BatchNorm in its place"):
        check_dense(model)
    model.own.norm = BatchNorm(3)  # type: ignore[union-attr]
    check_dense(model)
    model.towers = _Plain()  # type: ignore[assignment]
    model.towers.norm = BatchNorm(3)  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="each tower group would normalise for itself"):
        check_dense(model)


def refuse_compile(rank: int) -> None:
    """Runs on every rank."""
    del rank
    model = build_model(MODELS["dnn"], inputs(), seed=0)
    parallel = parallelize(model, placed(2, Placement.TABLE_WISE), Topology.create())
    with pytest.raises(ConfigError, match=r"--training\.compile off"):
        TrainStep(model, TrainingConfig(compile=Compile.DEFAULT), parallel=parallel)


def test_a_compiled_network_is_refused() -> None:
    run_ranks(refuse_compile, 2)
