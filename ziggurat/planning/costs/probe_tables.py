"""Tables to measure a lookup kernel on: drawn with all sizes, list lengths and skews, and put together into groups.

The cost of looking up a group of tables is learned from measured groups (`learned.py`), so the groups have to cover
what a plan may put on a device. As NeuroShard does (Zha et al., arXiv 2305.01868, section 3.1, "table augmentation"), a
pool of tables is drawn, each table exists with every number of columns, and a group is 1 to 15 of these, drawn at
random with replacement. After `groups_per_pool` groups a new pool is drawn, so that a model can be tried on tables that
it has never seen:

    rows       log-normal, from tens to millions              a few large tables, many small ones
    list       one row for 0.35 of the tables, else 1 + log-normal, median 5.5 or 16, Poisson from sample to sample
    skew       row r of a random order is read ∝ r^-a, a uniform from 0 to 1.4
    columns    4, 8, 16, 32, 64 or 128

What a cost model may see of the skew is `reuse`: the shares of the distinct rows of a batch that occur 1, 2, 3 to 4,
5 to 8, … times, which any user can count in a batch of real data (`count_reuse`).

All draws follow from one seed, and group number i does not depend on how many were drawn before: an interrupted
measurement goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Int64

from ziggurat.planning.problem import TableProfile
from ziggurat.typed import checked

NUM_REUSE_BINS = 17
_SCRAMBLE = 1_000_000_007  # a prime above any number of rows here: multiplying by it permutes the rows
_MAX_SKEW = 1.4
_MAX_ROWS = 60.0  # of a sample, in the mean


@dataclass(frozen=True, kw_only=True)
@checked
class DrawConfig:
    """Settings of the tables and groups to draw.

    Args:
        num_samples: samples of a batch that a device looks up: those of all ranks.
        num_tables: tables of a pool.
        groups_per_pool: groups that are drawn from one pool.
        max_rows: of a table.
        dims: numbers of columns.
        max_tables: of a group.
        group_mib: most that the weights of a group may take.
        num_batches: different batches of each table, so that nothing is read from a cache that a real step would miss.
        skews: exponents to choose from; () for any from 0 to 1.4.
        single_share: share of the tables that are read one row a sample.
        list_lengths: median of the others' mean lengths; pools take turns.
        seed: of everything.
    """

    FORMERLY: ClassVar[Mapping[str, str]] = {"groups_a_pool": "groups_per_pool"}

    num_samples: int = 2048
    num_tables: int = 160
    groups_per_pool: int = 400
    max_rows: int = 2_000_000
    dims: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    max_tables: int = 15
    group_mib: int = 768
    num_batches: int = 4
    skews: tuple[float, ...] = ()
    single_share: float = 0.35
    list_lengths: tuple[float, ...] = (5.5, 16.0)
    seed: int = 0


@dataclass(frozen=True)
class TableDraw:
    """A table of the pool and what some batches read of it.

    Args:
        profile: with the first of the dims; `with_dim` gives the others.
        skew: the exponent a.
        lengths: rows of each sample, by batch; None: one each.
        rows: sample after sample, by batch.
    """

    profile: TableProfile
    skew: float
    lengths: tuple[Int64[np.ndarray, "N"], ...] | None
    rows: tuple[Int64[np.ndarray, "n"], ...]

    def with_dim(self, dim: int) -> TableProfile:
        """The same table with another number of columns."""
        return replace(self.profile, dim=dim)


def draw_pool(config: DrawConfig, number: int) -> tuple[TableDraw, ...]:
    """Draw pool number `number`: the tables of groups `number · groups_per_pool` and following."""
    first = number * config.num_tables
    return tuple(_draw_table(config, index) for index in range(first, first + config.num_tables))


def draw_group(config: DrawConfig, pool: Sequence[TableDraw], index: int) -> tuple[tuple[int, int], ...]:
    """Draw group number `index`: (position in its pool, columns) for each of its tables."""
    # 1: of groups, beside the 0 of tables. The number is part of the seed, so no group depends on those before it.
    generator = np.random.default_rng([config.seed, 1, index])
    while True:
        size = int(generator.integers(1, config.max_tables + 1))
        tables = generator.integers(len(pool), size=size).tolist()
        dims = generator.choice(config.dims, size=size).tolist()
        weights = sum(pool[table].profile.num_rows * dim for table, dim in zip(tables, dims, strict=True))
        if 4 * weights <= config.group_mib << 20:
            return tuple(zip(tables, dims, strict=True))


def count_reuse(rows: Int64[np.ndarray, "n"]) -> tuple[float, ...]:
    """Shares of the distinct rows of a batch that occur 1, 2, 3 to 4, …, more than 2^15 times (17 numbers).

    The features `bin_0` to `bin_16` of NeuroShard's cost model. Zeros for an empty batch.
    """
    if rows.size == 0:
        return (0.0,) * NUM_REUSE_BINS
    _, counts = np.unique(rows, return_counts=True)
    bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), NUM_REUSE_BINS - 1)
    return tuple((np.bincount(bins, minlength=NUM_REUSE_BINS) / counts.size).round(5).tolist())


def draw_rows(
    generator: np.random.Generator, *, count: int, num_rows: int, skew: float, offset: int
) -> Int64[np.ndarray, "n"]:
    """Rows with probabilities ∝ rank^-skew, ranks in an order given by `offset`. Row 0, padding, is left out."""
    usable = num_rows - 1
    # At 0 the formula below divides by 0; near it, it has the same limit.
    exponent = 1.0 - skew if abs(1.0 - skew) > 1e-3 else 1e-3
    # The inverse of the distribution function of a continuous power law from 1 to usable + 1.
    ranks = (((usable + 1.0) ** exponent - 1.0) * generator.random(count) + 1.0) ** (1.0 / exponent)
    ranks = np.minimum(ranks.astype(np.int64) - 1, usable - 1)
    return 1 + (ranks * _SCRAMBLE + offset) % usable


def _draw_table(config: DrawConfig, index: int) -> TableDraw:
    generator = np.random.default_rng([config.seed, 0, index])
    num_rows = int(np.clip(np.exp(generator.normal(10.5, 1.8)), 50, config.max_rows))
    skew = float(generator.choice(config.skews) if config.skews else generator.uniform(0.0, _MAX_SKEW))
    is_single = bool(generator.random() < config.single_share)
    usual = config.list_lengths[index // config.num_tables % len(config.list_lengths)]
    lengths_median = np.log(max(usual - 1.0, 1e-3))
    pooling = 1.0 if is_single else float(np.clip(1.0 + generator.lognormal(lengths_median, 1.0), 1.0, _MAX_ROWS))
    offset = int(generator.integers(num_rows))
    lengths = []
    rows = []
    for _ in range(config.num_batches):
        each = np.ones(config.num_samples, np.int64) if is_single else generator.poisson(pooling, config.num_samples)
        lengths.append(each.astype(np.int64))
        rows.append(draw_rows(generator, count=int(each.sum()), num_rows=num_rows, skew=skew, offset=offset))
    profile = TableProfile(
        name=f"table{index}",
        num_rows=num_rows,
        dim=config.dims[0],
        pooling_factor=sum(map(len, rows)) / (config.num_samples * config.num_batches),
        reuse=tuple(np.mean([count_reuse(each) for each in rows], axis=0).round(5).tolist()),
        optimizer_bytes_per_row=4,
    )
    return TableDraw(profile, skew, None if is_single else tuple(lengths), tuple(rows))
