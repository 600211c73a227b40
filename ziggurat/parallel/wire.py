"""Wire formats: what embeddings and their gradients look like while they travel.

    fp32        4 bytes a number, exact
    bf16, fp16  2 bytes
    int8, fp8   1 byte, and one FP32 scale for each row of `width` numbers: 1 + 4/width bytes

A row is cut out of one embedding, so numbers of different features never share a scale:

    int8   scale = max|x| / 127   q = round(x / scale)           fp8 (e4m3)   scale = max|x| / 448

Rounding to nearest is biased for gradients that are smaller than half a step: they vanish every time. Stochastic
rounding (up with the probability of the remainder) is right on average; it is used in the backward pass where asked
for. Reference for its effect: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv 1502.02551.
Quantised exchange of embeddings: Yang et al., "Training with Low-precision Embedding Tables", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class WireFormat(StrEnum):
    """How a number travels."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8 = "fp8"


class Rounding(StrEnum):
    """How a number loses its last bits."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """Formats of the two hops.

    Args:
        in_tower: inside a tower group (usually one host).
        between_towers: between tower groups (usually between hosts); the only hop of a flat model.
        backward_rounding: of gradients; activations are rounded to nearest.
    """

    in_tower: WireFormat = WireFormat.FP32
    between_towers: WireFormat = WireFormat.FP32
    backward_rounding: Rounding = Rounding.NEAREST


_DTYPES = {WireFormat.FP32: torch.float32, WireFormat.BF16: torch.bfloat16, WireFormat.FP16: torch.float16}
_SCALE_BYTES = 4
_FP8_MAX = 448.0


@dataclass(frozen=True)
class Wire:
    """A format for rows of one width.

    Args:
        format: how a number travels.
        width: numbers that share a scale; every message is a whole number of rows.
        rounding: to nearest, or stochastic.
    """

    format: WireFormat
    width: int
    rounding: Rounding = Rounding.NEAREST

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffers that travel."""
        return _DTYPES.get(self.format, torch.uint8)

    def num_items(self, num_numbers: int) -> int:
        """Items of `dtype` that `num_numbers` numbers take on the wire."""
        if self.format in _DTYPES:
            return num_numbers
        assert num_numbers % self.width == 0, (num_numbers, self.width)
        return num_numbers // self.width * (self.width + _SCALE_BYTES)

    def encode(self, numbers: Tensor) -> Tensor:
        """Any shape of FP32 (or what the network computes in) to a flat buffer of `dtype`."""
        flat = numbers.reshape(-1)
        if flat.dtype == self.dtype:
            return flat
        if self.format in _DTYPES:
            stochastic = self.rounding is Rounding.STOCHASTIC and flat.dtype == torch.float32
            return _to_half(flat, self.format, stochastic=stochastic)
        rows = flat.to(torch.float32).view(-1, self.width)
        largest = rows.abs().amax(dim=1, keepdim=True)
        if self.format is WireFormat.INT8:
            scale = (largest / 127.0).clamp_(min=torch.finfo(torch.float32).tiny)
            scaled = rows / scale
            scaled = scaled.add_(torch.rand_like(scaled)).floor_() if self._is_stochastic else scaled.round_()
            payload = scaled.clamp_(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            scale = (largest / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
            scaled = rows / scale
            scaled = _dither_fp8(scaled) if self._is_stochastic else scaled
            payload = scaled.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([payload, scale.flatten().view(torch.uint8).view(-1, _SCALE_BYTES)], dim=1).view(-1)

    def decode(self, buffer: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The flat numbers of a buffer."""
        if self.format in _DTYPES:
            return buffer.to(dtype)
        rows = buffer.view(-1, self.width + _SCALE_BYTES)
        scale = rows[:, self.width :].flatten().clone().view(torch.float32).unsqueeze(1)
        stored = torch.int8 if self.format is WireFormat.INT8 else torch.float8_e4m3fn
        payload = rows[:, : self.width].clone(memory_format=torch.contiguous_format).view(stored)
        return payload.to(torch.float32).mul_(scale).view(-1).to(dtype)

    @property
    def _is_stochastic(self) -> bool:
        return self.rounding is Rounding.STOCHASTIC


def _to_half(flat: Tensor, wire_format: WireFormat, *, stochastic: bool) -> Tensor:
    if wire_format is WireFormat.BF16:
        if not stochastic:
            return flat.to(torch.bfloat16)
        noise = torch.randint(0, 1 << 16, flat.shape, dtype=torch.int32, device=flat.device)
        bits = torch.where(flat.isfinite(), flat.view(torch.int32) + noise, flat.view(torch.int32))
        return (bits & -65536).view(torch.float32).to(torch.bfloat16)
    if stochastic:
        exponent = torch.frexp(flat.abs().clamp(min=2.0**-14)).exponent - 11  # FP16 has 11 significant bits
        step = torch.ldexp(torch.ones_like(flat), exponent)
        flat = (flat / step).add_(torch.rand_like(flat)).floor_().mul_(step)
    return flat.to(torch.float16)  # what is too large becomes infinite: the guard of the step finds it


def _dither_fp8(scaled: Tensor) -> Tensor:
    """Round to e4m3's grid (4 significant bits, steps of 2⁻⁹ below 2⁻⁶), up with the probability of the remainder."""
    exponent = torch.frexp(scaled.abs().clamp(min=2.0**-6)).exponent - 4
    step = torch.ldexp(torch.ones_like(scaled), exponent)
    return (scaled / step).add_(torch.rand_like(scaled)).floor_().mul_(step)
