"""Collisions: which rows of a rank's tables the present step updates, and which of them the next one reads.

    present step reads   3 7 7 9        marks    . . . x . . . x . x
    next step reads      7 4 4 2        7 collides: it waits for the update; 4 and 2 are looked up now

Each table group keeps two bits of memory a row and step, as bytes: rows of the present batch and rows of the next one.
Marks are set and taken back by the rows themselves, so a step costs its lookups, whatever the size of the tables.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from ziggurat.embeddings import EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.jagged import JaggedRows, offsets_of
from ziggurat.ops.lookup import GradientPart, LookupLayout, Lookups
from ziggurat.ops.lookup.reference import jagged_rows, single_rows
from ziggurat.parallel.prioritised.cells import NOTHING, NOW, WAITS
from ziggurat.parallel.tables.ids import batch_of_rows


class RowMarks:
    """Some rows of one table group, marked.

    Args:
        tables: whose rows.
    """

    def __init__(self, tables: EmbeddingTables) -> None:
        self._tables = tables
        self._marks: list[Bool[Tensor, "rows"]] = []
        self._marked: list[tuple[int, Int64[Tensor, "N"]]] = []
        self._padding: list[Int64[Tensor, "tables"]] = []

    def storage(self, index: int) -> Bool[Tensor, "rows"]:
        """True for the marked rows of one storage."""
        if not self._marks:  # made when first needed: tables may not have their memory before
            weights = self._tables.tables
            storages = [weights.storage(each) for each in range(weights.num_storages)]
            self._marks = [torch.zeros(each.num_rows, dtype=torch.bool, device=each.device) for each in storages]
            places = [(place.storage, place.first_row) for place in weights.places.values()]
            for number in range(weights.num_storages):
                self._padding.append(torch.tensor([row for storage, row in places if storage == number]))
        return self._marks[index]

    def add(self, index: int, rows_N: Int64[Tensor, "N"]) -> None:
        """Mark rows of one storage; padding stays unmarked, because no step updates it."""
        marks = self.storage(index)
        marks[rows_N] = True
        marks[self._padding[index]] = False
        self._marked.append((index, rows_N))

    def add_batch(self, batch: Batch) -> None:
        """Mark every row that a lookup of the batch reads."""
        if not batch.batch_size:
            return
        lookups = Lookups.of(batch)
        for index, layout in enumerate(self._tables.layouts):
            if layout.single:
                self.add(index, single_rows(layout, lookups).reshape(-1))
            if layout.jagged:
                self.add(index, jagged_rows(layout, lookups)[0])

    def add_changed(self) -> None:
        """Mark the rows that an update of the marked ones changes as well, such as those that leave a cache."""
        marked: dict[int, list[Int64[Tensor, "N"]]] = {}
        for index, rows_N in self._marked:
            marked.setdefault(index, []).append(rows_N)
        for index, parts in marked.items():
            storage = self._tables.tables.storage(index)
            if storage.changes_others:
                rows = torch.unique(torch.cat([rows_N.reshape(-1) for rows_N in parts]))
                # Only rows that are marked still: padding was taken out of the marks, and changes nothing.
                self.add(index, storage.changed_with(rows[self._marks[index][rows]]))

    def clear(self) -> None:
        """Take all marks back."""
        for index, rows_N in self._marked:
            # Only what was marked is written: tables may be far larger than a batch.
            self.storage(index)[rows_N] = False
        self._marked.clear()


def codes_of(
    tables: EmbeddingTables, batch: Batch, *, marks: RowMarks, column_fields: dict[int, int], out: UInt8[Tensor, "R F"]
) -> None:
    """Write the code of every cell: whether it reads a marked row.

    Args:
        tables: that are looked up.
        batch: rows of the samples of all ranks.
        marks: rows that are waiting for an update.
        column_fields: the column of `out` of each field, by its first column in the lookup output.
        out: zeros, `NOTHING`.
    """
    size = batch.batch_size
    if not size:
        return
    lookups = Lookups.of(batch)
    for index, layout in enumerate(tables.layouts):
        marked = marks.storage(index) if layout.slots else torch.empty(0, dtype=torch.bool)
        if layout.single:
            waits_SR = marked[single_rows(layout, lookups)]
            for slot, waits_R in zip(layout.single, waits_SR, strict=True):
                out[:, column_fields[slot.column]] = torch.where(waits_R, WAITS, NOW)
        if layout.jagged:
            rows_N, lengths_JR = jagged_rows(layout, lookups)
            offsets = offsets_of(lengths_JR.reshape(-1))
            # Marked rows up to the end of each list, less those up to its begin.
            counted = offsets_of(marked[rows_N].to(torch.int64))[offsets].diff().view(lengths_JR.shape)
            for slot, waiting_R, lengths_R in zip(layout.jagged, counted, lengths_JR, strict=True):
                codes_R = torch.where(waiting_R > 0, WAITS, NOW)
                out[:, column_fields[slot.column]] = torch.where(lengths_R > 0, codes_R, NOTHING)


def only_cells(batch: Batch, wanted_FR: Bool[Tensor, "F R"]) -> Batch:
    """A batch whose other cells are empty: lists without rows, single features of the padding row.

    Args:
        batch: of rows.
        wanted_FR: cells to keep, single features first, then lists.
    """
    num_single = batch.single.shape[0]
    size = batch.batch_size
    # Row 0 of a table is padding, which reads as zeros.
    single = torch.where(wanted_FR[:num_single], batch.single, 0)
    lists = batch.jagged
    if len(wanted_FR) > num_single and size:
        lengths = lists.offsets.diff()
        kept = wanted_FR[num_single:].reshape(-1)
        values = lists.values[torch.repeat_interleave(kept, lengths)]
        lists = JaggedRows(values, offsets_of(torch.where(kept, lengths, 0)))
    return batch_of_rows(single, lists, size=size)


def part_of_rows(part: GradientPart, wanted: Callable[[Tensor], Tensor]) -> GradientPart:
    """The same gradient for some of the rows that were read; the order of those that stay is kept.

    Args:
        part: what a backward pass left for one storage.
        wanted: says of rows of the storage which stay.
    """
    layout = part.layout
    lookups = part.lookups
    single = lookups.single
    size = lookups.batch_size
    if not size:
        return part
    if layout.single:
        rows_SB = single_rows(layout, lookups)
        indices = torch.tensor([slot.index for slot in layout.single], device=single.device)
        # The batch's own tensor, which other layouts read, stays as it is.
        single = single.clone()
        # Row 0, padding, takes no gradient.
        single[indices] = torch.where(wanted(rows_SB), single[indices], 0)
    values = lookups.values
    offsets = lookups.offsets
    if layout.jagged:
        values, offsets = _lists_of_rows(layout, lookups, wanted)
    # A new one: what was sorted ahead belongs to the rows as they were.
    kept = Lookups(batch_size=size, single=single, values=values, offsets=offsets)
    return GradientPart(layout=layout, lookups=kept, grad=part.grad)


def _lists_of_rows(
    layout: LookupLayout, lookups: Lookups, wanted: Callable[[Tensor], Tensor]
) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "J*B+1"]]:
    """Lists with the wanted rows alone; lists of other storages become empty."""
    lengths_JB = lookups.offsets.diff().view(-1, lookups.batch_size)
    rows_n, _ = jagged_rows(layout, lookups)
    keep_n = wanted(rows_n)
    if len(layout.jagged) < len(lengths_JB):
        mine = torch.zeros(len(lengths_JB), dtype=torch.bool, device=rows_n.device)
        mine[[slot.index for slot in layout.jagged]] = True
        keep_N = torch.repeat_interleave(mine, lengths_JB.sum(dim=1))
        # A copy chooses, since the chosen places are what is written.
        keep_N[keep_N.clone()] = keep_n
    else:
        keep_N = keep_n
    # Kept rows up to each old offset are the new offsets.
    return lookups.values[keep_N], offsets_of(keep_N.to(torch.int64))[lookups.offsets]
