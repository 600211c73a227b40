"""A precision from outside the package: what it rounds, in a run, on ranks, and equal to one device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parallel.in_turn import in_turn
from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.models.converted import take_precision
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import TABLE_WISE
from ziggurat.plan import Plan
from ziggurat.precision import Precision
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep


@pytest.fixture(scope="module")
def tf32() -> Iterator[Precision]:
    """The precision, listed while these tests run."""
    yield importlib.import_module("examples.extensions.tf32_anywhere").TF32_ANYWHERE
    del Precision._members["tf32_anywhere"]


def test_it_keeps_ten_bits_of_the_mantissa_and_rounds_ties_to_even(tf32: Precision) -> None:
    bit = 2.0**-10
    given = [
        1.0,
        1 + bit,
        1 + bit / 2,
        1 + 3 * bit / 2,
        1 + bit / 2 + 2**-23,
        -1 - 3 * bit / 2,
        1e-42,
        math.inf,
        -math.inf,
    ]
    wanted = [1.0, 1 + bit, 1.0, 1 + 2 * bit, 1 + bit, -1 - 2 * bit]
    found = tf32.arithmetic.rounded(torch.tensor(given), dim=-1).tolist()
    assert found[: len(wanted)] == wanted
    assert found[-2:] == [math.inf, -math.inf]
    assert math.isnan(tf32.arithmetic.rounded(torch.tensor([math.nan]), dim=-1).item())
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    error = (tf32.arithmetic.rounded(values, dim=-1) - values).abs() / values.abs()
    assert 2.0**-12 < error.max() <= 2.0**-11


def test_a_step_takes_it_by_name_and_says_so(tf32: Precision) -> None:
    del tf32
    batch = random_batch(inputs(), 64, seed=1)
    losses = {}
    for name in ("fp32", "tf32_anywhere"):
        config = from_json(TrainingConfig, {"precision": name}, where="test")
        assert to_json(config)["precision"] == name
        step = TrainStep(build(towers=None, optimizer="rowwise_adagrad"), config)
        losses[name] = [float(step(batch).loss) for _ in range(5)]
        assert step.products == ("" if name == "fp32" else "tf32_anywhere in 5 modules")
    assert losses["fp32"] != losses["tf32_anywhere"]
    for exact, rounded in zip(*losses.values(), strict=True):
        assert abs(exact - rounded) < 1e-3


def check_ranks(rank: int, plan_json: str, dense: str) -> None:
    """Runs on every rank, whose process has to import the precision."""
    tf32 = importlib.import_module("examples.extensions.tf32_anywhere").TF32_ANYWHERE
    plan = from_json(Plan, plan_json, where="test")

    def converted():
        model = build(towers=plan.towers, optimizer="rowwise_adagrad")
        assert take_precision(model, tf32)
        return model

    assert_same_as_single_device(
        converted,
        plan,
        batch=random_batch(inputs(), 13, seed=1),
        config=ParallelConfig(dense=DenseParallelism(dense)),
        # The last bit of a sum over ranks may move an operand of the second step to its neighbour, 2⁻¹⁰ away.
        tolerance=Tolerance(fields=1e-6, others=2e-4),
    )


def test_four_ranks_equal_one_device(tf32: Precision) -> None:
    del tf32
    plans = [to_json(placed(4, TABLE_WISE, None, 1)), to_json(placed(4, TABLE_WISE, TOWERS, 2))]
    run_ranks(in_turn, 4, check_ranks, [(plan, dense) for plan in plans for dense in ("ddp", "fsdp")])


def refuses(rank: int, plan_json: str) -> None:
    """Runs on every rank: a parallel model is too late to convert."""
    from ziggurat.parallel.parallelize import parallelize
    from ziggurat.parallel.topology import Topology

    tf32 = importlib.import_module("examples.extensions.tf32_anywhere").TF32_ANYWHERE
    model = build(towers=None, optimizer="rowwise_adagrad")
    parallel = parallelize(model, from_json(Plan, plan_json, where="test"), Topology.create())
    with pytest.raises(ConfigError, match="before it was made parallel") as refused:
        TrainStep(model, TrainingConfig(precision=tf32), parallel=parallel)
    first, second = list(refused.value.ways_out)
    assert "--" not in first + second  # a call of Python has no flags
    names: dict[str, Any] = {"model": build(towers=None, optimizer="rowwise_adagrad"), "TrainingConfig": TrainingConfig}
    exec(first.removeprefix("before parallelize: "), names)
    assert TrainStep(names["model"], TrainingConfig(precision=tf32)).products == "tf32_anywhere in 5 modules"
    exec(second.replace("; ", "; config = "), names)
    assert names["config"].precision is Precision.FP32


def test_a_parallel_model_is_refused(tf32: Precision) -> None:
    del tf32
    run_ranks(refuses, 2, to_json(placed(2, TABLE_WISE)))
