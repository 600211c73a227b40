"""Gradients of tables that every rank has a copy of: summed over ranks, and the same bits on all of them.

A dense all-reduce of such a table moves all its rows at every step, and would touch rows that nobody read (weight decay
and Adam's moments must not). So only rows that were read travel, each rank's own occurrences summed before:

    rank 0   rows 3 5 8          to the owner r mod S      owner 0: 8 = 8₀       ─► to all ranks
    rank 1   rows 5 9            ─────────────────►        owner 1: 3 = 3₀, 5 = 5₀ + 5₁, 9 = 9₁

    bytes a rank sends ≈ (S−1)/S · (U + V) · (4D + 4)        U rows of its own, V distinct rows of all ranks

Each row is summed once, by its owner, in the order of the ranks; everybody else gets those very bits, so copies that
were equal stay equal bit for bit. With rows and sums each is two messages to every other rank.

Sparse all-reduce of deduplicated gradients: Mudigere et al. (Neo), ISCA 2022, section 4.2.3 (data parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ziggurat.ops.lookup import SummedGradient
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.tables.buckets import counted
from ziggurat.parallel.topology import RankGroup, sizes_device

_INTEGERS = {4: torch.int32, 8: torch.int64}


def sum_over_ranks(gradients: Sequence[SummedGradient], *, group: RankGroup, traffic: Traffic) -> list[SummedGradient]:
    """Sum sparse gradients over the ranks of a group; collective, the same bits on every rank.

    Args:
        gradients: of the same tables, in the same order, on every rank; rows distinct.
        group: who has a copy.
        traffic: counts messages.

    Returns:
        All rows that any rank has, each once.
    """
    if group.process_group is None or not gradients:
        return list(gradients)
    size = group.size
    dims = [gradient.sums.shape[1] for gradient in gradients]
    outgoing: list[list[SummedGradient]] = [[] for _ in range(size)]
    owners = [gradient.rows % size for gradient in gradients]
    all_counts = torch.stack([counted(owner, size=size) for owner in owners]).tolist()  # one wait for a device
    for gradient, owner, counts in zip(gradients, owners, all_counts, strict=True):
        order = torch.sort(owner, stable=True).indices
        rows = gradient.rows[order].split(counts)
        sums = gradient.sums[order].split(counts)
        for member in range(size):
            outgoing[member].append(SummedGradient(rows=rows[member], sums=sums[member]))
    owned = _exchange(outgoing, dims=dims, group=group, traffic=traffic, purpose="copied tables to owners")
    totals = [_add([pieces[index] for pieces in owned]) for index in range(len(gradients))]
    shared = _exchange([totals] * size, dims=dims, group=group, traffic=traffic, purpose="copied tables to all")
    return [
        SummedGradient(
            rows=torch.cat([pieces[index].rows for pieces in shared]),
            sums=torch.cat([pieces[index].sums for pieces in shared]),
        )
        for index in range(len(gradients))
    ]


def _add(parts: list[SummedGradient]) -> SummedGradient:
    """Sums of equal rows, in the order of the parts."""
    # Stable, so that equal rows are added up in the order of the ranks.
    rows, order = torch.sort(torch.cat([part.rows for part in parts]), stable=True)
    distinct, counts = torch.unique_consecutive(rows, return_counts=True)
    sums = F.embedding_bag(order, torch.cat([part.sums for part in parts]), counts.cumsum(0) - counts, mode="sum")
    return SummedGradient(rows=distinct, sums=sums)


def _exchange(
    outgoing: Sequence[Sequence[SummedGradient]],
    *,
    dims: list[int],
    group: RankGroup,
    traffic: Traffic,
    purpose: str,
) -> list[list[SummedGradient]]:
    """Gradients for each member, there; gradients from each member, back. Row numbers travel as bits of the values."""
    first = outgoing[0][0].sums
    integers = _INTEGERS[first.element_size()]
    num_rows = torch.tensor([[len(each.rows) for each in mine] for mine in outgoing], device=sizes_device(group))
    num = len(dims)
    sizes = all_to_all(
        num_rows.view(-1),
        sent=[num] * group.size,
        received=[num] * group.size,
        group=group,
        traffic=traffic,
        purpose="copied tables, sizes",
    ).wait()
    counts: list[list[int]] = sizes.view(-1, num).tolist()
    pieces: list[Tensor] = []
    for mine in outgoing:
        for each in mine:
            # Bits, not values: as a float a large row number would lose its last digits.
            pieces += [each.rows.to(integers).view(first.dtype), each.sums.reshape(-1)]

    def items(numbers: Sequence[int]) -> int:
        return sum(number * (1 + dim) for number, dim in zip(numbers, dims, strict=True))

    buffer = all_to_all(
        torch.cat(pieces),
        sent=[items([len(each.rows) for each in mine]) for mine in outgoing],
        received=[items(numbers) for numbers in counts],
        group=group,
        traffic=traffic,
        purpose=purpose,
    ).wait()
    lengths = [length for numbers in counts for n, dim in zip(numbers, dims, strict=True) for length in (n, n * dim)]
    received = iter(buffer.split(lengths))
    return [
        [
            SummedGradient(rows=next(received).view(integers).to(torch.int64), sums=next(received).view(-1, dim))
            for dim in dims
        ]
        for _ in counts
    ]
