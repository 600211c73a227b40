"""The partitioner finds planted groups, keeps every limit, and says what is impossible."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.towers.planted import features_of, planted_interactions
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, PlanError
from ziggurat.plan import Towers
from ziggurat.planning.towers.items import BalanceBy, FeatureLoad, longest_first, too_heavy
from ziggurat.planning.towers.partitioner import (
    Refine,
    TowerPartition,
    TowerPartitionConfig,
    TowerStrategy,
    partition_towers,
)
from ziggurat.planning.towers.plane import PlaneConfig


def random_interactions(num_features: int, *, seed: int = 0) -> torch.Tensor:
    half = torch.rand(num_features, num_features, generator=torch.Generator().manual_seed(seed)).triu(1)
    return half + half.T + torch.eye(num_features)


def groups_of(towers: Towers) -> frozenset[frozenset[str]]:
    return frozenset(map(frozenset, towers.towers))


def held(partition: TowerPartition, by: BalanceBy) -> list[float]:
    report = partition.report()
    return [
        {BalanceBy.COUNT: len(t.features), BalanceBy.BYTES: t.num_bytes, BalanceBy.LOOKUPS: t.reads}[by]
        for t in report.towers
    ]


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("num_features", "num_towers"), [(8, 2), (26, 2), (26, 4), (26, 8), (96, 12)])
def test_planted_groups_are_recovered_exactly(num_features: int, num_towers: int, noise: float) -> None:
    for seed in range(2):
        interactions, groups = planted_interactions(num_features, num_towers, dim=16, noise=noise, seed=seed)
        config = TowerPartitionConfig(num_towers=num_towers, seed=seed)
        partition = partition_towers(interactions, features=features_of(num_features), config=config)
        assert groups_of(partition.towers) == groups
        report = partition.report()
        assert report.within > report.naive_within
        assert report.across < report.within


@pytest.mark.slow
def test_a_thousand_features_in_64_towers_within_a_minute() -> None:
    interactions, groups = planted_interactions(1000, 64, dim=64, noise=1.0, seed=0, num_samples=32)
    begin = time.process_time()
    config = TowerPartitionConfig(num_towers=64)
    partition = partition_towers(interactions, features=features_of(1000), config=config)
    assert time.process_time() - begin < 60
    assert groups_of(partition.towers) == groups


def test_26_features_take_less_than_two_seconds() -> None:
    interactions = random_interactions(26)
    begin = time.process_time()
    partition_towers(interactions, features=features_of(26), config=TowerPartitionConfig(num_towers=8))
    assert time.process_time() - begin < 2


def test_diverse_towers_mix_what_belongs_together() -> None:
    interactions, groups = planted_interactions(24, 4, dim=16, noise=0.5, seed=1)
    config = TowerPartitionConfig(num_towers=4, strategy=TowerStrategy.DIVERSE, tolerance=0.0)
    partition = partition_towers(interactions, features=features_of(24), config=config)
    for tower in partition.towers.towers:  # 6 features from 4 groups: no group more than twice
        assert max(len(group & set(tower)) for group in groups) == 2
    report = partition.report()
    assert report.within < report.across


def test_naive_deals_out_and_sequential_cuts() -> None:
    features, interactions = features_of(7), random_interactions(7)
    naive = partition_towers(
        interactions, features=features, config=TowerPartitionConfig(num_towers=3, strategy=TowerStrategy.NAIVE)
    )
    assert naive.towers.towers == (("f0", "f3", "f6"), ("f1", "f4"), ("f2", "f5"))
    blocks = partition_towers(
        interactions, features=features, config=TowerPartitionConfig(num_towers=3, strategy=TowerStrategy.SEQUENTIAL)
    )
    assert blocks.towers.towers == (("f0", "f1", "f2"), ("f3", "f4"), ("f5", "f6"))
    assert naive.towers.strategy == "naive"
    report = naive.report()
    assert (report.within, report.across) == (report.naive_within, report.naive_across)


def test_swaps_are_never_worse_than_the_plane_alone_and_usually_better() -> None:
    better = 0
    for seed in range(3):
        interactions, _ = planted_interactions(48, 8, dim=16, noise=2.0, seed=seed)
        within = {}
        for refine in Refine:
            config = TowerPartitionConfig(num_towers=8, refine=refine, tolerance=0.0)
            within[refine] = partition_towers(interactions, features=features_of(48), config=config).report().within
        assert within[Refine.SWAPS] >= within[Refine.NONE] - 1e-9
        better += within[Refine.SWAPS] > within[Refine.NONE] + 1e-3
    assert better >= 2


def test_same_seed_same_towers() -> None:
    interactions, features = random_interactions(20), features_of(20)
    config = TowerPartitionConfig(num_towers=3, seed=5)
    first, second = (partition_towers(interactions, features=features, config=config) for _ in range(2))
    assert first.towers == second.towers
    assert first.coordinates.equal(second.coordinates)
    assert first.towers.seed == 5
    assert from_json(TowerPartitionConfig, to_json(config), where="test") == config


def test_features_of_one_table_stay_together() -> None:
    features = [FeatureLoad(name=f"f{i}", table=f"t{i % 5}", table_bytes=8) for i in range(15)]
    for strategy in TowerStrategy:
        config = TowerPartitionConfig(num_towers=3, strategy=strategy)
        partition = partition_towers(random_interactions(15), features=features, config=config)
        partition.towers.check({feature.name: feature.table for feature in features})
        assert sum(tower.num_bytes for tower in partition.report().towers) == 5 * 8  # each table once


@pytest.mark.parametrize("balance", [BalanceBy.BYTES, BalanceBy.LOOKUPS])
def test_loads_are_balanced_within_the_tolerance(balance: BalanceBy) -> None:
    rng = np.random.default_rng(0)
    weights = rng.lognormal(3, 1, 40)
    features = [
        FeatureLoad(name=f"f{i}", table=f"t{i}", table_bytes=int(100 * w), lookups=w if i % 2 else 4 * w, dim=4)
        for i, w in enumerate(weights)
    ]
    loose, tight = (
        partition_towers(
            random_interactions(40),
            features=features,
            config=TowerPartitionConfig(num_towers=4, balance=balance, tolerance=tolerance),
        )
        for tolerance in (0.5, 0.05)
    )
    for partition, tolerance in ((loose, 0.5), (tight, 0.05)):
        loads = held(partition, balance)
        assert not partition.notes
        assert max(loads) <= (1 + tolerance) * np.mean(loads) * (1 + 1e-9)
    assert loose.report().within > tight.report().within


def test_a_table_heavier_than_a_share_stands_alone_and_the_rest_is_balanced() -> None:
    features = features_of(9)
    features[4] = FeatureLoad(name="f4", table="huge", table_bytes=1000)
    features[5] = FeatureLoad(name="f5", table="large", table_bytes=30)  # heavy only once the huge one is gone
    config = TowerPartitionConfig(num_towers=4, balance=BalanceBy.BYTES, tolerance=0.1)
    partition = partition_towers(random_interactions(9), features=features, config=config)
    assert {("f4",), ("f5",)} < set(partition.towers.towers)
    assert sorted(held(partition, BalanceBy.BYTES)) == [12, 16, 30, 1000]
    text = partition.report().text()
    assert "alone: 'huge', 'large'" in text
    assert "a tolerance of 0.1 cannot be kept" in text  # 7 tables of 4 bytes in 2 towers


def test_memory_is_a_hard_limit_beside_the_balance() -> None:
    interactions, groups = planted_interactions(12, 3, dim=8, noise=0.3, seed=0)
    group = sorted(next(iter(groups)))
    features = [FeatureLoad(name=f"f{i}", table=f"t{i}", table_bytes=50 if f"f{i}" in group else 10) for i in range(12)]
    free = partition_towers(interactions, features=features, config=TowerPartitionConfig(num_towers=3))
    assert groups_of(free.towers) == groups  # one tower holds 200 bytes
    for refine in Refine:
        config = TowerPartitionConfig(num_towers=3, memory_limit_bytes=120, refine=refine)
        partition = partition_towers(interactions, features=features, config=config)
        assert max(held(partition, BalanceBy.BYTES)) <= 120
        assert sorted(held(partition, BalanceBy.COUNT)) == [4, 4, 4]


def test_what_is_impossible_is_refused() -> None:
    interactions, features = random_interactions(4), features_of(4, num_bytes=30)
    features[2] = FeatureLoad(name="f2", table="big", table_bytes=90)

    def refused(words: str, **changes: object) -> None:
        config = TowerPartitionConfig(**{"num_towers": 2, **changes})  # type: ignore[arg-type]
        with pytest.raises(PlanError) as caught:
            partition_towers(interactions, features=features, config=config)
        assert words in str(caught.value)
        assert caught.value.ways_out

    refused("1 to 4 towers", num_towers=5)
    refused("table 'big' of 90 bytes", memory_limit_bytes=80)
    refused("takes features in order", memory_limit_bytes=100, strategy=TowerStrategy.NAIVE)
    features[2] = FeatureLoad(name="f2", table="t2", table_bytes=30)
    refused("120 bytes in 4 tables", memory_limit_bytes=59)
    refused("120 bytes in 4 tables", memory_limit_bytes=40, num_towers=3)
    features[3] = FeatureLoad(name="f3", table="t2", table_bytes=31)
    refused("the same table_bytes")
    features[3] = FeatureLoad(name="f3", table="t2", table_bytes=30)
    refused("1 features share the table", num_towers=4)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (torch.eye(3), "shape"),
        (2 - torch.eye(4), "numbers from"),
        (torch.full((4, 4), float("nan")), "numbers from"),
        (torch.tensor([[0.0, 1.0], [0.0, 0.0]]).repeat(2, 2), "not symmetric"),
    ],
)
def test_matrices_that_are_no_interactions_are_refused(matrix: torch.Tensor, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        partition_towers(matrix, features=features_of(4), config=TowerPartitionConfig())


def test_impossible_settings_are_refused() -> None:
    for changes in ({"num_towers": 0}, {"restarts": 0}, {"tolerance": -1.0}, {"memory_limit_bytes": -1}, {"seed": -1}):
        with pytest.raises(ConfigError, match="num_towers and restarts"):
            TowerPartitionConfig(**changes)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_feature_once_and_every_limit_kept(data: st.DataObject) -> None:
    num_tables = data.draw(st.integers(1, 12), "tables")
    num_features = data.draw(st.integers(num_tables, 18), "features")
    num_towers = data.draw(st.integers(1, num_tables), "towers")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    sizes = rng.integers(0, 50, num_tables) * data.draw(st.sampled_from([0, 1, 100]), "scale")
    tables = [*range(num_tables), *rng.integers(0, num_tables, num_features - num_tables)]
    features = [
        FeatureLoad(name=f"f{i}", table=f"t{t}", table_bytes=int(sizes[t]), lookups=float(rng.integers(0, 5)), dim=2)
        for i, t in enumerate(tables)
    ]
    balance = data.draw(st.sampled_from(BalanceBy), "balance")
    config = TowerPartitionConfig(
        num_towers=num_towers,
        strategy=data.draw(st.sampled_from(TowerStrategy), "strategy"),
        balance=balance,
        tolerance=data.draw(st.sampled_from([0.0, 0.1, 1.0]), "tolerance"),
        refine=data.draw(st.sampled_from(Refine), "refine"),
        restarts=1,
        plane=PlaneConfig(num_steps=20),
    )
    partition = partition_towers(random_interactions(num_features), features=features, config=config)
    partition.towers.check({feature.name: feature.table for feature in features})
    assert len(partition.towers) == num_towers
    report = partition.report()
    assert sum(tower.num_bytes for tower in report.towers) == sizes.sum()
    assert partition.coordinates.shape == (num_features, 2)
    if config.strategy in (TowerStrategy.COHERENT, TowerStrategy.DIVERSE) and not partition.notes:
        loads = held(partition, balance)
        mean = sum(loads) / num_towers
        most = max(np.ceil(mean), np.floor(mean * (1 + config.tolerance) + 1e-9))
        most = most if balance is BalanceBy.COUNT else mean * (1 + config.tolerance)
        assert max(loads) <= most * (1 + 1e-6) + 1e-9


def test_longest_first_is_grahams_rule() -> None:
    assignment = longest_first(np.array([3.0, 7.0, 5.0, 4.0, 1.0]), num_towers=2)
    assert sorted(np.bincount(assignment, weights=[3.0, 7.0, 5.0, 4.0, 1.0]).tolist()) == [10.0, 10.0]
    assert sorted(np.bincount(longest_first(np.zeros(6), num_towers=3)).tolist()) == [2, 2, 2]


@settings(max_examples=100, deadline=None)
@given(load=st.lists(st.floats(0, 1e6), min_size=1, max_size=12), tolerance=st.sampled_from([0.0, 0.1]), data=st.data())
def test_who_is_too_heavy_is_heavier_than_everyones_share(
    load: list[float], tolerance: float, data: st.DataObject
) -> None:
    num_towers = data.draw(st.integers(1, len(load)))
    alone = too_heavy(np.array(load), num_towers=num_towers, tolerance=tolerance)
    assert len(alone) < num_towers
    rest = np.delete(load, alone)
    share = rest.sum() / (num_towers - len(alone))
    if len(alone):
        assert min(np.array(load)[alone]) >= share
    if num_towers - len(alone) > 1:
        assert rest.max() <= (1 + tolerance) * share * (1 + 1e-6)


def test_planning_needs_no_process_group_and_no_reader_of_files() -> None:
    code = (
        "import sys\n"
        "for name in ('polars', 'pyarrow', 'fbgemm_gpu', 'matplotlib', 'scipy'): sys.modules[name] = None\n"
        "from ziggurat.planning.towers import affinity, partitioner, plots\n"
        "sys.exit(any(name.startswith(('ziggurat.parallel', 'ziggurat.data')) for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
