"""A small cost model for tests whose prices do not add up, and problems to go with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ziggurat.placements import Placement
from ziggurat.planning.problem import PlanningProblem, ShardProfile, TableProfile

ALL = tuple(Placement)


class RootCostModel:
    """A device costs 1 + √(Σ a) + its columns; everybody waits for a tenth of the busiest. One launch is free."""

    def encode(self, shards: Sequence[ShardProfile]) -> np.ndarray:
        return np.array([[shard.pooling_factor * shard.dim, shard.dim / 8] for shard in shards], dtype=np.float32)

    def local(self, states: np.ndarray) -> np.ndarray:
        work = np.sqrt(np.maximum(states[:, 0], 0.0))
        return np.stack([work + (states[:, 0] > 1e-3), states[:, 1]], axis=1).astype(np.float32)

    def exchange(self, local: np.ndarray) -> np.ndarray:
        own = local[..., 0] + local[..., 1]
        return (own + 0.1 * own.max(axis=1, keepdims=True)).astype(np.float32)


class GuessingCostModel(RootCostModel):
    """The same, with an estimate of the exchange."""

    def estimate(self, local: np.ndarray) -> np.ndarray:
        return (local[..., 0] + local[..., 1]).max(axis=1)


def random_problem(
    seed: int,
    *,
    num_tables: int = 12,
    num_devices: int = 4,
    room: float = 1.3,
    placements: tuple[Placement, ...] = ALL,
    allowed: tuple[tuple[int, ...] | None, ...] = (),
    devices_per_host: int = 0,
) -> PlanningProblem:
    """Tables of 4 to 64 columns; devices have `room` times the mean of what all tables need."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        TableProfile(
            name=f"t{index}",
            num_rows=int(rng.integers(100, 4000)),
            dim=int(2 ** rng.integers(2, 7)),
            pooling_factor=float(rng.lognormal(1.0, 1.0)),
            optimizer_bytes_per_row=4,
        )
        for index in range(num_tables)
    )
    need = sum(table.bytes_of(num_rows=table.num_rows, dim=table.dim) for table in tables)
    largest = max(table.bytes_of(num_rows=table.num_rows, dim=table.dim) for table in tables)
    return PlanningProblem(
        tables=tables,
        num_devices=num_devices,
        memory_bytes=(int(max(room * need / num_devices, largest)) + 1000,),
        reserve_bytes=1000,
        placements=placements,
        allowed=allowed,
        devices_per_host=devices_per_host,
    )
