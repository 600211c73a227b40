"""Loader: batches from encoded data, shuffled within a bounded buffer, from any position on.

    for batch in Loader(dataset, config=LoaderConfig(batch_size=2048, seed=7)).batches(epoch=3, start_step=1207): …

How: whole row groups are read (pyarrow decodes them outside the interpreter lock) and transposed into fixed-width
records; a window of about `shuffle_buffer_rows` records is kept in memory; a batch gathers its records by a
permutation that is a pure function of (seed, epoch). See `records.py` and `epoch_stream.py`.

    window k      ██████████████████░░░░   batches are cut from here …
    window k+1    ████░░░░░░░░░░░░░░░░░░   … while the next one fills, one row group at a time, in step with them

Two windows alternate, so memory is at most 2 · (shuffle_buffer_rows + one row group) records, and no batch waits for a
whole window. The rows that do not fill a last batch of window k become the head of window k+1.

Ranks: `batch_size` is per rank. The global batch is `world_size · batch_size` consecutive rows of the epoch's stream
and rank r takes its slice, so every rank makes the same number of steps; in the last, ranks may get fewer rows or
none (a batch of size 0). Every rank reads every row group and keeps its own rows: exact for any number of ranks, at
the price of decoding (about 0.2 µs a row) on each.

Position: (epoch, step), or (epoch, number of rows that all ranks have consumed) to go on with another number of ranks.
Starting anywhere skips the windows before it without reading them.

Two background threads work ahead: one decodes row groups, the other makes batches of them, `prefetch` ahead. An error
in either is raised by the iterator; dropping or closing the iterator stops both.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import pyarrow as pa

from ziggurat.data.background import in_background
from ziggurat.data.encoded.epoch_stream import EpochStream, RankSlices, Shuffle, Window
from ziggurat.data.encoded.records import (
    concatenate_values,
    gather_segments,
    record_dtype,
    records_to_batch,
    write_records,
)
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.typed import Count, CountOrNone, checked

__all__ = ["Dataset", "Deduplicate", "Loader", "LoaderConfig", "Shuffle"]


class Deduplicate(StrEnum):
    """Whether batches keep what repeats once (`Batch.repeated`)."""

    AUTO = "auto"  # groups of features for which it pays, measured on a batch; needs shuffle = sessions or none
    OFF = "off"  # never


class Dataset(Protocol):
    """What a loader reads from: `EncodedDataset` on disk, `MemoryDataset` in memory."""

    @property
    def inputs(self) -> InputSpec:
        """What the columns are."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        ...

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Rows of each row group."""
        ...

    @property
    def row_sum(self) -> int:
        """Sum of the mixed row ids (see `ledger.expected_sum`)."""
        ...

    @property
    def with_labels(self) -> bool:
        """False for data to predict."""
        ...

    def read_group(self, index: int) -> pa.Table:
        """The encoded columns of one row group."""
        ...

    def sessions(self, index: int) -> np.ndarray:
        """Lengths of the sessions of one row group, in their order; asked for by `shuffle = sessions` alone."""
        ...


@dataclass(frozen=True, kw_only=True)
@checked
class LoaderConfig:
    """Settings of a `Loader`.

    Args:
        batch_size: rows a rank and step.
        shuffle: see `Shuffle`; evaluation and prediction use `none`.
        shuffle_buffer_rows: rows that are shuffled with each other; bounds the memory (2 · rows · record bytes).
        seed: of the order. The same seed and epoch give the same order.
        deduplicate: whether training keeps equal lists of a batch once; see `Deduplicate`.
        prefetch: batches that are prepared ahead in the background; 0 does all work in the caller's thread.
    """

    batch_size: Count = 2048
    shuffle: Shuffle = Shuffle.BUFFER
    shuffle_buffer_rows: Count = 1_000_000
    seed: int = 0
    deduplicate: Deduplicate = Deduplicate.AUTO
    prefetch: CountOrNone = 4


class Loader:
    """Batches of one data set for one rank.

    Args:
        dataset: what to read.
        config: see `LoaderConfig`.
        rank: this process, 0 … world_size−1.
        world_size: number of processes that share the data.

    Attributes:
        groups: features of which a batch keeps each distinct combination once (`Batch.repeated`); () keeps all.
    """

    def __init__(
        self, dataset: Dataset, *, config: LoaderConfig | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                expected="0 <= rank < world_size",
                found=f"rank = {rank}, world_size = {world_size}",
                where="Loader",
                ways_out="pass the rank and the number of processes that torchrun set",
            )
        self.dataset = dataset
        self.config = config or LoaderConfig()
        self.rank = rank
        self.world_size = world_size
        self.groups: tuple[FeatureGroup, ...] = ()
        self._storages: list[np.ndarray] = []

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self.dataset.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the same on every rank; the last may be partial."""
        return self.num_steps()

    def num_steps(self, *, start_row: int = 0) -> int:
        """Batches from a position in the epoch (rows consumed by all ranks) to its end."""
        return self._slices(start_row).num_steps

    def batches(self, *, epoch: int, start_step: int = 0, start_row: int = 0) -> Iterator[Batch]:
        """The batches of this rank, from a position in an epoch to its end.

        Args:
            epoch: number of the epoch, 0 or more.
            start_step: batches to skip, counted from `start_row`.
            start_row: rows of the epoch that all ranks together have consumed before; batches are cut from here on.
                With the same number of ranks, `start_row = step · batch_size · world_size` equals `start_step = step`.

        Raises:
            ConfigError: the position is not in the epoch.
            DataError: a row group is damaged.
        """
        first_row = start_row + start_step * self.config.batch_size * self.world_size
        last = self.steps_per_epoch * self.config.batch_size * self.world_size  # the end of a partial last step
        if epoch < 0 or start_step < 0 or start_row < 0 or first_row > max(last, self.num_rows):
            raise ConfigError(
                expected=f"epoch >= 0 and a position within its {self.num_rows} rows ({self.steps_per_epoch} steps)",
                found=f"epoch = {epoch}, start_step = {start_step}, start_row = {start_row}",
                where="Loader.batches",
                ways_out=("resume with the data and the batch size that the checkpoint was made with",),
            )
        produced = self._produced(self._slices(first_row), epoch)
        if self.config.prefetch == 0:
            return produced
        return in_background(produced, depth=self.config.prefetch, name="ziggurat-loader")

    def _produced(self, slices: RankSlices, epoch: int) -> Iterator[Batch]:
        # Fresh memory is paged in at up to 1 ms per 2 MiB on a virtual machine, so passes hand their storage on.
        storages, self._storages = self._storages, []
        producer = _Producer(self.dataset, self.config, slices, epoch=epoch, groups=self.groups)
        producer.allocate(storages)
        tables = producer.tables()
        if self.config.prefetch:
            tables = in_background(tables, depth=1, name="ziggurat-loader-read")
        try:
            yield from producer.batches(tables)
        finally:
            tables.close()
            self._storages = producer.storages

    def _slices(self, first_row: int) -> RankSlices:
        return RankSlices(
            batch_size=self.config.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            first_row=first_row,
            num_rows=self.num_rows,
        )


class _WindowRecords:
    """The records of one rank in one window, in memory; filled one row group at a time.

    The head are the records that the window before could not fill a batch with.
    """

    def __init__(self, producer: _Producer, number: int, *, before: _WindowRecords | None) -> None:
        self._producer = producer
        self._groups = producer.windows[number].groups
        self._num_read = 0
        order, self._keep = producer.local_order(producer.windows[number])
        head = before.left_over() if before is not None else np.empty(0, dtype=np.int64)
        self.num_rows = len(head) + len(order)
        self.records = producer.storages[number % 2][: self.num_rows]
        order += len(head)
        self._order = np.concatenate([np.arange(len(head)), order]) if len(head) else order
        self._chunks: list[np.ndarray] = []
        self._num_values = 0
        self._values = np.empty(0, dtype=np.int32)
        self._source_rows = 0  # rows of the window seen, kept or not
        self._filled = len(head)
        if before is not None and len(head):
            self._take_head(before, head)

    @property
    def num_whole_batches(self) -> int:
        return self.num_rows // self._producer.slices.batch_size

    def left_over(self) -> np.ndarray:
        """Indices of the records after the last whole batch, in stream order."""
        return self._order[self.num_whole_batches * self._producer.slices.batch_size :]

    def _take_head(self, before: _WindowRecords, head: np.ndarray) -> None:
        records = before.records.take(head)
        lengths = records["lengths"]
        self._add_values([gather_segments(before._values, records["starts"].ravel(), lengths.ravel())])
        ends = np.cumsum(lengths.ravel(), dtype=np.int64)
        records["starts"] = (ends - lengths.ravel()).reshape(lengths.shape)
        self.records[: len(head)] = records

    def _add_values(self, chunks: list[np.ndarray]) -> None:
        self._chunks += chunks
        self._num_values += sum(len(chunk) for chunk in chunks)

    def fill_to(self, fraction: float, tables: Iterator[pa.Table]) -> None:
        """Take row groups until this share of them is in memory."""
        while self._num_read < math.ceil(fraction * len(self._groups)):
            self._add(next(tables))
            self._num_read += 1
            if self._num_read == len(self._groups):
                self._values = concatenate_values(self._chunks)
                self._chunks = []

    def _add(self, table: pa.Table) -> None:
        keep = None
        if self._keep is not None:
            first, last = np.searchsorted(self._keep, (self._source_rows, self._source_rows + table.num_rows))
            keep = self._keep[first:last] - self._source_rows
        num_kept = table.num_rows if keep is None else len(keep)
        self._source_rows += table.num_rows
        target = self.records[self._filled : self._filled + num_kept]
        inputs = self._producer.dataset.inputs
        self._add_values(
            write_records(target, table, inputs=inputs, keep=keep, start=self._num_values, shared=self._producer.shared)
        )
        self._filled += num_kept

    def batch(self, index: int) -> Batch:
        """Batch `index` of the window; the one after the last whole one is what is left over."""
        size = self._producer.slices.batch_size
        records = self.records.take(self._order[index * size : (index + 1) * size], mode="clip")
        producer = self._producer
        return records_to_batch(records, self._values, inputs=producer.dataset.inputs, groups=producer.groups)


class _Producer:
    """Makes the batches of one pass, in the thread that iterates."""

    def __init__(
        self,
        dataset: Dataset,
        config: LoaderConfig,
        slices: RankSlices,
        *,
        epoch: int,
        groups: tuple[FeatureGroup, ...],
    ) -> None:
        self.dataset = dataset
        self.groups = groups
        self.shared = frozenset(at for group in groups for at in group.jagged)
        self.slices = slices
        self._stream = EpochStream(
            dataset.group_sizes,
            shuffle=config.shuffle,
            buffer_rows=config.shuffle_buffer_rows,
            seed=config.seed,
            epoch=epoch,
            sessions=dataset.sessions if config.shuffle is Shuffle.SESSIONS else None,
        )
        self.windows = [window for window in self._stream.windows if window.end > slices.first_row]
        self.storages: list[np.ndarray] = []

    def local_order(self, window: Window) -> tuple[np.ndarray, np.ndarray | None]:
        """The rank's rows of a window: their order, and which of the window's rows are kept (None: all).

        The order indexes the kept rows: entry i is the place among them of the row that comes i-th in the stream.
        """
        order = self._stream.order(window)
        positions = self.slices.positions(window)
        if positions is None:
            return order, None
        mine = order[positions]
        is_kept = np.zeros(window.num_rows, dtype=np.bool_)
        is_kept[mine] = True
        return np.cumsum(is_kept)[mine] - 1, np.flatnonzero(is_kept)

    def tables(self) -> Generator[pa.Table]:
        """The row groups of all windows, in the order in which they are needed."""
        for window in self.windows:
            for group in window.groups:
                yield self.dataset.read_group(group)

    def batches(self, tables: Iterator[pa.Table]) -> Iterator[Batch]:
        """The batches, in order; `tables` are those of `tables()`, perhaps read ahead."""
        num_windows, num_steps, made = len(self.windows), self.slices.num_steps, 0
        filling = _WindowRecords(self, 0, before=None) if num_windows else None
        for number in range(num_windows):
            assert filling is not None
            current = filling
            current.fill_to(1.0, tables)
            filling = _WindowRecords(self, number + 1, before=current) if number + 1 < num_windows else None
            whole = current.num_whole_batches
            for index in range(whole):
                yield current.batch(index)
                made += 1
                if filling is not None:
                    filling.fill_to((index + 1) / whole, tables)
            if filling is None and made < num_steps:
                yield current.batch(whole)
                made += 1
        assert made == num_steps

    def allocate(self, used: list[np.ndarray]) -> None:
        """Get two storages that hold every other window each, those of a pass before if they are large enough."""
        dtype = record_dtype(self.dataset.inputs, with_labels=self.dataset.with_labels)
        rows = [self.slices.rows_before(window.end) - self.slices.rows_before(window.start) for window in self.windows]
        for number in range(2):
            capacity = max(rows[number::2], default=0) + self.slices.batch_size
            fits = number < len(used) and len(used[number]) >= capacity
            self.storages.append(used[number] if fits else np.empty(capacity, dtype=dtype))
