"""Add a wire format: four bits a number, and a scale for each field of a sample.

    scale = max|x| / 7, in BF16 rounded up        code = round(x / scale) + 7 = 0 … 14, two codes a byte

A field of 16 numbers takes 8 bytes and 2 of its scale: 0.625 bytes a number, against 1.125 of int8. To the nearest it
is coarse; gradients that are smaller than half a step vanish, unless they are rounded up or down at random.

    import four_bits                            # lists it; every rank has to
    ziggurat --extension four_bits train … --wire four_bits --parallel.wire.backward-rounding stochastic
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.parallel.exchange.wire_formats import PackedRows, WireFormat

_LARGEST = 7


class FourBits(PackedRows):
    """Codes of four bits in units of a BF16 scale."""

    name = "four_bits"

    def row_bytes(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Return half a byte a number, rounded up over the row, and two bytes a field."""
        return (sum(widths) + 1) // 2, 2 * len(widths)

    def encode_rows(self, rows_RC: Tensor, *, widths: tuple[int, ...], at_random: bool) -> tuple[Tensor, ...]:
        """Return pairs of codes, and scales."""
        largest = [field.abs().amax(dim=1) for field in rows_RC.split(list(widths), dim=1)]
        scales_RF = _round_up(torch.stack(largest, dim=1) / _LARGEST)
        in_units = rows_RC / _of_numbers(scales_RF, widths)
        steps = (in_units + torch.rand_like(in_units)).floor() if at_random else in_units.round()
        # A field of zeros is divided by zero; one that is not finite arrives as NaN by its scale alone.
        steps = steps.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)
        codes = (steps + _LARGEST).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        return codes[:, ::2] | codes[:, 1::2] << 4, scales_RF.view(torch.uint8)

    def decode_rows(self, parts: tuple[Tensor, ...], *, widths: tuple[int, ...]) -> Tensor:
        """Return codes times scales."""
        pairs, scale_bytes = parts
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, : sum(widths)]
        return (codes.float() - _LARGEST) * _of_numbers(scale_bytes.view(torch.bfloat16), widths)


def _of_numbers(scales_RF: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Repeat the scale of each field for its numbers, as FP32."""
    return scales_RF.float().repeat_interleave(torch.tensor(widths, device=scales_RF.device), dim=1)


def _round_up(scales: Tensor) -> Tensor:
    """Return BF16 that is not below FP32 scales, so that no number leaves the range."""
    rounded = scales.to(torch.bfloat16)
    upper = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, upper, rounded)


FOUR_BITS = WireFormat.add(FourBits())
