"""Interactions of fields by Triton against their references; run by test_triton.py, in a process of its own.

TRITON_INTERPRET=1 python -m tests.ops.interactions.triton_cases cpu
python -m tests.ops.interactions.triton_cases cuda
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ziggurat.ops.interactions import cross
from ziggurat.ops.interactions.cross import cross_layers, cross_layers_reference
from ziggurat.ops.interactions.cross_triton import add_crossed, add_crossed_backward, why_not_triton
from ziggurat.ops.interactions.dot import pair_places
from ziggurat.ops.interactions.dot_interaction import DotShape, dot_interaction, dot_interaction_reference, why_not
from ziggurat.ops.interactions.dot_triton import DotLaunch, interaction_backward_triton, interaction_triton

DEVICE = torch.device("cpu")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def leaves(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [each.to(DEVICE, dtype).requires_grad_() for each, dtype in zip(drawn, dtypes, strict=True)]


def case_dots() -> None:
    """Against FP64 from equally rounded fields: value and gradients, in one rounding."""
    tried = 0
    for size, fields, dim, passed, padding in (
        (3, (1, 26), 16, 16, 1),
        (2, (1, 4), 64, 64, 0),
        (2, (5,), 96, 0, 3),
        (4, (1, 2, 3), 128, 128, 7),
        (3, (2, 1), 5, 3, 2),
        (1, (1,), 8, 8, 2),
        (2, (10, 30), 20, 0, 0),
        (0, (1, 3), 16, 16, 0),
    ):
        shape = DotShape(sum(fields), dim, passed=passed, padding=padding)
        for dtype, kinds in ((FP32, (FP32, FP32, FP32)), (BF16, (BF16, FP32, BF16)), (BF16, (FP32, BF16, FP32))):
            pieces = leaves([(size, count * dim) for count in fields], kinds[: len(fields)], seed=dim)
            places = pair_places(shape.num_fields, device=DEVICE)
            assert not why_not(pieces, shape=shape, dtype=dtype), why_not(pieces, shape=shape, dtype=dtype)
            row = dot_interaction(pieces, shape=shape, dtype=dtype, places=places)
            assert row.dtype is dtype
            exact = [piece.detach().to(dtype).double().requires_grad_() for piece in pieces]
            expected = dot_interaction_reference(exact, shape=shape, dtype=FP64, places=places)
            tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4} if dtype is FP32 else {"rtol": 2**-7, "atol": 4e-3}
            torch.testing.assert_close(row.double(), expected, **tolerance)
            upstream = leaves([(size, shape.width)], [dtype])[0].detach()
            wanted = torch.autograd.grad(expected, exact, upstream.double())
            for found, piece, each in zip(torch.autograd.grad(row, pieces, upstream), pieces, wanted, strict=True):
                assert found.dtype is piece.dtype
                bound: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if dtype is FP32 else {"rtol": 2**-6, "atol": 2e-2}
                torch.testing.assert_close(found.double(), each, **bound)
            tried += 1
    assert tried == 24


def case_dots_of_several_samples_a_program() -> None:
    """Every launch against FP64: samples that do not fill the last program, columns in chunks, fields of two pieces."""
    for size, fields, dim, passed in ((5, (1, 4), 32, 32), (4, (2, 2), 24, 40), (3, (4,), 16, 5)):
        shape = DotShape(sum(fields), dim, passed=passed, padding=3)
        places = pair_places(shape.num_fields, device=DEVICE)
        for dtype, tolerance in ((FP32, 1e-4), (BF16, 2**-5)):
            pieces = [
                each.detach()
                for each in leaves([(size, count * dim) for count in fields], [dtype] * len(fields), seed=dim)
            ]
            upstream = leaves([(size, shape.width)], [dtype])[0].detach()
            exact = [piece.double().requires_grad_() for piece in pieces]
            expected = dot_interaction_reference(exact, shape=shape, dtype=FP64, places=places)
            wanted = torch.autograd.grad(expected, exact, upstream.double())
            for samples, stages, chunk in ((2, 2, 16), (4, 3, 32)):
                launch = DotLaunch(samples=samples, warps=2, stages=stages, chunk=chunk)
                row = interaction_triton(pieces, shape=shape, dtype=dtype, launch=launch)
                torch.testing.assert_close(row.double(), expected.detach(), rtol=tolerance, atol=tolerance)
                found = interaction_backward_triton(pieces, shape=shape, gradient_BW=upstream, launch=launch)
                for mine, each in zip(found, wanted, strict=True):
                    torch.testing.assert_close(mine.double(), each, rtol=tolerance, atol=4 * tolerance)


def case_dots_of_equal_fields_and_strides() -> None:
    """All fields equal; pieces that are slices; the same bits on repeat."""
    wide = torch.ones(5, 7 * 32, device=DEVICE)
    pieces, shape, places = [wide[:, 32:64], wide[:, 96:]], DotShape(5, 32, passed=32), pair_places(5, device=DEVICE)
    row = dot_interaction(pieces, shape=shape, dtype=FP32, places=places)
    assert torch.equal(row[:, 32:], torch.full_like(row[:, 32:], 32.0))
    assert torch.equal(row, dot_interaction(pieces, shape=shape, dtype=FP32, places=places))


def case_dots_twice() -> None:
    """The second derivative goes through the reference."""
    pieces, shape = leaves([(2, 8), (2, 16)], [FP32, FP32]), DotShape(3, 8, passed=8, padding=2)
    places, found = pair_places(3, device=DEVICE), []
    for form in (dot_interaction, dot_interaction_reference):
        row = form(pieces, shape=shape, dtype=FP32, places=places)
        first = torch.autograd.grad(row.square().sum(), pieces, create_graph=True)
        found.append(torch.autograd.grad(torch.cat(first, dim=1).square().sum(), pieces))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-3)


def case_what_dots_do_not_serve() -> None:
    """Too many fields, and pieces that are no whole fields."""
    for fields, dim, widths in ((65, 8, (65 * 8,)), (4, 1032, (4 * 1032,)), (3, 8, (4, 20))):
        pieces = [torch.zeros(2, width, device=DEVICE) for width in widths]
        assert why_not(pieces, shape=DotShape(fields, dim), dtype=FP32)


def case_cross_pieces() -> None:
    """Each kernel alone against the equations, for sizes beside those of tiles, skewed, equal and empty."""
    for size, dim in ((1, 1), (3, 5), (300, 130), (257, 128), (0, 7), (512, 3)):
        for dtype in (FP32, BF16, FP16):
            x, x0, g, first = (each.detach() for each in leaves([(size, dim)] * 4, [FP32] * 4, seed=size))
            f = leaves([(size, dim)], [dtype], seed=9)[0].detach()
            out, cast = add_crossed(x, x0, f, needs_cast=True)
            torch.testing.assert_close(out, x + x0 * f.float(), rtol=1e-6, atol=1e-6)
            assert torch.equal(cast, out.to(dtype))
            assert add_crossed(x, x0, f, needs_cast=False)[1] is not cast
            for before in (None, first):
                kept = None if before is None else before.clone()
                of_factor, found, of_bias = add_crossed_backward(g, x0, f, first_Bd=kept)
                assert torch.equal(of_factor, (g * x0).to(dtype))
                assert before is None or found is kept
                start = 0.0 if before is None else before
                torch.testing.assert_close(found, g * f.float() + start, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(of_bias, of_factor.float().sum(0), rtol=1e-5, atol=1e-4)
                again = add_crossed_backward(g, x0, f, first_Bd=None if before is None else before.clone())
                assert torch.equal(again[2], of_bias)


def case_cross_layers() -> None:
    """Three layers, of full and low rank, with and without autocast: value and every gradient."""
    for rank, dtype in ((0, FP32), (4, FP32), (0, BF16), (4, BF16)):
        size, dim, layers = 40, 33, 3
        inputs = leaves([(size, dim)], [FP32])[0]
        downs = leaves([(rank, dim)] * layers, [FP32] * layers, seed=1) if rank else []
        ups = leaves([(dim, rank or dim)] * layers, [FP32] * layers, seed=2)
        biases = leaves([(dim,)] * layers, [FP32] * layers, seed=3)
        weights = [each.detach().mul_(0.2).requires_grad_() for each in (*downs, *ups)]
        downs, ups = weights[: len(downs)], weights[len(downs) :]
        assert not why_not_triton(inputs, dtype), why_not_triton(inputs, dtype)
        upstream, found = torch.randn(size, dim, device=DEVICE), []
        for function in (cross_layers, cross_layers_reference):
            with torch.autocast(DEVICE.type, dtype=BF16, enabled=dtype is BF16):
                crossed = function(inputs, downs=downs, ups=ups, biases=biases)
            every = [inputs, *downs, *ups, *biases]
            found.append([crossed, *torch.autograd.grad(crossed, every, upstream)])
        for mine, wanted in zip(*found, strict=True):
            assert mine.dtype is FP32
            scale = float(wanted.detach().abs().max())
            bound: dict[str, Any] = (
                {"rtol": 1e-4, "atol": 1e-4 * scale} if dtype is FP32 else {"rtol": 2**-6, "atol": 0.02 * scale}
            )
            torch.testing.assert_close(mine, wanted, **bound)


def case_cross_stays_with_torch() -> None:
    """FP64, which gradients are checked in."""
    assert "float64" in why_not_triton(torch.zeros(2, 2, dtype=FP64), FP64)
    assert cross.why_not_triton is why_not_triton


def main(device: str, *names: str) -> None:
    """Run all cases, or some."""
    global DEVICE
    DEVICE = torch.device(device)
    for name, case in list(globals().items()):
        if name.startswith("case_") and (not names or name in names):
            case()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
