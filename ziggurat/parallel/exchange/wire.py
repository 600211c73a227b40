"""Wires: formats of messages whose rows have one layout, forward and backward.

A format (`wire_formats/`) says how many bits may be lost, so what travels depends on what comes in as well. BF16
numbers in an FP32 wire travel as they are: nothing is lost, and half of the bytes are saved. `Wire.carried` and
`Wire.is_exact` hold the whole table (docs/guides/many-ranks.md prints it).

A row is what one sample sends to one rank: several fields side by side, `widths` numbers each. What fields share (a
scale, an exponent), they share with no other field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.parallel.exchange.wire_formats import PLAIN, WireFormat
from ziggurat.typed import checked

__all__ = ["PLAIN", "Rounding", "Wire", "WireConfig", "WireFormat", "decode_pieces", "encode_pieces"]


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

    Raises:
        ConfigError: gradients are to be rounded at random in a format that cannot.
    """

    in_tower: WireFormat = PLAIN
    between_towers: WireFormat = PLAIN
    backward_rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        if self.backward_rounding is Rounding.NEAREST:
            return
        for hop, format_ in (("in_tower", self.in_tower), ("between_towers", self.between_towers)):
            if not format_.rounds_at_random:
                able = ", ".join(each.name for each in WireFormat if each.rounds_at_random)
                option = f"--parallel.wire.{hop.replace('_', '-')}"
                raise ConfigError(
                    expected=f"a wire that can round gradients up or down at random: {able}",
                    found=f"{format_.name}, which rounds to the nearest",
                    where=f"WireConfig, {hop} beside backward_rounding = {self.backward_rounding.value}",
                    ways_out=("--parallel.wire.backward-rounding nearest", f"{option} int8"),
                )


_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Wire:
    """A format for messages whose rows have one layout.

    Args:
        format: how a number travels.
        widths: numbers of each field of a row, from left to right. Every message is a whole number of rows.
        rounding: to nearest, or stochastic.
    """

    format: WireFormat
    widths: tuple[int, ...]
    rounding: Rounding = Rounding.NEAREST

    @property
    def packs_rows(self) -> bool:
        """True if numbers travel as bytes that only whole rows can be read from."""
        return self.format.packs_rows

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that a number of type `dtype` travels as; `torch.uint8` stands for packed rows."""
        return self.format.carried(dtype)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """True if a number of type `dtype` arrives with all its bits."""
        return self.format.is_exact(dtype)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """True if numbers of type `dtype` travel each by itself, as they are or rounded to the nearest."""
        return not self.packs_rows and (self.is_exact(dtype) or self.rounding is Rounding.NEAREST)

    def bytes_per_number(self, dtype: torch.dtype) -> float:
        """Bytes that a number of type `dtype` takes in a large message, its share of a scale included."""
        return self.format.bytes_per_number(dtype, widths=self.widths)

    def describe(self, dtype: torch.dtype) -> str:
        """Describe what travels, for people: "bf16, because numbers are computed in BF16: 2 bytes a number, exact"."""
        name = _NAMES.get(self.carried(dtype), self.format.name)
        why = "" if name == self.format.name else f", because numbers are computed in {_NAMES[dtype].upper()}"
        how = "exact" if self.is_exact(dtype) else "rounded"
        return f"{name}{why}: {self.bytes_per_number(dtype):.3g} bytes a number, {how}"

    @cached_property
    def num_columns(self) -> int:
        """Numbers of a row."""
        return sum(self.widths)

    def num_items(self, num_numbers: int) -> int:
        """Items of a message that `num_numbers` numbers for one rank take."""
        return self.format.num_items(num_numbers, widths=self.widths)

    def encode(self, numbers: Tensor) -> Tensor:
        """Encode whole rows of any shape, for one rank, to a flat message of type `carried`."""
        at_random = self.rounding is Rounding.STOCHASTIC
        return self.format.encode(numbers.reshape(-1), widths=self.widths, at_random=at_random)

    def decode(self, buffer: Tensor, *, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The flat numbers of a message from one rank.

        Args:
            buffer: the message.
            count: numbers in it.
            dtype: of the numbers.
        """
        return self.format.decode(buffer, count=count, widths=self.widths, dtype=dtype)


def encode_pieces(wires: Sequence[Wire], numbers: Tensor, *, sizes: Sequence[int]) -> Tensor:
    """One buffer for several receivers.

    Args:
        wires: of each receiver; one format, several layouts.
        numbers: flat, receiver after receiver.
        sizes: numbers for each.
    """
    if not wires[0].packs_rows:
        # Each number travels by itself, whatever the layout: one message needs no cuts.
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
    if not wires[0].packs_rows:
        return wires[0].decode(buffer, count=sum(sizes), dtype=dtype).split(list(sizes))
    pieces = buffer.split([wire.num_items(size) for wire, size in zip(wires, sizes, strict=True)])
    triples = zip(wires, pieces, sizes, strict=True)
    return tuple(wire.decode(piece, count=size, dtype=dtype) for wire, piece, size in triples)
