"""The benchmark of orders: where it launches ranks, and the arithmetic that it sets beside what it measures."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.collectives import CASES, Launch, interleaved, parse_options
from benchmarks.datacentre.jobs import Job
from tests.benchmarks.test_datacentre import plain, toy

MIB = 1 << 20


def test_ranks_are_launched_in_turns_on_the_racks() -> None:
    assert interleaved(4).hosts == (0, 2, 1, 3)
    assert interleaved(8).racks() == [0, 1] * 4
    assert parse_options([]).cases.split(",") == list(CASES)


@pytest.mark.parametrize(("size", "ratio"), [(4, 2.0), (8, 4.0)])
def test_a_ring_is_as_slow_as_the_hops_that_leave_a_rack(size: int, ratio: float) -> None:
    launch = interleaved(size)
    good = [*range(0, size, 2), *range(1, size, 2)]
    best_ms = launch.ring_ms(good, num_bytes=16 * MIB)
    assert best_ms == pytest.approx(2 * (size - 1) / size * 16 * MIB * 8 / 200e3)
    assert launch.ring_ms(range(size), num_bytes=16 * MIB) / best_ms == pytest.approx(ratio)


def test_a_ring_inside_a_rack_is_as_slow_as_the_links_of_hosts() -> None:
    one_rack = Launch(network=dataclasses.replace(interleaved(4).network, racks=1), hosts=(0, 1, 2, 3))
    assert one_rack.ring_ms(range(4), num_bytes=16 * MIB) == pytest.approx(1.5 * 16 * MIB * 8 / 1000e3)


def test_a_job_puts_ranks_on_the_hosts_that_it_is_told() -> None:
    spec = dataclasses.replace(toy(), hosts=(0, 1, 0, 1))
    with Job(spec, plain(hosts=2, ranks_per_host=2)) as job:
        assert [info["LOCAL_RANK"] for info in job.infos] == ["0", "0", "1", "1"]
        assert [answer["value"] for answer in job.ask({"op": "run", "name": "add", "steps": 1})] == [10.0] * 4
