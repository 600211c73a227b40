"""LookupMeter: milliseconds that looking up and updating a group of tables takes, on this processor with our kernel.

What runs is what a training step runs for the tables of one device: for each number of columns one lookup of all its
tables, then, with a gradient of the result, one exact update by row-wise Adagrad (`ziggurat.ops.lookup`).

What is read is the *processor time of this process*, not the clock: a machine that other programs use gives the process
less time, which does not count, though caches and memory are shared with them, which does. Each round takes all batches
of the group in turn, so that one finds in the caches what another has left there; of each batch the fastest counts.

Memory is one arena that all groups share. Fresh memory for each group would cost more time than the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ziggurat.ops.lookup import (
    FieldKind,
    FieldSlot,
    GradientPart,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    UpdateRule,
)
from ziggurat.ops.lookup.cut_rows import apply_cut, cut_rows, in_order, spans_of
from ziggurat.ops.machine.huge_pages import advise_huge_pages
from ziggurat.ops.table_optimizers import USUAL
from ziggurat.planning.costs.probe_tables import TableDraw

_STEP = Step(rule=UpdateRule(kind=USUAL), learning_rate=1e-3)


@dataclass(frozen=True, kw_only=True)
class LookupTimes:
    """Processor milliseconds of one step of a group.

    Args:
        forward_ms: lookup and pooling.
        total_ms: with summing gradients of equal rows and updating.
    """

    forward_ms: float
    total_ms: float


class LookupMeter:
    """Measures the milliseconds that looking up and updating a group of tables takes on this processor.

    Args:
        kernel: to measure.
        arena_mib: most weights of a group.
        rounds: of all batches of a group.
        clock: seconds; processor time of this process unless given.
    """

    def __init__(
        self,
        kernel: LookupKernel,
        *,
        arena_mib: int = 768,
        rounds: int = 3,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._kernel = kernel
        self._rounds = rounds
        self._clock = clock
        self._weights = torch.empty(arena_mib << 18)  # MiB of FP32 numbers
        # Before the first touch, which decides the size of pages; and that touch must not fall into a measurement.
        advise_huge_pages(self._weights)
        self._weights.zero_()
        self._sums = torch.zeros(self._weights.numel() // 4)  # one for each row, and rows have 4 columns or more

    def measure(self, tables: Sequence[tuple[TableDraw, int]]) -> LookupTimes:
        """Time one group: tables of the pool, each with its number of columns."""
        work = self._work(tables)
        forward, total = np.full((2, len(work)), np.inf)
        for _ in range(1 + self._rounds):  # the first warms up, and is never the fastest
            for index, batch in enumerate(work):
                start = self._clock()
                outs = [self._look_up(part) for part in batch]
                between = self._clock()
                for part, out in zip(batch, outs, strict=True):
                    # The result stands in for its gradient: the time does not hang on the numbers.
                    gradient = GradientPart(layout=part.layout, lookups=part.lookups, grad=out)
                    self._kernel.update(part.weight, state={"sum": part.sums}, parts=[gradient], step=_STEP)
                forward[index] = min(forward[index], between - start)
                total[index] = min(total[index], self._clock() - start)
        return LookupTimes(forward_ms=1e3 * float(forward.mean()), total_ms=1e3 * float(total.mean()))

    def measure_cut(self, tables: Sequence[tuple[TableDraw, int]]) -> float:
        """Processor milliseconds of the same step for tables that are cut by columns (`ops/lookup/cut_rows.py`).

        What the holders of the other columns say, and when, is not part of it.
        """
        work = self._work(tables)
        best = np.full(len(work), np.inf)
        for _ in range(1 + self._rounds):
            for index, batch in enumerate(work):
                start = self._clock()
                outs = [self._look_up(part) for part in batch]
                for part, out in zip(batch, outs, strict=True):
                    self._update_cut(part, out)
                best[index] = min(best[index], self._clock() - start)
        return 1e3 * float(best.mean())

    def _update_cut(self, part: _Part, grad: Tensor) -> None:
        recorded = GradientPart(layout=part.layout, lookups=part.lookups, grad=grad)
        gradient = in_order(self._kernel.sum_gradients([recorded]))
        spans = spans_of(gradient, [(slot.first_row, slot.num_rows) for slot in part.layout.slots])
        for slot, span in zip(part.layout.slots, spans, strict=True):
            rows = slice(slot.first_row, slot.first_row + slot.num_rows)
            cut = cut_rows(gradient, first_row=slot.first_row, span=span)
            apply_cut(
                self._kernel,
                cut,
                weight=part.weight[rows],
                accumulator=part.sums[rows],
                mean_square=cut.squares / part.layout.dim,
                step=_STEP,
            )

    def _look_up(self, part: _Part) -> Tensor:
        out = torch.empty(part.lookups.batch_size, part.layout.width)
        self._kernel.lookup(part.weight, layout=part.layout, lookups=part.lookups, out=out)
        return out

    def _work(self, tables: Sequence[tuple[TableDraw, int]]) -> list[list[_Part]]:
        """Return the work by batch, one part for each number of columns."""
        by_dim: dict[int, list[TableDraw]] = {}
        for table, dim in tables:
            by_dim.setdefault(dim, []).append(table)
        num_batches = len(tables[0][0].rows)
        work: list[list[_Part]] = [[] for _ in range(num_batches)]
        weights_used = sums_used = 0
        for dim, mine in by_dim.items():
            num_rows = sum(table.profile.num_rows for table in mine)
            weight = self._weights[weights_used : weights_used + num_rows * dim].view(num_rows, dim)
            sums = self._sums[sums_used : sums_used + num_rows]
            weights_used += num_rows * dim
            sums_used += num_rows
            layout = _layout(mine, dim)
            for index in range(num_batches):
                work[index].append(_Part(layout, _lookups(mine, index), weight, sums))
        return work


@dataclass(frozen=True)
class _Part:
    """The tables of one number of columns, and one batch for them."""

    layout: LookupLayout
    lookups: Lookups
    weight: Tensor
    sums: Tensor


def _in_order(tables: Sequence[TableDraw]) -> list[TableDraw]:
    """Those with one row a sample first, as layouts have them."""
    return [t for t in tables if t.lengths is None] + [t for t in tables if t.lengths is not None]


def _layout(tables: Sequence[TableDraw], dim: int) -> LookupLayout:
    slots = []
    first_row = 0
    num_single = sum(table.lengths is None for table in tables)
    for position, table in enumerate(_in_order(tables)):
        single = table.lengths is None
        slots.append(
            FieldSlot(
                name=f"field{position}",
                kind=FieldKind.SINGLE if single else FieldKind.SUM,
                index=position if single else position - num_single,
                table=f"table{position}",
                first_row=first_row,
                num_rows=table.profile.num_rows,
                column=position * dim,
            )
        )
        first_row += table.profile.num_rows
    return LookupLayout(dim=dim, width=dim * len(slots), slots=tuple(slots))


def _lookups(tables: Sequence[TableDraw], batch: int) -> Lookups:
    single = [table.rows[batch] for table in tables if table.lengths is None]
    lists = [table for table in tables if table.lengths is not None]
    lengths = [table.lengths[batch] for table in lists if table.lengths is not None]
    num_samples = len(single[0]) if single else len(lengths[0])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))]) if lengths else np.zeros(1)
    values = np.concatenate([table.rows[batch] for table in lists]) if lists else np.zeros(0)
    return Lookups(
        batch_size=num_samples,
        single=torch.from_numpy(np.stack(single) if single else np.zeros((0, num_samples), np.int64)),
        values=torch.from_numpy(values.astype(np.int64)),
        offsets=torch.from_numpy(offsets.astype(np.int64)),
    )
