"""Copied tables summed as whole tables: the bits of sums of the rows that were read, and one answer on all ranks."""

from __future__ import annotations

import torch

from ziggurat.ops.lookup import FieldKind, FieldSlot, GradientPart, LookupLayout, Lookups, SummedGradient
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.tables.copies import sum_over_ranks
from ziggurat.parallel.tables.dense_copies import small_storages, sum_whole_tables
from ziggurat.parallel.topology import Topology
from ziggurat.testing.ranks import run_ranks

NUM_ROWS, DIMS = (11, 5, 7), (4, 3, 1)


def gradients_of(rank: int, *, padded: bool) -> list[SummedGradient]:
    """Some rows of each storage, others on every rank, none of the second on rank 1; padding behind them."""
    generator, found = torch.Generator().manual_seed(rank), []
    for index, (num_rows, dim) in enumerate(zip(NUM_ROWS, DIMS, strict=True)):
        count = 0 if (rank, index) == (1, 1) else num_rows // 2 - rank % 2
        rows = 1 + torch.randperm(num_rows - 1, generator=generator)[:count].sort().values
        sums = torch.randn(count, dim, generator=generator)
        more = 3 if padded else 0
        found.append(
            SummedGradient(
                rows=torch.cat([rows, rows.new_zeros(more)]), sums=torch.cat([sums, sums.new_zeros(more, dim)])
            )
        )
    return found


def both(rank: int) -> None:
    """Runs on every rank."""
    topology = Topology.create()
    group, traffic = topology.world, Traffic(topology)
    by_rows = sum_over_ranks(gradients_of(rank, padded=False), group=group, traffic=traffic)
    whole = sum_whole_tables(gradients_of(rank, padded=True), NUM_ROWS, group=group, traffic=traffic)
    for one, other, num_rows in zip(by_rows, whole, NUM_ROWS, strict=True):
        rows, order = one.rows.sort()
        is_read = other.rows > 0
        assert len(other.rows) >= num_rows
        assert torch.equal(other.rows[is_read], rows)
        assert torch.equal(other.sums[is_read], one.sums[order])
        assert not other.sums[~is_read].any()


def agreed(rank: int) -> list[bool]:
    """Runs on every rank: rank r looks up r rows of the first storage and 3r of the second."""
    topology = Topology.create()
    slot = FieldSlot(name="x", kind=FieldKind.SINGLE, index=0, column=0, table="a", first_row=0, num_rows=9)
    layout = LookupLayout(dim=1, width=1, slots=(slot,))
    none = torch.zeros(0, dtype=torch.int64)

    def part(size: int) -> GradientPart:
        rows = torch.ones(1, size, dtype=torch.int64)
        lookups = Lookups(batch_size=size, single=rows, values=none, offsets=none.new_zeros(1))
        return GradientPart(layout=layout, lookups=lookups, grad=torch.zeros(size, 1))

    recorded = [[part(rank)], [part(rank), part(2 * rank)], []]
    return small_storages(recorded, (2, 2, 2), group=topology.world, traffic=Traffic(topology))


def test_whole_tables_have_the_bits_of_rows_that_were_read() -> None:
    run_ranks(both, 3)


def test_ranks_decide_alike_by_the_mean_of_their_lookups() -> None:
    assert run_ranks(agreed, 3) == [[False, True, False]] * 3
