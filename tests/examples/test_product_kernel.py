"""A product kernel from outside the package: its numbers, dispatch by it, and what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.precision.test_dispatch import plan
from ziggurat.errors import ConfigError
from ziggurat.numerics.probe import Direction
from ziggurat.precision.dispatch import DispatchedArithmetic, DispatchPlan
from ziggurat.precision.kernels import ProductKernel


@pytest.fixture(scope="module")
def scaled_half() -> Iterator[ProductKernel]:
    """The kernel, listed while these tests run."""
    yield importlib.import_module("examples.extensions.scaled_half").SCALED_HALF
    del ProductKernel._members["scaled_half"]


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_it_is_nearer_than_bf16_at_any_size(size: float, scaled_half: ProductKernel) -> None:
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(2, 5, 64, generator=draw) * size
    right = torch.randn(64, 7, generator=draw)
    exact = left.double() @ right.double()
    errors = {
        kernel.name: float((kernel.multiply(left, right) - exact).norm() / exact.norm())
        for kernel in (scaled_half, ProductKernel.named("bf16"))
    }
    assert errors["scaled_half"] < 2.0**-11 < errors["bf16"]
    assert bool(torch.isinf(scaled_half.multiply(torch.full((1, 8), torch.inf), torch.ones(8, 1))).all())
    tiny = torch.full((1, 8), 1e-44)
    torch.testing.assert_close(scaled_half.multiply(tiny, torch.ones(8, 1)), tiny.sum(dim=1, keepdim=True))
    assert not bool(scaled_half.multiply(torch.zeros(2, 8), right[:8]).any())


def test_dispatch_computes_by_it_and_leaves_it_where_it_refuses(scaled_half: ProductKernel) -> None:
    arithmetic = DispatchedArithmetic({Direction.FORWARD: scaled_half}, module="top")
    left = torch.randn(3, 16)
    right = torch.randn(16, 4)
    assert torch.equal(arithmetic.matmul(left, right), scaled_half.multiply(left, right))
    left = torch.randn(3, 8200)
    right = torch.randn(8200, 4)
    assert torch.equal(arithmetic.matmul(left, right), left @ right)


def test_a_file_that_names_it_is_refused_until_it_is_listed(tmp_path: Path, scaled_half: ProductKernel) -> None:
    path = plan(forward="scaled_half").write(tmp_path / "dispatch.json")
    del ProductKernel._members["scaled_half"]
    try:
        with pytest.raises(ConfigError) as refused:
            DispatchPlan.read(path, model="DNN", shapes={"layer": {}}, device=torch.device("cpu"))
    finally:
        ProductKernel.add(scaled_half)  # what --extension does
    assert "scaled_half" in refused.value.found
    assert "--extension MODULE" in refused.value.ways_out[0]
    read = DispatchPlan.read(path, model="DNN", shapes={"layer": {}}, device=torch.device("cpu"))
    assert read.choices == plan(forward="scaled_half").choices


class Kernel(ProductKernel):
    name = "mine"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left.float(), right.float())


class OtherShape(Kernel):
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return super().multiply(left, right).mT


class OtherDtype(Kernel):
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left.double(), right.double())


class ChangesOperands(Kernel):
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right.mul_(2)) / 2


class FarAway(Kernel):
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return super().multiply(left.flip(-1), right)


class PreparesSomethingElse(Kernel):
    def prepared(self, operand: Tensor) -> Tensor:
        return operand.bfloat16()


class Fails(Kernel):
    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        raise RuntimeError("no such instruction")


class SaysTrue(Kernel):
    def available(self, device: torch.device) -> str:
        return True  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (OtherShape, "(48, 32)"),
        (OtherDtype, "torch.float64"),
        (ChangesOperands, "changed in place"),
        (FarAway, "an error of 1."),
        (PreparesSomethingElse, "another one"),
        (Fails, "no such instruction"),
        (SaysTrue, "True"),
    ],
)
def test_a_kernel_that_breaks_a_promise_is_refused_when_it_is_listed(kernel: type[Kernel], found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProductKernel.add(kernel())
    assert found in refused.value.found
    assert "mine" not in {each.name for each in ProductKernel}
    kernel.multiply, kernel.prepared, kernel.available = Kernel.multiply, Kernel.prepared, Kernel.available
    try:  # the way out: correct it
        assert ProductKernel.add(kernel()).name == "mine"
    finally:
        del ProductKernel._members["mine"]
