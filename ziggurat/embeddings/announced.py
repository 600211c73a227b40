"""AnnouncedBatches: tables learn which batch comes next, so that its rows are there when its step begins.

A disk begins to read (`storage/disk`); tables in the memory of the host send rows to the device (`storage/host`), and
need the rows of every list, pooled or not: a step on a device cannot stop to fetch one. The rows are read from the copy
of the batch that stayed on the host, where there is one, so that nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.embeddings.layouts import every_layout
from ziggurat.embeddings.weights import TableWeights
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.ops.lookup import LookupLayout, Lookups
from ziggurat.ops.lookup.layout import check_rows
from ziggurat.ops.lookup.reference import rows_of


class AnnouncedBatches:
    """Announces coming batches to tables.

    Args:
        inputs: features of the batches.
        tables: what they are looked up in.
        pooled: where pooled fields read, one layout a storage.
    """

    def __init__(self, inputs: InputSpec, tables: TableWeights, *, pooled: Sequence[LookupLayout]) -> None:
        self._tables = tables
        self._pooled = pooled
        self._every = every_layout(inputs, tables)
        self._last: Batch | None = None

    def announce(self, batch: Batch) -> None:
        """Say which batch comes next.

        Raises:
            BoundsError: a row is outside its table, and its rows would travel.
            DataError: so with wrong offsets of lists.
        """
        storages = self._tables.storages
        if not any(storage.is_sparse or storage.awaits_batches for storage in storages):
            return
        self._last = batch
        known = batch if batch.on_host is None else batch.on_host
        lookups = Lookups.of(known.expanded() if known.repeated else known)
        for storage, pooled, every in zip(storages, self._pooled, self._every, strict=True):
            read = every if storage.awaits_batches else pooled
            if storage.awaits_batches:
                check_rows(read, lookups)  # what travels ahead has to be there
            if (storage.is_sparse or storage.awaits_batches) and read.slots and lookups.batch_size:
                storage.announce(rows_of(read, lookups))

    def begin(self, batch: Batch) -> None:
        """Say that a training step on a batch begins: its rows are announced now, where they were not before."""
        storages = self._tables.storages
        if not any(storage.awaits_batches for storage in storages):
            return
        if self._last is not batch:
            self.announce(batch)
        self._last = None
        for storage in storages:
            storage.begin()
