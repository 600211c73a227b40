"""Column-wise: equal parts of the columns, all rows each.

    rows  ██|██|██   D/k columns of all rows on each of k ranks

Every rank gets the same ids and answers with a narrower result, so a wide table's lookups and memory are divided, and
nothing is summed. Row-wise optimizer state belongs to all columns of a row, so each part keeps its own.
"""

from __future__ import annotations

from ziggurat.errors import PlanError
from ziggurat.placements.placement import Part, Placement


class ColumnWise(Placement):
    """Some of the columns on each rank."""

    name = "column_wise"
    cuts_columns = True
    is_searched = True
    torchrec = "column_wise"

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Cut the columns evenly.

        Raises:
            PlanError: they cannot be.
        """
        width, rest = divmod(num_columns, num_parts)
        if rest:
            raise PlanError(
                expected=f"a number of ranks that divides the {num_columns} columns of the table",
                found=f"{num_parts} ranks",
                where=self.name,
                ways_out="name other ranks, or place the table table_wise or row_wise",
            )
        return tuple(
            Part(first_row=0, num_rows=num_rows, first_column=index * width, num_columns=width)
            for index in range(num_parts)
        )

    def largest_part(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[int, int]:
        """Return all rows and a part of the columns."""
        return num_rows, num_columns // num_parts
