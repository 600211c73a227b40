"""Admission: what a cache of rows did with the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor

HIT, FREE, NO_WAY = -2, -1, -3  # what `Admission.left` says beside rows


@dataclass(frozen=True, slots=True)
class Admission:
    """Places where the rows of a step go.

    Args:
        places: the way of each row, as set · 32 + way; -1 for a conflict.
        left: the row that left it, or `HIT`, `FREE` or `NO_WAY` (a conflict).
        hits: rows that were held.
        stored: rows that left for others.
        conflicts: rows that found no way.
    """

    places: Int64[Tensor, "U"]
    left: Int64[Tensor, "U"]
    hits: int
    stored: int
    conflicts: int

    @classmethod
    def counted(cls, places: Int64[Tensor, "U"], left: Int64[Tensor, "U"]) -> Admission:
        """An admission, its numbers counted."""
        kinds = (left == HIT, left >= 0, left == NO_WAY)
        return cls(places, left, *(int(kind.count_nonzero()) for kind in kinds))
