"""Extra columns: what a loss reads beside labels, and no model: scores of a teacher that were logged, for example.

    [[extra]]
    name = "teacher"
    column = "score_of_old_model"

    [[extra]]
    name = "teacher_vector"
    dim = 64

They come from the raw file through encoded data and the loader to `Batch.extras["teacher"]`, (B,) or (B, dim) of
float32, NaN where the cell is empty: a loss says what it makes of a row without one. Scores are computed without them,
so files to score, exports and requests have none, and files to evaluate need none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ziggurat.errors import SchemaError
from ziggurat.features.events import (
    HISTORY_LENGTHS,
    HISTORY_PLACES,
    PIECE_HOMES,
    PIECE_LENGTHS,
    PIECE_SETS,
    PIECE_STARTS,
)
from ziggurat.typed import DimOrDefault, checked

# What batches have of their own beside the columns of a schema, where histories are cut or thinned.
_OURS = frozenset(
    [PIECE_STARTS, PIECE_LENGTHS, PIECE_SETS, PIECE_HOMES, HISTORY_PLACES, HISTORY_LENGTHS, "piece_facts"]
)


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Extra:
    """A column of numbers that a loss reads.

    Args:
        name: its key in `Batch.extras`.
        column: the raw column; "" is the name.
        dim: 0 for a number a row, else the length of the list of numbers that each row has.

    Example:
        >>> zg.Extra(name="teacher", column="score_of_old_model").dim
        0
    """

    name: str
    column: str = ""
    dim: DimOrDefault = 0

    def __post_init__(self) -> None:
        if self.name in _OURS or "." in self.name:
            raise SchemaError(
                expected=f"an extra with a name without a dot, and none of {', '.join(sorted(_OURS))}",
                found=repr(self.name),
                where="schema, extras",
                ways_out='rename the extra, and name its column: name = "mine", column = "piece.starts"',
            )
