"""Table: the rows that one or more features look up, and how raw ids find theirs. See `schema.py` for the words."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.errors import SchemaError
from ziggurat.features.growing import Evict
from ziggurat.features.schema_checks import refuse_impossible_table
from ziggurat.typed import Count, DimOrDefault, Rows, checked

PADDING_ROW = 0
UNKNOWN_ROW = 1
MISSING_ROW = 2
NUM_RESERVED_ROWS = 3


_checked = functools.partial(checked, error=SchemaError)


class Encoding(StrEnum):
    """Ways in which a table turns raw ids into rows."""

    VOCABULARY = "vocabulary"  # fitted on the training data: one row for each id seen min_count times
    HASHING = "hashing"  # a stable 64-bit hash modulo num_rows; no fitting, collisions possible
    IDENTITY = "identity"  # the ids are already 0 … num_rows-1
    GROWING = "growing"  # training admits ids as they come, num_rows at a time; see docs/guides/growing-vocabularies.md


class OutOfRange(StrEnum):
    """Ways to treat an id outside 0 … num_rows-1 of an `identity` table."""

    ERROR = "error"
    UNKNOWN = "unknown"  # counted, and sent to the unknown row
    CLAMP = "clamp"  # counted, and moved to the nearest valid id


@dataclass(frozen=True, kw_only=True)
@_checked
class Table:
    """An embedding table with the rows that one or more features share.

    Args:
        name: unique among tables.
        encoding: see `Encoding`.
        num_rows: rows for ids (without the reserved ones); refused for vocabulary, needed for all others.
        min_count: a vocabulary keeps ids seen at least this often in the training data; a growing one admits an id when
            training has seen it so often.
        max_rows: a vocabulary keeps at most this many ids, the most frequent ones. 0: no limit.
        out_of_range: what an `identity` table does with ids outside its range.
        embedding_dim: columns of this table; 0 takes the model's.
        evict: which id of a full growing table makes room for another one.

    Example:
        >>> zg.Table(name="item", min_count=5).min_count
        5
    """

    name: str
    encoding: Encoding = Encoding.VOCABULARY
    num_rows: Rows = 0
    min_count: Count = 1
    max_rows: Rows = 0
    out_of_range: OutOfRange = OutOfRange.ERROR
    embedding_dim: DimOrDefault = 0
    evict: Evict = Evict.LEAST_FREQUENT

    def __post_init__(self) -> None:
        refuse_impossible_table(self)
