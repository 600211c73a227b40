"""Dispatch takes the fastest kernel that is accurate enough, computes with it, and refuses a file of something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.numerics.probe import Direction, ProbeRecord, ProductStatistics
from ziggurat.precision import NATIVE
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import (
    Choice,
    DispatchedArithmetic,
    DispatchPlan,
    KernelMeasured,
    choose,
    plan_dispatch,
)
from ziggurat.precision.kernels import ProductKernel

CPU = torch.device("cpu")


def measured(**found: tuple[float, float]) -> dict[str, KernelMeasured]:
    return {name: KernelMeasured(error=error, speedup=speedup) for name, (error, speedup) in found.items()}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 2.0), int8=(0.1, 3.0)), "int8"),
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 2.0), int8=(0.2, 3.0)), "bf16"),
        (measured(fp32=(0.0, 1.0), bf16=(0.01, 1.05), int8=(math.inf, 0.0)), "fp32"),
        (measured(fp32=(0.0, 1.0)), "fp32"),
    ],
)
def test_fastest_safe_kernel_is_chosen(found: dict[str, KernelMeasured], wanted: str) -> None:
    assert choose(found).kernel == wanted


def plan(**kernels: str) -> DispatchPlan:
    choices = {Direction(each): Choice(kernel=kernel, reason="") for each, kernel in kernels.items()}
    return DispatchPlan(model="DNN", machine=machine_facts(CPU), choices={"layer": choices}, missing={})


def test_each_direction_computes_by_its_own_kernel() -> None:
    arithmetic = plan(forward="bf16", input_gradient="fp32", weight_gradient="mx4").arithmetic("layer")
    left, right = torch.randn(32, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    gradient = torch.randn(32, 8)
    product = arithmetic.matmul(left, right)
    product.backward(gradient)
    kernels = {name: ProductKernel.named(name).multiply for name in ("bf16", "fp32", "mx4")}
    assert product.equal(kernels["bf16"](left.detach(), right.detach()))
    assert left.grad is not None
    assert left.grad.equal(gradient @ right.detach().t())
    assert right.grad is not None
    assert right.grad.equal(kernels["mx4"](left.detach().t(), gradient))
    assert not right.grad.equal(left.detach().t() @ gradient)


def test_operands_of_one_kernel_are_converted_once_and_give_the_same_bits() -> None:
    arithmetic = plan(forward="bf16", input_gradient="bf16", weight_gradient="bf16").arithmetic("layer")
    left = torch.randn(3, 32, 16, requires_grad=True)
    weight = torch.randn(8, 16, requires_grad=True)
    gradient = torch.randn(3, 32, 8)
    product = arithmetic.matmul(left, weight.t())
    saved = product.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert {each.dtype for each in saved} == {torch.bfloat16}
    product.backward(gradient)
    multiply = ProductKernel.named("bf16").multiply
    rows = left.detach()
    right = weight.detach().t()
    assert product.equal(multiply(rows, right))
    assert left.grad is not None
    assert left.grad.dtype is torch.float32
    assert left.grad.equal(multiply(gradient, right.mT))
    assert weight.grad is not None
    assert weight.grad.equal(multiply(rows.mT, gradient).sum_to_size(right.shape).t())


def test_products_in_fp32_alone_stay_native_and_broadcast_gradients_are_summed() -> None:
    assert plan(forward="fp32", input_gradient="fp32", weight_gradient="fp32").arithmetic("layer") is NATIVE
    assert plan(forward="bf16").arithmetic("another") is NATIVE
    left, right = torch.randn(3, 5, 4), torch.randn(4, 2, requires_grad=True)
    DispatchedArithmetic({}).matmul(left, right).sum().backward()
    assert right.grad is not None
    torch.testing.assert_close(right.grad, left.sum(dim=(0, 1))[:, None].expand(4, 2))


def test_a_kernel_that_does_not_take_a_shape_gives_way_to_fp32_and_says_so_once() -> None:
    arithmetic = DispatchedArithmetic({Direction.FORWARD: ProductKernel.named("int8")}, module="top.layers.0")
    left = torch.randn(4, 7)
    right = torch.randn(7, 8)
    for _ in range(2):
        assert arithmetic.matmul(left, right).equal(left @ right)
    assert arithmetic.take_news() == [
        "dispatch: top.layers.0, forward: FP32 in place of int8, width 7 is no multiple of 8"
    ]
    assert not arithmetic.matmul(torch.randn(4, 8), torch.randn(8, 8)).isnan().any()
    assert not arithmetic.take_news()


def test_plan_measures_every_product_and_is_read_as_written(tmp_path: Path) -> None:
    record = ProbeRecord(model="DNN")
    for name in ("layer", "layer#2"):
        rows, weight = torch.randn(64, 16), torch.randn(16, 8)
        product = ProductStatistics.of(name, rows, weight, weights=(False, True), shapes=((64, 16), (16, 8)))
        product.update(rows, weight)
        product.update_gradient(torch.randn(64, 8))
        record.products[name] = product
    found = plan_dispatch(record, device=CPU)
    assert list(found.choices) == ["layer"]
    assert all("error" in choice.reason or "no kernel" in choice.reason for choice in found.choices["layer"].values())
    path = found.write(tmp_path / "dispatch.json")
    assert DispatchPlan.read(path, model="DNN", modules={"layer", "other"}, device=CPU) == found


def of_machine(**facts: str) -> Callable[[DispatchPlan], DispatchPlan]:
    return lambda plan: replace(plan, machine=plan.machine | facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, model="DLRM"), "a dispatch of DNN"),
        (lambda plan: replace(plan, choices={}), "nothing would be computed otherwise"),
        (lambda plan: replace(plan, choices={"tower": plan.choices["layer"]}), "tower"),
        (of_machine(machine="another"), "measured with machine"),
        (of_machine(torch="1.0"), "measured with torch"),
        (of_machine(ziggurat="0"), "measured with ziggurat"),
    ],
)
def test_file_of_something_else_is_refused_by_name(
    tmp_path: Path, change: Callable[[DispatchPlan], DispatchPlan], message: str
) -> None:
    path = change(plan(forward="bf16")).write(tmp_path / "dispatch.json")
    with pytest.raises(ConfigError, match=message):
        DispatchPlan.read(path, model="DNN", modules={"layer"}, device=CPU)
    with pytest.raises(MissingFileError):
        DispatchPlan.read(tmp_path / "none.json", model="DNN", modules={"layer"}, device=CPU)
