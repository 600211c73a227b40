"""Our contestant on many ranks: `parallelize`, the sharded table optimizer, fused Adam. Ranks of a job (`datacentre`).

Settings: `workload`, and `variants`: a list of `Variant`s as JSON, all built in one process, so that they can take
turns. Flat variants have no towers.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.datacentre.serve import serve_ranks
from benchmarks.ours import config_of, inputs_of, to_batch
from benchmarks.rank_batches import rank_batches
from benchmarks.workload import ModelKind, Workload
from ziggurat.config import from_json
from ziggurat.embeddings.contract import innermost
from ziggurat.features.batch import Batch
from ziggurat.models import Outputs, build_model
from ziggurat.models.build import BuiltInConfig
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.ops.machine.allocator import keep_freed_memory
from ziggurat.parallel.dense import Reduction
from ziggurat.parallel.exchange.blocks import BlockExchange
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Towers
from ziggurat.planning.placement import place_tables
from ziggurat.training.config import Precision


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the workload.

    Args:
        name: in commands and reports.
        towers: number of towers; 0: the flat model.
        tower_size: S, ranks a tower group; 0: the smallest that the towers allow.
        compression: of the tower modules.
        wire: between towers (between all ranks in a flat model).
        wire_in_tower: inside a tower group.
        reduction: gradients of the dense network.
        num_parts: parts of a batch whose exchange and computation overlap (`Pipeline`).
        compute: of the dense network and the tower modules; BF16 is autocast.
    """

    name: str
    towers: int = 0
    tower_size: int = 0
    compression: float = 1.0
    wire: WireFormat = WireFormat.FP32
    wire_in_tower: WireFormat = WireFormat.FP32
    reduction: Reduction = Reduction.FP32
    num_parts: int = 1
    compute: Precision = Precision.FP32


def tower_module(workload: Workload, variant: Variant) -> TowerModuleConfig:
    """Linear maps under DLRM; under DCNv2 one cross layer of low rank and a projection."""
    if workload.model is ModelKind.DLRM:
        return TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=variant.compression)
    return TowerModuleConfig(
        kind=TowerModuleKind.CROSS, compression=variant.compression, cross_rank=workload.cross_rank // 4
    )


def split_features(workload: Workload, *, num_towers: int) -> Towers:
    """Neighbours share a tower; nothing is learned here, and speed does not depend on it."""
    names = [f"c{index}" for index in range(len(workload.lengths))]
    bounds = [len(names) * tower // num_towers for tower in range(num_towers + 1)]
    towers = tuple(tuple(names[first:last]) for first, last in itertools.pairwise(bounds))
    return Towers(towers=towers, strategy="by hand")


class OurVariant:
    """A parallel model with its optimizers and its loop.

    Args:
        variant: how it is trained.
        workload: what.
        batches: of this rank.
        model_config: another one than that of the workload.
        places: order and hosts of the ranks, as of `Topology.create`.
    """

    def __init__(
        self,
        variant: Variant,
        workload: Workload,
        batches: list[Batch],
        *,
        model_config: BuiltInConfig | None = None,
        places: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.workload, self.batches, self.step_number = workload, batches, 0
        self.computes_bf16 = variant.compute is Precision.BF16
        inputs, config = inputs_of(workload), model_config or config_of(workload)
        towers = split_features(workload, num_towers=variant.towers) if variant.towers else None
        if towers is not None:
            config = replace(config, tower_module=tower_module(workload, variant))
        world_size = int(os.environ["WORLD_SIZE"])
        plan = place_tables(
            inputs, dim=workload.dim, world_size=world_size, towers=towers, tower_size=variant.tower_size
        )
        self.topology = Topology.create(tower_size=plan.ranks_per_group, **(places or {}))
        self.model = build_model(config, inputs, seed=workload.seed, towers=towers)
        wire = WireConfig(in_tower=variant.wire_in_tower, between_towers=variant.wire)
        settings = ParallelConfig(wire=wire, reduction=variant.reduction)
        self.parallel = parallelize(self.model, plan, self.topology, config=settings)
        self.pipeline = Pipeline(self.model, self.parallel, num_parts=variant.num_parts)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=workload.learning_rate, fused=True)
        self.tables = self.parallel.table_optimizer(self.model)
        self.global_weight = torch.tensor([float(workload.batch_size * world_size)])  # all batches are full

    def describe(self) -> dict[str, Any]:
        """Sizes and settings for the report."""
        return {
            "num_dense_parameters": sum(value.numel() for value in self.model.parameters()),
            "overlaps": self.pipeline.overlaps(),
            "topology": self.topology.describe(),
            "tables": self.parallel.spread.tables.report(),
        }

    def step(self) -> float:
        """One step; the ids of the next batch travel during the backward pass."""
        batch = self._batch(self.step_number)
        self.step_number += 1
        loss = self.pipeline.step(
            batch, loss_of=self._loss, autocast=self._autocast, upcoming=self._batch(self.step_number)
        )
        self.dense.step()
        self.tables.step(self.workload.table_learning_rate)
        self.dense.zero_grad(set_to_none=True)
        return float(loss)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.computes_bf16)

    def _loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return self.model.loss(outputs, batch).mean(self.global_weight)

    def _batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]


class OurRanks:
    """All variants of one workload on this rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        keep_freed_memory()
        workload = Workload.from_json(settings["workload"])
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        batches = [
            to_batch(raw, workload, labels=raw.label_sets[0])
            for raw in rank_batches(workload, rank=rank, world_size=world_size)
        ]
        variants = [from_json(Variant, each, where="variants") for each in settings["variants"]]
        self.variants = {each.name: OurVariant(each, workload, batches) for each in variants}
        self.info = {name: variant.describe() for name, variant in self.variants.items()}

    def run(self, name: str, steps: int) -> float:
        """Train."""
        value = 0.0
        for _ in range(steps):
            value = self.variants[name].step()
        return value

    def profile(self, name: str, steps: int) -> dict[str, Any]:
        """Where the time of a step goes on this rank, in ms, and what it sends, in bytes a step."""
        variant = self.variants[name]
        traffic = variant.parallel.traffic
        traffic.reset()
        clock = PhaseClock()
        begin = time.perf_counter()
        with timed_phases(variant, clock):
            for _ in range(steps):
                variant.step()
        total_s = time.perf_counter() - begin
        phases = {phase: seconds * 1e3 / steps for phase, seconds in clock.seconds.items()}
        phases["rest"] = total_s * 1e3 / steps - sum(phases.values())
        rows = [{**row, "bytes": int(row["bytes"]) // steps, "messages": int(row["messages"]) / steps}
                for row in traffic.report()]  # fmt: skip
        return {"step_ms": total_s * 1e3 / steps, "phases_ms": phases, "traffic": rows}


class PhaseClock:
    """Seconds by phase; a phase inside another is counted as its own alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                spent = time.perf_counter() - begin
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return run


@contextmanager
def timed_phases(variant: OurVariant, clock: PhaseClock) -> Iterator[None]:
    """Put clocks around the parts of a step, and take them away again."""
    model, embeddings = variant.model, variant.model.embeddings
    places: list[tuple[Any, str, str]] = [
        (embeddings, "announce", "send sizes of ids"),
        (embeddings, "send_ids", "send ids"),
        (innermost(embeddings), "_take_ids", "wait for ids"),
        (embeddings.tables, "lookup", "lookup"),
        (model, "dense_outputs", "dense forward"),
        (variant.dense, "step", "dense optimizer"),
        (variant.tables, "step", "table optimizer"),
        (Tensor, "backward", "backward: compute, dense gradients"),
    ]
    hops: list[tuple[str, BlockExchange]] = [("hop", embeddings.hop)]  # type: ignore[list-item]
    transform = variant.parallel.fields.towers
    if transform is not None:
        hops = [("intra-group all-to-all", embeddings.hop), ("inter-group all-to-all", transform.hop)]  # type: ignore[list-item]
        places.append((transform, "_run", "tower modules"))
    for name, hop in hops:
        places += [
            (hop, "send_values", f"{name} forward, send"),
            (hop, "receive_values", f"{name} forward, wait"),
            (hop, "send_gradient", f"{name} backward, send"),
            (hop, "receive_gradient", f"{name} backward, wait"),
        ]
    saved = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    try:
        for owner, name, phase in places:
            _put(owner, name, clock.timed(phase, getattr(owner, name)))
        yield
    finally:
        for owner, name, value in saved:
            if value is None:
                object.__delattr__(owner, name)
            else:
                _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; of a module without making it a submodule."""
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


if __name__ == "__main__":
    serve_ranks(OurRanks)
