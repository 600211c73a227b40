"""Cells: what one rank looks up for one sample and feature; the unit in which an exchange is split in two.

A rank that holds tables has a matrix of cells, samples of all members of its group by its features. Each has a code:

    NOTHING   its list is empty here: it is zero, and never travels
    NOW       no row of it is waiting for an update: it travels at once
    WAITS     it reads a row that the present step updates: it travels after that

                 f0   f1   f2                     codes travel first, two bits a cell; who knows them knows which
    sample 0   [ NOW   –   WAITS ]                numbers come in which message, so the messages hold numbers alone:
    sample 1   [ NOW  NOW   –    ]                now:  f0 of 0, f0 of 1, f1 of 1       waits:  f2 of 0

A cell travels whole, so its sum over a list is made by one kernel in one order, whatever the code: that is why the
exchange is the plain one bit for bit. Fields may have different widths; numbers are moved in units of the largest
width that divides all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

NOTHING, NOW, WAITS = 0, 1, 2
_CODES_PER_BYTE = 4  # of two bits each


@dataclass(frozen=True, kw_only=True)
class CellField:
    """One feature of a member's lookup output.

    Args:
        width: its numbers.
        column: the first of them in what the member looks up.
        target: the first of them in what a rank wants; -1: nobody in the group wants it.
    """

    width: int
    column: int
    target: int


@dataclass(frozen=True)
class MemberCells:
    """The places where the cells of one member of a group come from and go to, in units.

    Args:
        fields: from left to right, without gaps.
        unit: numbers that move together.
    """

    fields: tuple[CellField, ...]
    unit: int

    @property
    def num_fields(self) -> int:
        """Columns of the matrix of codes."""
        return len(self.fields)

    @cached_property
    def num_columns(self) -> int:
        """Numbers that the member looks up for a sample."""
        return sum(field.width for field in self.fields)

    @cached_property
    def field_of_unit(self) -> Int64[Tensor, "U"]:
        """The field that each unit of a sample belongs to."""
        counts = torch.tensor([field.width // self.unit for field in self.fields], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.fields)), counts)

    @cached_property
    def target_of_unit(self) -> Int64[Tensor, "U"]:
        """The unit of the wanted sample that each unit becomes."""
        firsts = [torch.arange(f.width // self.unit) + f.target // self.unit for f in self.fields]
        # The empty one is for members without fields: `cat` refuses an empty list.
        return torch.cat([*firsts, torch.empty(0, dtype=torch.int64)])

    @cached_property
    def unwanted(self) -> Bool[Tensor, "F"]:
        """Fields that nobody in the group wants."""
        return torch.tensor([field.target < 0 for field in self.fields], dtype=torch.bool)

    def units(self, chosen_RF: Bool[Tensor, "R F"]) -> Bool[Tensor, "R U"]:
        """The same choice for units in place of fields."""
        # Every field is one unit wide: the choice is one of units already.
        if self.unit * self.num_fields == self.num_columns:
            return chosen_RF
        return chosen_RF[:, self.field_of_unit.to(chosen_RF.device)]


def common_unit(widths: Sequence[int]) -> int:
    """The largest number of columns that divides all of these."""
    return math.gcd(*widths) or 1  # of nothing it is 0


def pack_codes(codes_RF: UInt8[Tensor, "R F"]) -> UInt8[Tensor, "n"]:
    """Four codes a byte, sample after sample."""
    flat = F.pad(codes_RF.reshape(-1), (0, -codes_RF.numel() % _CODES_PER_BYTE)).view(-1, _CODES_PER_BYTE)
    return flat[:, 0] | flat[:, 1] << 2 | flat[:, 2] << 4 | flat[:, 3] << 6


def num_packed(num_rows: int, num_fields: int) -> int:
    """Bytes of packed codes."""
    return -(-num_rows * num_fields // _CODES_PER_BYTE)


def unpack_codes(packed: UInt8[Tensor, "n"], *, num_rows: int, num_fields: int) -> UInt8[Tensor, "R F"]:
    """Return the codes that `pack_codes` was given."""
    flat = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)
    return flat[: num_rows * num_fields].view(num_rows, num_fields)


def pick(values_RC: Float[Tensor, "R C"], chosen_RU: Bool[Tensor, "R U"], *, unit: int) -> Float[Tensor, "n unit"]:
    """The chosen units of a matrix, row after row."""
    return values_RC.reshape(*chosen_RU.shape, unit)[chosen_RU]


def put(values_RC: Float[Tensor, "R C"], chosen_RU: Bool[Tensor, "R U"], units: Float[Tensor, "n unit"]) -> None:
    """Write chosen units back, in place: the reverse of `pick`."""
    values_RC.view(*chosen_RU.shape, units.shape[1])[chosen_RU] = units
