"""WirePlaces: where the fields of a matrix of embeddings are in messages, as a table that a kernel reads.

    matrix (rows, columns)                          message: items (bytes where numbers have scales)

    field   first_row ┐        column … + width     start + r · pitch … + width       the numbers of row r
            num_rows  ┘                             scale + r · scale_pitch           its scale (bytes); −1: none

A message for several ranks lies one after the other in one buffer, so one table holds the fields of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

_MAX_ALIGN = 16


class FieldPlace(NamedTuple):
    """One field of the rows for one rank.

    Args:
        first_row: of the matrix.
        num_rows: how many.
        column: of the matrix, the first of the field.
        width: columns.
        start: items in front of the field's first number in the message.
        pitch: items from one row to the next.
        scale: bytes in front of its first scale; −1 where numbers travel without.
        scale_pitch: bytes from one scale to that of the next row.
    """

    first_row: int
    num_rows: int
    column: int
    width: int
    start: int
    pitch: int
    scale: int = -1
    scale_pitch: int = 0


@dataclass(frozen=True)
class WirePlaces:
    """Fields, on a device.

    Args:
        fields: a line for each `FieldPlace`.
        pads: (first byte, bytes) of what is filled up with zeros; fewer than 16 bytes each.
        num_items: of the whole message.
        most_rows: of a field.
        most_width: of a field.
        align: the largest power of two, 16 at most, that all columns, widths, starts and pitches are multiples of.
    """

    fields: Int64[Tensor, "F 8"]
    pads: Int64[Tensor, "P 2"]
    num_items: int
    most_rows: int
    most_width: int
    align: int

    @staticmethod
    def of(
        fields: Sequence[FieldPlace], *, pads: Sequence[tuple[int, int]], num_items: int, device: torch.device
    ) -> WirePlaces:
        """Copy a table to a device.

        Args:
            fields: those without rows or columns are left out.
            pads: those of no bytes are left out.
            num_items: of the whole message.
            device: of matrix and message.
        """
        fields = [each for each in fields if each.num_rows and each.width]
        pads = [each for each in pads if each[1]]
        numbers = [number for each in fields for number in (each.column, each.width, each.start, each.pitch)]
        return WirePlaces(
            fields=torch.tensor(fields, dtype=torch.int64).view(-1, len(FieldPlace._fields)).to(device),
            pads=torch.tensor(pads, dtype=torch.int64).view(-1, 2).to(device),
            num_items=num_items,
            most_rows=max((each.num_rows for each in fields), default=0),
            most_width=max((each.width for each in fields), default=0),
            align=math.gcd(_MAX_ALIGN, *numbers),
        )
