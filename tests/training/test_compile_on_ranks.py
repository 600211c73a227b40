"""torch.compile of copied dense networks: the same weights as eager ones on two ranks; what it cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.rank_runs import GLOBAL_BATCH, Case, model_of, plan_of, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.errors import ConfigError
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Compile
from ziggurat.training.step.train_step import TrainStep

NUM_ROWS = 3 * GLOBAL_BATCH + 20  # the last batch is not full


def trained(rank: int, mode: Compile) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after an epoch on this rank, and how many graphs were compiled."""
    model = model_of(Case())
    parallel = parallelize(model, plan_of(Case(), 2), Topology.create())
    step = TrainStep(model, training_config(2, compile=mode), parallel=parallel)
    torch._dynamo.utils.counters.clear()
    config = LoaderConfig(batch_size=GLOBAL_BATCH // 2)
    for batch in Loader(tiny_dataset(NUM_ROWS), config=config, rank=rank, world_size=2).batches(epoch=0):
        assert step(batch).finite
    return dict(model.named_parameters()), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def on_ranks(rank: int) -> Any:
    """Greatest difference of weights; graphs of both; greatest difference between ranks."""
    eager, none = trained(rank, Compile.OFF)
    compiled, graphs = trained(rank, Compile.DEFAULT)
    difference = max((eager[name] - compiled[name]).abs().max().item() for name in eager)
    moved = max((eager[name] - value).abs().max().item() for name, value in model_of(Case()).named_parameters())
    said = []
    for config in (ParallelConfig(dense=DenseParallelism.FSDP), ParallelConfig(num_parts=2)):
        model = model_of(Case())
        parallel = parallelize(model, plan_of(Case(), 2), Topology.create(), config=config)
        with pytest.raises(ConfigError) as caught:
            TrainStep(model, training_config(2, compile=Compile.DEFAULT), parallel=parallel)
        said.append(str(caught.value))
    return difference, moved, none, graphs, sum(value.double().sum().item() for value in compiled.values()), said


@pytest.mark.slow
def test_compiled_copies_train_like_eager_ones() -> None:
    first, second = run_ranks(on_ranks, 2, timeout_s=300.0)
    for difference, moved, none, graphs, _, said in (first, second):
        assert difference < 1e-5 < moved
        assert (none, graphs) == (0, 1)
        assert all("--training.compile off" in text for text in said)
    assert first[4] == second[4]  # the copies stay copies
