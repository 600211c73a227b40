"""Table-wise: a table lies whole on one rank, and is looked up there as on one device."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.placements.placement import Part, Placement


class TableWise(Placement):
    """The whole table on one rank."""

    name = "table_wise"
    is_searched = True
    fits_one_rank = True
    torchrec = "table_wise"

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Return the table as one part."""
        del num_parts
        return (Part(first_row=0, num_rows=num_rows, first_column=0, num_columns=num_columns),)

    def check_ranks(self, ranks: Sequence[int], *, group: Sequence[int]) -> str:
        """Ask for exactly one rank."""
        del group
        return "" if len(ranks) == 1 else f"exactly one for {self.name}"
