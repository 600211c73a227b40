"""PrioritisedExchange: rows that the present step does not touch are looked up and sent while it computes.

    compute   ── forward of t ─────────── │ look ahead │ ── backward of t ──── │ update │ ── forward of t+1 ──
    behind    gradients of t−1, the rest    codes of t+1   cells of t+1 that     of rows    gradients of t, the rest
                                                           wait for nothing      that t+1
    in front                                                                     reads: gradients of t, then cells

Only the last line is waited for with nothing else to do. It carries *collisions*: rows that both batches read. Those of
the next batch cannot be looked up before the update, and their gradients are wanted first; all others have a step's
time. Feng et al., "FreeScale", arXiv 2604.24073 (MLSys 2026), section 4.2 and algorithm 2; theirs serves un-pooled
lists of tables that are cut by rows, this one whatever is looked up, cell by cell (`cells.py`).

Nothing changes but time: each row is updated once a step with the same sum in the same order, and read after the same
updates as in the plain step. So weights and optimizer state are those of the plain exchange, bit for bit:

    look ahead of t+1     after the rest of t−1 is applied; reads rows that t does not touch
    first update of t     rows that t+1 reads: all gradients that they have came in the first round
    second update of t    the other rows, with the same rate and step number; before anything else reads them

A batch that was not announced, with slices, or looked up without gradients takes the plain hop; whatever is still on
its way is applied before it (`settle`). So do vectors of rows that only the model knows (drawn items). Lists that are
not pooled travel row by row (`lists.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from ziggurat.embeddings.contract import EmbeddingsWrapper, Slices
from ziggurat.features.batch import Batch
from ziggurat.ops.function_ctx import Ctx
from ziggurat.parallel.exchange.collectives import Pending
from ziggurat.parallel.prioritised.cells import NOTHING, NOW, WAITS
from ziggurat.parallel.prioritised.collisions import RowMarks, codes_of, only_cells
from ziggurat.parallel.prioritised.hop import CellExchange, CellTransfer
from ziggurat.parallel.prioritised.lists import AheadList, Lists
from ziggurat.parallel.prioritised.updates import Due, DueLookup, Later, land, pooled_lookups, split
from ziggurat.parallel.tables.embeddings import ShardedEmbeddings
from ziggurat.parallel.tables.ids import LocalIds


@dataclass
class _Present:
    """The batch that the step computes.

    Args:
        ids: rows that this rank looked up for it.
        transfer: its cells; None where it took the plain hop.
        lists: its un-pooled lists that came ahead.
        vectors: rows that were looked up the plain way beside: table group, storage, rows.
    """

    ids: LocalIds
    transfer: CellTransfer | None
    lists: list[AheadList] = field(default_factory=list)
    vectors: list[tuple[int, int, Int64[Tensor, "N"]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Ahead:
    """The next batch, on its way: its cells that wait for nothing are under way."""

    batch: Batch
    ids: LocalIds
    transfer: CellTransfer
    now: Pending
    lists: list[AheadList]
    now_of_lists: list[Pending]


@dataclass
class CellCounts:
    """Counts the cells of next batches, and those that waited, on this rank."""

    cells: int = 0
    waited: int = 0


class PrioritisedExchange(EmbeddingsWrapper):
    """Takes the place of the plain hop in steps whose next batch is known. Methods are collective.

    Args:
        embeddings: whose hop it is.
        hop: the hop in two rounds.
        lists: un-pooled lists that travel ahead.
        local_columns: where columns of copied tables are in what a rank wants, in the order of their lookup.

    Attributes:
        is_on: whether the next step looks ahead; the same on all ranks.
        defers: whether gradients may come in two rounds; not where all are needed at once (their norm).
        counts: cells since they were last read.
    """

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        *,
        hop: CellExchange,
        lists: Lists,
        local_columns: Int64[Tensor, "L"],
    ) -> None:
        super().__init__(embeddings)
        self._sharded = (embeddings,)  # in a tuple: not a submodule
        self.cells = hop
        self.lists = lists
        self._local_columns = local_columns
        self.is_on = True
        self.defers = True
        self.counts = CellCounts()
        tables = embeddings.tables
        # An input that asks for a gradient: where no table is copied, autograd would otherwise skip the backward pass.
        self._anchor = torch.zeros((), requires_grad=True)
        # Of two groups of three: the last one, copies, is looked up where its samples are, and nothing of it travels.
        self._marks = [[RowMarks(each) for each in tables.local[:2]] for _ in range(2)]
        self._marked: LocalIds | None = None  # whose rows the first marks are
        self._present: _Present | None = None
        self._ahead: _Ahead | None = None
        # Lists of the present batch that nobody took yet, and their vectors.
        self._came: tuple[Batch, dict[str, tuple[AheadList, Tensor]]] | None = None
        self._due: list[Due] = []
        self._later: Later | None = None
        self._column_fields = _column_fields(embeddings)

    @property
    def _embeddings(self) -> ShardedEmbeddings:
        return self._sharded[0]

    # --------------------------------------------------------------------------------------------- a step's parts

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B T"]:
        """Pooled embeddings of a batch without slices; see `ShardedEmbeddings.forward`."""
        return self._forward(batch).to(dtype)

    def _forward(self, batch: Batch) -> Float[Tensor, "B T"]:
        embeddings = self._embeddings
        is_training = torch.is_grad_enabled()
        ahead = self._ahead
        # By identity: an equal batch that is another object was not announced.
        if is_training and ahead is not None and ahead.batch is batch:
            return self._arrive(ahead)
        # Plain lookups read any row, so the rest of the last update has to be there first.
        self.settle()
        if is_training:
            self._came = None
        pending = embeddings.take_pending(batch)
        self.lists.drop(pending)
        lookup = embeddings.start_lookup(batch, pending)
        if is_training:
            self._present = _Present(lookup.ids, None)
        return embeddings.finish_lookup(lookup)

    def send_ahead(self, upcoming: Batch | None) -> None:
        """Send what can be sent of the next batch, before the backward pass of the present one.

        Args:
            upcoming: announced; None: not known, or there is none.
        """
        # The look-ahead reads rows, so the rest of the update before has to be applied.
        self.settle()
        embeddings = self._embeddings
        present = self._present
        self._present = None
        if not self.is_on or upcoming is None or upcoming.repeated or present is None:
            self.lists.drop()
            self.send_ids()
            return
        ids, pending = embeddings.take_ahead(upcoming)
        lists = self.lists.take(pending)
        codes_RF = self._mark(present, ids, lists)
        per_place = embeddings.rows_by_member(ids)
        num_rows = per_place[self.cells.group.position]
        size = self.cells.group.size
        transfer = CellTransfer(per_place, [num_rows] * size, [0] * size, num_rows, codes_RF)
        before = {each.feature.spec.name: each.transfer for each in present.lists}
        codes, codes_of_lists = self._send_codes(present, transfer, lists, before)
        # Outside autograd: the gradient comes back by cells (`take_gradient`), not through this lookup.
        with torch.no_grad():
            values = embeddings.tables.lookup(ids)
        # What comes, and in which sizes, is known by the codes alone; so cells are sent after them.
        self.cells.receive_codes(codes, transfer, present=present.transfer)
        now = self.cells.send_now(transfer, values)
        now_of_lists = []
        for each, codes_of_list in zip(lists, codes_of_lists, strict=True):
            hop = each.feature.hop
            hop.receive_codes(codes_of_list, each.transfer, present=before.get(each.feature.spec.name))
            now_of_lists.append(hop.send_now(each.transfer, self.lists.look_up(each)))
        self._ahead = _Ahead(upcoming, ids, transfer, now, lists, now_of_lists)

    def unpooled_slices(self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32) -> Slices:
        """An un-pooled list, as it has come ahead or looked up the plain way."""
        came = self._came
        is_here = came is not None and came[0] is batch and name in came[1]
        if came is None or not is_here or dtype != torch.float32 or not torch.is_grad_enabled():
            self.settle()
            return super().unpooled_slices(batch, name, dtype=dtype)
        each, arrived = came[1].pop(name)
        landing = _Landing(send=partial(self.take_list_gradient, each), columns=None)
        vectors = _Land.apply(self._anchor, None, (landing, arrived))
        lists, inverse = batch.lists(each.feature.index)
        # Rows that were sorted for their owners come back in that order; the inverse puts them as the batch has them.
        vectors = vectors if each.order is None else vectors[torch.argsort(each.order)]
        return vectors, lists.offsets, inverse

    def vectors(
        self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "N D"]:
        """The vectors of some rows of one table, looked up the plain way."""
        self.settle()
        return super().vectors(table, rows_N, dtype=dtype)

    def announce(self, *batches: Batch) -> None:
        """Tell how many ids of batches without slices will come, and of their un-pooled lists."""
        for batch in batches:
            ids = self._embeddings.announce_ids(batch)
            if self.is_on:
                self.lists.announce(batch, ids)

    def send_ids(self) -> None:
        """Send the ids of the batches that were announced."""
        self._embeddings.send_ids()
        self.lists.send_ids()

    def settle(self) -> None:
        """Apply what the last update left for later: after this all tables are as after a plain step."""
        later = self._later
        self._later = None
        if later is not None:
            later.finish(self._embeddings.tables)

    @property
    def is_settled(self) -> bool:
        """False while an update is not complete."""
        return self._later is None

    def drain(self) -> None:
        """Receive and forget what was sent ahead for batches that will not come."""
        self.settle()
        self.lists.drop()
        if self._ahead is not None:
            # Messages have to be received even if nobody wants them: the other ranks' memory waits for it.
            for pending in (self._ahead.now, *self._ahead.now_of_lists):
                pending.wait()
        self._ahead = self._present = self._came = None
        super().drain()

    def note(self, group: int, storage: int, rows_N: Int64[Tensor, "N"]) -> None:
        """Hear of rows that an un-pooled lookup of the present batch reads; not collective."""
        # Copies, the last group, have no marks: nothing of them travels.
        if self._present is not None and torch.is_grad_enabled() and group < len(self._marks[0]):
            self._present.vectors.append((group, storage, rows_N))

    # ---------------------------------------------------------------------------------------------- the optimizer

    def take_gradient(self, transfer: CellTransfer, ids: LocalIds, gradient: Tensor) -> None:
        """Send the gradient of cells of the present batch, the first round at once; it is recorded when it has come."""
        lookups = pooled_lookups(ids, self._embeddings.tables)
        # Where this gradient would stand among the parts: the order of sums has to be the plain step's.
        before = self._num_recorded()
        self._due.append(Due(self.cells, self.cells.send_gradient(transfer, gradient), lookups, before))

    def take_list_gradient(self, landed: AheadList, gradient: Tensor) -> None:
        """Do what `take_gradient` does, for an un-pooled list."""
        tables = self._embeddings.tables
        before = self._num_recorded()
        hop = landed.feature.hop
        group = landed.feature.group
        found = []
        if group >= 0:
            flat, layouts = tables.local[group].flat_lookup(landed.feature.spec.table, landed.route.rows)
            found.append(DueLookup(group, slice(0, hop.mine.num_columns), flat, layouts))
        self._due.append(Due(hop, hop.send_gradient(landed.transfer, gradient), found, before))

    def _num_recorded(self) -> list[list[int]]:
        """Parts that are recorded so far, by table group and storage; copies take no part in the exchange."""
        return [[len(parts) for parts in each.recorded] for each in self._embeddings.tables.local[:2]]

    @property
    def is_deferring(self) -> bool:
        """True between a backward pass and the update, if some gradients are to come after it."""
        return any(not due.rounds.is_whole for due in self._due)

    def bound(self) -> tuple[float, int]:
        """The largest magnitude of this rank's share of the gradients to come, and how many lookups they belong to."""
        lookups = [each.lookups for due in self._due for each in due.lookups]
        count = sum(each.single.numel() + each.values.numel() for each in lookups)
        return max((due.rounds.largest for due in self._due), default=0.0), count

    def complete(self) -> None:
        """Wait for all gradients, and record them as the plain hop does."""
        due = self._due
        self._due = []
        land(due, tables=self._embeddings.tables)

    def split(self, then: Callable[[], None], *, number: int) -> None:
        """Record the gradients of rows that the next batch reads; keep the others, to be applied by `then`.

        Args:
            then: updates the rows whose gradients are recorded, as part of the same step.
            number: of the step.
        """
        if not self.is_deferring:
            self.complete()
            return
        due = self._due
        self._due = []
        marks = self._marks[0]  # of the next batch, since `_mark`
        self._later = split(due, tables=self._embeddings.tables, marks=marks, number=number, then=then)

    def forget_gradient(self) -> None:
        """Receive and forget the gradient of a step that is skipped."""
        due = self._due
        self._due = []
        # The second round was never sent, so nothing of it has to be received.
        for each in due:
            each.rounds.first.wait()

    # -------------------------------------------------------------------------------------------------- details

    def _arrive(self, ahead: _Ahead) -> Float[Tensor, "B T"]:
        """Look up what had to wait, and put the batch together; then let go what the update left for later."""
        self._ahead = None
        embeddings = self._embeddings
        ids = ahead.ids
        transfer = ahead.transfer
        embeddings.set_sizes(ids)
        with torch.no_grad():
            values = embeddings.tables.lookup(self._waiting(ids, transfer.codes))
        waiting = self.cells.send_waiting(transfer, values)
        waiting_lists = []
        for each in ahead.lists:
            keep_N = (each.transfer.codes == WAITS).flatten()
            waiting_lists.append(each.feature.hop.send_waiting(each.transfer, self.lists.look_up(each, keep_N)))
        # All is sent before anything is waited for, and copies are looked up meanwhile.
        local = embeddings.tables.lookup_copies(ids)
        arrived = self.cells.receive(transfer, now=ahead.now, waiting=waiting)
        came = {}
        for each, now, late in zip(ahead.lists, ahead.now_of_lists, waiting_lists, strict=True):
            came[each.feature.spec.name] = each, each.feature.hop.receive(each.transfer, now=now, waiting=late)
        # Only now: the waiting cells are in front of it, and what is behind has the whole step's time.
        if self._later is not None:
            self._later.send_rest()
        self.send_ids()
        self._present = _Present(ids, transfer, ahead.lists)
        self._came = ahead.batch, came
        landing = _Landing(send=partial(self.take_gradient, transfer, ids), columns=self._local_columns)
        pooled = _Land.apply(self._anchor, local, (landing, arrived))
        return embeddings.with_means(pooled, ids, rows_sent=transfer.rows_sent, num_rows=transfer.num_rows)

    def _send_codes(
        self, present: _Present, transfer: CellTransfer, lists: list[AheadList], before: dict[str, CellTransfer]
    ) -> tuple[Pending, list[Pending]]:
        """Send all codes, of cells and of each list, and count them."""
        of_cells = self.cells.send_codes(transfer, present=present.transfer)
        of_lists = [
            each.feature.hop.send_codes(each.transfer, present=before.get(each.feature.spec.name)) for each in lists
        ]
        for codes in (transfer.codes, *(each.transfer.codes for each in lists)):
            self.counts.cells += int((codes != NOTHING).sum())
            self.counts.waited += int((codes == WAITS).sum())
        return of_cells, of_lists

    def _mark(self, present: _Present, ids: LocalIds, lists: list[AheadList]) -> UInt8[Tensor, "R F"]:
        """Codes of the next batch's cells, and which gradients of the present batch come first."""
        marks, others = self._marks
        # The marks of the step before were of this batch already, unless it took the plain hop.
        if self._marked is not present.ids:
            _set(marks, present.ids)
            self.lists.mark(present.lists, marks)
        for group, storage, rows_N in present.vectors:
            marks[group].add(storage, rows_N)
        for each in marks:
            each.add_changed()
        codes_RF = self._codes(ids, marks)
        for each in lists:
            each.transfer.codes = self.lists.codes(each, marks, marked=WAITS, others=NOW)
        # From here on `others` are the rows of the next batch, and tell which gradients of the present one come first.
        _set(others, ids)
        self.lists.mark(lists, others)
        if present.transfer is not None and self.defers:
            present.transfer.firsts = self._codes(present.ids, others)
            for each in present.lists:
                each.transfer.firsts = self.lists.codes(each, others, marked=WAITS, others=NOW)
        # Changed places: in the next step the first are those of its present batch.
        self._marks = [others, marks]
        self._marked = ids
        return codes_RF

    def _codes(self, ids: LocalIds, marks: list[RowMarks]) -> UInt8[Tensor, "R F"]:
        tables = self._embeddings.tables
        batches = ids.batches
        codes_RF = torch.zeros(
            batches[0].batch_size, self.cells.mine.num_fields, dtype=torch.uint8, device=batches[0].single.device
        )
        for index, fields in enumerate(self._column_fields):
            # A group without tables has no rows to mark, and its codes stay 0: nothing.
            if tables.mine.groups[index].shards:
                codes_of(tables.local[index], batches[index], marks=marks[index], column_fields=fields, out=codes_RF)
        codes_RF[:, self.cells.mine.unwanted] = NOTHING
        return codes_RF

    def _waiting(self, ids: LocalIds, codes_RF: UInt8[Tensor, "R F"]) -> LocalIds:
        """The same rows without those of cells that have gone already."""
        wanted_FR: Bool[Tensor, "F R"] = (codes_RF == WAITS).t()
        batches = list(ids.batches)
        first = 0
        for index, group in enumerate(self._embeddings.tables.mine.exchanged.groups):
            count = len(group.single) + len(group.lists)
            batches[index] = only_cells(batches[index], wanted_FR[first : first + count])
            first += count
        return replace(ids, batches=tuple(batches))


@dataclass(frozen=True)
class _Landing:
    """The way back of what has arrived.

    Args:
        send: sends its gradient.
        columns: those that copied tables fill on this rank; None: none.
    """

    send: Callable[[Tensor], None]
    columns: Int64[Tensor, "L"] | None


class _LandCtx(Ctx, Protocol):
    landing: _Landing


class _Land(torch.autograd.Function):
    """Adds what has arrived to the graph: the backward pass sends its gradient, and waits for nothing."""

    @staticmethod
    def forward(ctx: _LandCtx, anchor: Tensor, local_BL: Tensor | None, landed: tuple[_Landing, Tensor]) -> Tensor:
        del anchor  # requires a gradient, so that every rank takes part in the backward pass
        # In a tuple, unseen by autograd: an input that is also the output would have to be marked and copied.
        ctx.landing, arrived_BT = landed
        if local_BL is not None and ctx.landing.columns is not None:
            # In place: copies have columns of their own in what arrived, which nobody sends.
            arrived_BT[:, ctx.landing.columns] = local_BL
        return arrived_BT

    @staticmethod
    def backward(ctx: _LandCtx, gradient_BT: Tensor) -> tuple[None, Tensor | None, None]:  # type: ignore[override]
        landing = ctx.landing
        landing.send(gradient_BT)
        if landing.columns is None or not ctx.needs_input_grad[1]:
            return None, None, None
        # The anchor gets none: it is there to be asked, not to learn.
        return None, gradient_BT[:, landing.columns], None


def _set(marks: list[RowMarks], ids: LocalIds) -> None:
    """Mark the rows of a batch, and no others."""
    for each, batch in zip(marks, ids.batches[:2], strict=True):
        each.clear()
        each.add_batch(batch)


def _column_fields(embeddings: ShardedEmbeddings) -> list[dict[int, int]]:
    """Return, for each table group, the number of the field that begins at a column of its lookup output."""
    found = []
    number = 0
    first = 0
    for group in embeddings.tables.mine.exchanged.groups:
        fields = (*group.single, *group.lists)
        found.append({share.column - first: number + index for index, share in enumerate(fields)})
        number = number + len(fields)
        first = first + group.num_columns
    return found
