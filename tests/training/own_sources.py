"""Data sources that are not ours: a shuffled one with random state of its own, and what ranks train with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.training.rank_runs import Case, model_of, plan_of, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.features.batch import Batch
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.training.trainer import Trainer


def all_rows(num_rows: int) -> Batch:
    config = LoaderConfig(batch_size=num_rows, shuffle=Shuffle.NONE)
    return next(Loader(tiny_dataset(num_rows), config=config).batches(epoch=0))


class ShuffledBlocks:
    """Blocks of samples in a random order, drawn anew each epoch by a generator that is part of the state."""

    def __init__(self, samples: Batch, *, block: int, seed: int) -> None:
        size = samples.batch_size
        self.blocks = [samples.rows(first, min(first + block, size)) for first in range(0, size, block)]
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        if not self.order:
            self.order = torch.randperm(len(self.blocks), generator=self.generator).tolist()
        while self.order:
            yield self.blocks[self.order.pop()]

    def state_dict(self) -> dict[Any, Any]:
        return {"order": tuple(self.order), "generator": self.generator.get_state(), "note": b"a", 3: np.float64(1)}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        assert (state_dict["note"], state_dict[3]) == (b"a", 1)
        self.order = list(state_dict["order"])
        self.generator.set_state(state_dict["generator"])


class SizedBlocks(ShuffledBlocks):
    """One that knows how many batches an epoch has."""

    def __len__(self) -> int:
        return len(self.blocks)


class CountedEpochs:
    """One that moves on to the next epoch when it has been iterated to the end, as many loaders do."""

    def __init__(self, samples: Batch, *, block: int) -> None:
        self.blocks = ShuffledBlocks(samples, block=block, seed=0).blocks
        self.epoch, self.index = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.index < len(self.blocks):
            self.index += 1
            yield self.blocks[(self.index + self.epoch) % len(self.blocks)]
        self.epoch, self.index = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.index = state_dict["epoch"], state_dict["index"]


def train_blocks(
    rank: int, world_size: int, folder: str, stop: int, resume: bool, sizes: list[int], counted: bool = False
) -> Any:
    """Train on blocks of this rank; `sizes`: samples of each rank. Weights, ids of the rows, rows counted."""
    case = Case()
    model, parallel = model_of(case), None
    if world_size > 1:
        parallel = parallelize(model, plan_of(case, world_size), Topology.create())
    source = ShuffledBlocks(all_rows(sizes[rank]), block=16, seed=rank)
    if counted:
        source = CountedEpochs(all_rows(sizes[rank]), block=16)
    config = training_config(1, max_steps=stop, checkpoint_every=3)
    trainer = Trainer(model, config=config, train=source, valid=[all_rows(40)], folder=Path(folder), parallel=parallel)
    trainer.fit(resume=resume)
    evaluation = trainer.evaluate(trainer.valid)
    dense = [parameter.detach().double().sum().item() for parameter in trainer.step.dense_named.values()]
    return {"metrics": evaluation.metrics, "dense": dense}, trainer.position.rows, trainer.position.step
