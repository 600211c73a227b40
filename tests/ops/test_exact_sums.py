"""Exact sums: those of fractions, whatever the order and the parts; C++ and numpy alike."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ziggurat.ops.exact_sums import ExactSums, exact_sums, exact_sums_reference


def hard_numbers(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 500))
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-119, 38, size)
    values[: size // 4] = 0.0
    values[size // 4 : size // 2] = rng.integers(-9, 9, size // 2 - size // 4)
    if size:
        values[0], values[-1] = 5e-324, -1e-310
    return values


@pytest.mark.parametrize("seed", range(8))
def test_sums_are_those_of_fractions(seed):
    values = hard_numbers(seed)
    found = exact_sums(values)
    assert found == exact_sums_reference(values)
    assert found.count == len(values)
    assert Fraction(found.total, 1 << 1200) == sum(map(Fraction, values.tolist()), Fraction(0))
    squares = (Fraction(value) ** 2 for value in values.tolist() if abs(value) >= 2.0**-400)
    assert Fraction(found.squares, 1 << 1200) == sum(squares, Fraction(0))


@pytest.mark.parametrize("seed", range(4))
def test_order_and_parts_change_nothing(seed):
    values = hard_numbers(seed)
    order = np.random.default_rng(seed).permutation(len(values))
    cut = len(values) // 3
    assert exact_sums(values[order[:cut]]) + exact_sums(values[order[cut:]]) == exact_sums(values)


def test_mean_and_deviation():
    values = np.log1p(np.arange(1000.0))
    found = exact_sums(values)
    assert found.mean == pytest.approx(values.mean(), rel=1e-15)
    assert found.deviation == pytest.approx(values.std(), rel=1e-13)
    assert (ExactSums().mean, ExactSums().deviation) == (0.0, 0.0)
    assert exact_sums(np.full(77, 0.1)).deviation == 0.0
