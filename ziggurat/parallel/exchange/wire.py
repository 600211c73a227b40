"""Wire formats: what embeddings and their gradients look like while they travel.

    fp32        as computed: 4 bytes a number, or 2 where the network computes in BF16 or FP16; exact
    bf16, fp16  2 bytes
    int8, fp8   1 byte, and a scale of 2 bytes for each field of a sample: 1 + 2/width bytes

A format says how many bits may be lost, so what travels depends on what comes in as well. BF16 numbers in an FP32 wire
travel as they are: nothing is lost, and half of the bytes are saved. `Wire.carried` and `Wire.is_exact` hold the whole
table (docs/guides/many-ranks.md prints it).

A row is what one sample sends to one rank: several fields side by side, `widths` numbers each. Every field has a scale
of its own, so numbers of different features never share one:

    int8   scale ≥ max|x| / 127   q = round(x / scale)           fp8 (e4m3)   scale ≥ max|x| / 448

Scales are BF16, rounded up, so that no number leaves the range; a step is at most 1/128 larger than with an FP32 scale.
What one rank gets is all its numbers, then all its scales, each filled up to a multiple of 16 bytes: a GPU reads and
writes 16 bytes at once, from such places.

    [ numbers of row 0 | of row 1 | … | 0 ][ scales of row 0 | of row 1 | … | 0 ]

Rounding to nearest is biased for gradients that are smaller than half a step: they vanish every time. Stochastic
rounding (up with the probability of the remainder) is right on average; it is used in the backward pass where asked
for. Reference for its effect: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv 1502.02551.
Quantised exchange of embeddings: Yang et al., "Training with Low-precision Embedding Tables", 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from ziggurat.typed import checked


class WireFormat(StrEnum):
    """The format in which a number travels."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8 = "fp8"


class Rounding(StrEnum):
    """The way a number loses its last bits."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, kw_only=True)
@checked
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


_HALVES = (torch.bfloat16, torch.float16)
_DTYPES = {WireFormat.FP32: torch.float32, WireFormat.BF16: torch.bfloat16, WireFormat.FP16: torch.float16}
SCALE_BYTES = 2
_ALIGNMENT = 16
_LARGEST = {WireFormat.INT8: 127.0, WireFormat.FP8: 448.0}
# Significant bits, and the exponent of the smallest normal number: below it steps are of one size.
_GRIDS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.float8_e4m3fn: (4, -6)}


@dataclass(frozen=True)
class Wire:
    """A format for messages whose rows have one layout.

    Args:
        format: how a number travels.
        widths: numbers of each field of a row, from left to right; they share a scale where the format has scales.
            Every message is a whole number of rows.
        rounding: to nearest, or stochastic.
    """

    format: WireFormat
    widths: tuple[int, ...]
    rounding: Rounding = Rounding.NEAREST

    @property
    def has_scales(self) -> bool:
        """True if numbers travel as bytes with scales."""
        return self.format not in _DTYPES

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that a number of type `dtype` travels as; `torch.uint8` stands for bytes with scales."""
        if self.format is WireFormat.FP32 and dtype in _HALVES:
            return dtype
        return _DTYPES.get(self.format, torch.uint8)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """True if a number of type `dtype` arrives with all its bits."""
        return self.carried(dtype) is dtype

    def is_plain(self, dtype: torch.dtype) -> bool:
        """True if numbers of type `dtype` travel each by itself, as they are or rounded to the nearest."""
        return not self.has_scales and (self.is_exact(dtype) or self.rounding is Rounding.NEAREST)

    def bytes_per_number(self, dtype: torch.dtype) -> float:
        """Bytes that a number of type `dtype` takes in a large message, its share of a scale included."""
        if not self.has_scales:
            return self.carried(dtype).itemsize
        return 1 + SCALE_BYTES * len(self.widths) / max(self.num_columns, 1)

    def describe(self, dtype: torch.dtype) -> str:
        """Describe what travels, for people: "bf16, because numbers are computed in BF16: 2 bytes a number, exact"."""
        name = self.format.value if self.has_scales else _NAMES[self.carried(dtype)]
        why = "" if name == self.format.value else f", because numbers are computed in {_NAMES[dtype].upper()}"
        how = "exact" if self.is_exact(dtype) else "rounded"
        return f"{name}{why}: {self.bytes_per_number(dtype):.3g} bytes a number, {how}"

    @cached_property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return sum(self.widths)

    def num_items(self, num_numbers: int) -> int:
        """Items of a message that `num_numbers` numbers for one rank take."""
        if not self.has_scales or not num_numbers:
            return num_numbers
        return aligned(num_numbers) + aligned(self._num_rows(num_numbers) * self._scale_bytes)

    def _num_rows(self, num_numbers: int) -> int:
        assert num_numbers % self.num_columns == 0, (num_numbers, self.num_columns)
        return num_numbers // self.num_columns

    @property
    def _scale_bytes(self) -> int:
        return SCALE_BYTES * len(self.widths)

    def encode(self, numbers: Tensor) -> Tensor:
        """Encode whole rows of any shape, for one rank, to a flat message of type `carried`."""
        flat = numbers.reshape(-1)
        if self.has_scales:
            return self._encode_rows(flat.to(torch.float32).view(-1, max(self.num_columns, 1)))
        target = self.carried(flat.dtype)
        if flat.dtype == target:
            return flat
        wide = flat if flat.dtype == torch.float64 else flat.to(torch.float32)
        if self.rounding is Rounding.NEAREST:
            return wide.to(target)
        if target == torch.bfloat16:
            return _dither_to_bf16(wide.to(torch.float32))
        return _dither(wide, grid=target).to(target)  # too large for FP16 becomes infinite: the step's guard finds it

    def decode(self, buffer: Tensor, *, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The flat numbers of a message from one rank.

        Args:
            buffer: the message.
            count: numbers in it.
            dtype: of the numbers.
        """
        if not self.has_scales or not count:
            return buffer[:count].to(dtype)
        rows = self._num_rows(count)
        begin = aligned(count)
        stored = torch.int8 if self.format is WireFormat.INT8 else torch.float8_e4m3fn
        numbers = buffer[:count].view(stored).view(rows, self.num_columns)
        scales = buffer[begin : begin + rows * self._scale_bytes].view(torch.bfloat16).view(rows, len(self.widths))
        pieces = []
        column = 0
        field = 0
        for width, num_fields in self._runs:
            fields = (
                numbers[:, column : column + num_fields * width].to(torch.float32).unflatten(1, (num_fields, width))
            )
            factors = scales[:, field : field + num_fields].to(torch.float32).unsqueeze(2)
            pieces.append(fields.mul_(factors).flatten(1))
            column = column + num_fields * width
            field = field + num_fields
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return whole.reshape(-1).to(dtype)

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Neighbouring fields of one width are encoded together: (width, number of fields)."""
        return [(width, len(list(fields))) for width, fields in itertools.groupby(self.widths)]

    def _encode_rows(self, rows_RC: Tensor) -> Tensor:
        """Numbers, then scales, each filled up to a multiple of 16 bytes."""
        # A tensor: dividing by a number is multiplying by 1 / x on GPUs.
        largest = torch.full((), _LARGEST[self.format], device=rows_RC.device)
        column = 0
        payloads = []
        scales = []
        is_stochastic = self.rounding is Rounding.STOCHASTIC
        for width, count in self._runs:
            numbers = rows_RC[:, column : column + count * width].unflatten(1, (count, width))
            column += count * width
            scale = _round_up((numbers.abs().amax(dim=2) / largest).clamp_(min=torch.finfo(torch.float32).tiny))
            scaled = numbers / scale.unsqueeze(2)
            if self.format is WireFormat.INT8:
                scaled = scaled.add_(torch.rand_like(scaled)).floor_() if is_stochastic else scaled.round_()
                payload = scaled.clamp_(-largest, largest).to(torch.int8)
            else:
                scaled = _dither(scaled, grid=torch.float8_e4m3fn) if is_stochastic else scaled
                payload = scaled.clamp_(-largest, largest).to(torch.float8_e4m3fn)
            payloads.append(payload.view(torch.uint8).flatten(1))
            scales.append(scale.to(torch.bfloat16))
        if not rows_RC.numel():
            return rows_RC.new_empty(0, dtype=torch.uint8)
        message: list[Tensor] = []
        for part in (torch.cat(payloads, dim=1), torch.cat(scales, dim=1).view(torch.uint8)):
            message += [part.view(-1), part.new_zeros(aligned(part.numel()) - part.numel())]
        return torch.cat(message)


def aligned(num_bytes: int) -> int:
    """The next multiple of 16."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def encode_pieces(wires: Sequence[Wire], numbers: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """One buffer for several receivers.

    Args:
        wires: of each receiver; one format, several layouts.
        numbers: flat, receiver after receiver.
        sizes: numbers for each.
    """
    if not wires[0].has_scales:
        return wires[0].encode(numbers)
    return torch.cat([wire.encode(piece) for wire, piece in zip(wires, numbers.split(list(sizes)), strict=True)])


def decode_pieces(
    wires: Sequence[Wire], buffer: Tensor, *, sizes: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The flat numbers from each of several senders.

    Args:
        wires: of each sender; one format, several layouts.
        buffer: sender after sender.
        sizes: numbers from each.
        dtype: of the numbers.
    """
    if not wires[0].has_scales:
        return wires[0].decode(buffer, count=sum(sizes), dtype=dtype).split(list(sizes))
    pieces = buffer.split([wire.num_items(size) for wire, size in zip(wires, sizes, strict=True)])
    triples = zip(wires, pieces, sizes, strict=True)
    return tuple(wire.decode(piece, count=size, dtype=dtype) for wire, piece, size in triples)


def _round_up(positive: Tensor) -> Tensor:
    """FP32 numbers that BF16 holds, none below the given ones."""
    bits = (positive.view(torch.int32) + 0xFFFF) & -65536
    return torch.where(positive.isfinite(), bits.view(torch.float32), positive)


def _dither_to_bf16(numbers: Tensor) -> Tensor:
    """FP32 to BF16, up with the probability of the remainder: noise below the last bit, then truncation."""
    noise = torch.randint(0, 1 << 16, numbers.shape, dtype=torch.int32, device=numbers.device)
    bits = torch.where(numbers.isfinite(), numbers.view(torch.int32) + noise, numbers.view(torch.int32))
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


def _dither(numbers: Tensor, *, grid: torch.dtype) -> Tensor:
    """Round to the grid of a type, up with the probability of the remainder."""
    significant, smallest = _GRIDS[grid]
    exponent = torch.frexp(numbers.abs().clamp(min=2.0**smallest)).exponent - significant
    step = torch.ldexp(torch.ones_like(numbers), exponent)
    return (numbers / step).add_(torch.rand_like(numbers)).floor_().mul_(step)
