"""Row-wise: equal blocks of rows, all columns each.

    rows  ████████   rows 0 … n−1 on the first rank
          ────────
          ████████   rows n … 2n−1 on the second, …

Every feature becomes, on each rank, a list of those of its rows that lie there; partial sums of all ranks add up to the
pool. Memory is divided for a table of any width; each rank sends a partial sum for every sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ziggurat.placements.placement import Part, Placement

if TYPE_CHECKING:
    from torch import Tensor


class RowWise(Placement):
    """A block of rows on each rank."""

    name = "row_wise"
    cuts_rows = True
    torchrec = "table_row_wise"  # over all ranks of a tower group

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Cut the rows into blocks of one size; the last ones may be smaller, or empty."""
        block = -(-num_rows // num_parts)
        begins = [min(index * block, num_rows) for index in range(num_parts + 1)]
        return tuple(
            Part(first_row=begin, num_rows=end - begin, first_column=0, num_columns=num_columns)
            for begin, end in itertools.pairwise(begins)
        )

    def largest_part(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[int, int]:
        """Return the block on the first rank."""
        return -(-num_rows // num_parts), num_columns

    def owners(self, rows_N: Tensor, parts: Sequence[Part]) -> Tensor:
        """Divide: blocks have one size."""
        return rows_N.div(max(parts[0].num_rows, 1), rounding_mode="floor")

    def local_rows(self, rows_N: Tensor, owners_N: Tensor, parts: Sequence[Part]) -> Tensor:
        """Subtract where the owner's block begins."""
        return rows_N - owners_N * parts[0].num_rows + (owners_N > 0)
