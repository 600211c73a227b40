"""Which row says last what an item is like, where dates can be read in two ways."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.fit.latest_items import LatestItems, read_latest_items
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.date_order import DateOrder

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="item"),), labels=(zg.Label(name="like"),), time="at", items=zg.Items(id="item")
)


def latest_row(folder: Path, chunks: list[list[str]], *, num_shards: int, order: DateOrder) -> int:
    """The latest row of an item that every row is about; each shard reads its chunks by itself."""
    merged, start = LatestItems(SCHEMA, date_order=order), 0
    for shard in range(num_shards):
        one = LatestItems(SCHEMA, date_order=order)
        for dates in chunks[shard::num_shards]:
            frame = pl.DataFrame({"item": ["a"] * len(dates), "like": [1] * len(dates), "at": dates})
            chunk = RawChunk(frame=frame, path=Path("f.csv"), first_row=start, start=start)
            one.add(chunk, parse_chunk(SCHEMA, chunk, bad_rows=BadRows()))
            start += len(dates)
        one.save(folder)
        merged.absorb(folder)
    merged.write(folder)
    rows, _ = read_latest_items(folder)
    return int(rows.item())


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(
    ("last", "order", "row"),
    [
        ("01/25/2024", DateOrder.AUTO, 1),
        ("25/01/2024", DateOrder.AUTO, 2),
        ("01/02/2024", DateOrder.AUTO, 2),  # nothing shows it: the day first
        ("25/01/2024", DateOrder.MONTH_FIRST, 1),
    ],
)
def test_dates_are_read_in_the_order_that_the_last_of_them_shows(
    tmp_path: Path, last: str, order: DateOrder, row: int, num_shards: int
) -> None:
    chunks = [["2024-01-01"], ["05/03/2024", "04/06/2024"], [last]]  # 5 March and 4 June, or 3 May and 6 April
    assert latest_row(tmp_path, chunks, num_shards=num_shards, order=order) == row


def test_what_the_first_cells_of_text_are_holds_for_all_of_it(tmp_path: Path) -> None:
    """Numbers among dates are no times, also where a chunk holds nothing else."""
    assert latest_row(tmp_path, [["2024-01-01"], ["20240301"]], num_shards=1, order=DateOrder.AUTO) == 0
