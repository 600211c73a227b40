"""Pack and unpack messages by Triton: one launch reads each number once and writes it once, converted, in its place.

In torch the same takes a copy for each block of columns, and for numbers with scales about eight launches for each
receiver (absolute values, maxima, quotients, rounding, limits, conversion, two concatenations), each of which reads or
writes everything. Here a program holds some rows of one field: it finds their scales in registers.

Every number is rounded to the nearest, by operations on its bits: the bits of the reference on every GPU, those without
instructions for FP8 among them. Stochastic rounding stays with torch, whose random numbers it takes.

The reference is `parallel/exchange/wire.py` (formats) with `ops/columns.py` (places). Not timed on a GPU yet.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ziggurat.ops.kernel_choice import kernels_of, power_of_two, why_no_triton
from ziggurat.ops.machine.launches import Launch, LaunchPart, launches_on, tile_rows
from ziggurat.ops.wire.places import WirePlaces

WIRE_KERNELS = "ziggurat.ops.wire.triton_kernels"
_MAX_WIDTH = 4096
_MAX_FIELDS = 65_535  # of a grid of CUDA
_SERVED = (torch.float32, torch.bfloat16, torch.float16)


class WireCode(StrEnum):
    """Formats of the numbers in a message."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"  # with scales
    FP8 = "fp8"  # e4m3, with scales

    @property
    def has_scales(self) -> bool:
        """True if a message is bytes, and each field of a row has a scale."""
        return self in (WireCode.INT8, WireCode.FP8)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the items of a message."""
        return _ITEMS[self]


_ITEMS = {
    WireCode.FP32: torch.float32,
    WireCode.BF16: torch.bfloat16,
    WireCode.FP16: torch.float16,
    WireCode.INT8: torch.uint8,
    WireCode.FP8: torch.uint8,
}


def why_not_triton(matrix: Tensor) -> str:
    """The reason why the kernels cannot serve a matrix of embeddings; "" if they can."""
    if matrix.dtype not in _SERVED:
        return f"embeddings in {matrix.dtype}"
    return why_no_triton(WIRE_KERNELS, matrix, what="embeddings")


def why_not_places(places: WirePlaces) -> str:
    """The reason why the kernels cannot serve a table; "" if they can."""
    if places.most_width > _MAX_WIDTH:
        return f"fields of {places.most_width} columns, and a program holds {_MAX_WIDTH}"
    return f"{len(places.fields)} fields, and a launch has {_MAX_FIELDS}" if len(places.fields) > _MAX_FIELDS else ""


def _tile(places: WirePlaces, launch: Launch) -> dict[str, int]:
    """Rows and columns that a program holds, for fields of at most so many columns, and its warps."""
    rows = tile_rows(places.most_width, numbers=launch.numbers)
    padded = power_of_two(places.most_width, least=1)
    return {"rows": rows, "padded": padded, "num_warps": launch.warps}


def pack(
    matrix: Float[Tensor, "R C"],
    code: WireCode,
    *,
    places: WirePlaces,
    out: Shaped[Tensor, "M"] | None = None,
    launch: Launch | None = None,
) -> Shaped[Tensor, "M"]:
    """Write a message: the fields of a matrix in their places, in a format.

    Args:
        matrix: FP32, BF16 or FP16; its rows may lie apart.
        code: the format.
        places: of the fields.
        out: memory for the message, contiguous; new memory unless given.
        launch: of the kernel; that of the device's family unless given.
    """
    message = torch.empty(places.num_items, dtype=code.dtype, device=matrix.device) if out is None else out
    matrix = matrix if matrix.stride(1) == 1 or not matrix.numel() else matrix.contiguous()
    kernels = kernels_of(WIRE_KERNELS)
    if len(places.fields):
        tile = _tile(places, launch or launches_on(matrix.device)[LaunchPart.MESSAGES])
        kernels.pack_kernel[(-(-places.most_rows // tile["rows"]), len(places.fields))](
            _bits(matrix),
            places.fields,
            *_numbers_and_scales(message, code),
            matrix.stride(0),
            code=code.value,
            align=places.align,
            **tile,
            enable_fp_fusion=False,
        )
    if len(places.pads):
        kernels.pads_kernel[(len(places.pads),)](message.view(torch.uint8), places.pads)
    return message


def unpack(
    message: Shaped[Tensor, "M"],
    code: WireCode,
    *,
    places: WirePlaces,
    out: Float[Tensor, "R C"],
    launch: Launch | None = None,
) -> Float[Tensor, "R C"]:
    """Read a message: write its fields into their columns of a matrix; other columns stay as they are.

    Args:
        message: contiguous.
        code: its format.
        places: of the fields.
        out: FP32, BF16 or FP16, contiguous.
        launch: of the kernel; that of the device's family unless given.
    """
    if len(places.fields):
        tile = _tile(places, launch or launches_on(out.device)[LaunchPart.MESSAGES])
        kernels_of(WIRE_KERNELS).unpack_kernel[(-(-places.most_rows // tile["rows"]), len(places.fields))](
            *_numbers_and_scales(message, code),
            places.fields,
            _bits(out),
            out.stride(0),
            code=code.value,
            align=places.align,
            **tile,
            enable_fp_fusion=False,
        )
    return out


def _numbers_and_scales(message: Tensor, code: WireCode) -> tuple[Tensor, Tensor]:
    """The message as the kernel reads its numbers, and as it reads its scales."""
    if not code.has_scales:
        return _bits(message), message
    # Scales are BF16 at even bytes, which the kernel counts in twos.
    return message.view(torch.int8) if code is WireCode.INT8 else message, message.view(torch.int16)


def _bits(numbers: Tensor) -> Tensor:
    """BF16 as integers: its bits are rounded as bits. (Triton's interpreter would cut them off.)"""
    return numbers.view(torch.int16) if numbers.dtype == torch.bfloat16 else numbers
