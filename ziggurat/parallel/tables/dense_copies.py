"""Gradients of small copied tables on GPUs, summed over ranks as whole tables: no host waits to know their number.

`copies.py` sends rows that were read, and has to ask how many there are, which empties the queue of a GPU. Tables that
have no more rows than a rank looks up in a step travel whole here, with a mark beside each row that was read:

    rank 0   rows 3 5 8     [ g mark ] of every row, row r in block r mod S      block o ─► owner o
    rank 1   rows 5 9       owner o adds its blocks up in the order of the ranks             ─► to all ranks

    bytes a rank sends = 2 · (S−1)/S · R · (4D + 4)       R rows of the tables of one dim, read or not

A row is added up by the same owner in the same order as there, zeros of ranks that did not read it between: the same
numbers. What nobody read comes back without a mark and becomes padding with a gradient of zero, so weight decay and
Adam's moments leave it alone. With R lookups of random rows on each of many ranks this sends 1.2 times the bytes.

Which storages go this way, ranks decide alike: each tells the others how many rows it looks up, from host to host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ziggurat.ops.lookup import GradientPart, SummedGradient
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import RankGroup, sizes_device


def small_storages(
    recorded: Sequence[Sequence[GradientPart]], num_rows: Sequence[int], *, group: RankGroup, traffic: Traffic
) -> list[bool]:
    """Find storages with no more rows than the ranks of a group look up on average; collective, the same on each.

    Args:
        recorded: gradients of each storage, in this step.
        num_rows: R, of each.
        group: who has a copy.
        traffic: counts messages.
    """
    own = [sum(part.lookups.single.numel() + part.lookups.values.numel() for part in parts) for parts in recorded]
    num_lookups = all_to_all(
        torch.tensor(own * group.size, device=sizes_device(group)),
        sent=[len(own)] * group.size,
        received=[len(own)] * group.size,
        group=group,
        traffic=traffic,
        purpose="lookups of copied tables",
    ).wait()
    means = num_lookups.view(-1, len(own)).double().mean(dim=0).tolist()
    return [rows <= mean for rows, mean in zip(num_rows, means, strict=True)]


def sum_whole_tables(
    gradients: Sequence[SummedGradient], num_rows: Sequence[int], *, group: RankGroup, traffic: Traffic
) -> list[SummedGradient]:
    """`copies.sum_over_ranks` of small tables; collective, the same bits on every rank, and no host waits.

    Args:
        gradients: of the same storages, in the same order, on every rank; rows distinct, but for row 0 with zeros.
        num_rows: R, of each storage.
        group: who has a copy.
        traffic: counts messages.

    Returns:
        Of each storage as many rows as it has, and some more; those that nobody read are row 0, with zeros.
    """
    if group.process_group is None or not gradients:
        return list(gradients)
    size = group.size
    rows_of_owner = [-(-rows // size) for rows in num_rows]
    widths = [gradient.sums.shape[1] + 1 for gradient in gradients]
    blocks = [_blocks(gradient, size=size, rows=rows) for gradient, rows in zip(gradients, rows_of_owner, strict=True)]
    lengths = [rows * width for rows, width in zip(rows_of_owner, widths, strict=True)]
    by_owner = torch.cat([each.view(size, -1) for each in blocks], dim=1)
    received = _exchanged(by_owner, group=group, traffic=traffic, purpose="copied tables to owners")
    total = received[0]
    for other in received[1:]:
        total = total + other
    everyone = _exchanged(total.expand(size, -1), group=group, traffic=traffic, purpose="copied tables to all")
    pieces = zip(everyone.split(lengths, dim=1), rows_of_owner, widths, strict=True)
    return [_read_rows(piece.reshape(size, rows, width)) for piece, rows, width in pieces]


def _blocks(gradient: SummedGradient, *, size: int, rows: int) -> Tensor:
    """(size · rows, D + 1): every row in its owner's block, with its mark."""
    # The mark is a number more in each row: a sum of zeros is not yet a row that nobody read.
    sums = torch.nn.functional.pad(gradient.sums, (0, 1), value=1.0)
    places = gradient.rows % size * rows + gradient.rows.div(size, rounding_mode="floor")
    return sums.new_zeros(size * rows, sums.shape[1]).index_copy_(0, places, sums)


def _read_rows(blocks_SRW: Tensor) -> SummedGradient:
    """Return the sums of the owners, as rows of the storage."""
    size, rows, width = blocks_SRW.shape
    table = blocks_SRW.transpose(0, 1).reshape(size * rows, width)  # in the order of the rows
    is_read = table[:, -1] > 0
    numbers = torch.arange(size * rows, device=table.device)
    return SummedGradient(
        rows=torch.where(is_read, numbers, 0), sums=torch.where(is_read.unsqueeze(1), table[:, :-1], 0.0)
    )


def _exchanged(blocks: Tensor, *, group: RankGroup, traffic: Traffic, purpose: str) -> Tensor:
    """A row of numbers for each member, there; one from each, back."""
    size, length = blocks.shape
    arrived = all_to_all(
        blocks.reshape(-1),
        sent=[length] * size,
        received=[length] * size,
        group=group,
        traffic=traffic,
        purpose=purpose,
    ).wait()
    return arrived.view(size, length)
