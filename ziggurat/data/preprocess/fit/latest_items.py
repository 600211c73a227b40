"""LatestItems: which training row says last, in time, what an item is like.

A model that finds items is evaluated by ranking all items of the training rows, each with its features as they were
last seen. Encoded rows have no time, and files are in any order; so while raw rows are read, the latest row of each
item is kept (`add`), and its number and time go beside the encoded training rows (`write`). Of rows of one time the
later one in the files counts, as in a catalogue (`data/catalogue.py`). Where the schema has no time, nothing is kept,
and the order of the files counts.

A split by time leaves no training row after those that are evaluated. Other splits may, as all features then may.

Memory: 24 bytes an item, twice that while rows are taken in, and twice all of it where dates can be read in two ways.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.data.preprocess.values.parsing import ParsedChunk
from ziggurat.data.preprocess.values.times import is_date_column, readable_times, without_categories
from ziggurat.data.preprocess.values.vocabulary import Ids, Rows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import OrderSigns
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Schema
from ziggurat.files.parquet import write_table

LATEST_FILE = "latest_items.parquet"
_STATE_FILE = "latest_items.npz"
_ENTRIES = ("keys", "times", "rows")
_Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
_MIN_PENDING = 1 << 20


class LatestItems:
    """The latest row of each item, while rows are read.

    Whether the day or the month stands first in dates like 01/03/2024 may show in the last of all rows, so from the
    first such date on both readings are kept, and one is chosen when all rows are there; the day first if none shows.

    Args:
        schema: names the item and the time; where it lacks either, nothing is kept.
        date_order: of dates like 01/03/2024.
    """

    def __init__(self, schema: Schema, *, date_order: DateOrder) -> None:
        self._item = schema.items.id if schema.items is not None and schema.time else ""
        self._time = schema.time
        self._order = date_order
        self._signs = OrderSigns()
        self._is_date: bool | None = None  # of text: what its first cells show holds for all
        self._latest = _Latest()  # with the day first, if nothing else was asked for
        self._month_first: _Latest | None = None  # None: the same

    @property
    def is_kept(self) -> bool:
        """True if there is anything to keep."""
        return bool(self._item)

    def add(self, chunk: RawChunk, parsed: ParsedChunk) -> None:
        """Take in rows.

        Args:
            chunk: raw rows.
            parsed: those of them that are usable.
        """
        if not self._item:
            return
        column = without_categories(chunk.column(self._time))
        if column.dtype == pl.String:
            self._is_date = is_date_column(column) if self._is_date is None else self._is_date
            if self._order is DateOrder.AUTO:
                self._signs.add(column)
                self._keep_both()
        ids = parsed.features[self._item]
        if isinstance(ids, Rows):
            keys = ids.rows.astype(np.uint64)
            there = np.ones(parsed.num_rows, dtype=bool)
        else:
            assert isinstance(ids, Ids), "before the fitter numbers them"
            keys = ids.keys
            there = np.ones(len(ids), dtype=bool) if ids.missing is None else ~ids.missing
        # Parsed rows are some of the chunk's, in the same order.
        places = np.searchsorted(chunk.global_rows, parsed.global_rows)
        for latest, order in ((self._latest, self._order), (self._month_first, DateOrder.MONTH_FIRST)):
            if latest is not None:
                times = readable_times(column, order=order, is_date=self._is_date)[places]
                # A row without a time comes before all others, but counts where an item has no better one.
                times = np.where(np.isnan(times), -np.inf, times)
                latest.add((keys[there], times[there], parsed.global_rows[there]))

    def save(self, folder: Path) -> None:
        """Keep what the rows of a shard have said, for `absorb`."""
        if self._item:
            both = {"": self._latest, "month_first_": self._month_first}
            state = {
                f"{which}{name}": values
                for which, latest in both.items()
                if latest is not None
                for name, values in zip(_ENTRIES, latest.merged(), strict=True)
            }
            signs = np.array([self._signs.in_question, self._signs.day_first, self._signs.month_first], dtype=np.int64)
            np.savez(folder / _STATE_FILE, signs=signs, **state)

    def absorb(self, folder: Path) -> None:
        """Take in what `save` kept there."""
        if self._item:
            with np.load(folder / _STATE_FILE, allow_pickle=False) as found:
                state = {name: found[name] for name in found.files}
            signs = state.get("signs", np.zeros(3, dtype=np.int64))  # absent: kept by an earlier release
            self._signs.in_question |= bool(signs[0])
            self._signs.day_first += int(signs[1])
            self._signs.month_first += int(signs[2])
            self._keep_both()
            self._latest.add(tuple(state[name] for name in _ENTRIES))
            if self._month_first is not None:
                self._month_first.add(tuple(state.get(f"month_first_{name}", state[name]) for name in _ENTRIES))

    def write(self, folder: Path) -> None:
        """Write rows and times, by row, into the folder of the encoded training rows."""
        if not self._item:
            return
        chosen = self._month_first if self._signs.order is DateOrder.MONTH_FIRST else None
        _, times, rows = (chosen or self._latest).merged()
        order = np.argsort(rows)
        table = pa.table({"row": rows[order], "time": times[order]})
        write_table(table, folder / LATEST_FILE)

    def _keep_both(self) -> None:
        if self._signs.in_question and self._month_first is None:
            self._month_first = copy.deepcopy(self._latest)


class _Latest:
    """The latest entry of each key, under one reading of the times."""

    def __init__(self) -> None:
        self._kept: _Entries = (np.empty(0, dtype=np.uint64), np.empty(0), np.empty(0, dtype=np.int64))
        self._pending: list[_Entries] = []
        self._num_pending = 0

    def add(self, entries: _Entries) -> None:
        part = _latest(*entries)
        self._pending.append(part)
        self._num_pending += len(part[0])
        if self._num_pending > max(_MIN_PENDING, len(self._kept[0])):
            self.merged()

    def merged(self) -> _Entries:
        keys, times, rows = (np.concatenate(each) for each in zip(self._kept, *self._pending, strict=True))
        self._kept = _latest(keys, times, rows)
        self._pending = []
        self._num_pending = 0
        return self._kept


def _latest(keys: np.ndarray, times: np.ndarray, rows: np.ndarray) -> _Entries:
    """The entry of each key that is the latest; of equal times that of the last row."""
    order = np.lexsort((rows, times, keys))
    # Behind the last key stands its complement, which is another key for sure.
    last = np.diff(keys[order], append=~keys[order[-1:]]) != 0 if len(order) else np.empty(0, dtype=bool)
    chosen = order[last]
    return keys[chosen], times[chosen], rows[chosen]


def read_latest_items(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read what `write` wrote: (N,) int64 rows, ascending, and their (N,) times.

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
