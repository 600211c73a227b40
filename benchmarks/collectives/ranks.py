"""One rank of a job of `benchmarks.collectives`: finds the order of its job, then runs collectives or steps in it.

Settings: `what` is "collectives", "steps" or "towers"; `algorithm` is what the order is for; `hosts` is where each rank
really is, for the given order of towers, which a launcher that is wrong would lay across hosts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251

from benchmarks.datacentre.serve import serve_ranks
from benchmarks.our_ranks import OurVariant, Variant
from benchmarks.ours import config_of, to_batch
from benchmarks.rank_batches import rank_batches
from benchmarks.workload import ModelKind, Workload
from ziggurat.models import DLRMConfig, WukongConfig
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.ops.machine.allocator import keep_freed_memory
from ziggurat.parallel.process_groups import make_group
from ziggurat.planning.rank_order.rank_order import RankOrder
from ziggurat.runs.planning.rank_order import OrderProbeConfig, probe_order

MIB = 1 << 20


class CollectiveRanks:
    """All-reduces and exchanges of all with all, in the given and in the found order."""

    def __init__(self, order: RankOrder) -> None:
        self.facts: dict[str, Any] = {}
        self._groups = {name: _group(ranks) for name, ranks in (("given", order.given), ("found", order.order))}

    def run(self, name: str, steps: int) -> float:
        """Communicate; the name is "all_reduce found 16", with MiB of every rank."""
        what, order, size = name.split()
        group = self._groups[order]
        buffer = torch.zeros(int(size) * MIB // 4)
        received = torch.empty_like(buffer) if what == "all_to_all" else buffer
        for _ in range(steps):
            if what == "all_to_all":
                dist.all_to_all_single(received, buffer, group=group)
            else:
                dist.all_reduce(buffer, group=group)
        return 0.0


class StepRanks:
    """Training steps of one model in the given and in the found order."""

    def __init__(self, settings: dict[str, Any], order: RankOrder) -> None:
        keep_freed_memory()
        towers = 2 if settings["what"] == "towers" else 0
        model = ModelKind(settings.get("model", "dlrm"))
        workload = Workload(model=model, dim=64 if towers else 16, batch_size=256, num_rows=5_000, num_batches=4)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        batches = [
            to_batch(raw, workload, labels=raw.label_sets[0])
            for raw in rank_batches(workload, rank=rank, world_size=world_size)
        ]
        variant = Variant(name="steps", towers=towers, tower_size=2 if towers else 0, compression=4.0)
        # Where ranks really are; a launcher that is wrong has no shared memory between hosts either.
        given = {"order": order.given, "hosts": tuple(settings["hosts"])}
        found = {"order": order.order, "hosts": order.hosts}
        config = _with_large_head(workload) if not towers else None
        self._steps = {
            name: OurVariant(variant, workload, batches, model_config=config, places=places)
            for name, places in (("given", given), ("found", found))
        }
        self.facts = {f"steps {name}": each.describe() for name, each in self._steps.items()}

    def run(self, name: str, steps: int) -> float:
        """Train."""
        value = 0.0
        for _ in range(steps):
            value = self._steps[name].step()
        return value


class OrderRanks:
    """This rank of the job: `info` has the order that was found, as the file's text, and what else is known."""

    def __init__(self, settings: dict[str, Any]) -> None:
        started = time.perf_counter()
        probed = probe_order(OrderProbeConfig(algorithm=settings.get("algorithm", "ring")))
        facts: dict[str, Any] = {"probe_s": time.perf_counter() - started}
        self._inner = (
            CollectiveRanks(probed.order) if settings["what"] == "collectives" else StepRanks(settings, probed.order)
        )
        self.info = {"order": _text(probed.order), "facts": facts | self._inner.facts}

    def run(self, name: str, steps: int) -> float:
        """Take so many steps, or collectives."""
        return self._inner.run(name, steps)


def _with_large_head(workload: Workload) -> DLRMConfig | WukongConfig:
    """Return the model of a workload with three million weights or more before the logit."""
    config = config_of(workload)
    wide = MLPConfig(hidden_dims=(2048, 1024, 512))
    if isinstance(config, DLRMConfig):
        return replace(config, top=wide)
    assert isinstance(config, WukongConfig)
    return replace(config, head=wide)


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    made = make_group(ranks)
    assert made is not None, "an order has every rank"
    return made


def _text(order: RankOrder) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        order.save(path)
        return path.read_text()


if __name__ == "__main__":
    serve_ranks(OrderRanks)
