"""GrowingBatches: numbers of ids in batches become rows, table by table; and the ids come and go.

    batch of numbers ─► ids of the table's features, in order ─► GrowingIds ─► the same batch with rows
                                                                    └► new ids, with the rows to be drawn for them

On many ranks every rank sees the ids of all of them and takes every decision itself: maps are equal on all ranks, and
those of one device, since the order of ids within a step does not matter. Reserved numbers (padding, unknown, missing)
are rows already and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.embeddings.growing.new_rows import NewRows
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import JaggedRows
from ziggurat.features.schema import NUM_RESERVED_ROWS, UNKNOWN_ROW
from ziggurat.ops.growing.growing_ids import GrowingIds

STATE = "growing."
Ids = Int64[np.ndarray, " N"]
Gather = Callable[[list[Ids]], list[list[Ids]]]  # the numbers of this rank's features → those of all ranks, in order


class GrowingBatches:
    """The growing tables of a model.

    Args:
        inputs: of the model.
        gather: tells every rank the numbers of all; None on one device.
        rank: of this process.
    """

    def __init__(self, inputs: InputSpec, *, gather: Gather | None = None, rank: int = 0) -> None:
        self._inputs = inputs
        self._gather = gather
        self._rank = rank
        self.ids = {spec.name: GrowingIds(spec.growing) for spec in inputs.tables if spec.growing is not None}
        self._single = [index for index, spec in enumerate(inputs.single) if spec.table in self.ids]
        self._jagged = [index for index, spec in enumerate(inputs.jagged) if spec.table in self.ids]

    def admitted(self, batch: Batch, *, step: int) -> tuple[Batch, list[NewRows]]:
        """The batch with rows, after new ids were admitted; collective on many ranks.

        Args:
            batch: of numbers, on the CPU; deduplicated ones are written out, so that sightings are those of samples.
            step: that it is for, from 1 on.
        """
        batch = batch.expanded()
        mine = self._features(batch)
        new = list[NewRows]()
        everyone = [mine] if self._gather is None else self._gather(mine)
        tables = self._tables()
        found = list(mine)
        for name, ids in self.ids.items():
            places = [place for place, table in enumerate(tables) if table == name]
            parts = [(place, rank, each[place]) for place in places for rank, each in enumerate(everyone)]
            rows, changed = self._step(name, ids, np.concatenate([part for _, _, part in parts]), step=step)
            new.append(changed)
            first = 0
            for place, rank, part in parts:
                if rank == self._rank:
                    found[place] = rows[first : first + len(part)]
                first += len(part)
        return self._with_rows(batch, found), new

    def frozen(self, batch: Batch) -> Batch:
        """The batch with rows, as ids have them now; nothing changes."""
        batch = batch.expanded()
        found = []
        for table, numbers in zip(self._tables(), self._features(batch), strict=True):
            rows = self.ids[table].find(numbers.view(np.uint64))
            rows = np.where(rows < 0, UNKNOWN_ROW, rows + NUM_RESERVED_ROWS)
            found.append(np.where(numbers < NUM_RESERVED_ROWS, numbers, rows))
        return self._with_rows(batch, found)

    def grown(self) -> dict[str, GrownVocabulary]:
        """Return the vocabularies that have grown so far, by table, for raw data."""
        return {name: GrownVocabulary.of(ids.state.keys[: len(ids)].astype(np.int64)) for name, ids in self.ids.items()}

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint keeps, sharing memory; `rebuild` goes on from what was loaded into it."""
        return {
            f"{STATE}{name}.{part}": torch.from_numpy(array.view(np.uint8).reshape(len(array), -1))
            for name, ids in self.ids.items()
            for part, array in ids.state.arrays().items()
            if len(array)
        }

    def begin_with(self, table: str, numbers: Ids, *, frequency: UInt8[np.ndarray, " K"]) -> None:
        """Give ids the first rows of a table that has none yet.

        Args:
            table: its name.
            numbers: of the ids, in the order of their rows; at most as many as the table has rows for.
            frequency: how often each counts as used.
        """
        self.ids[table].begin_with(numbers.view(np.uint64), frequency=frequency)

    def rebuild(self) -> None:
        """The state was loaded."""
        for ids in self.ids.values():
            ids.rebuild()

    def report(self) -> dict[str, int]:
        """Look-ups and changes since the last report, by table."""
        return {
            f"growing/{name}/{what}": count for name, ids in self.ids.items() for what, count in ids.report().items()
        }

    def _step(self, name: str, ids: GrowingIds, numbers: Ids, *, step: int) -> tuple[Ids, NewRows]:
        """Rows of all ranks' numbers of one table, and what is new in it."""
        is_id = numbers >= NUM_RESERVED_ROWS
        admission = ids.step(numbers[is_id].view(np.uint64), step=step)
        rows = numbers.copy()
        # Below 0: the id has no row, as long as it is not admitted.
        rows[is_id] = np.where(admission.rows < 0, UNKNOWN_ROW, admission.rows + NUM_RESERVED_ROWS)
        new_rows = torch.from_numpy(admission.new_rows + NUM_RESERVED_ROWS)
        return rows, NewRows(table=name, ids=admission.new_ids, rows=new_rows)

    def _tables(self) -> list[str]:
        """The table of each growing feature, single ones first."""
        specs = [self._inputs.single[index] for index in self._single]
        return [spec.table for spec in (*specs, *(self._inputs.jagged[index] for index in self._jagged))]

    def _features(self, batch: Batch) -> list[Ids]:
        """The numbers of each growing feature."""
        found = [batch.single[index].numpy() for index in self._single]
        return found + [batch.lists(index)[0].values.numpy() for index in self._jagged]

    def _with_rows(self, batch: Batch, rows: list[Ids]) -> Batch:
        # Nothing to replace, and a slice with steps of 0 is refused below.
        if not batch.batch_size:
            return batch
        single = batch.single.clone()
        for index, each in zip(self._single, rows[: len(self._single)], strict=True):
            single[index] = torch.from_numpy(each)
        values = batch.jagged.values
        if self._jagged:
            values = values.clone()
            # Offsets are feature-major: every B-th begins a feature.
            offsets = batch.jagged.offsets[:: batch.batch_size]
            for index, each in zip(self._jagged, rows[len(self._single) :], strict=True):
                values[offsets[index] : offsets[index] + len(each)] = torch.from_numpy(each)
        return replace(batch, single=single, jagged=JaggedRows(values, batch.jagged.offsets))
