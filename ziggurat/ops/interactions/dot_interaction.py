"""DLRM's interaction as one operation: from fields that lie apart to the input row of the network above.

    z (B, D) ────────┐                                          columns   D     P = F(F−1)/2    zeros
    pooled (B, F'·D) ┴──► fields x_0 … x_{F−1} ──► ⟨x_i, x_j⟩  ──────►  [ z │ pairs i < j │ alignment ]

*Reference.* Cast to the dtype of autocast, concatenate, `pairwise_dot`, concatenate. At D = 64 and batch 2048 that is
seven trips through matrices of 7 to 14 MiB for 0.2 GFLOP of products.

*Kernel.* `csrc/dot.cpp` reads a sample's fields where they lie, in FP32 or BF16, rounds them to the dtype of the result
as a cast would, multiplies, sums in FP32 and rounds once, when it writes. Processors with products of BF16 pairs
(AVX512_BF16) use them; others compute the same in FP32. Backward, the gradient of an FP32 field is written without
a rounding that the reference's product in BF16 makes.

The kernel serves FP32 and BF16 on the CPU for F ≤ 64 and D ≤ 128 a multiple of 8. On CUDA devices Triton does the same
where it can be imported (`interactions/dot_triton.py`). Everything else is the reference's.
One thread of a Zen 4, F = 27, batch 2048, forward and backward, in ms:

    D     FP32: reference, kernel     BF16: reference, kernel
    16            4.5,     3.3                4.9,     1.5
    64           16.6,    12.2               15.0,     6.1

Cost: 2·F²·D FLOPs a sample backward, half of that forward; every number is read or written once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.interactions.dot import DotShape, PairPlaces, dot_library, pair_places, pairwise_dot, why_not_shape
from ziggurat.ops.interactions.dot_triton import (
    DOT_KERNELS,
    interaction_backward_triton,
    interaction_triton,
    why_not_triton,
)
from ziggurat.ops.kernel_choice import constant_when_compiled, is_interpreted
from ziggurat.ops.machine.measured_choice import Answer, fastest, timed_size

_SERVED = (torch.float32, torch.bfloat16)


def dot_interaction_reference(
    pieces: Sequence[Float[Tensor, "B X"]], *, shape: DotShape, dtype: torch.dtype, places: PairPlaces
) -> Float[Tensor, "B W"]:
    """`[passed | pairs | zeros]` by torch operations and `pairwise_dot`, any device and dtype."""
    flat_BX = torch.cat([piece.to(dtype) for piece in pieces], dim=1)
    parts = [flat_BX[:, : shape.passed]]
    if shape.num_fields > 1:
        parts.append(pairwise_dot(flat_BX.unflatten(1, (shape.num_fields, shape.dim)), places=places))
    return torch.cat([*parts, flat_BX.new_zeros(flat_BX.shape[0], shape.padding)], dim=1)


def dot_interaction(
    pieces: Sequence[Float[Tensor, "B X"]], *, shape: DotShape, dtype: torch.dtype, places: PairPlaces
) -> Float[Tensor, "B W"]:
    """`dot_interaction_reference` by the fastest implementation that serves these pieces.

    Args:
        pieces: fields side by side, F·D columns together; the first has at least `passed` columns.
        shape: F, D and what goes beside the pairs.
        dtype: of the result.
        places: of F fields, on the device of the pieces (for the reference).
    """
    if why_not(pieces, shape=shape, dtype=dtype) or _is_torch_faster(pieces, shape=shape, dtype=dtype):
        return dot_interaction_reference(pieces, shape=shape, dtype=dtype, places=places)
    return _interaction(list(pieces), list(shape), dtype)


def why_not(pieces: Sequence[Tensor], *, shape: DotShape, dtype: torch.dtype) -> str:
    """The reason why the kernel does not serve these pieces; "" if it does."""
    wrong = [each for each in (dtype, *(piece.dtype for piece in pieces)) if each not in _SERVED]
    if wrong:
        return f"it is for FP32 and BF16, not {wrong[0]}"
    if _is_for_triton(pieces):
        return why_not_triton(pieces, num_fields=shape.num_fields, dim=shape.dim)
    return why_not_shape(shape.num_fields, shape.dim, dtype=torch.float32)


def _is_for_triton(pieces: Sequence[Tensor]) -> bool:
    # One piece on a GPU is enough: the kernel then says what is wrong with the others.
    return is_interpreted() or any(piece.device.type != "cpu" for piece in pieces)


def _is_torch_faster(pieces: Sequence[Tensor], *, shape: DotShape, dtype: torch.dtype) -> bool:
    """Return whether torch's operations were faster when both were timed on this GPU; False elsewhere."""
    if pieces[0].device.type != "cuda" or is_interpreted():
        return False
    # Plain values: torch.compile takes the answer to them for a constant.
    described = tuple((piece.shape[1], piece.dtype) for piece in pieces)
    size = timed_size(pieces[0].shape[0])
    return measured_form(described, tuple(shape), dtype, size, pieces[0].device).name != "triton"


@constant_when_compiled
def measured_form(
    pieces: tuple[tuple[int, torch.dtype], ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    size: int,
    device: torch.device,
) -> Answer:
    """Time the kernel and torch's operations, forward and backward; torch.compile asks once and does not look inside.

    Args:
        pieces: columns and dtype of each.
        shape: a `DotShape`.
        dtype: of the result.
        size: samples.
        device: a GPU.
    """
    described = DotShape(*shape)

    def contestant(form: Callable[[list[Tensor]], Tensor]) -> Callable[[], object]:
        def run() -> object:
            leaves, upstream = scratch()
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                return torch.autograd.grad(form(leaves), leaves, upstream)

        return run

    @functools.cache
    def scratch() -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(size, width, generator=draw, device=device) for width, _ in pieces]
        leaves = [each.to(of).requires_grad_() for each, (_, of) in zip(drawn, pieces, strict=True)]
        return leaves, torch.randn(size, described.width, generator=draw, device=device).to(dtype)

    @functools.cache
    def places() -> PairPlaces:
        return pair_places(described.num_fields, device=device)

    def by_triton(leaves: list[Tensor]) -> Tensor:
        return _interaction(leaves, list(shape), dtype)

    def by_torch(leaves: list[Tensor]) -> Tensor:
        return dot_interaction_reference(leaves, shape=described, dtype=dtype, places=places())

    return fastest(
        "dots",
        {"triton": contestant(by_triton), "torch": contestant(by_torch)},
        shape=f"{size} samples, {pieces}, {described}, {dtype}",
        kernels=DOT_KERNELS,
        device=device,
    )


class _Piece(ctypes.Structure):
    """Twin of `Piece` in dot.cpp."""

    _fields_ = (
        ("start", c_void_p),
        ("gradient", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
        ("is_bfloat16", c_int64),
    )


def _described(pieces: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> ctypes.Array[_Piece]:
    """The pieces as C structures; each is read where it lies."""
    starts = [0] * len(pieces) if gradients is None else [each.data_ptr() for each in gradients]
    return (_Piece * len(pieces))(
        *(
            _Piece(piece.data_ptr(), start, piece.shape[1], piece.stride(0), piece.dtype is torch.bfloat16)
            for piece, start in zip(pieces, starts, strict=True)
        )
    )


def _readable(piece: Tensor) -> Tensor:
    return piece if piece.stride(1) == 1 or not piece.numel() else piece.contiguous()


@torch.library.custom_op("ziggurat::dot_interaction", mutates_args=())
def _interaction(pieces: list[Tensor], shape: list[int], dtype: torch.dtype) -> Tensor:
    pieces = [_readable(piece) for piece in pieces]
    described = DotShape(*shape)
    if _is_for_triton(pieces):
        return interaction_triton(pieces, shape=described, dtype=dtype)
    row_BW = pieces[0].new_empty(pieces[0].shape[0], described.width, dtype=dtype)
    dot_library().ziggurat_dot_interaction(
        _described(pieces),
        len(pieces),
        row_BW.data_ptr(),
        dtype is torch.bfloat16,
        described.passed,
        described.padding,
        row_BW.shape[0],
        described.num_fields,
        described.dim,
        torch.get_num_threads(),
    )
    return row_BW


@torch.library.custom_op("ziggurat::dot_interaction_backward", mutates_args=())
def _interaction_backward(pieces: list[Tensor], shape: list[int], gradient_BW: Tensor) -> list[Tensor]:
    pieces = [_readable(piece) for piece in pieces]
    gradient_BW = gradient_BW.contiguous()
    described = DotShape(*shape)
    if _is_for_triton(pieces):
        return interaction_backward_triton(pieces, shape=described, gradient_BW=gradient_BW)
    gradients = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]
    dot_library().ziggurat_dot_interaction_backward(
        _described(pieces, gradients),
        len(pieces),
        gradient_BW.data_ptr(),
        gradient_BW.dtype is torch.bfloat16,
        described.passed,
        described.padding,
        gradient_BW.shape[0],
        described.num_fields,
        described.dim,
        torch.get_num_threads(),
    )
    return gradients


@_interaction.register_fake
def _(pieces: list[Tensor], shape: list[int], dtype: torch.dtype) -> Tensor:
    return pieces[0].new_empty(pieces[0].shape[0], DotShape(*shape).width, dtype=dtype)


@_interaction_backward.register_fake
def _(pieces: list[Tensor], shape: list[int], gradient_BW: Tensor) -> list[Tensor]:
    return [piece.new_empty(piece.shape) for piece in pieces]


class _ForwardCtx(SavedCtx, Protocol):
    shape: list[int]
    dtype: torch.dtype


class _BackwardCtx(SavedCtx, Protocol):
    shape: list[int]


def _keep_pieces(ctx: _ForwardCtx, inputs: tuple[list[Tensor], list[int], torch.dtype], output: Tensor) -> None:
    pieces, ctx.shape, ctx.dtype = inputs
    ctx.save_for_backward(*pieces)


def _derivative(ctx: _ForwardCtx, gradient_BW: Tensor) -> tuple[list[Tensor], None, None]:
    return _interaction_backward(list(ctx.saved_tensors), ctx.shape, gradient_BW), None, None


def _keep_both(ctx: _BackwardCtx, inputs: tuple[list[Tensor], list[int], Tensor], output: list[Tensor]) -> None:
    pieces, ctx.shape, gradient_BW = inputs
    ctx.save_for_backward(*pieces, gradient_BW)


def _second_derivative(ctx: _BackwardCtx, directions: list[Tensor]) -> tuple[list[Tensor], None, Tensor]:
    """Differentiate the backward pass, through the reference, whose operations can be differentiated again."""
    # Leaves of a graph of their own: the outer one must not be entered twice.
    *pieces, gradient_BW = (each.detach().requires_grad_() for each in ctx.saved_tensors)
    shape = DotShape(*ctx.shape)
    with torch.enable_grad():
        places = pair_places(shape.num_fields, device=gradient_BW.device)
        row_BW = dot_interaction_reference(pieces, shape=shape, dtype=gradient_BW.dtype, places=places)
        first = torch.autograd.grad(row_BW, pieces, gradient_BW, create_graph=True)
        *of_pieces, of_gradient = torch.autograd.grad(first, [*pieces, gradient_BW], directions)
    return list(of_pieces), None, of_gradient


_interaction.register_autograd(_derivative, setup_context=_keep_pieces)
_interaction_backward.register_autograd(_second_derivative, setup_context=_keep_both)
