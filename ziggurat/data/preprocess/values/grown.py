"""GrownVocabulary: which rows a growing table had given to which ids when a checkpoint was written; it is final."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from ziggurat.errors import CheckpointError
from ziggurat.features.schema import NUM_RESERVED_ROWS, UNKNOWN_ROW

_MAX_OF_BEFORE = 1 << 31  # numbers had 31 bits once; one of 62 bits is as small with a probability of 2^-31


@dataclass(frozen=True, kw_only=True)
class GrownVocabulary:
    """Rows of numbers of ids (`features/growing.py`).

    Args:
        numbers: (K,) of the ids that have a row, rising.
        table_rows: (K,) their rows, the reserved ones counted.
    """

    numbers: Int64[np.ndarray, " K"] = field(repr=False)
    table_rows: Int32[np.ndarray, " K"] = field(repr=False)

    @staticmethod
    def of(numbers_in_order: Shaped[np.ndarray, " K"]) -> GrownVocabulary:
        """Make a vocabulary from the numbers of rows 3, 4, 5 …"""
        order = np.argsort(numbers_in_order, kind="stable")
        rows = (order + NUM_RESERVED_ROWS).astype(np.int32)
        return GrownVocabulary(numbers=numbers_in_order[order].astype(np.int64), table_rows=rows)

    def __len__(self) -> int:
        return len(self.numbers)

    def refuse_older(self, table: str, *, where: str) -> None:
        """Raise unless the numbers are those of 62 bits that raw data is given today.

        Args:
            table: whose rows they are.
            where: the folder that the map was read from.

        Raises:
            CheckpointError: all of them are numbers of 31 bits, so that every id of raw data would be unknown.
        """
        if len(self.numbers) and int(self.numbers.max()) < _MAX_OF_BEFORE:
            raise CheckpointError(
                expected=f"numbers of 62 bits for the ids of the growing table {table!r}",
                found=f"numbers of 31 bits for all {len(self.numbers):,} of its ids, as a version before wrote them",
                where=where,
                ways_out=("train the run again, into another folder", "load it with the version that trained it"),
            )

    def rows(self, numbers: Shaped[np.ndarray, " N"]) -> Shaped[np.ndarray, " N"]:
        """(N,) rows of numbers, in their dtype: reserved ones stay, ids without a row are unknown."""
        found = np.full(len(numbers), UNKNOWN_ROW)
        if len(self.numbers):
            places = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
            found = np.where(self.numbers[places] == numbers, self.table_rows[places], UNKNOWN_ROW)
        return np.where(numbers < NUM_RESERVED_ROWS, numbers, found).astype(numbers.dtype)
