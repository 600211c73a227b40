"""The report's numbers, its table, and the picture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.planning.towers.planted import features_of, planted_interactions
from ziggurat.errors import PlanError
from ziggurat.plan import Towers
from ziggurat.planning.towers.items import FeatureLoad
from ziggurat.planning.towers.partitioner import TowerPartitionConfig, TowerStrategy, partition_towers
from ziggurat.planning.towers.plots import write_picture
from ziggurat.planning.towers.report import report_on

INTERACTIONS = torch.tensor(
    [[1.0, 0.8, 0.1, 0.2], [0.8, 1.0, 0.3, 0.0], [0.1, 0.3, 1.0, 0.6], [0.2, 0.0, 0.6, 1.0]], dtype=torch.float64
)
FEATURES = [
    FeatureLoad(name="user", table="user", table_bytes=1000, lookups=1.0, dim=8),
    FeatureLoad(name="age", table="age", table_bytes=40, lookups=1.0, dim=4),
    FeatureLoad(name="liked", table="item", table_bytes=600, lookups=20.5, dim=8),
    FeatureLoad(name="item", table="item", table_bytes=600, lookups=1.0, dim=8),
]


def test_numbers_are_right() -> None:
    towers = Towers(towers=(("user", "age"), ("liked", "item")), strategy="by hand")
    naive = Towers(towers=(("user", "liked"), ("age", "item")))
    report = report_on(towers, naive=naive, interactions=INTERACTIONS, features=FEATURES)
    assert report.within == pytest.approx(0.7)
    assert report.across == pytest.approx((0.1 + 0.2 + 0.3 + 0.0) / 4)
    assert report.naive_within == pytest.approx(0.05)
    first, second = report.towers
    assert (first.num_bytes, first.lookups, first.reads, first.within) == (1040, 2.0, 12.0, pytest.approx(0.8))
    assert (second.num_bytes, second.lookups, second.reads) == (600, 21.5, 172.0)
    assert report.imbalance["count"] == 1
    assert report.imbalance["bytes"] == pytest.approx(1040 / 820)
    text = report.text()
    for words in ("user, age", "liked, item", "1,040", "21.50", "0.700", "by hand", "× 1.27"):
        assert words in text


def test_towers_without_pairs_show_a_dash() -> None:
    towers = Towers(towers=(("user",), ("age",), ("liked", "item")))
    report = report_on(towers, naive=towers, interactions=INTERACTIONS, features=FEATURES)
    assert math.isnan(report.towers[0].within)
    assert "–" in report.text()
    one = Towers(towers=(("user", "age", "liked", "item"),))
    assert math.isnan(report_on(one, naive=one, interactions=INTERACTIONS, features=FEATURES).across)


@pytest.mark.parametrize(("num_features", "num_towers"), [(1, 1), (5, 5), (26, 4), (70, 24)])
def test_the_picture_shows_every_tower_and_is_the_same_again(
    num_features: int, num_towers: int, tmp_path: Path
) -> None:
    interactions, _ = planted_interactions(num_features, num_towers, dim=24, noise=0.5, seed=0, num_samples=8)
    features = features_of(num_features)
    features[0] = FeatureLoad(name="a$b_{<&", table="t0", table_bytes=4)
    config = TowerPartitionConfig(num_towers=num_towers, strategy=TowerStrategy.COHERENT, restarts=1)
    partition = partition_towers(interactions, features=features, config=config)
    first, second = (write_picture(partition, tmp_path / f"{name}.svg").read_text() for name in "ab")
    assert first == second
    assert ("tower 0" in first) == (num_towers <= 16)
    assert ("a$b_{&lt;&amp;" in first) == (num_features <= 60)
    if num_features == 5:
        assert write_picture(partition, tmp_path / "c.png").stat().st_size > 1000
    with pytest.raises(PlanError, match=r"\.svg"):
        write_picture(partition, tmp_path / "c.gif")
