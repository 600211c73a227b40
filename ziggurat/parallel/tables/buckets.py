"""Buckets: the rows of a feature, sorted by the rank that holds them. For tables whose rows are spread over ranks.

The placement tells the owner of each row (a division, where blocks of rows have one size). One stable sort by owner
then brings together what goes to each rank, and keeps the order of the samples inside a bucket:

    rows      7 0 9 | 3 | 8 1        3 samples; blocks of 5 rows on ranks a and b
    owner     b a b | a | b a
    to a      0 | 3 | 1              lengths 1 1 1
    to b      7 9 | | 8              lengths 2 0 1      as rows of the block: 3 5 | | 4 (behind its padding row)

Cost: O(N log N) for N rows and any number of ranks, where a mask for each rank costs ranks · N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ziggurat.errors import BoundsError
from ziggurat.parallel.tables.shards import Shard


@dataclass(frozen=True)
class Bucket:
    """The rows that one rank looks up of a feature.

    Args:
        lengths: rows of each sample.
        rows: sample after sample, local to the rank's part of the table.
    """

    lengths: Int[Tensor, "B"]
    rows: Int[Tensor, "n"]


def owners(rows_N: Int[Tensor, "N"], *, shards: tuple[Shard, ...]) -> Int[Tensor, "N"]:
    """Return the owner of each row among the shards of a table that is cut by rows."""
    return shards[0].placement.owners(rows_N, [shard.part for shard in shards])


def local_rows(rows_N: Int[Tensor, "N"], owners_N: Int[Tensor, "N"], *, shards: tuple[Shard, ...]) -> Tensor:
    """Rows of the owner's block, whose first is padding (its own, or the table's)."""
    return shards[0].placement.local_rows(rows_N, owners_N, [shard.part for shard in shards])


def check_bounds(rows_N: Tensor, *, table_rows: int, feature: str, lengths: Tensor | None, table: str) -> None:
    """Refuse rows that no rank holds.

    Raises:
        BoundsError: names the first, with its sample.
    """
    if rows_N.numel() == 0:
        return
    low, high = torch.aminmax(rows_N)
    if int(low) >= 0 and int(high) < table_rows:
        return
    position = sample = int(((rows_N < 0) | (rows_N >= table_rows)).nonzero()[0])
    if lengths is not None:
        # `right` passes over samples without rows, which end where they begin.
        sample = int(torch.searchsorted(lengths.cumsum(0), position, right=True))
    raise BoundsError(
        expected=f"rows 0 … {table_rows - 1} of table {table!r}",
        found=f"row {int(rows_N[position])}",
        where=f"feature {feature!r}, sample {sample} of this rank's batch",
        ways_out=(
            "encode raw ids with the run's Preprocessing instead of by hand",
            'choose out_of_range = "unknown" or "clamp" for the table in the schema',
        ),
    )


def sort_into_buckets(
    rows_N: Int[Tensor, "N"],
    lengths_B: Int[Tensor, "B"] | None,
    *,
    shards: tuple[Shard, ...],
    host_rows_N: Int[Tensor, "N"] | None = None,
) -> dict[int, Bucket]:
    """One bucket for each rank that holds a part of the table.

    Args:
        rows_N: rows of the whole table, sample after sample, all inside it (`check_bounds`).
        lengths_B: rows of each sample; None: one each.
        shards: of a table that is cut by rows.
        host_rows_N: the same rows in host memory, where `rows_N` are not: nobody then waits for a device.
    """
    num_samples = len(rows_N) if lengths_B is None else len(lengths_B)
    samples = torch.arange(num_samples, device=rows_N.device)
    if lengths_B is not None:
        # The size is given: a GPU would have to be asked for it.
        samples = torch.repeat_interleave(samples, lengths_B, output_size=len(rows_N))
    owners_N = owners(rows_N, shards=shards)
    sorted_N, order = torch.sort(owners_N, stable=True)
    local_N = local_rows(rows_N[order], sorted_N, shards=shards)
    lengths_KB = counted(owners_N * num_samples + samples, size=len(shards) * num_samples)
    lengths = lengths_KB.view(len(shards), num_samples)
    pieces = local_N.split(rows_by_owner(owners_N, shards=shards, host_rows_N=host_rows_N))
    return {shard.rank: Bucket(lengths[index], pieces[index]) for index, shard in enumerate(shards)}


def rows_by_owner(
    owners_N: Int[Tensor, "N"], *, shards: tuple[Shard, ...], host_rows_N: Int[Tensor, "N"] | None = None
) -> list[int]:
    """Count the rows that each shard holds.

    Args:
        owners_N: of the rows.
        shards: of a table that is cut by rows.
        host_rows_N: the rows in host memory, where `owners_N` are not: nobody then waits for a device.
    """
    if host_rows_N is not None:
        owners_N = owners(host_rows_N, shards=shards)
    return torch.bincount(owners_N, minlength=len(shards)).tolist()


def counted(numbers_N: Int[Tensor, "N"], *, size: int) -> Int[Tensor, "size"]:
    """Count each number below `size`; as `torch.bincount`, which on a GPU waits for the largest number."""
    if numbers_N.device.type == "cpu":
        return torch.bincount(numbers_N, minlength=size)
    return numbers_N.new_zeros(size).scatter_add_(0, numbers_N, torch.ones_like(numbers_N))
