"""Plans, wires and towers that ranks as threads compute like one device, on whatever device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.models import Model
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.rank_threads import building, run_ranks_as_threads


@dataclass(frozen=True)
class Case:
    """A way to spread a model.

    Args:
        plan: of its tables.
        has_modules: the model has towers.
        wire: between towers.
        limit: largest difference of fields and of everything else, relative to the largest number.
    """

    plan: Plan
    has_modules: bool = False
    wire: WireFormat = WireFormat.FP32
    limit: float = 2e-6


def cases(world_size: int) -> dict[str, Case]:
    """Every placement, flat and with towers, and every wire."""
    found: dict[str, Case] = {}
    for kind in Placement:
        if kind is not Placement.TABLE_ROW_WISE:
            found[kind.value] = Case(placed(world_size, kind))
        found[f"{kind.value} towers"] = Case(placed(world_size, kind, TOWERS, world_size // 2), has_modules=True)
    wise = placed(world_size, Placement.TABLE_WISE, TOWERS, world_size // 2)
    limits = {
        WireFormat.BF16: 0.02,
        WireFormat.FP16: 0.005,
        WireFormat.INT8: 0.05,
        WireFormat.MX9: 0.02,
        WireFormat.MX6: 0.15,
    }
    for wire, limit in limits.items():
        found[f"wire {wire.value}"] = Case(wise, has_modules=True, wire=wire, limit=limit)
    return found


def compare(world_size: int, case: Case, *, device: torch.device) -> None:
    """Raise unless two steps of ranks are those of one device."""
    batch = random_batch(inputs(), 13, seed=1).to(device)
    config = ParallelConfig(wire=WireConfig(between_towers=case.wire))

    def made() -> Model:
        with building():
            return build(towers=case.plan.towers if case.has_modules else None, optimizer="rowwise_adagrad").to(device)

    def check(rank: int) -> None:
        del rank
        tolerance = Tolerance(fields=case.limit, others=case.limit)
        assert_same_as_single_device(made, case.plan, batch=batch, config=config, tolerance=tolerance)

    run_ranks_as_threads(check, world_size)
