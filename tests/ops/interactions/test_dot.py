"""The C++ pairwise dot products against the reference in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ziggurat.ops.interactions.dot as ops_dot
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.interactions.dot import dot_kernel, pair_places, pairwise_dot, pairwise_dot_reference, why_not

needs_kernel = pytest.mark.skipif(not dot_kernel().startswith("C++"), reason=dot_kernel())


def both(fields: Tensor) -> tuple[Tensor, Tensor]:
    """Kernel and reference."""
    places = pair_places(fields.shape[1])
    return pairwise_dot(fields, places=places), pairwise_dot_reference(fields, places=places)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(2, 40), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_equals_the_reference_and_so_does_its_gradient(size: int, num_fields: int, vectors: int, dtype) -> None:
    fields = torch.randn(size, num_fields, 8 * vectors, dtype=dtype, requires_grad=True)
    assert not why_not(fields)
    found, expected = both(fields)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4 if dtype is torch.float32 else 1e-12)
    gradient = torch.randn_like(expected)
    found, expected = (torch.autograd.grad(pairs, fields, gradient)[0] for pairs in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4 if dtype is torch.float32 else 1e-12)


@needs_kernel
@pytest.mark.parametrize("num_fields", [2, 5, 64])
def test_fp32_is_near_the_reference_in_fp64(num_fields: int) -> None:
    fields = torch.randn(3, num_fields, 16)
    places = pair_places(num_fields)
    exact = pairwise_dot_reference(fields.double(), places=places)
    torch.testing.assert_close(pairwise_dot(fields, places=places).double(), exact, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_gradients_equal_finite_differences_twice() -> None:
    fields = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    places = pair_places(5)
    assert not why_not(fields)
    assert torch.autograd.gradcheck(lambda x: pairwise_dot(x, places=places), (fields,))
    assert torch.autograd.gradgradcheck(lambda x: pairwise_dot(x, places=places), (fields,))


@needs_kernel
def test_is_a_sound_custom_op() -> None:
    fields = torch.randn(3, 5, 8, requires_grad=True)
    torch.library.opcheck(ops_dot._dot, (fields,))
    torch.library.opcheck(ops_dot._dot_backward, (fields, torch.randn(3, 10, requires_grad=True)))


@needs_kernel
def test_runs_inside_a_compiled_graph_in_one_piece() -> None:
    places = pair_places(5)
    compiled = torch.compile(
        lambda x: pairwise_dot(x * 2, places=places).square(), fullgraph=True, backend="aot_eager", dynamic=False
    )
    fields = torch.randn(3, 5, 8, requires_grad=True)
    found, expected = compiled(fields), pairwise_dot(fields * 2, places=places).square()
    torch.testing.assert_close(found, expected)
    found, expected = (torch.autograd.grad(result.sum(), fields)[0] for result in (found, expected))
    torch.testing.assert_close(found, expected)


@needs_kernel
def test_other_memory_layouts_and_any_number_of_threads_give_the_same() -> None:
    fields = torch.randn(9, 8, 7).permute(2, 0, 1)
    places = pair_places(9)
    expected = pairwise_dot(fields.contiguous(), places=places)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(pairwise_dot(fields, places=places), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (torch.zeros(2, 65, 8), "F <= 64"),
        (torch.zeros(2, 3, 136), "D <= 128"),
        (torch.zeros(2, 3, 12), "multiple of 8"),
        (torch.zeros(2, 3, 8, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(2, 3, 8, device="meta"), "meta"),
    ],
)
def test_what_it_does_not_serve_goes_to_the_reference(fields: Tensor, word: str) -> None:
    assert word in why_not(fields)
    assert pairwise_dot(fields, places=pair_places(fields.shape[1], device=fields.device)).dtype is fields.dtype


def test_without_a_compiler_the_reference_runs_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_dot, "_LIBRARY", CppLibrary.missing("no g++"))
    fields = torch.randn(2, 3, 8)
    found, expected = both(fields)
    assert torch.equal(found, expected)
    assert "slower" in dot_kernel()
    assert "no g++" in dot_kernel()
