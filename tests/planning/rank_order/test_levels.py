"""Hosts and racks are seen in times between ranks, named for what they are, and not where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from ziggurat.planning.rank_order.levels import MIN_CONFIDENCE, infer_levels
from ziggurat.planning.rank_order.pair_times import PairTimes

from .networks import CORE_MS, HOST_MS, RACK_MS, network

HOSTS = (0, 1, 2, 3, 0, 1, 2, 3)
RACKS = (0, 1, 0, 1, 0, 1, 0, 1)


def test_hosts_and_racks_from_times_alone() -> None:
    host, rack = infer_levels(network(HOSTS, RACKS))
    assert (host.name, host.groups, host.is_used, host.is_even) == ("host", HOSTS, True, True)
    assert (rack.name, rack.groups, rack.is_used) == ("rack", RACKS, True)
    assert host.by == rack.by == "long messages"
    assert host.inside_ms == pytest.approx(HOST_MS, rel=0.3)
    assert host.between_ms == pytest.approx(RACK_MS, rel=0.3), "the next level, not all that is farther"
    assert rack.between_ms == pytest.approx(CORE_MS, rel=0.3)


def test_racks_of_hosts_with_one_rank_are_no_hosts() -> None:
    (rack,) = infer_levels(network(range(8), RACKS))
    assert (rack.name, rack.groups) == ("rack", RACKS)
    (rack,) = infer_levels(network(range(8), RACKS), machines=[f"m{rank}" for rank in range(8)])
    assert rack.name == "rack"


def test_what_ranks_say_of_their_machines_decides_on_hosts() -> None:
    """Two ranks of a host may be no nearer than others by their times: a machine is a machine."""
    pairs = network(range(6), [0] * 6, noise=0.01)
    (host,) = infer_levels(pairs, machines=["a", "b", "c", "a", "b", "c"])
    assert (host.name, host.groups, host.by) == ("host", (0, 1, 2, 0, 1, 2), "addresses")
    assert not host.is_used, "nothing in the times agrees"
    assert infer_levels(pairs, machines=["a"] * 6) == ()


def test_no_levels_where_all_ranks_are_as_far() -> None:
    for noise in (0.0, 0.05, 0.15):
        assert infer_levels(network(range(12), [0] * 12, noise=noise)) == ()
    assert infer_levels(network(range(2), [0, 1])) == ()


def test_latency_shows_racks_that_rates_do_not() -> None:
    racks = np.asarray(RACKS)
    flat = network(range(8), [0] * 8, noise=0.02)
    near = racks[:, None] == racks[None]
    latency_ms = np.where(near, 0.02, 0.09) * (1 - np.eye(8))
    (rack,) = infer_levels(PairTimes(latency_ms=latency_ms, long_ms=flat.long_ms))
    assert (rack.name, rack.groups, rack.by) == ("rack", RACKS, "latency")


def test_confidence_falls_where_near_and_far_overlap() -> None:
    """Machines that ranks name are groups that no noise has chosen, so that their confidence is that of the times."""
    names = [str(rank % 4) for rank in range(16)]
    confidences = []
    for noise in (0.1, 1.5, 4.0):
        levels = infer_levels(network([rank % 4 for rank in range(16)], [0] * 16, noise=noise), machines=names)
        confidences.append(next(level.confidence for level in levels if level.name == "host"))
    assert confidences[0] == 1.0
    assert confidences == sorted(confidences, reverse=True)
    assert confidences[1] > MIN_CONFIDENCE > confidences[2] > 0.5


def test_uneven_hosts_are_found_and_said_to_be_uneven() -> None:
    host, _ = infer_levels(network((0, 0, 0, 1, 1, 2), (0, 0, 0, 0, 0, 1)))
    assert host.groups == (0, 0, 0, 1, 1, 2)
    assert not host.is_even


def test_three_levels_have_names() -> None:
    """Hosts, racks, and rows of racks."""
    rows = np.arange(16) // 8
    pairs = network([rank // 2 for rank in range(16)], [rank // 4 for rank in range(16)])
    far = np.where(rows[:, None] == rows[None], 1.0, 8.0)
    levels = infer_levels(PairTimes(latency_ms=pairs.latency_ms, long_ms=pairs.long_ms * far))
    assert [(level.name, level.num_groups) for level in levels] == [("host", 8), ("rack", 4), ("rack 2", 2)]
