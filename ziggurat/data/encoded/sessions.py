"""Sessions of encoded rows: which adjacent rows a shuffle of sessions keeps together."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from ziggurat.data.encoded.records import SESSION_COLUMN
from ziggurat.errors import DataError
from ziggurat.features.batch import NO_GROUP


def session_lengths(table: pa.Table, *, where: str) -> Int64[np.ndarray, "n"]:
    """Lengths of runs of adjacent rows of one session; rows without a session are runs of one.

    Raises:
        DataError: the rows were prepared without a session; `where` names their origin.
    """
    if SESSION_COLUMN not in table.column_names:
        raise DataError(
            expected="data prepared with a session, for shuffle = sessions or session_lanes",
            found="a schema without one",
            where=where,
            ways_out=('[roles] session = "session_id" in the schema', "shuffle = buffer"),
        )
    ids = table.column(SESSION_COLUMN).to_numpy()
    if not len(ids):
        return np.empty(0, dtype=np.int64)
    begins = np.flatnonzero((ids[1:] != ids[:-1]) | (ids[1:] == NO_GROUP)) + 1
    return np.diff(np.concatenate([[0], begins, [len(ids)]]))
