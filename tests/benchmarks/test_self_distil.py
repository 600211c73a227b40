"""The studies of self-distillation: controls are what they are called, and tests need whole pairs."""

from __future__ import annotations

import polars as pl
import pytest
import torch
import torch.nn.functional as F

import ziggurat as zg
from benchmarks import self_distil
from benchmarks import self_distil_confirmed as confirmed
from tests.training.tiny import tiny_dataset
from ziggurat.errors import ConfigError
from ziggurat.testing.batches import random_batch


class Position:
    """A trainer that stands at a step."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.position = self
        self.step = step
        self.total_steps = total_steps


@pytest.mark.parametrize("step", [0, 5, 10])
@pytest.mark.parametrize("towards", [0.5, 0.2, None])
def test_controls_take_their_weight_from_the_labels(step: int, towards: float | None) -> None:
    inputs = tiny_dataset(10).inputs
    batch = random_batch(inputs, 30)
    loss = confirmed.LabelsWithLess(towards, inputs=inputs)
    loss.trainer = Position(step, 10)  # type: ignore[assignment]
    logits = torch.randn(30, 1)
    found = loss(zg.Outputs(logits=logits), batch)
    weight = 0.3 * {0: 0.0, 5: 0.5, 10: 1.0}[step]
    wanted = (1.0 - weight) * F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
    if towards is not None:
        target = torch.full_like(logits, towards)
        wanted = wanted + weight * F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
    torch.testing.assert_close(found.total.sum(), wanted)
    assert float(found.weight) == 30


@pytest.mark.parametrize("data", confirmed.RECIPES)
def test_so_many_labels_are_turned_round(data: str) -> None:
    name, values = ("label", [0, 1]) if data == "frappe" else ("rating", [2, 4])
    train = pl.DataFrame({name: pl.Series(values * 2_000, dtype=pl.Int32)})
    assert confirmed.turned_round(train, noise=0.0, data=data).equals(train)
    noisy = confirmed.turned_round(train, noise=0.1, data=data)
    is_positive = (noisy[name] >= (1 if data == "frappe" else 4)).to_list()
    turned = sum(found != bool(row % 2) for row, found in enumerate(is_positive))
    assert 300 < turned < 500
    assert noisy.equals(confirmed.turned_round(train, noise=0.1, data=data))


def test_a_comparison_needs_all_of_its_runs_and_others_count_as_chance() -> None:
    metrics = {"auc": 0.7, "log_loss": 0.5, "ece": 0.01}
    found = {
        confirmed.Cell(data="frappe", noise=0.0, kind=kind, seed=seed): {
            name: value + (0.01 + 0.0001 * (seed % 3)) * (kind == confirmed.ON) for name, value in metrics.items()
        }
        for seed in confirmed.SEEDS
        for kind in (confirmed.OFF, confirmed.ON)
    }

    def compared() -> list[confirmed.Comparison]:
        pairs = [(confirmed.ON, confirmed.OFF)]
        return confirmed.comparisons(found, pairs=pairs, data=["frappe"], noises=(0.0, 0.1), num_pairs=5)

    assert [each.name for each in compared()] == [
        f"frappe_noise_0_smc2_beside_labels_{metric}" for metric in confirmed.METRICS
    ]
    lines = confirmed.table(compared(), num_tests=12).splitlines()
    alone = confirmed.table(compared(), num_tests=3).splitlines()
    p, of_three = (float(each[2].split("|")[-3]) for each in (lines, alone))
    assert (p + 5e-5) / max(of_three, 1e-9) > 3.0
    found.popitem()
    assert compared() == []


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="confirmed"):
        self_distil.run(options=self_distil.parse_options(["--parts", "gears"]))
