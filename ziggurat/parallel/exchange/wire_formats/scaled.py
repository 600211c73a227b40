"""Wire formats of one byte a number, and a scale for each field of a row: INT8 and FP8.

Every field has a scale of its own, so numbers of different features never share one:

    int8   scale ≥ max|x| / 127   q = round(x / scale)           fp8 (e4m3)   scale ≥ max|x| / 448

Scales are BF16, rounded up, so that no number leaves the range; a step is at most 1/128 larger than with an FP32 scale.
Quantised exchange of embeddings: Yang et al., "Training with Low-precision Embedding Tables", 2020.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ziggurat.parallel.exchange.wire_formats.at_random import round_at_random
from ziggurat.parallel.exchange.wire_formats.packed_rows import PackedRows, runs

SCALE_BYTES = 2


class Scaled(PackedRows):
    """Codes of one byte in units of a scale.

    Attributes:
        largest: magnitude in units of the scale.
        stored: the type of codes.
    """

    largest: ClassVar[float]
    stored: ClassVar[torch.dtype]

    @abstractmethod
    def rounded(self, scaled: Tensor, *, at_random: bool) -> Tensor:
        """Round numbers in units of their scale to codes, as FP32; they may be changed in place."""

    def row_bytes(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return a byte a number, and a scale a field."""
        return sum(widths), SCALE_BYTES * len(widths)

    def encode_rows(
        self, rows_RC: Float[Tensor, "R C"], *, widths: tuple[int, ...], at_random: bool
    ) -> tuple[UInt8[Tensor, "R W"], ...]:
        """Return codes, and scales."""
        # A tensor: dividing by a number is multiplying by 1 / x on GPUs.
        largest = torch.full((), self.largest, device=rows_RC.device)
        column = 0
        codes = []
        scales = []
        for width, count in runs(widths):
            numbers = rows_RC[:, column : column + count * width].unflatten(1, (count, width))
            column += count * width
            # The least scale is above zero, by which a field of zeros would be divided.
            scale = _round_up((numbers.abs().amax(dim=2) / largest).clamp_(min=torch.finfo(torch.float32).tiny))
            scaled = self.rounded(numbers / scale.unsqueeze(2), at_random=at_random)
            codes.append(scaled.clamp_(-largest, largest).to(self.stored).view(torch.uint8).flatten(1))
            scales.append(scale.to(torch.bfloat16))
        return torch.cat(codes, dim=1), torch.cat(scales, dim=1).view(torch.uint8)

    def decode_rows(self, parts: tuple[UInt8[Tensor, "R W"], ...], *, widths: tuple[int, ...]) -> Float[Tensor, "R C"]:
        """Return codes times scales."""
        numbers = parts[0].view(self.stored)
        scales = parts[1].view(torch.bfloat16)
        pieces = []
        column = 0
        field = 0
        for width, count in runs(widths):
            fields = numbers[:, column : column + count * width].to(torch.float32).unflatten(1, (count, width))
            factors = scales[:, field : field + count].to(torch.float32).unsqueeze(2)
            pieces.append(fields.mul_(factors).flatten(1))
            column += count * width
            field += count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def kernel_code(self, dtype: torch.dtype) -> str:
        """Return the name: the kernels of `ops/wire` write scales as these do."""
        del dtype
        return self.name


class Int8(Scaled):
    """Integers from -127 to 127."""

    name = "int8"
    largest = 127.0
    stored = torch.int8

    def rounded(self, scaled: Tensor, *, at_random: bool) -> Tensor:
        """Round to integers."""
        return scaled.add_(torch.rand_like(scaled)).floor_() if at_random else scaled.round_()


class Fp8(Scaled):
    """FP8 of 4 exponent bits and 3 fraction bits."""

    name = "fp8"
    largest = 448.0
    stored = torch.float8_e4m3fn

    def rounded(self, scaled: Tensor, *, at_random: bool) -> Tensor:
        """Leave rounding to the nearest to the conversion."""
        return round_at_random(scaled, grid=self.stored) if at_random else scaled


def _round_up(positive: Tensor) -> Tensor:
    """Return FP32 numbers that BF16 holds, none below the given ones."""
    # BF16 is the upper half of FP32; what the mask cuts off has carried into it before.
    bits = (positive.view(torch.int32) + 0xFFFF) & -65536
    # The carry would make other numbers of an infinity or a NaN.
    return torch.where(positive.isfinite(), bits.view(torch.float32), positive)
