"""Data-parallel: a copy of the table on every rank that looks it up.

Lookups are a rank's own and nothing of them travels, so small tables that everybody reads cost no exchange. Gradients
of the rows that were read are summed over the copies, to the same bits on each (`parallel/tables/copies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.placements.placement import Hop, Moved, Part, Placement, StepBytes


class DataParallel(Placement):
    """The whole table on every rank that looks it up."""

    name = "data_parallel"
    is_copied = True

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Return the whole table for every rank."""
        return (Part(first_row=0, num_rows=num_rows, first_column=0, num_columns=num_columns),) * num_parts

    def check_ranks(self, ranks: Sequence[int], *, group: Sequence[int]) -> str:
        """Ask for all ranks that look the table up."""
        fits = tuple(ranks) == tuple(group)
        return "" if fits else f"all ranks that look the table up, {list(group)}, in this order"

    def bytes_moved(self, step: StepBytes, *, num_parts: int, hop: Hop) -> Moved:
        """Gradients of touched rows go to the ranks that sum them, and the sums come back to all."""
        del num_parts
        return Moved(gathered=hop.to_all(step.copied))
