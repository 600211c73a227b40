"""Placements: how one table is spread over ranks. One file each; this is the one list of them.

A placement of your own derives from `Placement` and is listed by `Placement.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.placements.column_wise import ColumnWise
from ziggurat.placements.data_parallel import DataParallel
from ziggurat.placements.placement import Hop, Moved, Part, Placement, StepBytes
from ziggurat.placements.row_wise import RowWise
from ziggurat.placements.table_row_wise import TableRowWise
from ziggurat.placements.table_wise import TableWise

TABLE_WISE = Placement.add(TableWise())
COLUMN_WISE = Placement.add(ColumnWise())
ROW_WISE = Placement.add(RowWise())
TABLE_ROW_WISE = Placement.add(TableRowWise())
DATA_PARALLEL = Placement.add(DataParallel())

__all__ = [
    "COLUMN_WISE",
    "DATA_PARALLEL",
    "ROW_WISE",
    "TABLE_ROW_WISE",
    "TABLE_WISE",
    "Hop",
    "Moved",
    "Part",
    "Placement",
    "StepBytes",
    "by_columns",
]


def by_columns(num_parts: int) -> Placement:
    """Return the placement of a table that is cut by columns into so many parts: one part is the whole table."""
    return COLUMN_WISE if num_parts > 1 else TABLE_WISE
