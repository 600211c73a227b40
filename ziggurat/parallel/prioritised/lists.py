"""Un-pooled lists ahead of their batch: every row of a list is a cell of its own.

The plain way (`tables/sequences.py`) asks for rows when the model wants a list, and waits for their vectors. Here the
rows are asked for when the batch is announced, with its other ids; the ranks that hold them send what the present step
does not touch ahead, and the rest after the update. A list that the model wants in another dtype, or twice, or without
gradients goes the plain way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import JaggedSpec
from ziggurat.parallel.prioritised.collisions import RowMarks
from ziggurat.parallel.prioritised.hop import CellExchange, CellTransfer
from ziggurat.parallel.tables.buckets import check_bounds
from ziggurat.parallel.tables.ids import PendingIds
from ziggurat.parallel.tables.sequences import PendingRows, Route, SequenceExchange
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.tables.shards import Shard


@dataclass(frozen=True)
class ListHop:
    """One un-pooled feature, and how its vectors travel.

    Args:
        spec: the feature.
        index: among the jagged features of the model.
        hop: of its vectors.
        shards: the parts of its table.
        group: of tables that this rank's part is in; -1: it has none.
    """

    spec: JaggedSpec
    index: int
    hop: CellExchange
    shards: tuple[Shard, ...]
    group: int


@dataclass
class AskedList:
    """The rows of one feature and batch on their way to the ranks that hold them."""

    rows: PendingRows
    order: Tensor | None
    num_rows: int


@dataclass
class AheadList:
    """One feature of the next batch, or of the present one.

    Args:
        feature: which.
        route: rows that this rank is asked for, by rank.
        order: in which this rank asked; None: as they stand in its lists.
        transfer: of the vectors, which come in the order of asking.
    """

    feature: ListHop
    route: Route
    order: Tensor | None
    transfer: CellTransfer


class Lists:
    """The un-pooled features of a model that can travel ahead. Methods are collective but where they say otherwise.

    Args:
        tables: this rank's part of the tables.
        sequences: the plain way.
        features: by name; those that are copied on every rank are left out.
    """

    def __init__(self, tables: ShardedTables, *, sequences: SequenceExchange, features: Mapping[str, ListHop]) -> None:
        self._tables = tables
        self._sequences = sequences
        self.features = dict(features)
        self._asked: list[tuple[PendingIds, dict[str, AskedList]]] = []

    def announce(self, batch: Batch, ids: PendingIds) -> None:
        """Tell the others how many rows will be asked for.

        Args:
            batch: that will come.
            ids: its other ids, which identify this announcement: a rank may bring one batch again and again.

        Raises:
            BoundsError: a row outside its table.
        """
        asked = {}
        for name, feature in self.features.items():
            lists, _ = batch.lists(feature.index)
            shards = feature.shards
            rows_N = lists.values
            host = batch.on_host
            on_host = lists if host is None or host is batch else host.lists(feature.index)[0]
            check_bounds(
                on_host.values,
                table_rows=shards[0].table_rows,
                feature=name,
                lengths=on_host.offsets.diff(),
                table=shards[0].table,
            )
            wanted, order, _ = self._sequences.wanted(
                rows_N, shards, host_rows_N=None if on_host is lists else on_host.values
            )
            pending = self._sequences.start_rows(wanted, device=rows_N.device)
            asked[name] = AskedList(pending, order, rows_N.numel())
        self._asked.append((ids, asked))

    def send_ids(self) -> None:
        """Ask for the rows of announced batches."""
        for _, asked in self._asked:
            for each in asked.values():
                self._sequences.send_rows(each.rows)

    def drop(self, ids: PendingIds | None = None) -> None:
        """Receive and forget what was asked for: with these ids, or all."""
        for known, asked in self._asked:
            for each in asked.values() if ids is None or known is ids else ():
                (each.rows.rows or each.rows.pending_sizes).wait()
        self._asked = [each for each in self._asked if ids is not None and each[0] is not ids]

    def take(self, ids: PendingIds) -> list[AheadList]:
        """Return the lists asked of this rank with these ids; codes are still to be set. Empty where ids came alone."""
        asked = next((asked for known, asked in self._asked if known is ids), {})
        self._asked = [each for each in self._asked if each[0] is not ids]
        found = []
        for name, each in asked.items():
            feature = self.features[name]
            route = self._sequences.finish_rows(each.rows)
            begins = [0] * len(route.sent)
            begin = 0
            if not feature.shards[0].placement.cuts_columns:
                for shard in feature.shards:  # vectors come in the order of the table's parts
                    begins[shard.rank], begin = begin, begin + route.sent[shard.rank]
            codes = torch.zeros(
                len(route.rows), feature.hop.mine.num_fields, dtype=torch.uint8, device=route.rows.device
            )
            transfer = CellTransfer(route.received, route.sent, begins, each.num_rows, codes)
            found.append(AheadList(feature, route, each.order, transfer))
        return found

    def storage_rows(self, each: AheadList) -> tuple[int, int, Int64[Tensor, "N"]] | None:
        """Table group, storage and rows that this rank is asked for; None where it has no part. Not collective."""
        group = each.feature.group
        if group < 0:
            return None
        place = self._tables.local[group].tables.places[each.feature.spec.table]
        return group, place.storage, each.route.rows + place.first_row

    def mark(self, lists: list[AheadList], marks: list[RowMarks]) -> None:
        """Mark the rows of lists. Not collective."""
        for each in lists:
            found = self.storage_rows(each)
            if found is not None:
                group, storage, rows_N = found
                marks[group].add(storage, rows_N)

    def codes(self, each: AheadList, marks: list[RowMarks], *, marked: int, others: int) -> Tensor:
        """The code of every row that this rank is asked for. Not collective."""
        found = self.storage_rows(each)
        if found is None:
            return each.transfer.codes
        group, storage, rows_N = found
        return torch.where(marks[group].storage(storage)[rows_N], marked, others).to(torch.uint8).unsqueeze(1)

    def look_up(self, each: AheadList, keep_N: Tensor | None = None) -> Float[Tensor, "N D"]:
        """Vectors of the rows that this rank is asked for, zeros where `keep_N` is False. Not collective."""
        hop = each.feature.hop
        rows_N = each.route.rows
        if each.feature.group < 0:
            return torch.empty(0, hop.mine.num_columns, device=rows_N.device)
        tables = self._tables.local[each.feature.group]
        name = each.feature.spec.table
        with torch.no_grad():
            # Row 0 is padding, which reads as zeros.
            return tables.vectors(name, rows_N if keep_N is None else torch.where(keep_N, rows_N, 0))
