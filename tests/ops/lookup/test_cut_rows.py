"""Rows of tables cut by columns: what the host does not count has the rows and numbers of what it counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.ops.lookup import FieldKind, FieldSlot, GradientPart, LookupLayout, Lookups
from ziggurat.ops.lookup.cut_rows import in_order, num_lookups, rows_of_tables, spans_of
from ziggurat.ops.lookup.reference import TorchKernel, sums_of_fixed_size

TABLES = {"a": (0, 5), "b": (5, 9), "c": (14, 3)}
FIELDS = (
    ("x", "a", FieldKind.SINGLE),
    ("y", "b", FieldKind.SINGLE),
    ("z", "b", FieldKind.SUM),
    ("w", "c", FieldKind.SUM),
)


def part_of(size: int, *, seed: int, is_told: bool) -> GradientPart:
    """Single rows and lists of three tables, padding among them, and a gradient."""
    generator, slots = torch.Generator().manual_seed(seed), []
    for column, (name, table, kind) in enumerate(FIELDS):
        first, num_rows = TABLES[table]
        place = {"first_row": first, "num_rows": num_rows, "column": 2 * column}
        slots.append(FieldSlot(name=name, kind=kind, index=column % 2, table=table, **place))
    single = torch.stack([torch.randint(num_rows, (size,), generator=generator) for num_rows in (5, 9)])
    lengths = torch.randint(4, (2, size), generator=generator)
    counts = lengths.sum(dim=1).tolist()
    values = [torch.randint(rows, (count,), generator=generator) for rows, count in zip((9, 3), counts, strict=True)]
    lookups = Lookups(
        batch_size=size,
        single=single,
        values=torch.cat(values),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]),
        rows_of_lists=tuple(counts) if is_told else None,
    )
    layout = LookupLayout(dim=2, width=8, slots=tuple(slots))
    return GradientPart(layout=layout, lookups=lookups, grad=torch.randn(size, 8, generator=generator))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 99), st.booleans())
def test_rows_that_nobody_counted_are_those_that_were_counted(sizes: list[int], seed: int, is_told: bool) -> None:
    parts = [part_of(size, seed=seed + at, is_told=is_told) for at, size in enumerate(sizes)]
    most = [num_lookups(parts, table) for table in TABLES]
    assert most[0] == sum(sizes)
    counted = in_order(TorchKernel().sum_gradients(parts))
    found = rows_of_tables(sums_of_fixed_size(parts), list(TABLES.values()), most=most)
    for mine, span, (first, _), count in zip(
        found, spans_of(counted, list(TABLES.values())), TABLES.values(), most, strict=True
    ):
        rows, sums = counted.rows[span], counted.sums[span]
        assert len(mine.rows) == count
        assert torch.equal(mine.rows[: len(rows)], rows)
        assert torch.equal(mine.sums[: len(rows)], sums)
        assert (mine.rows[len(rows) :] == first).all()
        assert not mine.sums[len(rows) :].any()
