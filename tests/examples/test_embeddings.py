"""Embeddings from outside the package: features that are hidden, on one device and on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.extensions.hidden_features import HiddenFeatures
from tests.parallel.in_turn import in_turn
from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import take_samples
from ziggurat.features.jagged import FeatureGroup, JaggedRows
from ziggurat.models import Model
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, Towers
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep

HIDDEN = ("user", "genres")
GROUPS = (FeatureGroup(single=(0,), jagged=(0, 2)), FeatureGroup(jagged=(1,)))


def hiding(towers: Towers | None = None) -> Model:
    model = build(towers=towers, optimizer="rowwise_adagrad")
    model.embeddings = HiddenFeatures(model.embeddings, names=HIDDEN)
    return model


def padded(batch: Batch) -> Batch:
    """The batch with padding for the user and for its genres, made by hand."""
    values = batch.jagged.values.clone()
    values[: int(batch.jagged.offsets[batch.batch_size])] = 0
    single = torch.cat([torch.zeros_like(batch.single[:1]), batch.single[1:]])
    return replace(batch, single=single, jagged=JaggedRows(values, batch.jagged.offsets))


def trained(model: Model, batches: list[Batch]) -> tuple[list[float], dict[str, Any]]:
    step = TrainStep(model, TrainingConfig(table_learning_rate=0.1))
    losses = []
    for number, batch in enumerate(batches):
        upcoming = batches[number + 1] if number + 1 < len(batches) else None
        losses.append(step(batch, upcoming=upcoming).loss)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def test_one_device_trains_as_if_rows_were_padding() -> None:
    batches = [random_batch(inputs(), 16, seed=seed) for seed in range(4)]
    model = hiding()
    begin = model.embeddings.table("user").clone()
    losses, weights = trained(model, batches)
    wanted, others = trained(build(towers=None, optimizer="rowwise_adagrad"), [padded(batch) for batch in batches])
    assert losses == wanted
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert torch.equal(weights["embeddings.tables.user.weight"], begin)
    assert model.embeddings.facts() == {"hidden/genres": 4 * 16.0, "hidden/user": 4 * 16.0}


def test_the_guide_runs() -> None:
    guide = Path("docs/guides/extending.md").read_text()
    section = guide.split("## Embeddings\n")[1]
    exec(section.split("```python\n")[1].split("```")[0], {})


def test_unknown_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected features .*user.*, found \['price'\]"):
        HiddenFeatures(build(towers=None, optimizer="sgd").embeddings, names=("price",))


def check(rank: int, plan_json: Any, num_parts: int, repeats: bool) -> None:
    plan = from_json(Plan, plan_json, where="test")
    batch = take_samples(random_batch(inputs(), 12, seed=2), torch.arange(16) // 2 % 12)
    batch = deduplicate(batch, GROUPS) if repeats else batch
    found: list[Model] = []

    def model() -> Model:
        found.append(hiding(plan.towers))
        return found[-1]

    assert_same_as_single_device(
        model, plan, batch=batch, tolerance=Tolerance(fields=1e-6, others=2e-6), num_parts=num_parts
    )
    many = found[1]
    assert isinstance(many.embeddings, HiddenFeatures)
    assert many.embeddings.hidden["user"] > 0 or rank == plan.world_size - 1  # the last rank has no samples


def test_four_ranks_equal_one_device() -> None:
    cases = [
        (to_json(placed(4, Placement.ROW_WISE)), 1, True),
        (to_json(placed(4, Placement.COLUMN_WISE)), 2, False),
        (to_json(placed(4, Placement.TABLE_WISE, TOWERS, 2)), 2, False),
    ]
    run_ranks(in_turn, 4, check, cases)


def steps_on_ranks(rank: int, plan_json: Any) -> None:
    """The prioritised exchange knows again what was announced behind the object that hides."""
    batches = [random_batch(inputs(), 8, seed=10 * rank + number) for number in range(4)]
    found = []
    for exchange in (Exchange.PLAIN, Exchange.PRIORITISED):
        model = hiding()
        plan = from_json(Plan, plan_json, where="test")
        parallel = parallelize(model, plan, Topology.create(), config=ParallelConfig(exchange=exchange))
        step = TrainStep(model, TrainingConfig(table_learning_rate=0.1), parallel=parallel)
        losses = [step(batch, upcoming=after).loss for batch, after in zip(batches, [*batches[1:], None], strict=True)]
        step.settle()
        tables = parallel.spread.tables
        rows = [tables.part(shard).clone() for group in tables.mine.groups for shard in group.shards]
        found.append((losses, rows))
        if parallel.prioritised is not None:
            assert parallel.prioritised.counts.cells > 0
    (losses, rows), (others, other_rows) = found
    assert losses == others
    assert all(torch.equal(one, other) for one, other in zip(rows, other_rows, strict=True))


def test_the_exchange_ahead_gives_the_same_bits() -> None:
    run_ranks(steps_on_ranks, 4, to_json(placed(4, Placement.ROW_WISE)))
