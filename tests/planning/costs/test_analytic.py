"""Analytic costs: every placement by hand, the cost model equal to the formulas, and what must never get worse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.clusters import round_cluster
from ziggurat.errors import ConfigError
from ziggurat.placements import Placement
from ziggurat.planning.cluster.cluster import Port
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.costs.analytic import AnalyticCostModel, AnalyticCosts, HopSettings, ShardWork
from ziggurat.planning.problem import Assignment, PlanningProblem, ShardProfile, TableProfile

TABLE = TableProfile(name="t", num_rows=1000, dim=8, pooling_factor=2.0, num_features=1, optimizer_bytes_per_row=4)


def shard(placement: Placement, *, parts: int = 1, rows: int = 1000, dim: int = 8) -> ShardProfile:
    return ShardProfile(table=TABLE, placement=placement, num_rows=rows, dim=dim, num_parts=parts)


def costs(batch_size: int = 10, **changes: float) -> AnalyticCosts:
    return AnalyticCosts(round_cluster(), HopSettings(batch_size=batch_size, **changes))  # type: ignore[arg-type]


# 4 ranks on 2 hosts, 10 samples each: N = 40; rows of 32 bytes, 2 a sample; out = 40 · 8 · 4 = 1,280 bytes
WHOLE = ShardWork(
    lookup_s=80 * 32 / 5e8 + 4 * 40 * 8 / 1e9,
    update_s=80 * (32 + 2 * (32 + 4)) / 5e8,
    ids_inside=(80 + 40) * 4 / 4,  # with a length a sample
    ids_between=(80 + 40) * 4 / 2,
    sent_inside=1280 / 4,
    sent_between=1280 / 2,
)
BY_HAND = {
    "whole": (shard(Placement.TABLE_WISE), WHOLE),
    "half of the columns": (
        shard(Placement.COLUMN_WISE, parts=2, dim=4),
        dataclasses.replace(
            WHOLE,
            lookup_s=80 * 16 / 5e8 + 4 * 40 * 4 / 1e9,
            update_s=80 * (16 + 2 * (16 + 4)) / 5e8,
            sent_inside=640 / 4,
            sent_between=640 / 2,
        ),
    ),
    "a quarter of the rows": (
        shard(Placement.ROW_WISE, parts=4, rows=250),
        dataclasses.replace(
            WHOLE,
            lookup_s=20 * 32 / 5e8 + 4 * 40 * 8 / 1e9,
            update_s=20 * 104 / 5e8,
            ids_inside=(20 + 40) * 4 / 4,
            ids_between=(20 + 40) * 4 / 2,
        ),
    ),
    "half of the rows in a host": (
        shard(Placement.TABLE_ROW_WISE, parts=2, rows=500),
        dataclasses.replace(
            WHOLE,
            lookup_s=40 * 32 / 5e8 + 4 * 40 * 8 / 1e9,
            update_s=40 * 104 / 5e8,
            ids_inside=(40 + 40) * 4 / 4,
            ids_between=(40 + 40) * 4 / 2,
            sent_inside=1280 / 2,  # partial sums to the other rank of the host
            sent_between=1280 / 2 / 2,  # sums of half of the samples, half of which are elsewhere
        ),
    ),
    "a copy": (
        shard(Placement.DATA_PARALLEL, parts=4),
        ShardWork(
            lookup_s=20 * 32 / 5e8 + 4 * 10 * 8 / 1e9,
            update_s=(20 * 32 + 80 * 2 * 36) / 5e8,  # its own gradients, and everybody's rows
            gathered_inside=(20 + 80) * 36 / 4,
            gathered_between=(20 + 80) * 36 / 2,
        ),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_placements_by_hand(case: str) -> None:
    given_shard, expected = BY_HAND[case]
    found = costs().work(given_shard)
    for name in ShardWork.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_a_copy_of_a_tiny_table_costs_no_more_than_its_rows() -> None:
    tiny = dataclasses.replace(TABLE, num_rows=3)
    copy = ShardProfile(table=tiny, placement=Placement.DATA_PARALLEL, num_rows=3, dim=8, num_parts=4)
    found = costs().work(copy)
    assert found.gathered_between == pytest.approx((3 + 3) * 36 / 2)
    assert found.update_s == pytest.approx((20 * 32 + 3 * 2 * 36) / 5e8)


def test_a_hop_takes_the_slower_link_and_one_rank_needs_none() -> None:
    found = costs()
    assert found.hop_s(inside=1e6, between=2e5) == pytest.approx(max(1e6 / 1e8, 2e5 / 1e7))
    assert found.hop_s(inside=1e6, between=2e5, group_size=1) == 0.0
    assert found.hop_s(inside=1e6, between=9e9, group_size=2) == pytest.approx(1e6 / 1e8)  # inside one host


def test_latency_and_messages_are_counted() -> None:
    link = {"latency_s": 1e-3, "message_s": 1e-4}
    found = AnalyticCosts(round_cluster(inside=link, between=link), HopSettings(batch_size=1))
    assert found.hop_s(inside=0, between=0) == pytest.approx(1e-3 + 2e-4)  # two ranks on the other host


def test_all_reduce_by_hand() -> None:
    found = costs()
    inside = 2 * 1e6 * (1 / 2) / 1e8
    assert found.all_reduce_s(1e6) == pytest.approx(inside + 2 * 1e6 / 2 * (1 / 2) / 1e7)
    shared = AnalyticCosts(round_cluster(between={"port": Port.HOST}), HopSettings(batch_size=1))
    assert shared.all_reduce_s(1e6) == pytest.approx(2 * 1e6 * (3 / 4) / 1e7)
    assert found.all_reduce_s(1e6, group_size=1) == 0.0


def test_a_tower_hop_stays_inside_its_group() -> None:
    found = AnalyticCosts(round_cluster(), HopSettings(batch_size=10, group_size=2)).work(shard(Placement.TABLE_WISE))
    assert found.sent_between == 0.0
    assert found.sent_inside == pytest.approx(1280 / 2)
    assert found.ids_between > 0  # ids still come from everybody


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4 ranks"):
        AnalyticCosts(round_cluster(), HopSettings(batch_size=1, group_size=8))


def test_a_table_costs_what_its_shards_cost() -> None:
    found = costs().table_cost([shard(Placement.TABLE_WISE)])
    assert found.lookup_ms == pytest.approx(1e3 * WHOLE.lookup_s)
    assert found.exchange_ms == pytest.approx(2e3 * 640 / 1e7)
    assert found.total_ms == pytest.approx(
        found.lookup_ms + found.ids_ms + found.exchange_ms + found.update_ms + found.reduction_ms
    )


def problem(num_tables: int = 6) -> PlanningProblem:
    tables = [
        TableProfile(name=f"t{index}", num_rows=100 * (index + 1), dim=8 * (index % 3 + 1), pooling_factor=1 + index)
        for index in range(num_tables)
    ]
    return PlanningProblem(
        tables=tuple(tables), num_devices=4, memory_bytes=(10**9,), devices_per_host=2, placements=tuple(Placement)
    )


def test_the_cost_model_says_what_the_formulas_say() -> None:
    """One table on one rank: its own work, ids, and twice its hop; the others receive a quarter of what it sends."""
    found = costs()
    cost_model = AnalyticCostModel(found)
    states = np.zeros((1, 4, 9), dtype=np.float32)
    states[0, 1] = cost_model.encode([shard(Placement.TABLE_WISE)])[0]
    per_rank = device_costs(cost_model, states)[0]
    work = found.work(shard(Placement.TABLE_WISE))
    hop = max(work.sent_inside / 1e8, work.sent_between / 1e7)
    ids = max(work.ids_inside / 1e8, work.ids_between / 1e7)
    assert per_rank[1] == pytest.approx(1e3 * (work.lookup_s + work.update_s + ids + 2 * hop), rel=1e-5)
    assert per_rank[0] == pytest.approx(1e3 * 2 * hop / 4, rel=1e-5)


@given(st.permutations(range(6)), st.integers(0, 3))
def test_states_add_up_in_any_order(order: list[int], device: int) -> None:
    tables = problem()
    cost_model = AnalyticCostModel(costs())
    shards = [tables.shards(i, Assignment(placement=Placement.TABLE_WISE, devices=(device,)))[0] for i in range(6)]
    whole = cost_model.encode(shards)
    np.testing.assert_allclose(cost_model.encode([shards[i] for i in order]).sum(0), whole.sum(0), rtol=1e-5)


@pytest.mark.parametrize("link", ["inside", "between"])
@pytest.mark.parametrize("placement", list(Placement))
def test_a_faster_link_never_costs_more(link: str, placement: Placement) -> None:
    parts = {Placement.TABLE_WISE: 1, Placement.TABLE_ROW_WISE: 2}.get(placement, 4)
    slow, fast = round_cluster(), round_cluster(**{link: {"bytes_per_s": 1e9}})
    totals = [
        AnalyticCosts(cluster, HopSettings(batch_size=64)).table_cost([shard(placement, parts=parts)]).total_ms
        for cluster in (slow, fast)
    ]
    assert totals[1] <= totals[0]


def test_fewer_bytes_on_the_wire_cost_less() -> None:
    full, half = costs(), costs(number_bytes=2.0)
    whole = [shard(Placement.TABLE_WISE)]
    assert half.table_cost(whole).exchange_ms == pytest.approx(full.table_cost(whole).exchange_ms / 2)
