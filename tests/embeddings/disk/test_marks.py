"""Marks of rows against a set: edges of bytes and of blocks, parts without any mark, ranges between them."""

from __future__ import annotations

import numpy as np
import pytest

from ziggurat.embeddings.storage.disk.bitmap import _BLOCK_BYTES, MarkedRows, RowMarks
from ziggurat.embeddings.storage.disk.unsaved import UnsavedRows

BLOCK = 8 * _BLOCK_BYTES
NUM_ROWS = 4 * BLOCK + 13
EDGES = (0, 1, 7, 8, 9, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 4 * BLOCK, NUM_ROWS - 1)
RANGES = (
    range(NUM_ROWS),
    range(0),
    range(8, 8),
    range(1, 8),
    range(7, 9),
    range(3, BLOCK + 1),
    range(BLOCK + 2, 2 * BLOCK + 5),  # nothing is marked here
    range(BLOCK - 1, BLOCK),
    range(9, 3 * BLOCK),
    range(4 * BLOCK + 1, NUM_ROWS),
)


def marked(rows: range, *, marks: set[int]) -> list[int]:
    """The rows of a range that a set has."""
    return sorted(row for row in marks if row in rows)


@pytest.fixture
def marks() -> RowMarks:
    """Rows at edges, in two parts that have one in common."""
    found = RowMarks(NUM_ROWS)
    found.add(np.array(EDGES[:8]))
    found.add(np.array(EDGES[7:]))
    return found


@pytest.mark.parametrize("rows", RANGES, ids=str)
def test_rows_of_a_range_are_counted_and_given_by_their_number(rows: range, marks: RowMarks) -> None:
    wanted = marked(rows, marks=set(EDGES))
    assert marks.count == len(EDGES)
    assert marks.among(rows).tolist() == wanted
    parts, counts = marks.counts(rows)
    assert sum(counts) == len(wanted)
    assert [marked(part, marks=set(EDGES)) for part in parts] == [marks.among(part).tolist() for part in parts]
    assert counts == [len(marks.among(part)) for part in parts]
    assert 0 not in counts
    found = MarkedRows(marks, rows)
    assert len(found) == len(wanted)
    for first in range(len(wanted) + 1):
        for count in range(len(wanted) - first + 1):
            assert found.take(first, count).tolist() == wanted[first : first + count]


@pytest.mark.parametrize("rows", RANGES, ids=str)
def test_rows_of_a_range_are_unmarked_and_no_others(rows: range, marks: RowMarks) -> None:
    marks.remove(rows)
    left = [row for row in EDGES if row not in rows]
    assert marks.among(range(NUM_ROWS)).tolist() == left
    assert marks.count == len(left)


def test_rows_are_unsaved_until_a_checkpoint_of_their_table_has_its_name() -> None:
    unsaved, one, other = UnsavedRows(NUM_ROWS), range(9), range(9, NUM_ROWS)
    unsaved.change(np.array(EDGES))
    assert unsaved.last(one) == ""
    unsaved.saved(one, name="100:a")
    assert (len(unsaved.among(one)), len(unsaved.among(other))) == (0, len(EDGES) - 4)
    assert (unsaved.last(one), unsaved.last(other)) == ("100:a", "")
    unsaved.change(np.array([7]))
    assert unsaved.among(one).take(0, 1).tolist() == [7]
    unsaved.begin(range(8, 10))
    assert unsaved.last(one) == "", "rows that begin anew are in no checkpoint"
