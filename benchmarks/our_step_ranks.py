"""The trainer's `TrainStep` on the ranks of a job, or in one process: what four ranks do together, one does alone.

Settings: `workload` (its batch size is a rank's) and `variants`: a list of `StepVariant`s as JSON. In a job of one rank
the step is that of one device, without `parallelize`; the ids of the next batch travel ahead, as in the trainer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist  # noqa: TID251

from benchmarks.datacentre.serve import serve_ranks
from benchmarks.ours import config_of, inputs_of, training_config, with_label_sets
from benchmarks.rank_batches import rank_batches
from benchmarks.workload import NUM_LABEL_SETS, Workload
from ziggurat.config import from_json
from ziggurat.features.batch import Batch
from ziggurat.models import build_model
from ziggurat.parallel.dense import Reduction
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.planning.placement import place_tables
from ziggurat.training.config import Compile, Precision
from ziggurat.training.step.train_step import TrainStep


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """One way to train the workload.

    Args:
        name: in commands and reports.
        precision: of the dense network.
        compile: of the dense network.
        wire: embeddings and their gradients.
        reduction: gradients of the dense network.
    """

    name: str
    precision: Precision = Precision.BF16
    compile: Compile = Compile.OFF
    wire: WireFormat = WireFormat.FP32
    reduction: Reduction = Reduction.FP32


class OneStep:
    """A model with its step and its batches."""

    def __init__(self, variant: StepVariant, workload: Workload, batches: list[Batch]) -> None:
        self.batches, self.number = batches, 0
        inputs = inputs_of(workload)
        model = build_model(config_of(workload), inputs, seed=workload.seed)
        self.parallel = None
        if dist.get_world_size() > 1:
            plan = place_tables(inputs, dim=workload.dim, world_size=dist.get_world_size())
            settings = ParallelConfig(wire=WireConfig(between_towers=variant.wire), reduction=variant.reduction)
            self.parallel = parallelize(model, plan, Topology.create(), config=settings)
        config = replace(training_config(workload, {}), precision=variant.precision, compile=variant.compile)
        self.step = TrainStep(model, config, parallel=self.parallel)

    def run(self, steps: int) -> float:
        """Train; returns the last loss, which is the same on every rank."""
        value = 0.0
        for _ in range(steps):
            batch, upcoming = self._batch(0), self._batch(1) if self.parallel is not None else None
            self.number += 1
            value = self.step(batch, upcoming=upcoming).loss
        return value

    def _batch(self, ahead: int) -> Batch:
        return self.batches[(self.number + ahead) % len(self.batches)]


class StepRanks:
    """All variants of one workload on this rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        workload = Workload.from_json(settings["workload"])
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        raws = rank_batches(workload, rank=rank, world_size=world_size)
        labelled = [with_label_sets(raw, workload) for raw in raws]
        batches = [labels[number] for number in range(NUM_LABEL_SETS) for labels in labelled]  # nothing to memorise
        variants = [from_json(StepVariant, each, where="variants") for each in settings["variants"]]
        self.variants = {each.name: OneStep(each, workload, batches) for each in variants}
        self.info = {
            name: {
                "num_dense_parameters": sum(value.numel() for value in each.step.model.parameters()),
                "precision": each.step.precision.value,
                "compile": each.step.config.compile.value,
            }
            for name, each in self.variants.items()
        }

    def run(self, name: str, steps: int) -> float:
        """Train."""
        return self.variants[name].run(steps)


if __name__ == "__main__":
    serve_ranks(StepRanks)
