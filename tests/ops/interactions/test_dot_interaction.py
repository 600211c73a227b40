"""DLRM's interaction in one kernel against the same by torch operations, and against FP64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ziggurat.ops.interactions.dot_interaction as ops
from ziggurat.ops.interactions.dot import dot_kernel, pair_places
from ziggurat.ops.interactions.dot_interaction import DotShape, dot_interaction, dot_interaction_reference, why_not

needs_kernel = pytest.mark.skipif(not dot_kernel().startswith("C++"), reason=dot_kernel())
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def drawn(size: int, widths: list[int], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Pieces of B samples."""
    return [torch.randn(size, width).to(dtype) for width, dtype in zip(widths, dtypes, strict=True)]


def gradients(row: Tensor, pieces: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(row, pieces, upstream.to(row.dtype), retain_graph=True))


def in_fp64(pieces: list[Tensor], shape: DotShape, dtype: torch.dtype, upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The row and the gradients in FP64, from fields rounded as a cast to `dtype` rounds them."""
    exact = [piece.detach().to(dtype).double().requires_grad_() for piece in pieces]
    places = pair_places(shape.num_fields)
    row = dot_interaction_reference(exact, shape=shape, dtype=FP64, places=places)
    return row.detach(), gradients(row, exact, upstream.to(dtype).double())


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 5),
    fields=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    eights=st.integers(1, 9),
    kinds=st.lists(st.sampled_from([FP32, BF16]), min_size=4, max_size=4),
    dtype=st.sampled_from([FP32, BF16]),
    passes=st.booleans(),
    padding=st.integers(0, 7),
)
def test_equals_fp64_up_to_one_rounding(size, fields, eights, kinds, dtype, passes, padding) -> None:
    dim = 8 * eights
    pieces = [piece.requires_grad_() for piece in drawn(size, [dim * n for n in fields], kinds[: len(fields)])]
    shape = DotShape(sum(fields), dim, passed=dim if passes else 0, padding=padding)
    assert not why_not(pieces, shape=shape, dtype=dtype)
    row = dot_interaction(pieces, shape=shape, dtype=dtype, places=pair_places(shape.num_fields))
    assert row.shape == (size, shape.width)
    assert row.dtype is dtype
    upstream = torch.randn(size, shape.width)
    expected_row, expected = in_fp64(pieces, shape, dtype, upstream)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype is FP32 else {"rtol": 2**-7, "atol": 2e-3}
    torch.testing.assert_close(row.double(), expected_row, **tolerance)
    for found, piece, wanted in zip(gradients(row, pieces, upstream), pieces, expected, strict=True):
        assert found.dtype is piece.dtype
        rounded = {"rtol": 2**-7, "atol": 2e-3} if piece.dtype is BF16 else {"rtol": 1e-5, "atol": 3e-4}
        torch.testing.assert_close(found.double(), wanted, **rounded)


@needs_kernel
def test_equals_the_reference_bit_for_bit_in_fp32() -> None:
    pieces = drawn(7, [16, 26 * 16], [FP32, FP32])
    shape, places = DotShape(27, 16, passed=16, padding=1), pair_places(27)
    arguments = {"shape": shape, "dtype": FP32, "places": places}
    assert torch.equal(dot_interaction(pieces, **arguments), dot_interaction_reference(pieces, **arguments))


@needs_kernel
def test_reads_pieces_where_they_lie_with_any_number_of_threads() -> None:
    wide = torch.randn(70, 5 * 16)
    apart = [wide[:, :16], wide[:, 32:64], torch.randn(16, 70).t()]
    shape, places = DotShape(4, 16, passed=16), pair_places(4)
    before, rows = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for pieces in (apart, [piece.contiguous() for piece in apart]):
                rows.append(dot_interaction(pieces, shape=shape, dtype=BF16, places=places))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(row, rows[0]) for row in rows)


@needs_kernel
def test_what_it_does_not_serve_goes_by_the_reference_and_says_why() -> None:
    for dim, dtype in ((16, FP64), (12, FP32), (16, torch.float16)):
        pieces = drawn(3, [dim, 2 * dim], [dtype if dtype is FP64 else FP32] * 2)
        shape = DotShape(3, dim)
        assert why_not(pieces, shape=shape, dtype=dtype)
        row = dot_interaction(pieces, shape=shape, dtype=dtype, places=pair_places(3))
        fields = torch.cat(pieces, dim=1).unflatten(1, (3, dim))
        expected = torch.stack([(fields[:, i] * fields[:, j]).sum(1) for i, j in ((0, 1), (0, 2), (1, 2))], dim=1)
        torch.testing.assert_close(row.double(), expected.double(), rtol=1e-2, atol=2e-2)


@needs_kernel
def test_can_be_differentiated_twice() -> None:
    pieces = [piece.requires_grad_() for piece in drawn(2, [8, 16], [FP32, FP32])]
    shape, places = DotShape(3, 8, passed=8, padding=2), pair_places(3)
    found = []
    for form in (dot_interaction, dot_interaction_reference):
        row = form(pieces, shape=shape, dtype=FP32, places=places)
        first = torch.autograd.grad(row.square().sum(), pieces, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), pieces))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-3)


@needs_kernel
def test_is_a_sound_custom_op_and_stays_one_piece_of_a_compiled_graph() -> None:
    pieces = [piece.requires_grad_() for piece in drawn(3, [8, 32], [FP32, FP32])]
    shape, places = DotShape(5, 8, passed=8, padding=5), pair_places(5)
    torch.library.opcheck(ops._interaction, (pieces, list(shape), FP32))
    torch.library.opcheck(ops._interaction_backward, (pieces, list(shape), torch.randn(3, shape.width)))
    compiled = torch.compile(
        lambda *parts: dot_interaction([part * 2 for part in parts], shape=shape, dtype=BF16, places=places),
        fullgraph=True,
        backend="aot_eager",
        dynamic=False,
    )
    found = compiled(*pieces)
    expected = dot_interaction([piece * 2 for piece in pieces], shape=shape, dtype=BF16, places=places)
    assert torch.equal(found, expected)
    upstream = torch.randn_like(found)
    for mine, plain in zip(*(gradients(each, pieces, upstream) for each in (found, expected)), strict=True):
        torch.testing.assert_close(mine, plain)
