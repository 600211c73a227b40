"""Round tensors to block formats: FP32 numbers in, the FP32 numbers that the format holds out.

    quantise(weight, BlockFormat.named("mx9"), axis=1)       blocks lie along axis 1

Blocks lie along the axis that a product sums over, so that a hardware unit multiplies whole blocks; a tensor that two
products sum over along unlike axes is therefore rounded twice, and rounding and transposing do not commute. The last
block of an axis is shorter where its length is no multiple of k1.

`quantise_reference` defines the numbers, in torch and for every device; on a CPU a kernel gives the same bits
(`kernel.py`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError, NumericsError
from ziggurat.numerics import blocks
from ziggurat.numerics.block_format import BlockFormat, Scope
from ziggurat.numerics.kernel import quantise_fast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantise(
    x: Float[Tensor, "*B"], format: BlockFormat, axis: int, *, name: str = "the tensor"
) -> Float[Tensor, "*B"]:
    """Return the FP32 numbers that a format holds of a tensor.

    Args:
        x: FP32, BF16 or FP16.
        format: of the numbers.
        axis: that blocks lie along.
        name: of the tensor, for messages.

    Raises:
        NumericsError: an infinity is among the numbers, or a number that a format without scales cannot hold.
        ConfigError: another dtype, or no such axis.
    """
    values = checked(x, axis, name=name)
    if values.numel():
        found = quantise_fast(values, format, axis)
        if found is not None:
            return found
    return quantise_reference(values, format, axis, name=name)


def quantise_reference(
    x: Float[Tensor, "*B"], format: BlockFormat, axis: int, *, name: str = "the tensor"
) -> Float[Tensor, "*B"]:
    """Compute the result that `quantise` must equal."""
    x = checked(x, axis, name=name)
    refuse_what_does_not_fit(x, format, name=name)
    if x.numel() == 0:
        return x.clone()
    rows = rows_along(x, format, axis)
    values = blocks.decode(blocks.encode(rows, format), format, n=rows.shape[1])
    return from_rows(values, x.shape, format, axis)


def checked(x: Tensor, axis: int, *, name: str) -> Float[Tensor, "*B"]:
    """Return a tensor as FP32.

    Raises:
        ConfigError: another dtype, or no such axis.
    """
    if x.dtype not in _DTYPES:
        raise ConfigError(
            expected="FP32, BF16 or FP16 numbers to round to a block format",
            found=f"{x.dtype}",
            where=name,
            ways_out="convert them: x.float()",
        )
    if x.dim() == 0:
        raise ConfigError(
            expected="a tensor with an axis, which blocks lie along",
            found="a tensor of a single number, without one",
            where=name,
            ways_out="give it an axis: x.view(1)",
        )
    if not -x.dim() <= axis < x.dim():
        raise ConfigError(
            expected=f"an axis of a tensor with {x.dim()}",
            found=f"axis {axis}",
            where=name,
            ways_out="axis=-1: blocks lie along the last axis, which a product sums over in its left operand",
        )
    # Of what needs neither, two calls that return the same tensor would cost as much as 1,500 numbers.
    return x if x.dtype is torch.float32 and not x.requires_grad else x.detach().float()


def rows_along(x: Float[Tensor, "*B"], format: BlockFormat, axis: int) -> Float[Tensor, "R n"]:
    """Return a tensor as rows along an axis; as one row, where its numbers share one scale."""
    if format.k1 is Scope.TENSOR:
        return x.reshape(1, -1)
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])


def from_rows(rows: Float[Tensor, "R n"], shape: torch.Size, format: BlockFormat, axis: int) -> Float[Tensor, "*B"]:
    """Return rows as the tensor that `rows_along` took them from."""
    if format.k1 is Scope.TENSOR:
        return rows.reshape(shape)
    moved = list(shape)
    length = moved.pop(axis)
    return rows.reshape(*moved, length).movedim(-1, axis).contiguous()


def refuse_what_does_not_fit(x: Float[Tensor, "*B"], format: BlockFormat, *, name: str) -> None:
    """Refuse infinities, and what a format without scales cannot hold.

    Raises:
        NumericsError: with the first of these numbers, its place and the ways out.
    """
    too_large = x.abs() > format.largest_held
    if too_large.any():
        raise overflow(x, too_large, format, name=name)


def overflow(x: Float[Tensor, "*B"], too_large: Tensor, format: BlockFormat, *, name: str) -> NumericsError:
    """Return the error about numbers that a format cannot hold."""
    first = tuple(too_large.nonzero()[0].tolist())
    value = float(x[first])
    count = int(too_large.sum())
    place = f"[{', '.join(map(str, first))}]"
    if format.has_scale:
        ways = ("look for what made it infinite: a division by zero, a learning rate that is too high",)
    else:
        ways = (
            "take a format whose numbers share a scale, which follows them: BlockFormat.named('mxfp8_e4m3')",
            "take one of a wider range: BlockFormat.named('bf16')",
        )
    return NumericsError(
        expected=f"{_held(format)} to round to {format}",
        found=f"{value:.6g} at {place}, the first of {count:,}" if count > 1 else f"{value:.6g} at {place}",
        where=f"{name}, {tuple(x.shape)}",
        ways_out=(*ways, "leave this tensor in FP32"),
    )


def _held(format: BlockFormat) -> str:
    """Return which numbers a format takes; of a limit that is itself too large, as 65520 of FP16, those below."""
    if format.has_scale:
        return "finite numbers"
    limit = f"{format.largest_held:.6g}"
    return f"magnitudes below {limit}" if float(limit) > format.largest_held else f"magnitudes of {limit} at most"
