"""Ranks find their hosts, tower groups and peers, and uneven hosts are refused on every rank."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ziggurat.errors import ConfigError, TopologyError
from ziggurat.parallel import process_groups
from ziggurat.parallel.topology import Axis, RankGroup, Topology
from ziggurat.testing.ranks import RankFailure, run_ranks


def groups_of(rank: int, tower_size: int, ranks_per_host: int) -> dict[str, object]:
    """What a rank sees, and the sums of the ranks in its groups, taken through the groups."""
    topology = Topology.create(tower_size=tower_size, ranks_per_host=ranks_per_host)
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


def refusal(rank: int, ranks_per_host: tuple[int, ...], tower_size: tuple[int, ...]) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_host[rank])
    try:
        Topology.create(tower_size=tower_size[rank])
    except TopologyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks_per_host", "tower_size", "message"),
    [
        ((2, 2, 1), (3, 3, 3), "the same number of ranks on every host"),
        ((2, 2, 2), (3, 3, 3), "the same number of ranks on every host"),
        ((3, 3, 3), (2, 2, 2), "one tower size on all ranks that divides 3"),
        ((3, 3, 3), (1, 1, 3), "one tower size on all ranks that divides 3"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    ranks_per_host: tuple[int, ...], tower_size: tuple[int, ...], message: str
) -> None:
    assert all(message in text for text in run_ranks(refusal, 3, ranks_per_host, tower_size))


def permuted(rank: int, tower_size: int, hosts: list[int], order: list[int]) -> dict[str, object]:
    """Groups of a layout in which neighbouring ranks are not on one host; a gather shows the order of each group."""
    topology = Topology.create(tower_size=tower_size, hosts=hosts, order=order)
    seen: dict[str, object] = {"place": topology.rank, "hosts": topology.hosts, "grid": topology.host_grid}
    for axis in Axis:
        group, ranks = topology.axes[axis], [torch.tensor(rank)]
        if group.process_group is not None:
            ranks = [torch.tensor(0) for _ in range(group.size)]
            dist.all_gather(ranks, torch.tensor(rank), group=group.process_group)
        seen[axis] = [int(each) for each in ranks]
        assert seen[axis] == [topology.order[place] for place in group.ranks]
        assert group.ranks[group.position] == topology.rank
    seen["text"] = topology.describe()
    seen["spans"] = topology.groups_span_hosts
    return seen


def test_ranks_that_are_dealt_to_hosts_in_turn() -> None:
    seen = run_ranks(permuted, 4, 2, [7, 3, 7, 3], [])
    assert [each["place"] for each in seen] == [0, 2, 1, 3]
    for rank, each in enumerate(seen):
        mates = [0, 2] if rank in (0, 2) else [1, 3]
        assert each[Axis.WORLD] == [0, 2, 1, 3]
        assert each[Axis.HOST] == each[Axis.TOWER] == mates
        assert each[Axis.PEER] == each[Axis.REPLICA] == ([0, 1] if rank < 2 else [2, 3])
        assert each["hosts"] == (0, 0, 1, 1)
        assert each["grid"] == ((0, 2), (1, 3))
        assert "host 0: 0, 2; host 1: 1, 3" in str(each["text"])
        assert not each["spans"]


def test_an_order_of_ones_own_and_one_that_is_none() -> None:
    for rank, each in enumerate(run_ranks(permuted, 4, 2, [0, 0, 1, 1], [0, 3, 1, 2])):
        assert each[Axis.TOWER] == ([0, 3] if rank in (0, 3) else [1, 2])
        assert each[Axis.HOST] == ([0, 1] if rank < 2 else [3, 2])
        assert each["spans"]
    with pytest.raises(RankFailure, match="rank 0 first"):
        run_ranks(permuted, 2, 1, [0, 0], [1, 0])


def hosts_of(rank: int, agents: tuple[int, ...]) -> tuple[int, ...]:
    os.environ["GROUP_RANK"] = str(agents[rank])
    return Topology.create().hosts


def test_hosts_are_those_that_ranks_report() -> None:
    assert run_ranks(hosts_of, 4, (1, 0, 1, 0)) == [(0, 0, 1, 1)] * 4
    assert run_ranks(hosts_of, 2, (0, 0)) == [(0, 0)] * 2


def test_one_process_is_a_world_of_one() -> None:
    topology = Topology.create(tower_size=8)
    assert topology.world == RankGroup((0,), 0)
    assert (topology.world_size, topology.num_hosts, topology.num_groups) == (1, 1, 1)


def test_an_order_that_a_torch_would_sort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11's `new_group` does not know `sort_ranks`: it takes ranks in ascending order and sorts all others."""
    made = list[list[int]]()

    def new_group(
        ranks: list[int], timeout: timedelta, backend: str | None = None, device_id: torch.device | None = None
    ) -> None:
        made.append(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(process_groups, "time_limit_s", lambda: 60.0)
    assert process_groups.make_group([0, 2]) is None
    with pytest.raises(ConfigError, match="the order of ranks that they are given") as refused:
        process_groups.make_group([2, 0])
    assert refused.value.found == f"torch {torch.__version__}, which sorts them, and ranks [2, 0]"
    assert refused.value.where == "the order of ranks"
    assert refused.value.ways_out == ("install a newer torch", "number ranks host by host, as torchrun does")
    assert made == [[0, 2]]
