"""What kernels on a device need to know of a layout, copied to the device once: a layout serves many batches.

    slots          (F, 5)   `LookupLayout.packed`: kind, index, first row, rows, column
    slot_of_list   (J,)     the slot that reads list feature j, −1 where another storage's does

Also of the noise by which rows are rounded: one line of `origins` for each table (`ops/row_formats/noise.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.ops.lookup.layout import FieldKind, LookupLayout
from ziggurat.ops.row_formats.noise import RowNoise

_MAX_KEPT = 256
_MAX_ALIGN = 16

Made = TypeVar("Made")


@dataclass(frozen=True)
class DeviceLayout:
    """A layout on a device.

    Args:
        slots: its fields.
        slot_of_list: slots by list feature.
        align: the largest power of two, 16 at most, that D, the width and every column are multiples of.
    """

    slots: Int64[Tensor, "F 5"]
    slot_of_list: Int64[Tensor, "J"]
    align: int

    @staticmethod
    def of(layout: LookupLayout, device: torch.device) -> DeviceLayout:
        """Copy a layout to a device."""
        # One entry at least: an empty tensor has no address to give to a kernel.
        slot_of_list = torch.full((max(layout.num_jagged, 1),), -1, dtype=torch.int64)
        for position, slot in enumerate(layout.slots):
            if slot.kind is not FieldKind.SINGLE:
                slot_of_list[slot.index] = position
        divisor = math.gcd(layout.dim, layout.width, *(slot.column for slot in layout.slots))
        align = math.gcd(divisor, _MAX_ALIGN)
        return DeviceLayout(layout.packed.to(device), slot_of_list.to(device), align)


def origins_of(noise: RowNoise, device: torch.device) -> Int64[Tensor, "origins 4"]:
    """First row, shift, key before any step, and column of each origin of rows."""
    columns = noise.columns.astype(np.int64)
    lines = np.stack([noise.first_rows, noise.shifts, noise.base_keys.view(np.int64), columns], axis=1)
    return torch.from_numpy(lines).to(device)


class Kept:
    """The latest things that were made of objects, by the objects themselves: hashing a layout costs more."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, torch.device], tuple[Any, Any]] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> Kept:
        # Objects of a copied model have other identities.
        return Kept()

    def get(self, source: Any, device: torch.device, make: Callable[[Any, torch.device], Made]) -> Made:
        """Return the result of `make` for this object, which is kept alive, so that its identity stays its own."""
        key = id(source), device
        if key not in self._kept:
            self._kept[key] = source, make(source, device)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]
