"""Sharding tasks drawn as NeuroShard's benchmark draws them, from synthetic tables with the published statistics.

A pool of 856 tables: rows from a gamma, mean list lengths from a log-normal distribution, with the means and deviations
of Meta's public tables (4.11 ± 3.13 million rows; 15.8 ± 25.6 lookups a sample); shares of rows by how often a batch
reads them from a Dirichlet distribution around the published means; 4.2 % of the tables are never read. A task for
four devices has 10 to 59 tables of the pool (with replacement) with columns from powers of two up to a maximum, 15 GB
together at most; for more devices in proportion.
"""

from __future__ import annotations

import numpy as np

_REUSE = (0.2246, 0.1044, 0.1262, 0.1061, 0.0824, 0.0562, 0.0386, 0.0328, 0.0313)
_REUSE += (0.0271, 0.0266, 0.0215, 0.0189, 0.0147, 0.0063, 0.0076, 0.0327)
_POOL = 856
_EMPTY = 0.042
_ROWS = (4_107_472.0, 3_134_816.0)
_LOOKUPS = (15.81, 25.59)
_GB_PER_DEVICE = 15.0 / 4


def draw_tasks(num: int, *, max_dim: int, seed: int, num_devices: int = 4) -> list[list[dict[str, float]]]:
    """Tasks as lists of tables with `row`, `dim`, `pooling_factor`, `bin_0` … `bin_16`.

    Args:
        num: tasks.
        max_dim: most columns of a table.
        seed: of pool and tasks.
        num_devices: devices that share a task.
    """
    rng = np.random.default_rng(seed)
    pool = _pool(rng)
    dims = [2**power for power in range(2, max_dim.bit_length())]
    tasks = []
    while len(tasks) < num:
        count = int(rng.integers(10 * num_devices // 4, 60 * num_devices // 4))
        chosen = [pool[index] | {"dim": float(rng.choice(dims))} for index in rng.integers(_POOL, size=count)]
        if sum(table["row"] * table["dim"] * 4 for table in chosen) <= _GB_PER_DEVICE * num_devices * 2**30:
            tasks.append(chosen)
    return tasks


def draw_tables(num: int, *, dims: tuple[int, ...], seed: int) -> list[dict[str, float]]:
    """Tables of the pool with columns from `dims`, without a limit on their bytes."""
    rng = np.random.default_rng(seed)
    pool = _pool(rng)
    return [pool[index] | {"dim": float(rng.choice(dims))} for index in rng.integers(_POOL, size=num)]


def _pool(rng: np.random.Generator) -> list[dict[str, float]]:
    mean, deviation = _ROWS
    rows = np.maximum(100, rng.gamma((mean / deviation) ** 2, deviation**2 / mean, _POOL)).astype(np.int64)
    mean, deviation = _LOOKUPS
    sigma = np.sqrt(np.log(1 + (deviation / mean) ** 2))
    lookups = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, _POOL)
    shares = rng.dirichlet(5 * np.array(_REUSE) / sum(_REUSE), _POOL)
    shares[rng.random(_POOL) < _EMPTY] = 0.0
    return [
        {"row": float(row), "pooling_factor": float(length)}
        | {f"bin_{index}": float(share) for index, share in enumerate(mine)}
        for row, length, mine in zip(rows, lookups, shares, strict=True)
    ]
