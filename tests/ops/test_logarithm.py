"""Logarithms that no processor changes: C++ for every instruction set and numpy give the same bits."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ziggurat.ops import logarithm


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    parts = [
        rng.random(20_000),
        rng.random(20_000) * 1000,
        np.exp(rng.random(20_000) * 88),
        np.exp(-rng.random(20_000) * 300),
        np.arange(5000.0),
        [0.0, 0.41421, 0.41421356237, 1.0, 3.4e38, 2.0**53, 5e-324, math.nan],
    ]
    return np.concatenate(parts)


def test_kernel_and_reference_have_the_same_bits() -> None:
    values = numbers()
    assert not logarithm.kernel_reason()
    same = np.testing.assert_array_equal
    same(logarithm.log1p(values).view(np.int64), logarithm.log1p_reference(values).view(np.int64))
    same(logarithm.log(1 + values).view(np.int64), logarithm.log_reference(1 + values).view(np.int64))


def test_the_error_is_below_one_unit_in_the_last_place() -> None:
    values = numbers()[:-1]
    exact = np.log1p(values.astype(np.longdouble))
    found = logarithm.log1p(values)
    assert np.all(np.abs(found - exact) <= np.spacing(np.maximum(found, 5e-324)))
    assert logarithm.log1p(np.array([math.e - 1]))[0] == pytest.approx(1.0, abs=2e-16)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3"])
def test_a_build_for_another_instruction_set_has_the_same_bits(level: str, tmp_path: Path) -> None:
    """Machines differ in FMA and in the width of vectors; a processor with AVX-512 runs these builds, too."""
    source, out = logarithm._SOURCE, tmp_path / "other.so"
    flags = ["-O3", "-std=c++17", "-fPIC", "-shared", *source.flags, f"-march={level}"]
    subprocess.run(["g++", *flags, str(source.path), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    logarithm._declare(library)
    values = numbers()
    found = logarithm._computed(library.ziggurat_log1p, values)
    np.testing.assert_array_equal(found.view(np.int64), logarithm.log1p(values).view(np.int64))
