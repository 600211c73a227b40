"""ShardedTableOptimizer: the exact update of tables that are spread over ranks.

Rows that a rank holds with all their columns are updated as on one device. A row that is cut by columns is harder:
row-wise Adagrad keeps one number a row, the sum of mean squared gradients over *all* columns,

    a ← a + (1/D) Σ_d g_d²          w_d ← w_d − η g_d / (√a + ε)

so ranks that hold parts of a row tell each other their Σ g_d² first. They have looked up the same rows, so each knows
what the others will send: one small all-to-all for all such tables, one number a distinct row and part. The number is
then the same on all of them, and a checkpoint of it fits any other placement.

Tables that every rank has a copy of are updated by every rank, with gradients summed over them (`copies.py`): the same
bits everywhere. The sum is made when the gradient is first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ziggurat.embeddings import EmbeddingTables, TableOptimizer
from ziggurat.embeddings.storage import LowPrecisionStorage, MemoryStorage, TableStorage
from ziggurat.ops.lookup import Step, SummedGradient
from ziggurat.ops.lookup.cut_rows import (
    PLAIN_STEP,
    CutRows,
    cut_rows,
    in_order,
    num_lookups,
    plain_gradient,
    rows_of_tables,
    spans_of,
)
from ziggurat.ops.lookup.triton import sums_without_waiting
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.prioritised.exchange import PrioritisedExchange
from ziggurat.parallel.tables.copies import sum_over_ranks
from ziggurat.parallel.tables.dense_copies import small_storages, sum_whole_tables
from ziggurat.parallel.tables.embeddings import ShardedEmbeddings
from ziggurat.parallel.tables.shards import Shard
from ziggurat.parallel.topology import Topology


@dataclass
class _Cut:
    """Distinct rows of one column-wise table in this step."""

    shard: Shard
    part: CutRows


class ShardedTableOptimizer:
    """The interface of `TableOptimizer`, over ranks. All methods but the dicts are collective.

    Args:
        embeddings: what to update.
        topology: the ranks.
        traffic: counts messages.
        ahead: leaves some of an update for later; None: nothing does.
    """

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        *,
        topology: Topology,
        traffic: Traffic,
        ahead: PrioritisedExchange | None = None,
    ) -> None:
        self.config = embeddings.config
        self._tables = embeddings.tables
        self._ahead = ahead
        self._topology = topology
        self._traffic = traffic
        self._rows, self._columns, self._copies = (TableOptimizer(tables) for tables in self._tables.local)
        self._all = (self._rows, self._columns, self._copies)
        self._mean_squares = self.config.optimizer.mean_squares
        # By all ranks' shares, not this one's: the exchange of row sums needs everybody.
        self._any_cut = bool(self._mean_squares) and any(share.columns.shards for share in self._tables.shares)
        self._scale = 1.0

    def zero_grad(self) -> None:
        """Forget what was recorded."""
        if self._ahead is not None:
            self._ahead.forget_gradient()
        for optimizer in self._all:
            optimizer.zero_grad()
        self._scale = 1.0

    def bound(self) -> tuple[float, int] | None:
        """Return the largest magnitude of this rank's gradients, and how many add up, where some are still to come.

        If the product of both, added up over ranks, is finite, so is every sum of gradients: `all_finite` need not be
        asked, which would wait for all of them.
        """
        if self._ahead is None or not self._ahead.is_deferring:
            return None
        largest, count = self._ahead.bound()
        # What the exchange does not defer is there already, and counts in the same bound.
        for part in (part for tables in self._tables.local for parts in tables.recorded for part in parts):
            bound = float(part.grad.abs().amax()) if part.grad.numel() else 0.0
            largest = max(largest, bound if math.isfinite(bound) else math.inf)
            count += part.lookups.single.numel() + part.lookups.values.numel()
        return largest, count

    def all_finite(self) -> bool:
        """True if nothing on this rank is NaN or infinite; the step asks all ranks (`training/step/world_sums.py`)."""
        # In this order: the sums over ranks are made of all that was recorded.
        self._complete()
        self._sum_copies()
        return all(optimizer.all_finite() for optimizer in self._all)

    def grad_norm_squared(self) -> float:
        """Return the squared norm of this rank's gradient; ranks add up, copies counted on the first rank with them."""
        self._complete()
        self._sum_copies()
        counted = list(zip(self._all, self._tables.local, strict=True))
        # Copies are equal on all ranks of a tower group, so one of them counts.
        counted = counted if self._topology.tower.position == 0 else counted[:2]
        sizes = [(optimizer, tables.tables.num_storages, len(self._unasked(tables))) for optimizer, tables in counted]
        # Only where no storage asks the host how many rows are distinct.
        late = [optimizer for optimizer, number, unasked in sizes if number and unasked == number]
        total = sum(optimizer.grad_norm_squared() for optimizer, _ in counted if optimizer not in late)
        norms = [optimizer.norm_squared_on_device() for optimizer in late]
        return total + float(torch.stack(norms).sum()) * self._scale**2 if norms else total

    def scale_grad(self, factor: float) -> None:
        """Multiply the gradient; done inside `step`."""
        for optimizer in self._all:
            optimizer.scale_grad(factor)
        self._scale *= float(factor)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every row that was read, once, then forget what was recorded.

        Args:
            lr: learning rate η.
        """
        if self._ahead is not None:
            scale = self._scale
            # The number that this step gets below: both halves must be rounded and corrected by the same.
            self._ahead.split(lambda: self._step_again(lr, scale=scale), number=self._rows.num_steps + 1)
        if self._any_cut:
            # First, because it takes what is recorded of cut tables away from the ordinary optimizer.
            self._step_cut(lr, scale=self._scale, number=self._columns.num_steps + 1)
        self._sum_copies()
        for optimizer in self._all:
            optimizer.step(lr)
        self._scale = 1.0

    @torch.no_grad()
    def _step_again(self, lr: float, *, scale: float) -> None:
        """Update further rows as part of the step that was made last: what `PrioritisedExchange.split` left."""
        if self._any_cut:
            # No + 1: the step was counted when its first half was made.
            self._step_cut(lr, scale=scale, number=self._columns.num_steps)
        for optimizer in (self._rows, self._columns):
            optimizer.step_again(lr, scale=scale)

    def _complete(self) -> None:
        """Wait for gradients that are still to come."""
        if self._ahead is not None:
            self._ahead.complete()

    def forget(self, share: float) -> None:
        """See `TableOptimizer.forget`; copies of one row are on all ranks alike, and stay so."""
        for optimizer in self._all:
            optimizer.forget(share)

    def state_dict(self) -> dict[str, Tensor]:
        """State by table, as parts of whole tables, and `step`."""
        if self._tables.check_settled is not None:
            self._tables.check_settled()
        entries: dict[str, Tensor] = {"step": torch.tensor(self._rows.num_steps)}
        alone = self._topology.world_size == 1
        for optimizer, group in zip(self._all, self._tables.mine.groups, strict=True):
            shards = {shard.table: shard for shard in group.shards}
            for name, rows in optimizer.state_rows().items():
                shard = shards[name.rpartition(".")[0]]
                whole = rows.tensor() if alone and shard.is_whole else None
                entries[name] = self._tables.state_shard(shard, rows) if whole is None else whole
        return entries

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the step count; parts share memory with what a checkpoint was loaded into."""
        for optimizer in self._all:
            optimizer.num_steps = int(state["step"])

    def _unasked(self, tables: EmbeddingTables) -> list[int]:
        """Storages on a GPU whose sums may have more rows than are distinct: no host waits for their number.

        Ranks that have parts of one table have storages of one kind for it, so they come to the same answer.
        """
        if self._ahead is not None or self._tables.device.type != "cuda":
            return []
        storages = enumerate(tables.tables.storages)
        return [index for index, each in storages if isinstance(each, MemoryStorage | LowPrecisionStorage)]

    def _sum_copies(self) -> None:
        """Sum the gradients of copied tables over the ranks that have them, once for what is recorded; collective."""
        # A norm or a check has asked before: what is summed over ranks is not summed again.
        if self._copies.is_replaced:
            return
        tables = self._tables.local[2]
        group = self._topology.tower
        num_rows = [storage.num_rows for storage in tables.tables.storages]
        whole = self._unasked(tables)
        if whole and group.process_group is not None:
            is_small = small_storages(tables.recorded, num_rows, group=group, traffic=self._traffic)
            whole = [index for index in whole if is_small[index]]
        sums = self._copies.sums(of_fixed_size=whole)
        found = {at: each for at, each in enumerate(sums) if each is not None}  # the same storages on every rank
        by_rows = [at for at in found if at not in whole]
        as_tables = [at for at in found if at in whole]
        summed = sum_over_ranks([found[at] for at in by_rows], group=group, traffic=self._traffic)
        # = zip|
        found |= zip(by_rows, summed, strict=True)
        sizes = [num_rows[at] for at in as_tables]
        summed = sum_whole_tables([found[at] for at in as_tables], sizes, group=group, traffic=self._traffic)
        found |= zip(as_tables, summed, strict=True)
        self._copies.replace_sums([found.get(index) for index in range(len(sums))])

    # ------------------------------------------------------------------------------- tables that are cut by columns

    def _step_cut(self, lr: float, *, scale: float, number: int) -> None:
        """Update column-wise tables as part of step `number`, and leave nothing of them to the ordinary optimizer."""
        tables = self._tables.local[1]
        cuts = self._cuts(tables, scale=scale)
        totals = self._add_up(cuts)
        step = Step(rule=self.config.rule, learning_rate=lr, number=number)
        # The rule is applied by hand here; what is left for the kernel is a plain step of rate 1, rounded by this
        # step's number.
        plain = replace(PLAIN_STEP, number=number)
        for cut, total in zip(cuts, totals, strict=True):
            place = tables.tables.places[cut.shard.table]
            storage = tables.tables.storage(place.storage)
            rows = torch.where(cut.part.rows > 0, cut.part.rows + place.first_row, 0)  # kernels pass padding over
            # The mean over all columns of the table, though this rank has only some.
            accumulated = storage.gather(rows, key=self._mean_squares) + total / cut.shard.table_columns
            storage.scatter(rows, accumulated, key=self._mean_squares)
            gradient = plain_gradient(cut.part, accumulated=accumulated, step=step)
            storage.apply(tables.kernel, gradient=SummedGradient(rows=rows, sums=gradient.sums), step=plain)
        for recorded in tables.recorded:
            recorded.clear()

    def _cuts(self, tables: EmbeddingTables, *, scale: float) -> list[_Cut]:
        """Every column-wise table of this rank, in the order of the model's tables, rows in increasing order."""
        kernel = tables.kernel
        found: dict[str, CutRows] = {}
        for index, parts in enumerate(tables.recorded):
            places = {name: place for name, place in tables.tables.places.items() if place.storage == index}
            if not parts or not places:
                continue
            of_tables = [(place.first_row, place.num_rows) for place in places.values()]
            if index in self._unasked(tables):
                most = [num_lookups(parts, name) for name in places]
                gradient = sums_without_waiting(kernel, parts)
                taken = [(each, slice(None)) for each in rows_of_tables(gradient, of_tables, most=most)]
            else:
                # In rising order of rows, on all ranks alike: the exchange names no rows.
                gradient = in_order(kernel.sum_gradients(parts))
                taken = [(gradient, span) for span in spans_of(gradient, of_tables)]
            decayed = _decayed(tables.tables.storage(index), weight_decay=self.config.weight_decay)
            for (name, place), (mine, span) in zip(places.items(), taken, strict=True):
                found[name] = cut_rows(mine, first_row=place.first_row, span=span, scale=scale, decayed=decayed)
        shards = self._tables.mine.columns.shards
        return [_Cut(shard, found[shard.table]) for shard in shards if shard.table in found]

    def _add_up(self, cuts: list[_Cut]) -> list[Tensor]:
        """Σ g² over all columns for every row of every cut, summed in the order of the columns on every rank."""
        owners = {cut.shard.table: [s.rank for s in self._tables.shards[cut.shard.table]] for cut in cuts}
        shared = [[cut for cut in cuts if rank in owners[cut.shard.table]] for rank in range(self._topology.world_size)]
        sizes = [sum(len(cut.part.rows) for cut in each) for each in shared]
        # To every owner the same sums, so that each adds up the whole row itself.
        flat = [cut.part.squares for each in shared for cut in each]
        received = all_to_all(
            torch.cat(flat) if flat else torch.empty(0, device=self._tables.device),
            sent=sizes,
            received=sizes,
            group=self._topology.world,
            traffic=self._traffic,
            purpose="row sums of cut tables",
        ).wait()
        pieces = iter(received.split([len(cut.part.rows) for each in shared for cut in each])) if flat else iter(())
        parts = {(rank, cut.shard.table): next(pieces) for rank, each in enumerate(shared) for cut in each}
        totals = []
        for cut in cuts:
            total = torch.zeros_like(cut.part.squares)
            # In the order of the columns, and from zero: the same bits on every owner.
            for rank in owners[cut.shard.table]:
                total = total + parts[rank, cut.shard.table]
            totals.append(total)
        return totals


def _decayed(storage: TableStorage, *, weight_decay: float) -> Callable[[Tensor], Tensor] | None:
    """Return what weight decay adds to the gradient of rows of a storage; None: it is off, no row is read."""
    if not weight_decay:
        return None
    return lambda rows: weight_decay * storage.gather(rows)
