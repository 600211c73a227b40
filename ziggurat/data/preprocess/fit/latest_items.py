"""LatestItems: which training row says last, in time, what an item is like.

A model that finds items is evaluated by ranking all items of the training rows, each with its features as they were
last seen. Encoded rows have no time, and files are in any order; so while raw rows are read, the latest row of each
item is kept (`add`), and its number and time go beside the encoded training rows (`write`). Of rows of one time the
later one in the files counts, as in a catalogue (`data/catalogue.py`). Where the schema has no time, nothing is kept,
and the order of the files counts.

A split by time leaves no training row after those that are evaluated. Other splits may, as all features then may.

Memory: 24 bytes an item, twice that while rows are taken in.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.data.preprocess.values.parsing import ParsedChunk
from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.preprocess.values.vocabulary import Ids
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import DateOrder, find_order
from ziggurat.errors import DataError
from ziggurat.features.schema import Schema

LATEST_FILE = "latest_items.parquet"
_STATE_FILE = "latest_items.npz"
_LEAST_PENDING = 1 << 20


class LatestItems:
    """The latest row of each item, while rows are read.

    Args:
        schema: names the item and the time; where it lacks either, nothing is kept.
        date_order: of dates like 01/03/2024.
    """

    def __init__(self, schema: Schema, *, date_order: DateOrder) -> None:
        self._item = schema.items.id if schema.items is not None and schema.time else ""
        self._time, self._order = schema.time, date_order
        self._kept = _none()
        self._pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_pending = 0

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._item)

    def add(self, chunk: RawChunk, parsed: ParsedChunk) -> None:
        """Take in rows.

        Args:
            chunk: raw rows.
            parsed: those of them that are usable.
        """
        if not self._item:
            return
        column = chunk.column(self._time)
        if self._order is DateOrder.AUTO and column.dtype == pl.String:
            self._order = find_order(column) or DateOrder.AUTO
        times = readable_times(column, order=self._order)
        times = times[np.searchsorted(chunk.global_rows, parsed.global_rows)]
        times = np.where(np.isnan(times), -np.inf, times)
        ids = parsed.ids.get(self._item)
        if ids is None:
            keys, there = parsed.rows[self._item].astype(np.uint64), np.ones(parsed.num_rows, dtype=bool)
        else:
            assert isinstance(ids, Ids), "before the fitter numbers them"
            keys, there = ids.keys, np.ones(len(ids), dtype=bool) if ids.missing is None else ~ids.missing
        part = _latest(keys[there], times[there], parsed.global_rows[there])
        self._pending.append(part)
        self._num_pending += len(part[0])
        if self._num_pending > max(_LEAST_PENDING, len(self._kept[0])):
            self._merge()

    def save(self, folder: Path) -> None:
        """Keep what the rows of a shard have said, for `absorb`."""
        if self._item:
            self._merge()
            keys, times, rows = self._kept
            np.savez(folder / _STATE_FILE, keys=keys, times=times, rows=rows)

    def absorb(self, folder: Path) -> None:
        """Take in what `save` kept there."""
        if self._item:
            with np.load(folder / _STATE_FILE, allow_pickle=False) as found:
                self._pending.append((found["keys"], found["times"], found["rows"]))
            self._merge()

    def write(self, folder: Path) -> None:
        """Write rows and times, by row, into the folder of the encoded training rows."""
        if not self._item:
            return
        self._merge()
        _, times, rows = self._kept
        order = np.argsort(rows)
        table = pa.table({"row": rows[order], "time": times[order]})
        pq.write_table(table, folder / LATEST_FILE, compression="zstd", write_page_checksum=True)

    def _merge(self) -> None:
        parts = [self._kept, *self._pending]
        self._kept = _latest(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        self._pending, self._num_pending = [], 0


def _none() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(0, dtype=np.uint64), np.empty(0), np.empty(0, dtype=np.int64)


def _latest(keys: np.ndarray, times: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entry of each key that is the latest; of equal times that of the last row."""
    order = np.lexsort((rows, times, keys))
    last = np.diff(keys[order], append=~keys[order[-1:]]) != 0 if len(order) else np.empty(0, dtype=bool)
    chosen = order[last]
    return keys[chosen], times[chosen], rows[chosen]


def read_latest_items(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """What `write` wrote: (N,) int64 rows, ascending, and their (N,) times.

    Raises:
        DataError: the file is damaged or absent.
    """
    path = folder / LATEST_FILE
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        return table.column("row").to_numpy(), table.column("time").to_numpy()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise DataError(
            expected="the latest rows of the items, in Parquet",
            found=str(error)[:200],
            where=str(path),
            ways_out="delete the folder and prepare the data again",
        ) from error
