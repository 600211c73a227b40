"""Precisions of few bits: operands of dense products in a block format, weights and sums in FP32.

    Y = q(X) q(W)        ∂X = q(∂Y) q(W)ᵀ        ∂W = q(X)ᵀ q(∂Y)

Each q rounds along the dim that its own product sums over, so that a unit for the format could multiply whole blocks.
A weight is therefore rounded twice a step, along either dim, and the two results differ: rounding does not commute with
transposing. What sums nothing (activations, norms, the loss), the optimizer's weights and the embeddings stay FP32.

    mx9, mx6, mx4                  shared microexponents (arXiv 2302.08007, section "Training with MX")
    mxfp8, mxfp6, mxfp4, mxint8    OCP Microscaling 1.0: E4M3, E2M3, E2M1 and integers in blocks of 32
    fp8_tensorwise, _rowwise       E4M3 with an FP32 scale for a tensor, or for each row of a sum
    fp8_128                        the same for 128 numbers
    bf16_emulated, bf16_truncated  operands in BF16, to the nearest or cut off (the study of BF16, arXiv 1905.12322)

The numbers are those of a unit that sums in FP32, up to the order of its sums; the time is that of FP32 products and of
rounding. These precisions are for quality: what a format costs, before anybody owns hardware for it.

A format of one's own is one more line: `Precision.add(InBlocks(BlockFormat.add(BlockFormat(name="mine", …))))`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.errors import NumericsError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics import catalogue as formats
from ziggurat.precision.arithmetic import RoundedArithmetic
from ziggurat.precision.precision import Precision


@dataclass(frozen=True, repr=False)
class BlockArithmetic(RoundedArithmetic):
    """Rounds operands to a block format, along the dim that a product sums over.

    Args:
        name: what reports call it.
        format: of the operands.
        module: whose products they are, for messages; "" where many share the arithmetic.
    """

    name: str
    format: BlockFormat
    module: str = ""

    def of_module(self, name: str) -> BlockArithmetic:
        """Return this arithmetic for one module. See `Arithmetic.of_module`."""
        return dataclasses.replace(self, module=name)

    def rounded(self, operand: Tensor, *, dim: int) -> Tensor:
        """Return the FP32 numbers that the format holds of an operand."""
        if torch.compiler.is_compiling():
            return _rounded_when_compiled(operand, self.format.name, dim, self.module)
        return _rounded(operand, self.format, dim, self.module)

    def take_overflow(self) -> str:
        """Return what was no number of the format since the last call, "" for nothing."""
        return _overflows.pop(self.format.name, "")


# By format: the first operand that it could not hold. A step that is not finite asks for it, in whatever thread its
# products were computed.
_overflows: dict[str, str] = {}


def _rounded(operand: Tensor, format: BlockFormat, dim: int, module: str) -> Tensor:
    """Round an operand; NaN throughout where it holds an infinity, or more than a format without scales can.

    An error would end one rank in the middle of a step, while the others wait for it. NaN reaches the loss or a
    gradient, where all ranks find it together: no weight changes, and the run stops or skips the step as it was told.
    """
    try:
        return quantise(operand, format, dim).to(operand.dtype)
    except NumericsError as error:
        product = f"a product of {module}" if module else "a product"
        place = f"an operand {tuple(operand.shape)} of {product} in {format}, {error.found}"
        _overflows.setdefault(format.name, f"{place} (expected {error.expected})")
        return torch.full_like(operand, torch.nan)


@torch.library.custom_op("ziggurat::rounded_to_blocks", mutates_args=())
def _rounded_when_compiled(operand: Tensor, format: str, dim: int, module: str) -> Tensor:
    """Round an operand; one operation to torch.compile, which does not look inside."""
    return _rounded(operand, BlockFormat.named(format), dim, module).contiguous()


@_rounded_when_compiled.register_fake
def _(operand: Tensor, format: str, dim: int, module: str) -> Tensor:
    return torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)


class InBlocks(Precision):
    """FP32 whose dense products read operands in a block format. See the module's docstring.

    Args:
        format: of the operands.
        name: of the precision; that of the format unless given.
    """

    def __init__(self, format: BlockFormat, *, name: str = "") -> None:
        self.name = name or format.name
        self.arithmetic = BlockArithmetic(self.name, format)


for _format, _name in (
    (formats.MX9, ""),
    (formats.MX6, ""),
    (formats.MX4, ""),
    (formats.MXFP8_E4M3, "mxfp8"),
    (formats.MXFP6_E2M3, "mxfp6"),
    (formats.MXFP4, ""),
    (formats.MXINT8, ""),
    (BlockFormat.named("fp8_e4m3_tensor"), "fp8_tensorwise"),
    (BlockFormat.named("fp8_e4m3_row"), "fp8_rowwise"),
    (BlockFormat.named("fp8_e4m3_128"), "fp8_128"),
    (BlockFormat.named("bf16"), "bf16_emulated"),
    (BlockFormat.named("bf16_truncated"), ""),
):
    Precision.add(InBlocks(_format, name=_name))
