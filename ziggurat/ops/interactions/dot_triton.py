"""DLRM's interaction by Triton: a program reads the fields of a sample once, and writes its row once.

    forward    fields ──► F × F products ──► the part above the diagonal, written in its place of the row
    backward   gradients of the pairs ──► G + Gᵀ ──► times the fields ──► the gradient of each piece, in its dtype

Torch writes and reads the fields once more as one matrix, all F² products, and the pairs. What is rounded, and where,
is as in C++: `dot_interaction.py`, which takes this kernel for tensors on CUDA devices where it is the faster one.

A program goes through some samples, one after the other, and has the next ones on their way meanwhile. How many, and
how many warps it has, is timed on the GPU (`ops/machine/measured_choice.py`): the last bits depend on it, so the answer
is kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.interactions.dot import DotShape
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two, why_no_triton
from ziggurat.ops.machine.measured_choice import fastest, timed_size

DOT_KERNELS = "ziggurat.ops.interactions.dot_triton_kernels"
_MAX_FIELDS = 64
_MAX_DIM = 1024
_CHUNK = {torch.float32: 32, torch.bfloat16: 128}  # columns at a time; wider ones spill
_TIMED = ((1, 2, 1), (8, 4, 2), (8, 2, 3), (16, 4, 3))  # samples, warps, stages


@dataclass(frozen=True, kw_only=True)
class DotLaunch:
    """Launch settings of the kernels of dots; the order of sums, and so the last bits, depend on them.

    Args:
        samples: of a program, one after the other.
        warps: of a program.
        stages: samples that are on their way at a time; 1: the next is read when this one is done.
        chunk: columns of fields that a program holds.
        precision: of products of FP32 numbers, as Triton names it.
    """

    samples: int
    warps: int
    stages: int
    chunk: int
    precision: str = "ieee"

    def __str__(self) -> str:
        return f"{self.samples} samples, {self.warps} warps, {self.stages} stages, {self.chunk} columns"


def why_not_triton(pieces: Sequence[Tensor], *, num_fields: int, dim: int) -> str:
    """The reason why the kernels cannot serve fields; "" if they can."""
    for piece in pieces:
        if reason := why_no_triton(DOT_KERNELS, piece, what="fields"):
            return reason
        if piece.shape[1] % dim:
            return f"a piece of {piece.shape[1]} columns, and fields have {dim}"
    if num_fields > _MAX_FIELDS or dim > _MAX_DIM:
        return f"it is for F <= {_MAX_FIELDS} and D <= {_MAX_DIM}, not F = {num_fields}, D = {dim}"
    return ""


def launch_of(num_fields: int, dim: int, *, dtype: torch.dtype) -> DotLaunch:
    """Return a launch that serves everywhere: as many columns and warps as spill no registers.

    Args:
        num_fields: F.
        dim: D.
        dtype: of the products.
    """
    chunk = min(power_of_two(dim), _CHUNK[dtype])
    if dtype == torch.float32 and num_fields > 32:
        # Of 32 columns Triton 3.6 and 3.7 spill 7 KiB of a thread's gradients, with four warps its products, too.
        return DotLaunch(samples=1, warps=8, stages=1, chunk=min(chunk, 16))
    return DotLaunch(samples=1, warps=4, stages=1, chunk=chunk)


def candidates_of(num_fields: int, dim: int, *, dtype: torch.dtype) -> dict[str, DotLaunch]:
    """Return the launches that are timed on a GPU, by name; the first is that of `launch_of`."""
    own = launch_of(num_fields, dim, dtype=dtype)
    found = [own]
    if dtype == torch.bfloat16:
        found += [
            dataclasses.replace(own, samples=samples, warps=warps, stages=stages)
            for samples, warps, stages in _TIMED
            if num_fields <= 32 or warps >= 4  # more fields fill the registers of fewer warps
        ]
    return {str(each): each for each in found}


def interaction_triton(
    pieces: Sequence[Float[Tensor, "B X"]], *, shape: DotShape, dtype: torch.dtype, launch: DotLaunch | None = None
) -> Float[Tensor, "B W"]:
    """`[passed | pairs | zeros]`; see `dot_interaction`.

    Args:
        pieces: of whole fields, FP32 or BF16.
        shape: F, D and what goes beside the pairs.
        dtype: of the result, FP32 or BF16.
        launch: of the kernel; the fastest on this GPU unless given.
    """
    first, second = _two(pieces)
    row_BW = first.new_empty(first.shape[0], shape.width, dtype=dtype)
    # A grid of no programs is an error of the launch.
    if row_BW.numel():
        launch = launch or _launch_on(pieces, shape=shape, dtype=dtype, is_backward=False)
        kernels_of(DOT_KERNELS).interaction_kernel[(-(-first.shape[0] // launch.samples),)](
            first,
            second,
            row_BW,
            first.stride(0),
            second.stride(0),
            first.shape[0],
            **_sizes(first, shape, dtype, launch),
        )
    return row_BW


def interaction_backward_triton(
    pieces: Sequence[Float[Tensor, "B X"]],
    *,
    shape: DotShape,
    gradient_BW: Float[Tensor, "B W"],
    launch: DotLaunch | None = None,
) -> list[Float[Tensor, "B X"]]:
    """The gradient of each piece, in its dtype.

    Args:
        pieces: of whole fields, FP32 or BF16.
        shape: F, D and what goes beside the pairs.
        gradient_BW: of the result, contiguous.
        launch: of the kernel; the fastest on this GPU unless given.
    """
    first, second = _two(pieces)
    # Dense, whatever the strides of the pieces are.
    found = [torch.empty(piece.shape, dtype=piece.dtype, device=piece.device) for piece in (first, second)]
    if first.shape[0]:
        dtype = gradient_BW.dtype
        launch = launch or _launch_on(pieces, shape=shape, dtype=dtype, is_backward=True)
        kernels_of(DOT_KERNELS).interaction_backward_kernel[(-(-first.shape[0] // launch.samples),)](
            first,
            second,
            gradient_BW,
            *found,
            first.stride(0),
            second.stride(0),
            first.shape[0],
            **_sizes(first, shape, dtype, launch),
        )
    if len(pieces) <= 2:
        # One piece was handed over twice; the second gradient is nobody's.
        return found[: len(pieces)]
    # The kernel knows two pieces; the gradient of the joined ones is cut again.
    rest = found[1].split([piece.shape[1] for piece in pieces[1:]], dim=1)
    return [
        found[0],
        # Copies: outputs of a custom operation must not be views of one tensor.
        *(each.to(piece.dtype, copy=True).contiguous() for each, piece in zip(rest, pieces[1:], strict=True)),
    ]


def _launch_on(pieces: Sequence[Tensor], *, shape: DotShape, dtype: torch.dtype, is_backward: bool) -> DotLaunch:
    """Return the fastest launch for these pieces, timed on this GPU; `launch_of` elsewhere."""
    device = pieces[0].device
    if device.type != "cuda" or is_interpreted():
        return launch_of(shape.num_fields, shape.dim, dtype=dtype)
    candidates = candidates_of(shape.num_fields, shape.dim, dtype=dtype)
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    # Rounded, so that the last, shorter batch of an epoch is no new shape to time.
    size = timed_size(pieces[0].shape[0])

    @functools.cache
    def scratch() -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(size, piece.shape[1], generator=draw, device=device).to(piece.dtype) for piece in pieces]
        return drawn, torch.randn(size, shape.width, generator=draw, device=device).to(dtype)

    def run(launch: DotLaunch) -> object:
        drawn, gradient_BW = scratch()
        if is_backward:
            return interaction_backward_triton(drawn, shape=shape, gradient_BW=gradient_BW, launch=launch)
        return interaction_triton(drawn, shape=shape, dtype=dtype, launch=launch)

    # Part of the key under which the answer is kept: other pieces may have another fastest launch.
    kinds = [(piece.shape[1], piece.dtype) for piece in pieces]
    answer = fastest(
        "dots_backward_launch" if is_backward else "dots_forward_launch",
        {name: functools.partial(run, launch) for name, launch in candidates.items()},
        shape=f"{size} samples, {kinds}, {shape}, {dtype}",
        kernels=DOT_KERNELS,
        device=device,
    )
    return candidates[answer.name]


def _two(pieces: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Two pieces: those behind the first side by side; without any, the first once more, of which nothing is read."""
    if len(pieces) <= 2:
        return pieces[0], pieces[-1]
    return pieces[0], torch.cat(list(pieces[1:]), dim=1)


def _sizes(first: Tensor, shape: DotShape, dtype: torch.dtype, launch: DotLaunch) -> dict[str, int | str]:
    return {
        "num_first": first.shape[1] // shape.dim,
        "num_fields": shape.num_fields,
        "dim": shape.dim,
        "passed": shape.passed,
        "padding": shape.padding,
        "in_bf16": dtype == torch.bfloat16,
        "interpreted": is_interpreted(),
        "padded_fields": power_of_two(shape.num_fields),
        "num_warps": launch.warps,
        "chunk": launch.chunk,
        "samples": launch.samples,
        "stages": launch.stages,
        "precision": launch.precision,
        "num_stages": 1,  # of the loop over columns: FP32 spills with more
        "padded_passed": power_of_two(shape.passed, least=1),
        "padded_padding": power_of_two(shape.padding, least=1),
    }
