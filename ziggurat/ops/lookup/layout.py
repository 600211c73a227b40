"""Where every field of a lookup reads and writes: plain data, shared by all kernels.

All tables of one embedding dimension D lie one after the other in one *storage* of shape (R, D), so that one call
serves every table. A *slot* says, for one field, which rows of the batch it takes, where its table starts in the
storage, and at which column of the output its D numbers go:

    storage (R, D)                    output (B, T), T = sum of all fields' dims
    ┌────────────┐ first_row of user  ┌──────────┬──────────┬──────────┐
    │ user   …   │                    │ user     │ item     │ genres   │  sample 0
    ├────────────┤ first_row of item  │          │          │          │  sample 1
    │ item   …   │                    └──────────┴──────────┴──────────┘
    ├────────────┤                      column 0   column D   column 2D
    │ genres …   │
    └────────────┘

Several fields may name the same table. With tables of different dims there is one storage and one layout for each
dim, and all of them write into the same output.

Rows in a `Lookups` are local to their table (row 0 is padding, see `ziggurat.features.schema`); kernels add
`first_row`. Row 0 of every table is never updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.errors import BoundsError, DataError
from ziggurat.features.batch import Batch
from ziggurat.ops.lookup.sorted_reads import SortedReads


class FieldKind(StrEnum):
    """Ways in which the rows of a field become one vector a sample."""

    SINGLE = "single"  # exactly one row a sample
    SUM = "sum"  # the sum over the rows of a list; zeros for an empty list
    MEAN = "mean"  # the sum divided by the list's length; zeros for an empty list


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSlot:
    """One field of a layout.

    Args:
        name: the field's name, for error messages.
        kind: one row a sample, or a pooled list.
        index: position in `Lookups.single`, or among the jagged fields of the `Lookups`.
        table: the table's name, for error messages.
        first_row: row of the storage where the table starts.
        num_rows: rows of the table, the reserved ones included.
        column: first of the field's D columns in the output.
    """

    name: str
    kind: FieldKind
    index: int
    table: str
    first_row: int
    num_rows: int
    column: int


@dataclass(frozen=True, kw_only=True)
class LookupLayout:
    """All fields that read from one storage.

    Args:
        dim: D, columns of the storage.
        width: T, columns of the output, which may hold fields of other layouts too.
        slots: the fields, in canonical order: single ones first.
    """

    dim: int
    width: int
    slots: tuple[FieldSlot, ...]

    @cached_property
    def packed(self) -> Int64[Tensor, "F 5"]:
        """The slots as numbers (kind, index, first row, rows, column), for compiled kernels."""
        # Compiled kernels know kinds by their place: 0 single, 1 sum, 2 mean.
        kinds = list(FieldKind)
        rows = [[kinds.index(slot.kind), slot.index, slot.first_row, slot.num_rows, slot.column] for slot in self.slots]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 5)

    def numbers_on(self, device: torch.device) -> LayoutNumbers:
        """The layout's numbers as tensors on a device, made once: a copy to a device makes the host wait."""
        if device not in self._numbers:
            self._numbers[device] = LayoutNumbers.of(self, device=device)
        return self._numbers[device]

    def lists_on(self, device: torch.device, *, num_lists: int) -> Int64[Tensor, "2 J"]:
        """First row of the table, and position among the slots, of all lists that a batch has; -1, 0 for others'."""
        if (device, num_lists) not in self._lists:
            numbers = [[-1] * num_lists, [0] * num_lists]
            for position, slot in enumerate(self.slots):
                if slot.kind is not FieldKind.SINGLE:
                    numbers[0][slot.index], numbers[1][slot.index] = slot.first_row, position
            self._lists[device, num_lists] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._lists[device, num_lists]

    @cached_property
    # Caches of a frozen object: `cached_property` writes past its guard, and equality does not see them.
    def _numbers(self) -> dict[torch.device, LayoutNumbers]:
        return {}

    @cached_property
    def _lists(self) -> dict[tuple[torch.device, int], Tensor]:
        return {}

    @cached_property
    def single(self) -> tuple[FieldSlot, ...]:
        """The fields with one row a sample."""
        return tuple(slot for slot in self.slots if slot.kind is FieldKind.SINGLE)

    @cached_property
    def jagged(self) -> tuple[FieldSlot, ...]:
        """The pooled fields."""
        return tuple(slot for slot in self.slots if slot.kind is not FieldKind.SINGLE)

    @cached_property
    def has_mean(self) -> bool:
        """True if a field is mean-pooled."""
        return any(slot.kind is FieldKind.MEAN for slot in self.slots)

    @cached_property
    def num_single(self) -> int:
        """Single fields that a `Lookups` must have at least."""
        return max((slot.index + 1 for slot in self.single), default=0)

    @cached_property
    def num_jagged(self) -> int:
        """Jagged fields that a `Lookups` must have at least."""
        return max((slot.index + 1 for slot in self.jagged), default=0)

    @cached_property
    def is_dense_block(self) -> bool:
        """True if the fields fill the whole output, in order: it is then a (B, F, D) tensor."""
        return self.width == len(self.slots) * self.dim and all(
            slot.column == position * self.dim for position, slot in enumerate(self.slots)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNumbers:
    """Numbers of a layout that kernels of torch operations need, as tensors on one device.

    Args:
        single: (s,) indices of the single fields.
        single_first_rows: (s, 1) rows of the storage where their tables start.
        jagged: (j,) indices of the pooled fields.
        first_rows: rows of the storage where tables of the layout start, rising: their padding.
        means: (m,) positions of mean-pooled fields among the slots.
        mean_lists: (m,) their indices among the jagged fields.
    """

    single: Int64[Tensor, "s"]
    single_first_rows: Int64[Tensor, "s 1"]
    jagged: Int64[Tensor, "j"]
    first_rows: Int64[Tensor, "t"]
    means: Int64[Tensor, "m"]
    mean_lists: Int64[Tensor, "m"]

    @staticmethod
    def of(layout: LookupLayout, *, device: torch.device) -> LayoutNumbers:
        """The numbers of a layout."""
        means = [(at, slot.index) for at, slot in enumerate(layout.slots) if slot.kind is FieldKind.MEAN]

        def made(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return LayoutNumbers(
            single=made([slot.index for slot in layout.single]),
            single_first_rows=made([slot.first_row for slot in layout.single]).unsqueeze(1),
            jagged=made([slot.index for slot in layout.jagged]),
            first_rows=made(sorted({slot.first_row for slot in layout.slots})),
            means=made([position for position, _ in means]),
            mean_lists=made([index for _, index in means]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """Row counts of the tables of a batch's features, on a device; the largest int64 where none is read.

    Args:
        single: (S, 1).
        jagged: (J,).
    """

    single: Int64[Tensor, "S 1"]
    jagged: Int64[Tensor, "J"]

    @staticmethod
    def of(layouts: Sequence[LookupLayout], lookups: Lookups) -> RowLimits:
        """The limits of the fields of some layouts."""
        # What no layout reads is below any limit, so it cannot be at fault.
        most = torch.iinfo(torch.int64).max
        # An empty batch has the one offset 0, and no lists.
        num_lists = (lookups.offsets.numel() - 1) // max(lookups.batch_size, 1)
        single = [most] * len(lookups.single)
        jagged = [most] * num_lists
        for slot in (slot for layout in layouts if lookups.batch_size for slot in layout.slots):
            limits = single if slot.kind is FieldKind.SINGLE else jagged
            # Several tables may read one field; a row has to be in all of them.
            limits[slot.index] = min(limits[slot.index], slot.num_rows)
        made = {"dtype": torch.int64, "device": lookups.single.device}
        return RowLimits(single=torch.tensor(single, **made).unsqueeze(1), jagged=torch.tensor(jagged, **made))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """The rows of one batch, as kernels want them.

    Args:
        batch_size: B.
        single: (S, B) rows, feature-major.
        values: (N,) rows of all lists.
        offsets: (J·B+1,) where each list starts and ends; list (j, b) is `values[offsets[jB+b] : offsets[jB+b+1]]`.
        are_checked: every row is in its table and offsets are right (`within_tables`); kernels need not look, nor
            make the host wait for the answer.
        sorted_reads: what updates need of these rows, where it was made ahead (`sorted_reads.py`).
        rows_of_lists: rows of the lists of each of J fields, where the host was told.
        filled: () int64, where `values` has room for more rows: those behind so many are padding, of no list.
    """

    batch_size: int
    single: Int64[Tensor, "S B"]
    values: Int64[Tensor, "N"]
    offsets: Int64[Tensor, "J*B+1"]
    are_checked: bool = False
    sorted_reads: tuple[SortedReads, ...] = ()
    rows_of_lists: tuple[int, ...] | None = None
    filled: Int64[Tensor, ""] | None = None

    @staticmethod
    def of(batch: Batch) -> Lookups:
        """The rows of a batch (no copy)."""
        return Lookups(
            batch_size=batch.batch_size,
            # `contiguous` copies nothing where rows lie so already; compiled kernels count on it.
            single=batch.single.contiguous(),
            values=batch.jagged.values.contiguous(),
            offsets=batch.jagged.offsets.contiguous(),
            rows_of_lists=batch.jagged.num_rows,
            filled=batch.jagged.filled,
        )

    def lengths(self, slot: FieldSlot) -> Int64[Tensor, "B"]:
        """List lengths of one jagged field."""
        size = self.batch_size
        # One offset more than lists, whose last one is the next feature's first.
        return self.offsets[slot.index * size : (slot.index + 1) * size + 1].diff()

    def rows(self, slot: FieldSlot) -> Int64[Tensor, "n"]:
        """Rows of one field, sample after sample, local to its table."""
        if slot.kind is FieldKind.SINGLE:
            return self.single[slot.index]
        first = slot.index * self.batch_size
        last = (slot.index + 1) * self.batch_size
        return self.values[int(self.offsets[first]) : int(self.offsets[last])]

    def num_rows(self, slot: FieldSlot) -> int:
        """Number of rows of one field; asks a device only where the host was not told."""
        if slot.kind is FieldKind.SINGLE:
            return self.batch_size
        return self.rows(slot).numel() if self.rows_of_lists is None else self.rows_of_lists[slot.index]

    def count(self, layout: LookupLayout) -> int:
        """Number of rows that a layout reads."""
        size = self.batch_size
        bounds = [(slot.index * size, (slot.index + 1) * size) for slot in layout.jagged]
        listed = sum(int(self.offsets[last]) - int(self.offsets[first]) for first, last in bounds)
        return listed + len(layout.single) * size


def within_tables(lookups: Lookups, *, limits: RowLimits, faults: Bool[Tensor, ""]) -> Lookups:
    """Lookups whose rows are all in their tables, without the host waiting for a device that knows whether they were.

    A row that was not becomes padding; lists that wrong offsets cut become empty.

    Args:
        lookups: of a batch.
        limits: rows of the tables.
        faults: on the device; true from here on where something was wrong. Whoever reads it finds out what with
            `check_rows` and the lookups as they were.
    """
    if not lookups.batch_size:
        return replace(lookups, are_checked=True)
    wrong_SB = (lookups.single < 0) | (lookups.single >= limits.single)
    # In place: the caller's tensor gathers the faults of all lookups, and is read once, later.
    faults |= wrong_SB.any()
    values = lookups.values
    offsets = lookups.offsets
    if len(limits.jagged):
        filled = len(values) if lookups.filled is None else lookups.filled
        are_right = (offsets[0] == 0) & (offsets[-1] == filled) & (offsets.diff() >= 0).all()
        # Even where offsets are wrong: `list_of_values` never points outside.
        wrong_N = (values < 0) | (values >= limits.jagged[list_of_values(lookups, step=lookups.batch_size)])
        faults |= ~are_right | wrong_N.any()
        # Row 0 is padding: what is read of it is thrown away with the step, since the flag is up.
        values = values.masked_fill(wrong_N, 0)
        # All zeros where they are wrong: every list is then empty, and no kernel reads outside.
        offsets = offsets * are_right
    single = lookups.single.masked_fill(wrong_SB, 0)
    return replace(lookups, single=single, values=values, offsets=offsets, are_checked=True)


def list_of_values(lookups: Lookups, *, step: int = 1) -> Int64[Tensor, "N"]:
    """The list that each value belongs to, or the feature with `step` = batch size; right or not, never outside."""
    # Ends of lists, or of every step-th one: the feature's.
    ends = lookups.offsets[step::step].contiguous()
    places_N = torch.arange(len(lookups.values), device=ends.device)
    return torch.searchsorted(ends, places_N, right=True).clamp_(max=len(ends) - 1)


def check_rows(layout: LookupLayout, lookups: Lookups) -> None:
    """Raise if any row lies outside its table or the offsets are not increasing; `within_tables` did it before.

    Cost: one pass of min and max over the rows of every field.

    Raises:
        BoundsError: names field, table and sample.
        DataError: the offsets fall, or end beyond the values.
    """
    size = lookups.batch_size
    if size == 0 or lookups.are_checked:
        return
    if layout.single:
        indices = [slot.index for slot in layout.single]
        # Selecting rows copies them, which the commonest case, all of them in order, is spared.
        rows_SB = lookups.single if indices == list(range(len(lookups.single))) else lookups.single[indices]
        limits = torch.tensor([slot.num_rows for slot in layout.single], device=rows_SB.device)
        # One pass tells right from wrong; which row is wrong is looked for only then.
        low, high = torch.aminmax(rows_SB, dim=1)
        if bool(((low < 0) | (high >= limits)).any()):
            raise_out_of_bounds(layout, lookups)
    if layout.jagged:
        offsets = lookups.offsets
        if int(offsets[0]) != 0 or int(offsets[-1]) != lookups.values.numel() or bool((offsets.diff() < 0).any()):
            raise DataError(
                expected=f"offsets that start at 0, never fall and end at {lookups.values.numel()}",
                found=f"first {int(offsets[0])}, last {int(offsets[-1])}, smallest step {int(offsets.diff().min())}",
                where="jagged offsets of the batch",
                ways_out="check batches made by hand with ziggurat.features.batch.validate_batch",
            )
        for slot in layout.jagged:
            rows = lookups.rows(slot)
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= slot.num_rows):
                raise_out_of_bounds(layout, lookups)


def raise_out_of_bounds(layout: LookupLayout, lookups: Lookups) -> None:
    """Raise the `BoundsError` of the first row outside its table; return if there is none."""
    for slot in layout.slots:
        rows = lookups.rows(slot)
        wrong = ((rows < 0) | (rows >= slot.num_rows)).nonzero()
        if wrong.numel() == 0:
            continue
        position = sample = int(wrong[0])
        if slot.kind is not FieldKind.SINGLE:
            # `right`: a row at the end of one list belongs to the next, and empty lists are passed over.
            ends = lookups.lengths(slot).cumsum(0)
            sample = int(torch.searchsorted(ends, position, right=True))
        raise BoundsError(
            expected=f"rows 0 … {slot.num_rows - 1} of table {slot.table!r}",
            found=f"row {int(rows[position])}",
            where=f"feature {slot.name!r}, sample {sample} of the batch",
            ways_out=(
                "encode raw ids with the run's Preprocessing instead of by hand",
                'choose out_of_range = "unknown" or "clamp" for the table in the schema',
            ),
        )


def mean_scale(layout: LookupLayout, lookups: Lookups, *, dtype: torch.dtype) -> Float[Tensor, "B F"]:
    """1 / length of every mean-pooled list, and 1 for the other fields and for empty lists."""
    scale_BF = torch.ones(lookups.batch_size, len(layout.slots), dtype=dtype, device=lookups.single.device)
    if layout.has_mean and lookups.batch_size:
        numbers = layout.numbers_on(scale_BF.device)
        # An empty list is divided by 1: its sum is zero anyway.
        lengths_MB = lookups.offsets.diff().view(-1, lookups.batch_size)[numbers.mean_lists]
        scale_BF[:, numbers.means] = lengths_MB.clamp_(min=1).to(dtype).reciprocal_().t()
    return scale_BF


def padding_mask(layout: LookupLayout, rows_N: Int64[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """True where a row of the storage is row 0 of a table of the layout."""
    first_rows = layout.numbers_on(rows_N.device).first_rows
    # The first table that begins at or after the row: equal only where the row is a table's first.
    found = torch.searchsorted(first_rows, rows_N).clamp_(max=len(first_rows) - 1)
    return first_rows[found] == rows_N
