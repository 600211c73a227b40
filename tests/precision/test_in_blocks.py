"""Precisions of few bits: products by hand, one device and ranks, compiled, resumed, and what a format cannot hold."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from tests.training.rank_runs import Case, stored, trainer_of
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.models.converted import take_precision
from ziggurat.numerics import BlockFormat, quantise_reference
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import TABLE_WISE
from ziggurat.plan import Plan
from ziggurat.precision import InBlocks, Linear, Precision
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep

NAMES = [precision.name for precision in Precision if isinstance(precision, InBlocks)]


def product(left: Tensor, right: Tensor, format: BlockFormat) -> Tensor:
    """A product of matrices whose operands are rounded along the dim that it sums over."""
    return quantise_reference(left, format, 1) @ quantise_reference(right, format, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_two_layers_is_six_products_by_hand(name: str) -> None:
    """Three products a layer, each rounded along its own sum; written out without autograd.

    Sums of a few integers are exact in FP32, whatever their order; those of other formats differ in their last bits.
    """
    arithmetic = Precision(name).arithmetic
    assert arithmetic is not None
    format = arithmetic.format
    generator = torch.Generator().manual_seed(1)
    x, first, second, up = (torch.randn(shape, generator=generator) for shape in ((37, 40), (24, 40), (5, 24), (37, 5)))
    layers = [Linear(40, 24, bias=False), Linear(24, 5, bias=False)]
    for layer, weight in zip(layers, (first, second), strict=True):
        layer.arithmetic = arithmetic
        layer.weight = nn.Parameter(weight.clone())
    given = x.clone().requires_grad_()
    hidden = layers[0](given)
    hidden.retain_grad()
    found = layers[1](hidden.relu())
    found.backward(up)

    limit = 0.0 if name.startswith(("mx9", "mx6", "mx4")) else 2e-6
    active = hidden.detach().relu()
    down = hidden.grad
    for ours, by_hand in (
        (hidden, product(x, first.T, format)),
        (found, product(active, second.T, format)),
        (layers[1].weight.grad, product(active.T, up, format).T),
        (down, product(up, second, format) * (active > 0)),
        (layers[0].weight.grad, product(x.T, down, format).T),
        (given.grad, product(down, first, format)),
    ):
        torch.testing.assert_close(ours, by_hand, rtol=limit, atol=limit * float(by_hand.abs().max()))


def test_a_weight_is_rounded_anew_for_the_other_direction() -> None:
    """Rounding does not commute with transposing: what a block shares depends on which numbers lie in it."""
    format = BlockFormat.named("mx4")
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    forward, backward = quantise_reference(weight, format, 1), quantise_reference(weight, format, 0)
    assert not torch.equal(forward, backward)
    layer = Linear(64, 64, bias=False)
    layer.arithmetic = Precision("mx4").arithmetic
    layer.weight = nn.Parameter(weight)
    x = torch.eye(64, requires_grad=True)  # exact in the format: products with it show the rounded weights
    y = layer(x)
    y.backward(torch.eye(64))
    assert torch.equal(y, forward.T)
    assert torch.equal(x.grad, backward)


@pytest.mark.parametrize("name", ["mx9", "fp8_rowwise", "fp8_tensorwise"])
def test_batched_products_are_those_of_one_matrix_after_the_other(name: str) -> None:
    """Also with a matrix that is broadcast, whose gradient is a sum; one scale for a tensor is one for the batch."""
    arithmetic = Precision(name).arithmetic
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(3, 4, 17, generator=generator, requires_grad=True)
    right = torch.randn(17, 6, generator=generator, requires_grad=True)
    up = torch.randn(3, 4, 6, generator=generator)
    found = arithmetic.matmul(left, right)
    found.backward(up)
    if name != "fp8_tensorwise":
        for index in range(3):
            torch.testing.assert_close(found[index], arithmetic.matmul(left[index], right), rtol=1e-6, atol=1e-6)
    exact = (torch.einsum("bmk,bmn->kn", left.detach(), up), torch.einsum("bmn,kn->bmk", up, right.detach()))
    for grad, wanted in zip((right.grad, left.grad), exact, strict=True):
        assert 0 < (grad - wanted).norm() / wanted.norm() < (0.01 if name == "mx9" else 0.08)


def test_torch_compile_has_the_bits_of_eager_products_in_one_graph() -> None:
    layer = Linear(40, 8)
    layer.arithmetic = Precision("mx6").arithmetic
    torch._dynamo.reset()
    compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(4))
    results = []
    for forward in (layer.forward, compiled):
        layer.zero_grad()
        y = forward(x)
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_fewer_bits_are_further_from_fp32_and_all_train() -> None:
    batch = random_batch(inputs(), 64, seed=1)
    losses: dict[str, list[float]] = {}
    for name in ("fp32", "mx9", "mx6", "mx4"):
        config = from_json(TrainingConfig, {"precision": name}, where="test")
        assert to_json(config)["precision"] == name
        step = TrainStep(build(towers=None, optimizer="rowwise_adagrad"), config)
        losses[name] = [float(step(batch).loss) for _ in range(5)]
        assert losses[name][-1] < losses[name][0]
    distances = [abs(losses[name][0] - losses["fp32"][0]) for name in ("mx9", "mx6", "mx4")]
    assert 0 < distances[0] < distances[1] < distances[2]


def test_an_infinite_activation_is_named_and_changes_no_weight() -> None:
    model = build(towers=None, optimizer="rowwise_adagrad")
    step = TrainStep(model, TrainingConfig(precision=Precision("mx9")))
    batch = random_batch(inputs(), 8, seed=1)
    step(batch)
    before = copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()})
    batch.dense[3, 0] = torch.inf
    result = step(batch).read()
    assert not result.finite
    place = r"an operand \(8, \d+\) of a product of dense_inputs\.bottom\.layers\.0 in mx9, inf at \[3, 0\] .*"
    assert re.fullmatch(place, result.first_bad), result.first_bad
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_copy_of_a_model_computes_as_the_model_does() -> None:
    model = build(towers=None, optimizer="sgd")
    precision = Precision("mx6")
    take_precision(model, precision)
    assert "mx6 in 5 modules" in take_precision(copy.deepcopy(model), precision, is_parallel=True)


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    settings = {"precision": Precision("mx6"), "checkpoint_every": 2}
    trainer_of(Case(dropout=0.1), tmp_path / "whole", world_size=1, **settings).fit()
    trainer_of(Case(dropout=0.1), tmp_path / "cut", world_size=1, max_steps=4, **settings).fit()
    trainer_of(Case(dropout=0.1), tmp_path / "cut", world_size=1, **settings).fit(resume=True)
    whole, cut = stored(tmp_path / "whole"), stored(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)


def check_ranks(rank: int, plan_json: str, dense: str, name: str) -> None:
    """Runs on every rank."""
    plan = from_json(Plan, plan_json, where="test")

    def converted():
        model = build(towers=plan.towers, optimizer="rowwise_adagrad")
        assert take_precision(model, Precision(name))
        return model

    assert_same_as_single_device(
        converted,
        plan,
        batch=random_batch(inputs(), 13, seed=1),
        config=ParallelConfig(dense=DenseParallelism(dense)),
        # Ranks round parts of a batch in blocks of their own where a product sums over samples: gradients of weights
        # differ by a step of the format, 2⁻⁷ of the largest of a block.
        tolerance=Tolerance(fields=2e-3, others=2e-2),
    )


@pytest.mark.parametrize(("dense", "has_towers"), [("ddp", False), ("fsdp", True)])
def test_four_ranks_equal_one_device_up_to_the_format(dense: str, has_towers: bool) -> None:
    plan = placed(4, TABLE_WISE, TOWERS if has_towers else None, 2 if has_towers else 1)
    run_ranks(check_ranks, 4, to_json(plan), dense, "mx9")


def test_a_format_from_outside_is_one_more_line() -> None:
    format = BlockFormat.add(BlockFormat(name="int5_of_32", element=BlockFormat.named("msfp14").element, k1=32, d1=8))
    mine = Precision.add(InBlocks(format))
    try:
        step = TrainStep(
            build(towers=None, optimizer="sgd"), from_json(TrainingConfig, {"precision": "int5_of_32"}, where="test")
        )
        assert step.products == "int5_of_32 in 5 modules"
        assert step(random_batch(inputs(), 8, seed=1)).finite
        with pytest.raises(ConfigError, match="int5_of_32"):
            Precision.add(InBlocks(BlockFormat.named("mx9"), name="int5_of_32"))
    finally:
        del Precision._members[mine.name]
        del BlockFormat._listed[format.name]
