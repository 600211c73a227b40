"""Samples dealt to ranks: all of them, whole, once, as planned, in the order of the stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.features.test_batch import INPUTS, full_batch, samples_of
from ziggurat.data.balance.cost import LengthCost, SampleCost, lengths_of
from ziggurat.data.balance.partition import Balance, loads_of, partition
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.jagged import FeatureGroup
from ziggurat.parallel.exchange.samples import SampleExchange
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Topology
from ziggurat.testing.ranks import run_ranks

SIZES = [(3, 0, 5, 1), (0, 0, 0, 2), (0, 0, 0, 0), (7, 7, 7, 7)]  # fewer samples than ranks; empty batches
COST = SampleCost(fixed=0.5, lists=(LengthCost(name="history", per_square=1.0), LengthCost(name="tags")))


def deal(rank: int, ranks_per_host: int) -> list[Any]:
    """Every size with every way to deal; histories of one rank are kept once, those of another are giant."""
    topology = Topology.create(ranks_per_host=ranks_per_host)
    assert topology.rank == rank
    found = []
    for balance in Balance:
        exchange = SampleExchange(
            topology, traffic=Traffic(topology), inputs=INPUTS, balance=balance, cost=COST, shares=()
        )
        assert ("share" in exchange.medium) == (ranks_per_host == 4)
        for case, sizes in enumerate(SIZES):
            batch = brought(case, rank, sizes[rank])
            dealt = exchange(batch)
            found.append((samples_of(dealt.batch.expanded()), dealt.loads, dealt.loads_before))
    return found


def brought(case: int, rank: int, size: int) -> Any:
    sequences = {0: None, 1: [2, 0, 4], 2: [500, 0], 3: [0]}[rank]
    batch = full_batch(size, seed=10 * case + rank, sequences=sequences)
    if case == 3:
        batch = deduplicate(batch, (FeatureGroup(jagged=(1,)),))
    return batch


def test_ranks_get_what_was_planned() -> None:
    for ranks_per_host in (4, 2):
        results = run_ranks(deal, 4, ranks_per_host)
        rounds = iter(zip(*results, strict=True))
        for balance in Balance:
            for case, sizes in enumerate(SIZES):
                whole = [brought(case, rank, size) for rank, size in enumerate(sizes)]
                samples = [sample for batch in whole for sample in samples_of(batch.expanded())]
                costs = [COST.of(lengths_of(batch, INPUTS), num_samples=batch.batch_size) for batch in whole]
                costs_B = np.concatenate(costs)
                plan = partition(costs_B, balance=balance, num_ranks=4)
                for rank, (got, loads, before) in enumerate(next(rounds)):
                    assert got == [samples[at] for at in np.flatnonzero(plan == rank)], (balance, case, rank)
                    np.testing.assert_array_equal(loads, loads_of(costs_B, plan, num_ranks=4))
                    np.testing.assert_allclose(before, [each.sum() for each in costs])
