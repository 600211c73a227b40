"""Learned costs: tables are drawn again the same, a made-up kernel is learned, the cost model is a set function."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.ops.lookup import TorchKernel
from ziggurat.placements import Placement
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.learned_training import LearningConfig, train_cost_model
from ziggurat.planning.costs.lookup_meter import LookupMeter
from ziggurat.planning.costs.measurements import ExchangeMeasurement, LookupMeasurement, Measurements
from ziggurat.planning.costs.probe_tables import DrawConfig, count_reuse, draw_group, draw_pool, draw_rows
from ziggurat.planning.costs.shard_features import distinct_rows
from ziggurat.planning.problem import ShardProfile, TableProfile

DRAW = DrawConfig(num_samples=64, num_tables=12, groups_per_pool=60, max_rows=500, max_tables=6, group_mib=4)
LEARNING = LearningConfig(steps=500, batch_size=64, width=32, group_width=16, exchange_steps=600)


def test_tables_and_groups_are_drawn_again_the_same() -> None:
    first, second = draw_pool(DRAW, 1), draw_pool(DRAW, 1)
    assert [table.profile for table in first] == [table.profile for table in second]
    assert all(np.array_equal(a.rows[0], b.rows[0]) for a, b in zip(first, second, strict=True))
    assert draw_group(DRAW, first, 7) == draw_group(DRAW, second, 7)
    assert {table.profile.name for table in draw_pool(DRAW, 0)}.isdisjoint(table.profile.name for table in first)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.4])
def test_rows_lie_in_the_table_and_skew_brings_rows_again(skew: float) -> None:
    generator = np.random.default_rng(0)
    rows = draw_rows(generator, count=4000, num_rows=1000, skew=skew, offset=17)
    assert rows.min() >= 1
    assert rows.max() <= 999
    distinct = len(np.unique(rows))
    flat = len(np.unique(draw_rows(generator, count=4000, num_rows=1000, skew=0.0, offset=17)))
    assert distinct <= flat + 30
    if skew >= 1.0:
        assert distinct < 0.9 * flat


def test_reuse_counts_occurrences_of_distinct_rows() -> None:
    reuse = count_reuse(np.array([5, 6, 6, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9, 9]))
    assert reuse[:4] == (0.2, 0.2, 0.4, 0.2)
    assert sum(count_reuse(np.zeros(0, np.int64))) == 0
    assert distinct_rows(lookups=30, num_rows=1000, reuse=(0.0, 1.0)[:1] + (0.0,) * 16) == 0
    assert distinct_rows(lookups=30, num_rows=1000, reuse=(0.0, 1.0) + (0.0,) * 15) == 15
    assert distinct_rows(lookups=30, num_rows=7, reuse=(1.0,) + (0.0,) * 16) == 7


def test_the_meter_times_every_batch_and_takes_the_fastest() -> None:
    pool = draw_pool(DRAW, 0)
    ticks = iter(np.cumsum(np.tile([0.0, 0.001, 0.002], 1000)))  # forward 1 ms, with update 3 ms
    meter = LookupMeter(TorchKernel(), arena_mib=4, rounds=2, clock=lambda: float(next(ticks)))
    times = meter.measure([(pool[table], dim) for table, dim in draw_group(DRAW, pool, 3)])
    assert times.forward_ms == pytest.approx(1.0)
    assert times.total_ms == pytest.approx(3.0)


def test_the_meter_looks_up_what_was_drawn() -> None:
    """Sums of the first batch, against numpy, for tables of two widths, single and lists."""
    pool = draw_pool(DRAW, 0)
    tables = [(table, 4 if index % 2 else 8) for index, table in enumerate(pool[:6])]
    assert {table.lengths is None for table, _ in tables} == {True, False}
    meter = LookupMeter(TorchKernel(), arena_mib=4, rounds=1)
    meter._weights.copy_(torch.arange(meter._weights.numel()) % 1000)
    for part in meter._work(tables)[0]:
        out = meter._look_up(part)
        mine = [table for table, dim in tables if dim == part.layout.dim]
        mine.sort(key=lambda table: table.lengths is not None)
        for slot, table in zip(part.layout.slots, mine, strict=True):
            lengths = np.ones(64, np.int64) if table.lengths is None else table.lengths[0]
            sums = torch.zeros(64, part.layout.dim)
            samples = torch.from_numpy(np.repeat(np.arange(64), lengths))
            sums.index_add_(0, samples, part.weight[torch.from_numpy(table.rows[0]) + slot.first_row])
            torch.testing.assert_close(out[:, slot.column : slot.column + part.layout.dim], sums)


def made_up(num_groups: int) -> Measurements:
    """A kernel that costs 0.7 times the sum to the power of 0.9; an exchange that waits for the widest."""
    pools = {number: draw_pool(DRAW, number) for number in range(1 + num_groups // DRAW.groups_per_pool)}
    lookups = []
    for index in range(num_groups):
        pool = pools[index // DRAW.groups_per_pool]
        group = draw_group(DRAW, pool, index)
        alone = sum(0.02 + pool[table].profile.pooling_factor * (1 + dim / 32) / 50 for table, dim in group)
        lookups.append(
            LookupMeasurement(
                tables=tuple(t for t, _ in group),
                dims=tuple(d for _, d in group),
                forward_ms=0.0,
                total_ms=0.7 * alone**0.9,
            )
        )
    generator = np.random.default_rng(0)
    exchanges = []
    for _ in range(150):
        columns = tuple(int(value) for value in generator.integers(4, 400, 4))
        times = tuple(0.1 + value / 500 + max(columns) / 300 for value in columns)
        exchanges.append(
            ExchangeMeasurement(columns=columns, starts_ms=(0.0,) * 4, forward_ms=times, backward_ms=times)
        )
    return Measurements(machine="made up", draw=DRAW, lookups=tuple(lookups), exchanges=tuple(exchanges))


@pytest.fixture(scope="module")
def cost_model() -> LearnedCostModel:
    torch.set_num_threads(1)
    return train_cost_model(made_up(200), config=LEARNING)


def shards(*dims: int, rows: int = 100, pooling: float = 3.0) -> list[ShardProfile]:
    return [
        ShardProfile(
            table=TableProfile(name=f"t{index}", num_rows=rows, dim=dim, pooling_factor=pooling + index),
            placement=Placement.TABLE_WISE,
            num_rows=rows,
            dim=dim,
        )
        for index, dim in enumerate(dims)
    ]


def test_it_learns_what_a_sum_cannot(cost_model: LearnedCostModel) -> None:
    card = cost_model.card
    assert card.groups is not None
    assert card.tables is not None
    assert card.forward is not None
    assert card.groups.mape < 0.06
    assert card.groups.mape < card.groups.additive_mape
    assert card.groups.rank_correlation > 0.98
    assert card.tables.num_cases == 20
    assert card.forward.mape < 0.05


def test_devices_are_sets_and_an_empty_one_looks_up_nothing(cost_model: LearnedCostModel) -> None:
    encoded = cost_model.encode(shards(8, 16, 32))
    one_order, another = encoded.sum(axis=0), encoded[[2, 0, 1]].sum(axis=0)
    np.testing.assert_allclose(cost_model.local(one_order[None]), cost_model.local(another[None]), rtol=1e-5)
    empty = cost_model.local(np.zeros((1, encoded.shape[1]), np.float32))
    assert empty.tolist() == [[0.0, 0.0]]
    states = np.stack([np.stack([one_order, encoded[0], encoded[1], encoded[2]])] * 2)
    costs = device_costs(cost_model, states)
    assert costs.shape == (2, 4)
    assert np.isfinite(costs).all()
    assert costs[0].argmax() == 0


def test_features_that_share_a_table_cost_a_lookup_each(cost_model: LearnedCostModel) -> None:
    (one,) = shards(16)
    both = dataclasses.replace(one, table=dataclasses.replace(one.table, pooling_factor=6.0, num_features=2))
    np.testing.assert_allclose(cost_model.encode([both]), 2 * cost_model.encode([one]), rtol=1e-5)


def test_numpy_and_torch_agree(cost_model: LearnedCostModel) -> None:
    """The cost model predicts for measured groups what training said."""
    measured = made_up(200)
    pool = draw_pool(DRAW, 0)
    errors = []
    for each in measured.lookups[:50]:
        group = [
            ShardProfile(
                table=pool[table].with_dim(dim),
                placement=Placement.TABLE_WISE,
                num_rows=pool[table].profile.num_rows,
                dim=dim,
            )
            for table, dim in zip(each.tables, each.dims, strict=True)
        ]
        found = cost_model.local(cost_model.encode(group).sum(axis=0)[None])[0, 0]
        errors.append(abs(found - each.total_ms) / each.total_ms)
    assert np.mean(errors) < 0.06


def test_files_bring_back_the_same_model_and_bad_ones_are_refused(cost_model: LearnedCostModel, tmp_path: Path) -> None:
    cost_model.save(tmp_path / "model.cost")
    again = LearnedCostModel.load(tmp_path / "model.cost")
    assert again.card == cost_model.card
    encoded = cost_model.encode(shards(8, 16))
    np.testing.assert_array_equal(again.encode(shards(8, 16)), encoded)
    with pytest.raises(MissingFileError, match="cluster probe"):
        LearnedCostModel.load(tmp_path / "other")
    (tmp_path / "model.cost.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="train it again"):
        LearnedCostModel.load(tmp_path / "model.cost")


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 50"):
        train_cost_model(made_up(20), config=LEARNING)


def test_measurements_come_back_from_their_file(tmp_path: Path) -> None:
    found = made_up(5)
    found.save(tmp_path / "probe.json")
    assert Measurements.load(tmp_path / "probe.json") == found
    (tmp_path / "probe.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        Measurements.load(tmp_path / "probe.json")


def test_a_cut_step_writes_what_a_whole_one_writes() -> None:
    pool = draw_pool(DRAW, 0)
    tables = [(table, 4 if index % 2 else 8) for index, table in enumerate(pool[:5])]
    meters = [LookupMeter(TorchKernel(), arena_mib=4, rounds=1) for _ in range(2)]
    for meter in meters:
        meter._weights.copy_(torch.sin(torch.arange(meter._weights.numel()) * 1.0))
    meters[0].measure(tables)
    assert meters[1].measure_cut(tables) > 0
    torch.testing.assert_close(meters[0]._sums, meters[1]._sums)
    torch.testing.assert_close(meters[0]._weights, meters[1]._weights)


def test_shards_of_cut_tables_cost_more(cost_model: LearnedCostModel) -> None:
    dearer = LearnedCostModel(cost_model.weights, dataclasses.replace(cost_model.card, cut_factor=2.0))
    (shard,) = shards(16)
    cut = dataclasses.replace(shard, placement=Placement.COLUMN_WISE, num_parts=2)
    whole_ms, cut_ms = (dearer.local(dearer.encode([each]))[0, 0] for each in (shard, cut))
    assert cut_ms > 1.3 * whole_ms
