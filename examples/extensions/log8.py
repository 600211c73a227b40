"""Add a row format: eight bits a number on a logarithmic scale, for rows whose numbers differ by orders of magnitude.

INT8 puts 256 equal steps between the ends of a row, so its small numbers are rounded as coarsely as its large ones.
Here every number has the same relative precision (one step is 9 %), down to 2^-15.75 of the largest:

    row     D + 4 bytes    the largest magnitude s in FP32, and a code for each column
    code    0              zero
            ±k, 1 … 127    x = ±s · 2^((k − 127) / 8); the sign is the upper bit

Stochastic rounding takes the level above or below with the probability that makes it right on average; below the least
level it takes zero or that. So many small updates add up.

Reference: Miyashita, Lee and Murmann, "Convolutional neural networks using logarithmic data representation", 2016.

    import log8                                 # lists it; settings may then say --tables.weights log8
"""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.row_formats.noise import noise

_SCALE_BYTES = 4
_SIGN = 128
_LEVELS = torch.cat([torch.zeros(1), torch.exp2((torch.arange(1, 128) - 127) / 8)])  # of a row whose scale is 1
_MIN_SCALE = 2.0**-100  # rows below it are zeros: their levels would not be normal numbers


class Log8(RowFormat):
    """A sign and seven bits of logarithm a number, one scale a row."""

    name = "log8"
    dtype = torch.uint8
    keeps_rows_whole = True
    time = 2.0  # torch decodes the rows of a batch
    worth = 0.6

    def width(self, dim: int) -> int:
        """Return the bytes of the scale and of the codes."""
        return _SCALE_BYTES + dim

    def encode(self, values_ND: Tensor, *, words_N: Tensor | None = None) -> Tensor:
        """Return the scale and the codes of each row."""
        magnitudes = values_ND.abs()
        scale_N1 = magnitudes.amax(dim=1, keepdim=True)
        scale_N1 = torch.where(scale_N1.isfinite(), scale_N1, torch.nan)
        scale_N1 = torch.where(scale_N1 < _MIN_SCALE, 0.0, scale_N1)
        levels = _LEVELS.to(values_ND.device)
        # The quotient is rounded, so its place may be off by one at a level; comparing with products repairs that.
        place = torch.bucketize((magnitudes / scale_N1).nan_to_num(0.0), levels, right=True).clamp(1, 127)
        lower = levels[place - 1] * scale_N1
        upper = levels[place] * scale_N1
        if words_N is None:
            rises = magnitudes - lower > upper - magnitudes
        else:
            u = (noise(words_N, torch.arange(values_ND.shape[1], device=words_N.device)) >> 8) * 2.0**-24
            rises = magnitudes - lower > u * (upper - lower)
        code = torch.where(rises, place, place - 1)
        code = torch.where(magnitudes == upper, place, code)
        code = torch.where(scale_N1 > 0, code, 0)
        signed = torch.where((values_ND < 0) & (code > 0), code + _SIGN, code).to(torch.uint8)
        return torch.cat([scale_N1.contiguous().view(torch.uint8), signed], dim=1)

    def decode(self, rows_NW: Tensor, *, dim: int) -> Tensor:
        """Return the numbers that codes stand for; NaN in all columns of a row that had a number that is not finite."""
        del dim
        scale = rows_NW[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        code = rows_NW[:, _SCALE_BYTES:].to(torch.int64)
        magnitude = _LEVELS.to(rows_NW.device)[code % _SIGN] * scale.view(torch.float32)
        return torch.where(code >= _SIGN, -magnitude, magnitude)


LOG8 = RowFormat.add(Log8())
