"""Loader: batches from encoded data, shuffled within a bounded buffer, from any position on.

    for batch in Loader(dataset, config=LoaderConfig(batch_size=2048, seed=7)).batches(epoch=3, start_step=1207): …

How: whole row groups are read by several threads (`reading.py`); their rows are permuted, column by column, into a
window of about `shuffle_buffer_rows` rows (`blocks.py`); a batch gathers runs of them. The order is a pure function of
(seed, epoch): see `lanes.py`, and `orders.py` for what all orders share.

    window k      ██████████████████░░░░   batches are gathered from here …
    window k+1    ████░░░░░░░░░░░░░░░░░░   … while the next one is read, one row group after the other, in step

Two windows alternate, so memory is at most 2 · (shuffle_buffer_rows + an eighth) rows of a rank's share, and no batch
waits for a whole window.

Ranks: `batch_size` is per rank. The global batch is `world_size · batch_size` consecutive rows of the epoch's stream,
the same for any number of ranks that has the same product, and each rank takes its part, so every rank makes the same
number of steps; in the last, ranks may get fewer rows or none. In the orders `lanes` and `session_lanes` a rank reads
its own row groups and the one at each border; in the others every rank reads every row group: each global batch lies
in a stretch of one row group (`none`), or all over a window (`buffer`, `sessions`). Those orders are frozen, because
runs go on in them.

Position: (epoch, step), or (epoch, number of rows that all ranks have consumed) to go on with another number of ranks.
Starting anywhere skips the windows before it without reading them.

An error in a thread is raised by the iterator; dropping or closing the iterator stops all threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from ziggurat.data.background import in_background
from ziggurat.data.encoded.blocks import BlockLayout
from ziggurat.data.encoded.epoch_stream import EpochStream, RankSlices, Shuffle
from ziggurat.data.encoded.lanes import LaneOrder
from ziggurat.data.encoded.orders import BufferOrder, RankOrder, StoredOrder
from ziggurat.data.encoded.reading import BlockReader, default_threads
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.ops.rows import Columns
from ziggurat.typed import Count, CountOrNone, ThreadsOrNone, checked

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["Dataset", "Deduplicate", "Loader", "LoaderConfig", "Shuffle", "is_dataset"]


class Deduplicate(StrEnum):
    """Choice of whether batches keep what repeats once (`Batch.repeated`)."""

    AUTO = "auto"  # groups of features for which it pays, measured on a batch; needs shuffle = session_lanes (or none)
    OFF = "off"  # never


class Dataset(Protocol):
    """Data that a loader reads from: `EncodedDataset` on disk, `MemoryDataset` in memory."""

    @property
    def inputs(self) -> InputSpec:
        """The description of the columns."""
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
        """Lengths of the sessions of one row group, in their order; asked for by orders of sessions alone."""
        ...


def is_dataset(data: object) -> TypeIs[Dataset]:
    """Return whether data is read group by group, and not a source that makes its own batches."""
    return hasattr(data, "read_group")


@dataclass(frozen=True, kw_only=True)
@checked
class LoaderConfig:
    """Settings of a `Loader`.

    Args:
        batch_size: rows a rank and step.
        shuffle: see `Shuffle`; evaluation and prediction use `none`.
        shuffle_buffer_rows: rows, of all ranks, that are shuffled with each other; bounds the memory of a rank
            (2 · rows / ranks · bytes of a row). With many ranks take several row groups for each.
        seed: of the order. The same seed and epoch give the same order.
        deduplicate: whether training keeps equal lists of a batch once; see `Deduplicate`.
        prefetch: batches that are prepared ahead in the background; 0 does all work in the caller's thread.
        read_threads: threads that read and decode; 0: the rank's share of the cores, at most four.

    Example:
        >>> zg.LoaderConfig(batch_size=256, seed=1).batch_size
        256
    """

    batch_size: Count = 2048
    shuffle: Shuffle = Shuffle.AUTO
    shuffle_buffer_rows: Count = 1_000_000
    seed: int = 0
    deduplicate: Deduplicate = Deduplicate.AUTO
    prefetch: CountOrNone = 4
    read_threads: ThreadsOrNone = 0


class Loader:
    """Batches of one data set for one rank.

    Args:
        dataset: what to read.
        config: see `LoaderConfig`.
        rank: this process, 0 … world_size−1.
        world_size: number of processes that share the data.

    Attributes:
        groups: features of which a batch keeps each distinct combination once (`Batch.repeated`); () keeps all.
        shuffle: the order; `auto` of the config has become one of the others.
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
        self.shuffle = Shuffle.LANES if self.config.shuffle is Shuffle.AUTO else self.config.shuffle
        self.groups: tuple[FeatureGroup, ...] = ()
        self._storages: list[Columns] = []

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self.dataset.num_rows

    def reading(self) -> str:
        """Say what this rank reads of the data, and with which order it would read less; for the start-up report."""
        if self.world_size == 1:
            return "every row group, once an epoch"
        if self.shuffle in (Shuffle.LANES, Shuffle.SESSION_LANES):
            return f"the row groups of this rank ({self.shuffle.value})"
        others = "shuffle = session_lanes" if self.shuffle is Shuffle.SESSIONS else "shuffle = lanes"
        return f"every rank decodes every row group (shuffle = {self.shuffle.value}); with {others} each reads its own"

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the same on every rank; the last may be partial."""
        return self.num_steps()

    def go_on_in(self, shuffle: str, *, where: str) -> None:
        """Take the order that a run was in: what is left of an epoch is right in the same order alone.

        Args:
            shuffle: value of a `Shuffle`; "" for runs that did not write it down, before there were lanes.
            where: the checkpoint, for the error.

        Raises:
            ConfigError: the settings ask for another order.
        """
        asked = self.config.shuffle
        # A run from before there were lanes had the only order of its time.
        if asked is Shuffle.AUTO:
            self.shuffle = Shuffle(shuffle or Shuffle.BUFFER)
        elif shuffle and asked.value != shuffle:
            raise ConfigError(
                expected=f"the order that the run is in: shuffle = {shuffle}",
                found=f"shuffle = {asked.value}",
                where=where,
                ways_out=("shuffle = auto keeps the order of a run", "start a new run in another folder"),
            )

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
        order = self._order(slices, epoch)
        # Made for each pass: the groups may have been chosen since the last one.
        layout = BlockLayout(self.dataset.inputs, with_labels=self.dataset.with_labels, groups=self.groups)
        storages, self._storages = self._storages, []  # a second pass at the same time makes its own
        # Without prefetching all work is the caller's own, as its setting promises.
        threads = (self.config.read_threads or default_threads()) if self.config.prefetch else 0
        read = getattr(self.dataset, "read_shared", self.dataset.read_group)  # not every data set can
        reader = BlockReader(order.windows, read_group=read, layout=layout, threads=threads, storages=storages)
        try:
            position = slices.first_row
            reader.advance(position)
            for step in range(order.num_steps):
                runs = order.runs(step)
                # `batch` counts the blocks that it is given, while runs name windows of the epoch.
                windows = sorted(set(runs[:, 0].tolist()))
                runs[:, 0] = np.searchsorted(windows, runs[:, 0])
                batch = layout.batch([reader.block(number) for number in windows], runs)
                position = min(position + slices.batch_size * slices.world_size, slices.num_rows)
                reader.advance(position)
                yield batch
        finally:
            # The next epoch uses the memory of its blocks again: fresh memory would have to be paged in.
            self._storages = reader.close()

    def _order(self, slices: RankSlices, epoch: int) -> RankOrder:
        sizes = self.dataset.group_sizes
        config = self.config
        if self.shuffle is Shuffle.NONE:
            return StoredOrder(sizes, slices=slices)
        is_lanes = self.shuffle in (Shuffle.LANES, Shuffle.SESSION_LANES)
        if not is_lanes:
            stream = EpochStream(
                sizes,
                shuffle=self.shuffle,
                buffer_rows=config.shuffle_buffer_rows,
                seed=config.seed,
                epoch=epoch,
                sessions=self.dataset.sessions if self.shuffle is Shuffle.SESSIONS else None,
            )
            return BufferOrder(stream, slices=slices, group_sizes=sizes)
        return LaneOrder(
            sizes,
            slices=slices,
            buffer_rows=config.shuffle_buffer_rows,
            seed=config.seed,
            epoch=epoch,
            # Every lane of a window asks for the sessions of its row groups: they are read once.
            sessions=functools.cache(self.dataset.sessions) if self.shuffle is Shuffle.SESSION_LANES else None,
        )

    def _slices(self, first_row: int) -> RankSlices:
        return RankSlices(
            batch_size=self.config.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            first_row=first_row,
            num_rows=self.num_rows,
        )
