"""Wire formats of which each number travels by itself: FP32, BF16, FP16.

A format says how many bits may be lost, so what travels depends on what comes in as well: BF16 numbers in an FP32 wire
travel as they are. Nothing is lost, and half of the bytes are saved.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ziggurat.parallel.exchange.wire_formats.at_random import round_at_random, round_to_bf16_at_random
from ziggurat.parallel.exchange.wire_formats.wire_format import WireFormat

_HALVES = (torch.bfloat16, torch.float16)
_KERNEL_CODES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class EachNumber(WireFormat):
    """Numbers in a type of torch.

    Attributes:
        dtype: what they are rounded to.
    """

    packs_rows = False
    dtype: ClassVar[torch.dtype]

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the format, whatever comes in."""
        del dtype
        return self.dtype

    def num_items(self, num_numbers: int, *, widths: tuple[int, ...]) -> int:
        """Return one item a number."""
        del widths
        return num_numbers

    def bytes_per_number(self, dtype: torch.dtype, *, widths: tuple[int, ...]) -> float:
        """Return the bytes of what is carried."""
        del widths
        return self.carried(dtype).itemsize

    def encode(self, numbers: Tensor, *, widths: tuple[int, ...], at_random: bool) -> Tensor:
        """Return the numbers, rounded unless they travel as they are."""
        del widths
        target = self.carried(numbers.dtype)
        if numbers.dtype == target:
            return numbers
        wide = numbers if numbers.dtype == torch.float64 else numbers.to(torch.float32)
        return self.rounded_at_random(wide) if at_random else wide.to(target)

    def decode(self, message: Tensor, *, count: int, widths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the numbers as they came."""
        del widths
        return message[:count].to(dtype)

    def rounded_at_random(self, numbers: Tensor) -> Tensor:
        """Round FP32 or FP64 numbers, up with the probability of the remainder."""
        return round_at_random(numbers, grid=self.dtype).to(self.dtype)

    def kernel_code(self, dtype: torch.dtype) -> str:
        """Return the code of what is carried."""
        return _KERNEL_CODES.get(self.carried(dtype), "")


class AsComputed(EachNumber):
    """FP32, or the halves that the network computes in: nothing is lost."""

    name = "fp32"
    dtype = torch.float32

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Return halves as they are."""
        return dtype if dtype in _HALVES else self.dtype


class Bf16(EachNumber):
    """BF16: the range of FP32, 8 significant bits."""

    name = "bf16"
    dtype = torch.bfloat16

    def rounded_at_random(self, numbers: Tensor) -> Tensor:
        """Add noise to the bits below the last one."""
        return round_to_bf16_at_random(numbers.to(torch.float32))


class Fp16(EachNumber):
    """FP16: 11 significant bits; what is too large becomes infinite, and the guard of the step finds it."""

    name = "fp16"
    dtype = torch.float16
