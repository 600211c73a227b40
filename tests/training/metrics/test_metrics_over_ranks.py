"""Metrics over ranks. Apart from test_metrics.py, because every rank imports its test's module."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from tests.training.metrics.labelled_samples import CLICK, FULL, full_samples
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.metrics.accumulator import MetricAccumulator


def uneven_slices(world_size: int, count: int) -> list[slice]:
    """Rank 1 has nothing, the others uneven parts."""
    cuts = [0, count // 7, count // 7, count // 2, count] if world_size == 4 else [0, count, count]
    return [slice(*cut) for cut in itertools.pairwise(cuts)]


def metrics_of_a_part(rank: int, count: int) -> tuple[list[float], int]:
    mine = uneven_slices(dist.get_world_size(), count)[rank]
    accumulator = MetricAccumulator(FULL, process_group=dist.group.WORLD)
    columns = [column[mine] for column in full_samples(count)]
    if columns[0].shape[0]:
        for pieces in zip(*(column.split(37) for column in columns), strict=True):
            accumulator.update(*pieces)
    return list(accumulator.compute().values()), len(accumulator.values(0)[0])


def doubles_on_one_rank(rank: int) -> list[float]:
    accumulator = MetricAccumulator(CLICK, process_group=dist.group.WORLD)
    if rank == 1:
        accumulator.update(torch.tensor([[0.1], [0.1 + 1e-12]], dtype=torch.float64), torch.tensor([[0.0], [1.0]]))
    return [accumulator.compute()["auc"], MetricAccumulator(CLICK, process_group=dist.group.WORLD).compute()["auc"]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_over_ranks_exact_and_the_same_everywhere(world_size):
    accumulator = MetricAccumulator(FULL)
    accumulator.update(*full_samples(1000))
    alone = list(accumulator.compute().values())
    for rank, (values, num_kept) in enumerate(run_ranks(metrics_of_a_part, world_size, 1000)):
        assert values == alone  # rank order is row order here, so not even the sums differ
        assert num_kept == (1000 if rank == 0 else 0)


def test_float64_scores_of_one_rank_keep_their_precision():
    assert all(first == 1.0 and math.isnan(second) for first, second in run_ranks(doubles_on_one_rank, 2))
