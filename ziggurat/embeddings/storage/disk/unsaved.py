"""UnsavedRows: which rows were changed since the last checkpoint, and which checkpoint that was. One bit for each row.

    changed   ──► marked                                     by whoever changes it, or by the cache when it leaves
    saved     ──► not marked; the table remembers the name   once the checkpoint has its own name on the disk
    failed    ──► as it was                                  the next checkpoint writes these rows, too
    begun     ──► the name is forgotten                      rows that were drawn anew: the next one is whole

A row that is held in memory is changed at each step. So the cache keeps a flag for each of its places, and sets the
mark when a row leaves, or a checkpoint asks: a step costs nothing here.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from ziggurat.embeddings.storage.disk.bitmap import MarkedRows, RowMarks


class UnsavedRows:
    """Rows that were changed since the last checkpoint of their table.

    Args:
        num_rows: of all tables together.
    """

    def __init__(self, num_rows: int) -> None:
        self._marks = RowMarks(num_rows)
        self._names: dict[range, str] = {}

    def change(self, rows: Int64[np.ndarray, "N"]) -> None:
        """Mark distinct rows: their numbers are other than in the checkpoint."""
        self._marks.add(rows)

    def among(self, rows: range) -> MarkedRows:
        """The rows of a table that the next checkpoint has to write."""
        return MarkedRows(self._marks, rows)

    def saved(self, rows: range, *, name: str) -> None:
        """A checkpoint holds the rows of a table as they are.

        Args:
            rows: of the table.
            name: of the checkpoint; nothing else is called so.
        """
        self._marks.remove(rows)
        self._names[rows] = name

    def last(self, rows: range) -> str:
        """The name of the last checkpoint of a table; "" if there is none that its marks count from."""
        return self._names.get(rows, "")

    def begin(self, rows: range) -> None:
        """Rows of a range begin anew, or with other arrays: no checkpoint has what they are."""
        gone = [table for table in self._names if table.start < rows.stop and rows.start < table.stop]
        for table in gone:
            del self._names[table]
