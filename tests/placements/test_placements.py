"""What every placement promises of the parts that it cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec, SingleSpec, TableSpec
from ziggurat.parallel.tables.shards import cut_tables
from ziggurat.placements import Part, Placement, by_columns
from ziggurat.placements.row_wise import RowWise
from ziggurat.plan import Plan, TablePlacement


@pytest.mark.parametrize("placement", list(Placement), ids=str)
@given(num_rows=st.integers(1, 40), width=st.integers(1, 6), num_parts=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_parts_cover_the_table(placement: Placement, num_rows: int, width: int, num_parts: int) -> None:
    """Once, or by each copy; the largest part is told without making them all; each row has one owner."""
    if placement.fits_one_rank:
        num_parts = 1
    num_columns = width * num_parts
    parts = placement.parts(num_rows=num_rows, num_columns=num_columns, num_parts=num_parts)
    assert len(parts) == num_parts
    cells = torch.zeros(num_rows, num_columns, dtype=torch.int64)
    for part in parts:
        rows = slice(part.first_row, part.first_row + part.num_rows)
        cells[rows, part.first_column : part.first_column + part.num_columns] += 1
    assert (cells == (num_parts if placement.is_copied else 1)).all()
    largest = max(part.num_rows * part.num_columns for part in parts)
    rows, columns = placement.largest_part(num_rows=num_rows, num_columns=num_columns, num_parts=num_parts)
    assert rows * columns == largest
    if placement.cuts_rows:
        every = torch.arange(num_rows)
        owners = placement.owners(every, parts)
        local = placement.local_rows(every, owners, parts)
        for row, owner, place in zip(every.tolist(), owners.tolist(), local.tolist(), strict=True):
            part = parts[owner]
            padding = 1 if part.first_row else 0
            assert part.first_row <= row < part.first_row + part.num_rows
            assert place == row - part.first_row + padding


def test_columns_that_cannot_be_dealt_evenly_are_refused() -> None:
    with pytest.raises(PlanError, match="divides the 10 columns"):
        by_columns(4).parts(num_rows=3, num_columns=10, num_parts=4)


def test_an_unknown_placement_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no placement; there are table_wise, column_wise, row_wise"):
        Placement("diagonal")


@pytest.mark.parametrize("damage", ["overlap", "gap", "order", "few", "columns"])
def test_parts_that_are_not_the_table_are_refused(damage: str) -> None:
    class Damaged(RowWise):
        name = "damaged"

        def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
            parts = list(super().parts(num_rows=num_rows, num_columns=num_columns, num_parts=num_parts))
            if damage == "order":
                parts.reverse()
            elif damage == "few":
                parts.pop()
            elif damage == "columns":
                parts[0] = replace(parts[0], num_columns=1)
            else:
                parts[1] = replace(parts[1], num_rows=parts[1].num_rows + (1 if damage == "overlap" else -1))
            return tuple(parts)

    inputs = InputSpec(
        single=(SingleSpec(name="user", table="user"),), tables=(TableSpec(name="user", num_rows=12, embedding_dim=4),)
    )
    plan = Plan(world_size=3, tables=(TablePlacement(table="user", placement=Damaged(), ranks=(0, 1, 2)),))
    with pytest.raises(PlanError, match="placement damaged, table 'user'"):
        cut_tables(plan, inputs, dim=4)
