"""Ranks that are threads of one process compute what one device computes, and say which of them failed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.parallel.parity_of_threads import cases, compare
from ziggurat.testing.rank_threads import run_ranks_as_threads
from ziggurat.testing.ranks import RankFailure

CPU = torch.device("cpu")
FEW = ("table_wise", "row_wise towers", "data_parallel towers", "wire int8", "wire mx9")


@pytest.mark.parametrize("name", FEW)
def test_two_ranks_of_one_process_equal_one_device(name: str) -> None:
    compare(2, cases(2)[name], device=CPU)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_placement_tower_and_wire_of_threads_equals_one_device(world_size: int) -> None:
    for case in cases(world_size).values():
        compare(world_size, case, device=CPU)


def test_each_thread_has_its_own_groups_and_a_failure_is_named() -> None:
    def ranks(rank: int) -> list[int]:
        group = dist.new_group([0, 2])
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        pair = torch.tensor([rank])
        if rank != 1:
            dist.all_reduce(pair, group=group)
        return [dist.get_rank(), int(total), int(pair)]

    assert run_ranks_as_threads(ranks, 3) == [[0, 6, 2], [1, 6, 1], [2, 6, 2]]
    assert not dist.is_initialized()

    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 failed.*on purpose"):
        run_ranks_as_threads(fails, 2, timeout_s=2.0)
