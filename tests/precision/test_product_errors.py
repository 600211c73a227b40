"""Errors of kernels on learned operands, against plain formulas; and what N(0, 1) operands hide."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ziggurat.numerics.probe import Direction, ProductStatistics
from ziggurat.precision.kernels import ProductKernel
from ziggurat.precision.product_errors import measure_errors, measure_speedups, relative_error

CPU = torch.device("cpu")
HERE = [kernel for kernel in ProductKernel if not kernel.available(CPU)]


def probed(rows: Tensor, weight: Tensor) -> ProductStatistics:
    shapes = (tuple(rows.shape), tuple(weight.shape))
    product = ProductStatistics.of("layer", rows, weight, weights=(False, True), shapes=shapes)
    product.update(rows, weight)
    product.update_gradient(torch.randn(len(rows), weight.shape[1]))
    return product


def test_error_is_the_mean_of_relative_errors() -> None:
    left, right = torch.randn(16, 32), torch.randn(32, 16)
    exact = left.double() @ right.double()
    rounded = left.bfloat16().double() @ right.bfloat16().double()
    wanted = float(((rounded.bfloat16().double() - exact) / exact).abs().mean())
    assert relative_error(ProductKernel("bf16"), left, right) == pytest.approx(wanted, rel=0.05)
    assert relative_error(ProductKernel.FP32, left, right) < 1e-4
    assert relative_error(ProductKernel.FP32, torch.full((2, 2), 1e30), torch.full((2, 2), 1e30)) == math.inf
    assert relative_error(ProductKernel.FP32, torch.zeros(2, 2), right[:2]) == 0


def plain_scaled(left: Tensor, right: Tensor, *, by_row: bool) -> Tensor:
    """E4M3 with scales, summed in FP64."""
    largest = (left.abs().amax(1, keepdim=True), right.abs().amax(0, keepdim=True))
    if not by_row:
        largest = (left.abs().max(), right.abs().max())
    of_left, of_right = (each / 448 for each in largest)
    product = (left / of_left).to(torch.float8_e4m3fn).double() @ (right / of_right).to(torch.float8_e4m3fn).double()
    return product * of_left * of_right


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_scaled_products_of_fp8_are_the_formula(name: str) -> None:
    kernel = ProductKernel(name)
    if lacks := kernel.available(CPU):
        pytest.skip(lacks)
    left, right = torch.randn(24, 64), torch.randn(64, 32)
    wanted = plain_scaled(left, right, by_row=name == "fp8_rowwise")
    torch.testing.assert_close(kernel.multiply(left, right).double(), wanted, rtol=1e-4, atol=1e-4)


def test_int8_product_is_the_formula() -> None:
    kernel = ProductKernel("int8")
    if lacks := kernel.available(CPU):
        pytest.skip(lacks)
    left, right = torch.randn(24, 64), torch.randn(64, 32)
    of_left, of_right = left.abs().amax(1, keepdim=True) / 127, right.abs().amax(0, keepdim=True) / 127
    wanted = (left / of_left).round().double() @ (right / of_right).round().double() * of_left * of_right
    torch.testing.assert_close(kernel.multiply(left, right).double(), wanted, rtol=1e-5, atol=1e-5)


def test_learned_distribution_shows_an_error_that_normal_operands_hide() -> None:
    generator = torch.Generator().manual_seed(0)
    # Features that are nearly one, and a weight whose columns sum to nearly zero: sums cancel.
    common = torch.randn(2000, 1, generator=generator)
    rows = common + 0.05 * torch.randn(2000, 64, generator=generator)
    weight = torch.randn(64, 16, generator=generator)
    weight -= weight.mean(dim=0)
    correlated = measure_errors(probed(rows, weight), Direction.FORWARD, HERE, device=CPU)
    # A few features that are 100,000 times as large as the rest, with weights as small: one scale holds neither. (E4M3
    # has 17 binades, so that 3,000 times cost real rows no more than N(0, 1): 0.17 to 0.32.)
    scales = torch.where(torch.arange(64) < 4, 1e5, 1.0)
    heavy = probed(torch.randn(2000, 64, generator=generator) * scales, weight / scales[:, None])
    with_outliers = measure_errors(heavy, Direction.FORWARD, HERE, device=CPU)
    for errors, name in ((correlated, "mx6"), (correlated, "bf16"), (with_outliers, "fp8_tensorwise")):
        assert errors[name].error > 2 * errors[name].normal_error, name
    # And of normal operands the probe shows what N(0, 1) does.
    normal = probed(torch.randn(2000, 64, generator=generator), torch.randn(64, 16, generator=generator))
    found = measure_errors(normal, Direction.FORWARD, HERE, device=CPU)["mx6"]
    assert 0.3 < found.error / found.normal_error < 3


def test_speedups_are_those_of_fast_kernels_that_take_the_shapes() -> None:
    found = measure_speedups(((64, 24), (24, 8)), HERE, device=CPU)
    assert found["fp32"] == pytest.approx(1.0)
    assert "mx9" not in found
    assert "fp8_rowwise" not in found  # 24 is no multiple of 16
    assert "int8" not in measure_speedups(((3, 64, 24), (24, 8)), HERE, device=CPU)
