"""Ranks find their hosts, tower groups and peers, and uneven hosts are refused on every rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ziggurat.errors import TopologyError
from ziggurat.parallel.topology import RankGroup, Topology
from ziggurat.testing.ranks import run_ranks


def groups_of(rank: int, tower_size: int, ranks_a_host: int) -> dict[str, object]:
    """What a rank sees, and the sums of the ranks in its groups, taken through the groups."""
    topology = Topology.create(tower_size=tower_size, ranks_a_host=ranks_a_host)
    sums = []
    for group in (topology.tower, topology.peers):
        total = torch.tensor(rank)
        if group.process_group is not None:
            dist.all_reduce(total, group=group.process_group)
        sums.append(int(total))
    return {
        "tower": topology.tower.ranks,
        "peers": topology.peers.ranks,
        "sums": sums,
        "order": topology.peer_order,
        "host": topology.host_of(rank),
        "positions": (topology.tower.position, topology.peers.position, topology.group_index),
    }


@pytest.mark.parametrize(
    ("tower_size", "towers", "peers", "order"),
    [
        (1, [[0], [1], [2], [3]], [[0, 1, 2, 3]], [0, 1, 2, 3]),
        (2, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 2, 1, 3]),
        (4, [[0, 1, 2, 3]], [[0], [1], [2], [3]], [0, 1, 2, 3]),
    ],
)
def test_groups(tower_size: int, towers: list[list[int]], peers: list[list[int]], order: list[int]) -> None:
    for rank, seen in enumerate(run_ranks(groups_of, 4, tower_size, 2)):
        tower = next(ranks for ranks in towers if rank in ranks)
        peer = next(ranks for ranks in peers if rank in ranks)
        assert (list(seen["tower"]), list(seen["peers"])) == (tower, peer)
        assert seen["sums"] == [sum(tower), sum(peer)]
        assert list(seen["order"]) == order
        assert seen["host"] == rank // 2
        assert seen["positions"] == (tower.index(rank), peer.index(rank), towers.index(tower))


def refusal(rank: int, ranks_a_host: tuple[int, ...], tower_size: tuple[int, ...]) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_a_host[rank])
    try:
        Topology.create(tower_size=tower_size[rank])
    except TopologyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks_a_host", "tower_size", "message"),
    [
        ((2, 2, 1), (3, 3, 3), "the same number of ranks on every host"),
        ((2, 2, 2), (3, 3, 3), "the same number of ranks on every host"),
        ((3, 3, 3), (2, 2, 2), "one tower size on all ranks that divides 3"),
        ((3, 3, 3), (1, 1, 3), "one tower size on all ranks that divides 3"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    ranks_a_host: tuple[int, ...], tower_size: tuple[int, ...], message: str
) -> None:
    assert all(message in text for text in run_ranks(refusal, 3, ranks_a_host, tower_size))


def test_one_process_is_a_world_of_one() -> None:
    topology = Topology.create(tower_size=8)
    assert topology.world == RankGroup((0,), 0)
    assert (topology.world_size, topology.num_hosts, topology.num_groups) == (1, 1, 1)
