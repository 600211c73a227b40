"""Shared memory between ranks of one host: the same numbers as gloo, and a word where something is wrong."""

from __future__ import annotations

import os
import random
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.errors import TopologyError
from ziggurat.parallel.exchange import host_memory
from ziggurat.parallel.exchange.collectives import all_to_all, start_sum
from ziggurat.parallel.exchange.host_memory import HostMemory
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, Topology
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.report.ranks import _host_link


def memories(size: int, *, timeout_s: float = 5.0) -> list[HostMemory]:
    """All members of a group, in this one process."""
    made = [host_memory._made(size) for _ in range(size)]
    controls = [control for _, control, _, _ in made]
    return [
        HostMemory(made[0][0], controls=controls, position=position, timeout_s=timeout_s) for position in range(size)
    ]


def test_messages_of_any_size_arrive_in_any_order_while_the_memory_grows_and_is_used_again() -> None:
    members, draw, under_way = memories(3), random.Random(0), []
    for number in range(120):
        sizes = [[draw.choice([0, 1, 17, 5_000, 60_000]) for _ in members] for _ in members]
        dtype = draw.choice([torch.float32, torch.int64, torch.uint8, torch.bfloat16])
        tickets = []
        for sender, member in enumerate(members):
            pieces = [torch.full((n,), 1 + (number + 3 * sender + to) % 100) for to, n in enumerate(sizes[sender])]
            message = torch.cat(pieces).to(dtype)
            if number % 2:  # written where it is read
                box = member.outbox(len(message), dtype=dtype)
                message = box.copy_(message)
            tickets.append(member.send(message, sizes=sizes[sender], purpose=f"exchange {number}"))
        under_way.append((number, sizes, dtype, tickets))
        while under_way and (len(under_way) > 20 or draw.random() < 0.45):
            number_then, sizes, dtype, tickets = under_way.pop(draw.randrange(min(3, len(under_way))))
            for to, member in enumerate(members):
                come = [row[to] for row in sizes]
                wanted = [torch.full((n,), 1 + (number_then + 3 * s + to) % 100) for s, n in enumerate(come)]
                received = member.receive(tickets[to], sizes=come, dtype=dtype)
                assert torch.equal(received, torch.cat(wanted).to(dtype))
    used = sum(segment.numel() for segment in members[0]._own.segments.values())
    assert used <= 64 << 20  # 120 messages of up to 1.4 MB went through it


def test_messages_that_nobody_has_read_yet_stop_nothing_that_comes_after_them() -> None:
    members, draw, unread = memories(3), random.Random(1), []
    for number in range(900):
        count = draw.choice([0, 1, 40, 2_000])
        values = [torch.full((3 * count,), 10.0 * number + sender) for sender in range(3)]
        tickets = [
            member.send(sent, sizes=[count] * 3, purpose=f"exchange {number % 5}")
            for member, sent in zip(members, values, strict=True)
        ]
        unread.append((number, count, tickets))
        kept = 90 if number < 300 else 7  # once there are more of them than the first slots
        while len(unread) > kept:
            then, count, tickets = unread.pop(-1 if draw.random() < 0.9 else draw.randrange(len(unread)))
            for position in draw.sample(range(3), 3):
                came = members[position].receive(tickets[position], sizes=[count] * 3, dtype=torch.float32)
                wanted = torch.tensor([[10.0 * then], [10.0 * then + 1], [10.0 * then + 2]]).expand(3, count)
                assert torch.equal(came.view(3, count), wanted)
    used = sum(segment.numel() for segment in members[0]._own.segments.values())
    assert used <= 16 << 20  # 900 messages of up to 24 kB, of which 90 were unread at a time


def test_more_unread_messages_than_anything_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_MAX_SLOTS", 66)
    first, second = memories(2)
    tickets = [first.send(torch.ones(2), sizes=[1, 1], purpose="ids") for _ in range(66)]
    with pytest.raises(TopologyError, match="66 messages of this rank that are not read"):
        first.send(torch.ones(2), sizes=[1, 1], purpose="ids")
    for ticket in tickets:
        second.send(torch.zeros(2), sizes=[1, 1], purpose="ids")
        assert second.receive(ticket, sizes=[1, 1], dtype=torch.float32).tolist() == [1.0, 0.0]


def test_a_rank_that_ended_is_noticed_though_it_had_time_left() -> None:
    first, second = memories(2, timeout_s=3600.0)
    ended = subprocess.Popen(["true"])
    first._controls[1].pidfd = os.pidfd_open(ended.pid)
    sent_before = second.send(torch.ones(2), sizes=[1, 1], purpose="before")
    ended.wait()
    assert sent_before.number == 0
    ticket = first.send(torch.ones(2), sizes=[1, 1], purpose="before")
    assert first.receive(ticket, sizes=[1, 1], dtype=torch.float32).tolist() == [1.0, 1.0]
    ticket = first.send(torch.ones(2), sizes=[1, 1], purpose="after")
    with pytest.raises(RuntimeError, match=r"Connection closed by peer: rank 1 of the group has ended \(after\)"):
        first.receive(ticket, sizes=[1, 1], dtype=torch.float32)


def test_a_rank_that_hangs_is_waited_for_as_long_as_the_job_says() -> None:
    first = memories(2, timeout_s=0.0)[0]
    ticket = first.send(torch.ones(2), sizes=[1, 1], purpose="ids")
    with pytest.raises(RuntimeError, match="Timed out waiting 0 s for rank 1"):
        first.receive(ticket, sizes=[1, 1], dtype=torch.float32)


def test_ranks_that_exchange_different_things_raise_instead_of_mixing_them_up() -> None:
    first, second = memories(2)
    ticket = first.send(torch.ones(2), sizes=[1, 1], purpose="ids")
    second.send(torch.ones(2), sizes=[1, 1], purpose="gradients")
    with pytest.raises(TopologyError, match="member 1 of the group exchanges something else"):
        first.receive(ticket, sizes=[1, 1], dtype=torch.float32)
    first, second = memories(2)
    ticket = first.send(torch.ones(2), sizes=[1, 1], purpose="ids")
    second.send(torch.ones(3), sizes=[2, 1], purpose="ids")
    with pytest.raises(TopologyError, match=r"found: +\[1, 2\] numbers"):
        first.receive(ticket, sizes=[1, 1], dtype=torch.float32)


def sums(rank: int) -> dict[str, object]:
    """Sums through memory, and what gloo makes of the same numbers."""
    topology = Topology.create()
    traffic = Traffic(topology)
    found: dict[str, object] = {"link": _host_link(topology)}
    for count, dtype in ((0, torch.float32), (3, torch.float64), (70_001, torch.float32), (70_001, torch.bfloat16)):
        mine = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)
        exact = mine.double()
        dist.all_reduce(exact)
        summed = start_sum(mine, group=topology.world, purpose="sum").wait()
        assert summed is mine
        torch.testing.assert_close(summed.double(), exact, rtol=4e-3 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
        found[f"{count} {dtype}"] = summed.double().numpy().tobytes()
    with_gloo = torch.empty(3)
    send = torch.arange(3.0) + 10 * rank
    dist.all_to_all_single(with_gloo, send)
    pending = all_to_all(send, sent=[1] * 3, received=[1] * 3, group=topology.world, traffic=traffic, purpose="numbers")
    assert torch.equal(pending.wait(), with_gloo)
    assert torch.equal(pending.wait(), with_gloo)
    return found


def test_sums_are_those_of_gloo_and_the_same_bits_on_every_rank() -> None:
    first, *others = run_ranks(sums, 3)
    assert first["link"] == "through shared memory"
    assert all(other == first for other in others)


def links(rank: int, refused: int) -> tuple[dict[str, bool], str]:
    """Which groups share memory; on one rank making it may fail."""

    def refuse(size: int) -> None:
        raise OSError(f"no memory for {size}")

    if rank == refused:
        host_memory._made = refuse  # type: ignore[assignment]  # this process ends with the test
    topology = Topology.create(tower_size=2, ranks_per_host=2)
    numbers = torch.tensor([float(rank)])
    tower: Tensor = start_sum(numbers, group=topology.tower, purpose="sum").wait()
    assert tower.tolist() == [sum(topology.tower.ranks)]
    return {axis.value: topology.axes[axis].memory is not None for axis in Axis}, _host_link(topology)


def test_memory_joins_ranks_of_one_host_and_no_others() -> None:
    expected = {"world": False, "tower": True, "peer": False, "host": True, "replica": False, "context": False}
    assert run_ranks(links, 4, -1) == [(expected, "through shared memory")] * 4


def test_without_memory_on_one_rank_its_whole_group_stays_with_gloo_and_says_why() -> None:
    results = run_ranks(links, 4, 3)
    assert [tower["tower"] for tower, _ in results] == [True, True, False, False]
    assert results[3][1] == "through torch.distributed, slower: OSError: no memory for 2"
    assert results[2][1] == "through torch.distributed, slower: member 1 of the group cannot share memory"
