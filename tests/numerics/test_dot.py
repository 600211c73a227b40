"""The dot-product unit: exact where 25 bits hold all, near where they do not, and clear about what it cannot take."""

from __future__ import annotations

import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.dot import dot

INTEGERS = ("mx9", "mx6", "mx4", "msfp12", "msfp16", "mxint8")


@pytest.mark.parametrize("name", INTEGERS)
def test_products_of_one_block_are_exact(name: str) -> None:
    format = BlockFormat.named(name)
    left, right = torch.randn(2, 50, format.k1)
    exact = (quantise(left, format, 1).double() * quantise(right, format, 1).double()).sum(dim=1)
    assert torch.equal(dot(left, right, format), exact.float())


@pytest.mark.parametrize("name", INTEGERS)
def test_long_products_are_near_the_exact_ones(name: str) -> None:
    format = BlockFormat.named(name)
    left, right = torch.randn(2, 20, 1000) * torch.randn(2, 20, 1).exp()
    q = [quantise(each, format, 1).double() for each in (left, right)]
    exact = (q[0] * q[1]).sum(dim=1)
    size = (q[0].abs() * q[1].abs()).sum(dim=1)
    assert bool(((dot(left, right, format).double() - exact).abs() <= 1e-6 * size).all())


def test_what_lies_below_the_fixed_point_is_cut_off() -> None:
    mx9 = BlockFormat.named("mx9")
    left = torch.zeros(64)
    left[0], left[16], left[32] = 1.0, 2.0**-10, -(2.0**-40)
    right = torch.ones(64)
    # 25 bits hold 2^-10 beside 1; of -2^-40 they hold one step below zero, as a shift leaves it.
    found = float(dot(left, right, mx9))
    assert 1 + 2.0**-10 - 2.0**-15 < found < 1 + 2.0**-10


def test_nan_and_shapes() -> None:
    mx9 = BlockFormat.named("mx9")
    left = torch.randn(2, 3, 70)
    left[1, 2, 69] = torch.nan
    found = dot(left, torch.randn(2, 3, 70), mx9)
    assert found.shape == (2, 3)
    assert found.isnan().nonzero().tolist() == [[1, 2]]


def test_what_the_unit_cannot_take() -> None:
    x = torch.randn(64)
    with pytest.raises(ConfigError, match="integers in blocks"):
        dot(x, x, BlockFormat.named("mxfp4"))
    with pytest.raises(ConfigError, match="unit=64"):
        dot(x, x, BlockFormat.named("mxint8"), unit=48)
