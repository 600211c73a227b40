"""The kernel's parts are the reference's, equal in number, and near to equal in sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.ops import karmarkar_karp as module
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.karmarkar_karp import karmarkar_karp, karmarkar_karp_reference

COSTS = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 7.0, 1e6, 3.3333]), max_size=40)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 9))
def test_kernel_equals_reference(costs: list[float], num_parts: int) -> None:
    """Few values: ties everywhere, and sums that round."""
    values = np.array(costs)
    parts = karmarkar_karp(values, num_parts=num_parts)
    np.testing.assert_array_equal(parts, karmarkar_karp_reference(values, num_parts=num_parts))
    counts = np.bincount(parts, minlength=num_parts)
    assert len(counts) == num_parts
    assert counts.max() - counts.min() <= 1


def test_example_of_the_text() -> None:
    parts = karmarkar_karp(np.array([9.0, 7, 6, 6, 5, 1]), num_parts=2)
    assert sorted(np.bincount(parts, weights=[9, 7, 6, 6, 5, 1])) == [16, 18]


def test_without_a_compiler_python_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert "no compiler" in module.karmarkar_karp_kernel()
    assert sorted(np.bincount(karmarkar_karp(np.array([3.0, 2, 2, 1]), num_parts=2), weights=[3, 2, 2, 1])) == [4, 4]
