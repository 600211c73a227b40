"""Our contestants on many ranks: one model, one set of batches, each kind of exchange. Ranks of a job (`datacentre`).

Settings: `shape` (a `Shape` as JSON), `ids` (which rows the batches read) and `exchanges` (the contestants).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.datacentre.serve import serve_ranks
from ziggurat.config import from_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.jagged import JaggedRows
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.ops.machine.allocator import keep_freed_memory
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

POOL = 48  # rows of "same": every batch reads all of them


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained.

    Args:
        batch_size: of a rank.
        num_features: each with a table of its own, cut by rows.
        num_rows: of a table.
        dim: of its rows.
        hidden: units of the layers of both MLPs.
        num_batches: before they repeat.
    """

    batch_size: int = 256
    num_features: int = 16
    num_rows: int = 100_000
    dim: int = 64
    hidden: tuple[int, ...] = (512, 256)
    num_batches: int = 16


def draw_rows(ids: str, shape: Shape, *, world_size: int, number: int) -> np.ndarray:
    """The rows of one global batch, (features, samples); every rank draws the same.

    Args:
        ids: "same" (all batches read the same few rows), "disjoint" (neighbours read none in common), or the exponent
            of a Zipf law, whose ranks are scattered over the rows.
        shape: sizes.
        world_size: ranks.
        number: of the batch.
    """
    generator, size = np.random.default_rng([7, number]), shape.batch_size * world_size
    rows = np.empty((shape.num_features, size), np.int64)
    for feature in range(shape.num_features):
        if ids == "same":
            rows[feature] = generator.integers(1, 1 + POOL, size)
        elif ids == "disjoint":
            half = shape.num_rows // 2
            rows[feature] = generator.integers(1, half, size) + number % 2 * half
        else:
            weights = np.arange(1, shape.num_rows, dtype=np.float64) ** -float(ids)
            ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), generator.random(size))
            rows[feature] = 1 + np.random.default_rng([8, feature]).permutation(shape.num_rows - 1)[ranks]
    return rows


class ExchangeRanks:
    """All contestants of one set of batches on this rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        keep_freed_memory()
        shape = from_json(Shape, settings["shape"], where="shape")
        topology = Topology.create()
        self._batches = _batches(settings["ids"], shape, topology)
        self._steps: dict[str, TrainStep] = {}
        self._numbers: dict[str, int] = {}
        for name in settings["exchanges"]:
            # A topology each: what one has announced lies in memory of its own while the others have their turns.
            self._steps[name], self._numbers[name] = _made(shape, Topology.create(), Exchange(name)), 0
        self.info: dict[str, Any] = {name: step.overlaps() for name, step in self._steps.items()}

    def run(self, name: str, steps: int) -> float:
        """Train; returns the last loss, which is the same on every rank."""
        step, value = self._steps[name], 0.0
        for _ in range(steps):
            number = self._numbers[name]
            self._numbers[name] += 1
            batch, upcoming = (self._batches[each % len(self._batches)] for each in (number, number + 1))
            value = step(batch, upcoming=upcoming).loss
        return value

    def profile(self, name: str, steps: int) -> dict[str, Any]:
        """What the exchange did since the last call."""
        del steps
        step = self._steps[name]
        assert step.parallel is not None
        traffic = step.parallel.traffic
        found: dict[str, Any] = dict(step.facts())
        found |= {"waited_ms": 1e3 * traffic.waited_s / max(traffic.num_steps, 1), "traffic": traffic.report()}
        found["steps"] = traffic.num_steps
        traffic.reset()
        step.facts()
        return found


def _batches(ids: str, shape: Shape, topology: Topology) -> list[Batch]:
    size, made = shape.batch_size, []
    mine = slice(topology.rank * size, (topology.rank + 1) * size)
    for number in range(shape.num_batches):
        rows = draw_rows(ids, shape, world_size=topology.world_size, number=number)[:, mine]
        generator = torch.Generator().manual_seed(1000 * number + topology.rank)
        made.append(
            Batch(
                dense=torch.randn(size, 13, generator=generator),
                single=torch.from_numpy(rows.copy()),
                jagged=JaggedRows.empty(),
                labels=torch.randint(2, (size, 1), generator=generator).float(),
                row_ids=torch.arange(size),
            )
        )
    return made


def _made(shape: Shape, topology: Topology, exchange: Exchange) -> TrainStep:
    names = [f"c{index}" for index in range(shape.num_features)]
    inputs = InputSpec(
        dense=tuple(f"i{index}" for index in range(13)),
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        tables=tuple(TableSpec(name=name, num_rows=shape.num_rows) for name in names),
        labels=(LabelSpec(name="click"),),
    )
    mlp = MLPConfig(hidden_dims=shape.hidden)
    config = DLRMConfig(embedding_dim=shape.dim, bottom=mlp, top=mlp, embedding=EmbeddingConfig(dim=shape.dim))
    ranks = tuple(range(topology.world_size))
    tables = tuple(TablePlacement(table=name, placement=Placement.ROW_WISE, ranks=ranks) for name in names)
    model = build_model(config, inputs, seed=1, draw_tables=False)
    plan = Plan(world_size=topology.world_size, tables=tables)
    parallel = parallelize(model, plan, topology, config=ParallelConfig(exchange=exchange), seed=1)
    settings = TrainingConfig(precision=Precision.FP32, threads=int(os.environ["OMP_NUM_THREADS"]))
    return TrainStep(model, settings, parallel=parallel)


if __name__ == "__main__":
    serve_ranks(ExchangeRanks)
