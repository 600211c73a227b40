"""Every pair of ranks meets once, in rounds of disjoint pairs, and orders are timed on all ranks alike."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ziggurat.parallel.exchange import pair_meter
from ziggurat.parallel.exchange.pair_meter import measure_orders, measure_pairs, pairs_by_round, where_this_rank_is
from ziggurat.testing.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 33])
def test_a_round_has_disjoint_pairs_and_all_rounds_have_every_pair_once(size: int) -> None:
    rounds = list(pairs_by_round(size))
    assert len(rounds) == size - 1 + size % 2
    for pairs in rounds:
        ranks = list(itertools.chain(*pairs))
        assert len(set(ranks)) == len(ranks) == size - size % 2
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(size), 2))


def measured(rank: int) -> dict[str, Any]:
    seen: list[int] = []
    latency_ms, long_ms = measure_pairs(long_bytes=1 << 16, short_repeats=3, long_repeats=2, on_round=seen.append)
    return {"latency": latency_ms, "long": long_ms, "rounds": seen, "where": where_this_rank_is()}


@pytest.mark.parametrize("size", [3, 4])
def test_all_ranks_know_the_times_of_all_pairs(size: int) -> None:
    found = run_ranks(measured, size)
    for each in found:
        assert each["rounds"] == list(range(1, size + size % 2))
        for name in ("latency", "long"):
            times = each[name]
            assert np.array_equal(times, found[0][name])
            assert np.array_equal(times, times.T)
            assert (times + np.eye(size) > 0).all()
            assert not times.diagonal().any()
    assert len({each["where"] for each in found}) == 1


def timed(rank: int) -> list[float]:
    return measure_orders([(0, 1, 2), (0, 2, 1)], num_bytes=1 << 12, repeats=2)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(torch.distributed.new_group).parameters,
    reason="this torch sorts the ranks of a group (2.11 does)",
)
def test_the_slowest_rank_times_an_order_for_all() -> None:
    found = run_ranks(timed, 3)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 2
    assert min(found[0]) > 0


def test_an_address_is_that_on_the_way_to_where_all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert where_this_rank_is()[1] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert where_this_rank_is()[1] == ""
    monkeypatch.delenv("MASTER_ADDR")
    assert where_this_rank_is()[1] == ""


def test_a_loopback_gives_way_to_the_address_on_the_way_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"head": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(pair_meter, "_address", lambda target: ways.get(target, ""))
    monkeypatch.setenv("MASTER_ADDR", "head")
    assert where_this_rank_is()[1] == "127.0.0.1"
    assert where_this_rank_is(towards="10.0.0.2")[1] == "10.0.0.1"
    assert where_this_rank_is(towards="10.9.9.9")[1] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    assert where_this_rank_is(towards="10.0.0.3")[1] == "10.0.0.1", "a way that others can use stays"
    assert pair_meter.is_loopback("::1")
    assert pair_meter.is_loopback("127.0.1.1")
    assert not pair_meter.is_loopback("10.0.0.1")
