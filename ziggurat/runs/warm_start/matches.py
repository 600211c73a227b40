"""Match the rows of a table of two runs by the raw ids that land in them.

    parent            u7 → row 3   u1 → row 4   u9 → row 5          vocabulary: ids by falling count
    run               u1 → row 3   u7 → row 4   u4 → row 5
    match             (4 → 3), (3 → 4)          u4 is new, u9 is gone

Which side knows its ids decides how a table is matched:

    the run knows them       a vocabulary, or numbers that are rows     the parent is asked for the row of each
    the parent knows them    and the run hashes, or lets ids come       the run is asked for the row of each
    neither                  both hash, or both let ids come            by the hash, where one size divides the other

Ids are looked up in bulk, by their stable hash (`data/preprocess/values/vocabulary.py`): 25 ns an id, and 24 to
48 bytes of memory besides its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from jaxtyping import Int64, UInt8

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.numeric import to_bucket_rows
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.features.growing import MAX_SIGHTINGS
from ziggurat.features.schema import NUM_RESERVED_ROWS, Encoding, Feature, Table, table_of

_NONE = np.empty(0, dtype=np.int64)
_IDS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GrownIds:
    """Ids that a growing table of the run begins with, in the order of their rows.

    Args:
        numbers: of the ids, as encoded data has them.
        frequency: how often each counts as used.
    """

    numbers: Int64[np.ndarray, " K"] = field(repr=False)
    frequency: UInt8[np.ndarray, " K"] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class RowMatch:
    """Pairs of rows of one table, reserved rows left out.

    Args:
        table: its name.
        theirs: (K,) rows of the parent.
        mine: (K,) rows of the run, each once.
        num_mine: rows for ids of the run, or ids where the table grows.
        num_theirs: rows of the parent that have ids.
        how: how they were matched, in words.
        why_not: why no row could be matched; "" where rows could.
        grown: what a growing table begins with.
    """

    table: str
    theirs: Int64[np.ndarray, " K"] = field(default_factory=lambda: _NONE, repr=False)
    mine: Int64[np.ndarray, " K"] = field(default_factory=lambda: _NONE, repr=False)
    num_mine: int = 0
    num_theirs: int = 0
    how: str = ""
    why_not: str = ""
    grown: GrownIds | None = None

    @property
    def num_taken(self) -> int:
        """Rows of the run that have one of the parent."""
        return len(self.mine)

    @property
    def num_gone(self) -> int:
        """Rows of the parent with ids that the run does not have."""
        if not len(self.theirs):
            return self.num_theirs
        # A byte for each row of the parent: to sort the rows that were taken takes a hundred times as long.
        is_taken = np.zeros(int(self.theirs.max()) + 1, dtype=bool)
        is_taken[self.theirs] = True
        return self.num_theirs - int(np.count_nonzero(is_taken))


def match_rows(
    table: str,
    *,
    mine: Preprocessing,
    theirs: Preprocessing,
    frequency: UInt8[np.ndarray, " R"] | None = None,
) -> RowMatch:
    """Match the rows of a table that both have.

    Args:
        table: its name.
        mine: of the run.
        theirs: of the parent, with what its growing vocabularies have become.
        frequency: of a growing table of the parent: how often each row was used.
    """
    numbers = [feature for feature in _features_of(mine, table) if feature.num_rows is not None]
    if numbers or any(feature.num_rows is not None for feature in _features_of(theirs, table)):
        return _match_buckets(table, mine=mine, theirs=theirs)
    my_table = mine.schema.table(table)
    their_table = theirs.schema.table(table)
    if (ids := _known_ids(mine, table)) is not None:
        found = _rows_of(theirs, table, ids)
        has_row = found >= NUM_RESERVED_ROWS
        rows = np.flatnonzero(has_row)
        rows += NUM_RESERVED_ROWS
        return RowMatch(
            table=table,
            theirs=found[has_row],
            mine=rows,
            num_mine=len(ids),
            num_theirs=_num_ids(theirs, their_table),
            how="by raw id"
            if their_table.encoding is not Encoding.HASHING
            else "by raw id, in the rows of their hashes",
        )
    if (ids := _known_ids(theirs, table)) is not None:
        found = _rows_of(mine, table, ids)
        order = np.arange(NUM_RESERVED_ROWS, len(ids) + NUM_RESERVED_ROWS)
        if my_table.encoding is Encoding.GROWING:
            counts = theirs.vocabularies[table].counts.to_numpy() if table in theirs.vocabularies else np.ones(len(ids))
            return _match_growing(my_table, numbers=found, rows=order, frequency=counts)
        # Ids of one hash share a row: that of the most frequent one is taken, which stands first.
        rows, first = np.unique(found, return_index=True)
        return RowMatch(
            table=table,
            theirs=order[first],
            mine=rows,
            num_mine=my_table.num_rows,
            num_theirs=len(ids),
            how="by raw id, into the rows of their hashes; of ids that share one the most frequent",
        )
    if my_table.encoding is their_table.encoding is Encoding.GROWING:
        grown = theirs.grown[table]
        counts = np.ones(len(grown)) if frequency is None else frequency[grown.table_rows - NUM_RESERVED_ROWS]
        return _match_growing(my_table, numbers=grown.numbers, rows=grown.table_rows, frequency=counts)
    if my_table.encoding is their_table.encoding is Encoding.HASHING:
        return _match_hashes(my_table, their_table)
    return RowMatch(
        table=table,
        num_mine=_num_ids(mine, my_table),
        num_theirs=_num_ids(theirs, their_table),
        why_not=f"{their_table.encoding} before, {my_table.encoding} now: neither knows its ids",
    )


def _features_of(preprocessing: Preprocessing, table: str) -> list[Feature]:
    return [feature for feature in preprocessing.schema.features if table_of(feature) == table]


def _num_ids(preprocessing: Preprocessing, table: Table) -> int:
    """Count the rows that have ids."""
    if table.name in preprocessing.vocabularies:
        return len(preprocessing.vocabularies[table.name])
    if table.encoding is Encoding.GROWING:
        return len(preprocessing.grown.get(table.name, ()))
    return table.num_rows


def _known_ids(preprocessing: Preprocessing, table: str) -> pl.Series | None:
    """Return the ids of rows 3, 4, 5 … as canonical texts; None where rows do not tell their ids."""
    if table in preprocessing.vocabularies:
        return preprocessing.vocabularies[table].ids
    described = preprocessing.schema.table(table)
    if described.encoding is Encoding.IDENTITY:
        return pl.int_range(described.num_rows, eager=True).cast(pl.String)
    return None


def _rows_of(preprocessing: Preprocessing, table: str, ids: pl.Series) -> Int64[np.ndarray, " N"]:
    """Return the rows of canonical texts; reserved ones where an id has none, numbers where a table grows."""
    described = preprocessing.schema.table(table)
    found = np.empty(len(ids), dtype=np.int64)
    for first in range(0, len(ids), _IDS_AT_ONCE):
        some = ids.slice(first, _IDS_AT_ONCE)
        if described.encoding is Encoding.IDENTITY:
            numbers = some.cast(pl.Int64, strict=False)
            # "007" is not the id 7 of a column of numbers.
            is_number = numbers.cast(pl.String).eq_missing(some) & numbers.is_between(0, described.num_rows - 1)
            rows = (numbers + NUM_RESERVED_ROWS).zip_with(is_number, pl.Series([0], dtype=pl.Int64))
            found[first : first + len(some)] = rows.fill_null(0).to_numpy()
        else:
            found[first : first + len(some)] = preprocessing.rows(table, Ids.of(some), {})
    return found


def _match_growing(table: Table, *, numbers: np.ndarray, rows: np.ndarray, frequency: np.ndarray) -> RowMatch:
    """Let a growing table begin with the ids of the parent, the most frequent ones where it has no room for all."""
    in_order = np.sort(numbers)
    if bool((in_order[1:] == in_order[:-1]).any()):  # ids that share a number: the first one of them
        numbers, first = np.unique(numbers, return_index=True)
        rows = rows[first]
        frequency = frequency[first]
    del in_order
    if not bool((rows[1:] > rows[:-1]).all()):
        by_row = np.argsort(rows)
        numbers = numbers[by_row]
        rows = rows[by_row]
        frequency = frequency[by_row]
    counts = np.minimum(frequency, MAX_SIGHTINGS).astype(np.uint8)
    # Bytes are ordered in one pass, which leaves those that are alike in the order of their rows.
    order = np.argsort(MAX_SIGHTINGS - counts, kind="stable")[: table.num_rows]
    return RowMatch(
        table=table.name,
        theirs=rows[order].astype(np.int64, copy=False),
        mine=np.arange(NUM_RESERVED_ROWS, len(order) + NUM_RESERVED_ROWS),
        num_mine=len(order),
        num_theirs=len(rows),
        how="by raw id: the table begins with the parent's ids",
        grown=GrownIds(numbers=numbers[order].astype(np.int64, copy=False), frequency=counts[order]),
    )


def _match_hashes(mine: Table, theirs: Table) -> RowMatch:
    """Give each hash the row that it had, where that is known: (h mod n·k) mod n = h mod n."""
    known = RowMatch(table=mine.name, num_mine=mine.num_rows, num_theirs=theirs.num_rows)
    if mine.num_rows % theirs.num_rows:
        why = f"ids were hashed into {theirs.num_rows:,} rows, and now into {mine.num_rows:,}, which is no multiple"
        return RowMatch(table=mine.name, num_mine=known.num_mine, num_theirs=known.num_theirs, why_not=why)
    return RowMatch(
        table=mine.name,
        theirs=np.tile(
            np.arange(NUM_RESERVED_ROWS, theirs.num_rows + NUM_RESERVED_ROWS), mine.num_rows // theirs.num_rows
        ),
        mine=np.arange(NUM_RESERVED_ROWS, mine.num_rows + NUM_RESERVED_ROWS),
        num_mine=known.num_mine,
        num_theirs=known.num_theirs,
        how="by hash",
    )


def _match_buckets(table: str, *, mine: Preprocessing, theirs: Preprocessing) -> RowMatch:
    """Give each bucket of a number the row of the parent's bucket that its middle falls into."""
    my_features = _features_of(mine, table)
    their_features = _features_of(theirs, table)
    my_state = mine.numbers.get(my_features[0].name)
    their_state = theirs.numbers.get(their_features[0].name)
    num_mine = next(spec.num_rows for spec in mine.inputs.tables if spec.name == table) - NUM_RESERVED_ROWS
    num_theirs = next(spec.num_rows for spec in theirs.inputs.tables if spec.name == table) - NUM_RESERVED_ROWS
    if my_state is None or their_state is None or not my_state.quantiles or not their_state.quantiles:
        why = ""
        both = np.arange(num_mine) + NUM_RESERVED_ROWS
        if num_mine != num_theirs:
            both = _NONE
            why = f"{num_theirs:,} rows of a kind of its own before, {num_mine:,} now"
        return RowMatch(
            table=table,
            theirs=both,
            mine=both,
            num_mine=num_mine,
            num_theirs=num_theirs,
            how="row by row",
            why_not=why,
        )
    edges = np.array(my_state.quantiles)
    # The first and the last bucket have one edge: a number beyond it stands for them.
    middles = np.concatenate([[-np.inf], (edges[1:] + edges[:-1]) / 2, [np.inf]])
    return RowMatch(
        table=table,
        theirs=to_bucket_rows(middles, their_state).astype(np.int64),
        mine=np.arange(len(middles)) + NUM_RESERVED_ROWS,
        num_mine=len(middles),
        num_theirs=len(their_state.quantiles) + 1,
        how="by the number in the middle of each bucket",
    )
