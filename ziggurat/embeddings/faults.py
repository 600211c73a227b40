"""RowFaults: rows outside their tables, noticed on a device that the host does not wait for.

On a CPU a lookup checks its rows before it reads, and raises. Where tables lie on a GPU that would stop the host at
every lookup until the GPU has come to it. So the check stays on the device: rows outside become padding, a flag is
raised, and the step that reads it (a step late, `training/step/late.py`) has changed nothing. Only then is the batch
looked at again, to say which row of which feature it was. Rows of a batch that was announced have been checked already,
while the step before computed (`sorted_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ziggurat.embeddings.layouts import field_slot
from ziggurat.embeddings.sorted_ahead import SortedAhead
from ziggurat.errors import BoundsError
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import LookupLayout, Lookups
from ziggurat.ops.lookup.layout import RowLimits, check_rows, within_tables

if TYPE_CHECKING:
    from ziggurat.embeddings.tables import EmbeddingTables
    from ziggurat.features.batch import Batch


class RowFaults:
    """A flag on a device: whether a lookup was given a row outside its table since it was last lowered.

    Args:
        tables: that are looked up.
        knows_rows: False if steps look up rows of lists' tables that their batches do not name.

    Attributes:
        flag: () bool.
        ahead: the rows of announced batches.
    """

    def __init__(self, tables: EmbeddingTables, *, knows_rows: bool = True) -> None:
        self.flag = torch.zeros((), dtype=torch.bool, device=tables.tables.device)
        self.ahead = SortedAhead(tables, limits_of=self._limits_of, knows_rows=knows_rows)
        self._limits: dict[tuple[int, int, int], tuple[Sequence[LookupLayout], RowLimits]] = {}

    def lower(self) -> None:
        """Forget what was noticed."""
        self.flag.zero_()

    def checked(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> Lookups:
        """The same lookups with every row in its table; raises the flag where one was not.

        Args:
            lookups: of a batch, on the device.
            layouts: that they are for; limits are kept by object, so give the same list every time.
        """
        known = self.ahead.taken(lookups, layouts)
        if known is not None:
            self.flag |= known[1]
            return known[0]
        checked = within_tables(lookups, limits=self._limits_of(lookups, layouts), faults=self.flag)
        return self.ahead.beside(checked, layouts)

    def list_read(self, batch: Batch, position: int) -> Lookups | None:
        """The rows of a list that is not pooled, as they were announced; None: nobody announced them."""
        return self.ahead.list_read(batch, position)

    def _limits_of(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> RowLimits:
        num_lists = (lookups.offsets.numel() - 1) // max(lookups.batch_size, 1)
        key = id(layouts), len(lookups.single), num_lists
        if key not in self._limits:
            limits = RowLimits.of(layouts, lookups)
            self._limits[key] = layouts, limits  # the layouts too, so that their id stays theirs
        return self._limits[key][1]


class SentRows:
    """Takes the place of `RowFaults` for tables on a GPU whose rows ranks send: each rank has looked at its own before.

    It did so in the copy of the batch in host memory (`parallel/tables/ids.py`), so no GPU is asked.
    """

    def checked(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> Lookups:
        """The same lookups, which need not be looked at again."""
        del layouts
        return replace(lookups, are_checked=True)

    def list_read(self, batch: Batch, position: int) -> None:
        """Nothing: ranks send the rows of lists that are not pooled when they are asked for."""
        del batch, position


def raise_fault(tables: EmbeddingTables, batch: Batch) -> None:
    """Say which row of a batch lies outside its table; waits for the device.

    Raises:
        BoundsError: with feature, table and sample, or without where the model made the row itself.
        DataError: offsets of lists that fall, or end elsewhere than the values.
    """
    lookups = Lookups.of(batch.expanded())
    layouts = list(tables.layouts)
    for index, spec in enumerate(tables.inputs.jagged):
        if spec.pooling is Pooling.NONE:
            slot = field_slot(spec, index=index, column=0, tables=tables.tables)
            layouts.append(LookupLayout(dim=0, width=0, slots=(slot,)))
    for layout in layouts:
        check_rows(layout, lookups)
    in_host = tables.tables.in_host
    raise BoundsError(
        expected="rows of tables that exist" + (", and that the batch names, to be sent ahead" if in_host else ""),
        found="one that does not, among those that the model looks up besides the batch's features",
        where="EmbeddingTables.vectors",
        ways_out=(
            "run the step on the CPU, which names the row: --device cpu",
            *(("all rows on the device: --tables.device-memory ''",) if in_host else ()),
        ),
    )
