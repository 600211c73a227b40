"""Groups of meshes go by the order of ranks, which a mesh of torch's own would sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ziggurat.parallel.dense import DenseParallelism, _mesh
from ziggurat.parallel.topology import Topology
from ziggurat.testing.ranks import run_ranks


def members(rank: int, dense: str, places: dict[str, Any]) -> list[tuple[list[int], int]]:
    """The ranks of every group of the mesh in the order in which a gather has them, and this rank's place."""
    with Topology.create(**places) as topology:
        mesh = _mesh(DenseParallelism(dense), topology, device="cpu")
        again = _mesh(DenseParallelism(dense), topology, device="cpu")
        assert again is mesh
        found = []
        for dim, group in enumerate(mesh.get_all_groups()):
            gathered = [torch.tensor(0) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, torch.tensor(rank), group=group)
            ranks = [int(each) for each in gathered]
            assert ranks[mesh.get_local_rank(dim)] == rank
            found.append((ranks, mesh.get_local_rank(dim)))
        return found


def test_the_groups_of_a_mesh_have_the_order_of_the_places() -> None:
    places = {"hosts": (0, 1, 1, 0), "order": (0, 3, 2, 1)}
    whole = run_ranks(members, 4, "fsdp", places)
    assert [ranks for ((ranks, _),) in whole] == [[0, 3, 2, 1]] * 4
    by_host = run_ranks(members, 4, "hsdp", places)
    assert [[ranks for ranks, _ in each] for each in by_host] == [
        [[0, 2], [0, 3]],
        [[3, 1], [2, 1]],
        [[0, 2], [2, 1]],
        [[3, 1], [0, 3]],
    ]


@pytest.mark.parametrize("dense", ["fsdp", "hsdp"])
def test_a_mesh_in_the_order_of_the_launcher_is_torchs_own(dense: str) -> None:
    found = run_ranks(members, 4, dense, {"ranks_per_host": 2})
    assert all(ranks == sorted(ranks) for each in found for ranks, _ in each)
