"""SortedAhead: rows of a coming batch are checked and sorted while the step before computes.

    compute   ─ update k-1 ─│── forward k ── backward k ── update k ──│── forward k+1 … backward k+1 ── update k+1
                            e                                         w                              sums sorted rows
    side                    │ check and sort the rows of batch k+1 ───┘

An update sums gradients of equal rows, which it finds by sorting rows (`ops/lookup/triton/runs.py`). Sorting needs ids
and no gradient, and so does the check that rows are in their tables (`faults.py`). Both are done on a queue of their
own as soon as a step knows the batch after it. `e`: the batch has arrived; `w`: the computation waits for the side
queue, on the device; the host never does. What was made belongs to the very tensors of that batch
(`ops/lookup/sorted_reads.py`): a batch that was changed on its way, and reads that nobody announced, are checked and
sorted when they are looked up and updated, to the same bits. Lists that are not pooled are announced too, in the order
in which models read them, which the backward pass turns round. At most two batches are held: the one that is trained,
and the one after it.

A step that is one graph (`training/step/graph.py`) knows no batch after its own: its rows are sorted on the side queue
from when they have been looked up, beside forward and backward pass, and its update waits for them (`beside`, `join`).

On a CPU the code runs as it is, without queues, and shows that the bits are the same; no CPU step uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from ziggurat.embeddings.storage import LowPrecisionStorage, MemoryStorage
from ziggurat.ops.lookup import LookupLayout, Lookups
from ziggurat.ops.lookup.layout import RowLimits, within_tables
from ziggurat.ops.lookup.sorted_reads import PlannedRead, SortedReads, SortsAhead

if TYPE_CHECKING:
    from ziggurat.embeddings.tables import EmbeddingTables
    from ziggurat.features.batch import Batch, JaggedRows

LimitsOf = Callable[[Lookups, Sequence[LookupLayout]], RowLimits]


@dataclass(frozen=True)
class _Known:
    """One lookup of a batch that was announced: as the batch has it, and checked and sorted."""

    given: Lookups
    layouts: Sequence[LookupLayout]
    ready: Lookups
    lists: tuple[JaggedRows, int] | None


@dataclass(frozen=True)
class _Read:
    """One lookup of a batch; `lists` says of which un-pooled feature, and where its lists are."""

    given: Lookups
    layouts: Sequence[LookupLayout]
    lists: tuple[JaggedRows, int] | None = None


@dataclass(frozen=True)
class _Batch:
    """Known facts of a batch; `fault` is true where a row was outside its table, `made` the event after all of it."""

    known: tuple[_Known, ...]
    fault: Bool[Tensor, ""]
    tensors: tuple[Tensor, ...]
    made: torch.cuda.Event | torch.Event | None


class SortedAhead:
    """Rows of announced batches, checked and sorted before their step.

    Args:
        tables: that read them.
        limits_of: rows of the tables that lookups read, on the device.
        knows_rows: False if steps look up rows of lists' tables that their batches do not name.

    Attributes:
        is_on: False leaves everything to lookup and update.
        is_within: sort the rows of a step beside that step.
        num_batches: that were made ready.
    """

    def __init__(self, tables: EmbeddingTables, *, limits_of: LimitsOf, knows_rows: bool = True) -> None:
        self._tables = tables
        self._limits_of = limits_of
        self._knows_rows = knows_rows
        self._device = tables.tables.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._begun: torch.cuda.Event | torch.Event | None = None
        self._current: _Batch | None = None
        self._coming: _Batch | None = None
        self.is_on = True
        self.is_within = False
        self._is_unjoined = False
        self.num_batches = 0

    def stop(self) -> None:
        """Leave everything to lookup and update, what was announced too."""
        self.is_on = False
        self._begun = None
        self._coming = None
        self._current = None

    def beside(self, checked: Lookups, layouts: Sequence[LookupLayout]) -> Lookups:
        """Begin to sort the rows of a lookup of this step, where that is asked for; `join` before they are taken.

        Args:
            checked: every row in its table.
            layouts: of the lookup.
        """
        kernel = self._tables.kernel
        # Only the lookup of all pooled fields: the update of a storage needs all of its reads sorted together.
        if not self.is_within or layouts is not self._tables.layouts or self._tables.has_dense_gradients:
            return checked
        if not isinstance(kernel, SortsAhead):
            return checked
        # Memory is safe without a word to torch: the lookups live until the update, and the queue waits for it in turn.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            found = self._sorted(kernel, [(checked, layouts)], hidden=set())
        self._is_unjoined = True
        return replace(checked, sorted_reads=found)

    def join(self) -> None:
        """Let the computation wait for what `beside` began."""
        if self._is_unjoined and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._is_unjoined = False

    def begin(self) -> None:
        """Say that a step begins: on the batch that was announced last, if the step knows it."""
        self._current = self._coming
        self._coming = None
        self._is_unjoined = False  # by a recording that failed
        if self._stream is not None and self.is_on:
            computing = torch.cuda.current_stream(self._device)
            # What the side queue reads of the batch was there at this point.
            self._begun = computing.record_event()
            if self._current is not None and self._current.made is not None:
                computing.wait_event(self._current.made)
                # Its memory came from the other queue, which must not hand it out while this one reads it.
                for tensor in self._current.tensors:
                    tensor.record_stream(computing)

    def announce(self, batch: Batch) -> None:
        """Check and sort the rows of the batch after this step's, which has arrived on the device."""
        kernel = self._tables.kernel
        is_expanded = batch.repeated != () and self._tables.has_dense_gradients  # by the lookup
        if not self.is_on or is_expanded or not isinstance(kernel, SortsAhead):
            return
        lists = self._lists_of(batch)
        reads = [*lists, *(_Read(*pooled) for pooled in self._tables.reads_of(batch))]
        # Lists that cannot be announced belong to the same updates as their tables' other reads.
        hidden = {spec.table for spec in self._tables.inputs.sequences} if not lists else set[str]()
        with self._beside([each.given for each in reads]):
            # Made on the side queue, so its memory is the side queue's as well.
            fault = torch.zeros((), dtype=torch.bool, device=self._device)
            limits = [self._limits_of(each.given, each.layouts) for each in reads]
            checked = [
                within_tables(each.given, limits=most, faults=fault) for each, most in zip(reads, limits, strict=True)
            ]
            pairs = [(lookups, each.layouts) for lookups, each in zip(checked, reads, strict=True)]
            found = self._sorted(kernel, pairs, hidden=hidden)
            made = None if self._stream is None else self._stream.record_event()
        ready = [replace(lookups, sorted_reads=found) for lookups in checked]
        known = [_Known(each.given, each.layouts, one, each.lists) for each, one in zip(reads, ready, strict=True)]
        # All that the other queue will read: `begin` tells torch's allocator of it.
        tensors = [tensor for lookups in checked for tensor in (lookups.single, lookups.values, lookups.offsets)]
        tensors += [fault, *(tensor for each in found for tensor in each.tensors)]
        self._coming = _Batch(tuple(known), fault, tuple(tensors), made)
        self.num_batches += 1

    def taken(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> tuple[Lookups, Bool[Tensor, ""]] | None:
        """The same lookups as they were made ready, and whether a row was outside its table; None: nobody announced."""
        if self._current is None:
            return None
        for each in self._current.known:
            given = each.given
            # By identity: equal numbers in other tensors may have been changed since.
            if each.layouts is layouts and given.single is lookups.single and given.values is lookups.values:
                return (each.ready, self._current.fault) if given.offsets is lookups.offsets else None
        return None

    def list_read(self, batch: Batch, position: int) -> Lookups | None:
        """The rows of a list that is not pooled as they were announced, for `taken`; None: nobody announced them."""
        if self._current is None:
            return None
        own = _lists_in(batch, position)
        found = [(each.lists, each.given) for each in self._current.known]
        return next((given for at, given in found if at and at[0] is own and at[1] == position), None)

    def _lists_of(self, batch: Batch) -> list[_Read]:
        """The lists that are not pooled, in the order of their gradients; [] where the host would have to wait."""
        if batch.on_host is None or not self._knows_rows or self._tables.has_dense_gradients:
            return []
        inputs = self._tables.inputs
        found = []
        # The backward pass comes to the lists in the opposite order.
        for spec in reversed(inputs.sequences):
            position = inputs.list_position(spec.name)
            flat = self._tables.flat(batch.lists(position)[0].values)
            found.append(_Read(flat, self._tables.table_layouts(spec.table), (_lists_in(batch, position), position)))
        return found

    def in_updates(self) -> dict[str, str]:
        """Return why the rows of some tables are sorted in updates, by the names of the tables."""
        if any(table.growing is not None for table in self._tables.inputs.tables):
            return {"all": "ids take their rows between two steps"}
        weights = self._tables.tables
        reasons = {index: self._why_in_update(index) for index in range(weights.num_storages)}
        return {", ".join(weights.tables_of(index)): why for index, why in reasons.items() if why}

    def _why_in_update(self, index: int) -> str:
        """Say why the rows of a storage are sorted in its update; return "" where they are sorted ahead."""
        weights = self._tables.tables
        if not isinstance(weights.storages[index], MemoryStorage | LowPrecisionStorage):
            return "their rows have places that are decided a step early"
        is_listed = any(weights.places[spec.table].storage == index for spec in self._tables.inputs.sequences)
        if is_listed and not self._knows_rows:
            return "rows are drawn in a step"  # by reads that nobody announces, which belong to the same update
        return "each read has a gradient of its own" if is_listed and self._tables.has_dense_gradients else ""

    def _sorted(
        self, kernel: SortsAhead, reads: Sequence[tuple[Lookups, Sequence[LookupLayout]]], *, hidden: set[str]
    ) -> tuple[SortedReads, ...]:
        """The sorted rows of each storage whose update takes them; not of those that have `hidden` tables."""
        found = []
        weights = self._tables.tables
        hides = {weights.places[table].storage for table in hidden}
        for index in range(self._tables.tables.num_storages):
            mine = [PlannedRead(layout=of[index], lookups=lookups) for lookups, of in reads if of[index].slots]
            if mine and index not in hides and not self._why_in_update(index):
                found.append(kernel.sorted_reads(mine))
        return tuple(each for each in found if each is not None)

    @contextlib.contextmanager
    def _beside(self, read: Sequence[Lookups]) -> Iterator[None]:
        """Inside, the side queue computes, and reads these tensors, which were there when the step began."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._begun or torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            yield
        for lookups in read:
            for tensor in (lookups.single, lookups.values, lookups.offsets):
                # The allocator must not give this memory away while the side queue still reads it.
                tensor.record_stream(self._stream)


def _lists_in(batch: Batch, position: int) -> JaggedRows:
    """Return the lists that include those of a feature: the lists of a group that repeats, or of the batch."""
    groups = (group.jagged for group in batch.repeated if position in group.features.jagged)
    return next(groups, batch.jagged)
