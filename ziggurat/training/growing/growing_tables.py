"""GrowingTables: the growing vocabularies of a run, between its data and its step.

    batch of the data ─► numbers of all ranks ─► same decisions everywhere ─► rows ─► step
                                                   └► new ids: each rank draws those rows that it holds

A batch is renamed after the step before it: what is admitted for it takes rows from others, whose last update must have
been made, and a checkpoint in between must not know of it. So ids do not travel a step ahead on ranks, as they do
without growing tables. Cost on R ranks: 8 bytes an id of a growing table to each of them, and each looks up the ids of
all (0.2 µs each); the decisions of each rank are those of one device with the whole batch.

Evaluation, scoring and exports read a map that does not change: unknown ids there are those without a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from jaxtyping import Int64, UInt8
from torch import Tensor

from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.embeddings.growing.growing_batches import GrowingBatches, Ids
from ziggurat.features.batch import Batch
from ziggurat.models import Model
from ziggurat.parallel.tables.sharded_tables import tables_of


class GrowingTables:
    """The growing vocabularies of a model.

    Args:
        model: on its device, its tables where they are trained.
        seed: of the run.
        gather: the bytes of every rank; collective.
        rank: of this process.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int = 0,
        gather: Callable[[bytes], list[bytes]] | None = None,
        rank: int = 0,
    ) -> None:
        self._model = model
        self._seed = seed
        gather_ids = None if gather is None else partial(_gather_ids, gather=gather)
        self._batches = GrowingBatches(model.inputs, gather=gather_ids, rank=rank)

    @property
    def is_any(self) -> bool:
        """True if the model has growing tables."""
        return bool(self._batches.ids)

    def admitted(self, batch: Batch, *, step: int) -> Batch:
        """The batch with rows, after new ids were admitted and their rows drawn; collective.

        Args:
            batch: of the data, on the CPU.
            step: that it is for, from 1 on.
        """
        batch, changes = self._batches.admitted(batch, step=step)
        for new in changes:
            for tables in tables_of(self._model) if len(new.ids) else ():
                tables.renew(new, seed=self._seed)
        return batch

    def frozen(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with rows, as ids have them now."""
        return (self._batches.frozen(batch) for batch in batches)

    def grown(self) -> dict[str, GrownVocabulary]:
        """Return the vocabularies that have grown so far, by table."""
        return self._batches.grown()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps, sharing memory: equal on all ranks."""
        return self._batches.state()

    def begin_with(self, table: str, numbers: Int64[np.ndarray, " K"], *, frequency: UInt8[np.ndarray, " K"]) -> None:
        """Give ids the first rows of a table that has none yet; see `GrowingBatches.begin_with`."""
        self._batches.begin_with(table, numbers, frequency=frequency)

    def rebuild(self) -> None:
        """The state was loaded."""
        self._batches.rebuild()

    def report(self) -> dict[str, int]:
        """Count by table: known and unknown look-ups, new and evicted ids since the last report, and ids with a row."""
        return self._batches.report()


def _gather_ids(mine: list[Ids], *, gather: Callable[[bytes], list[bytes]]) -> list[list[Ids]]:
    """Numbers of this rank's features to those of every rank: lengths, then numbers."""
    lengths = np.array([len(each) for each in mine], dtype=np.int64)
    # The empty array gives a rank without features a type: `concatenate` refuses an empty list.
    numbers = np.concatenate([np.empty(0, np.int64), *mine])
    found = []
    for part in gather(lengths.tobytes() + numbers.tobytes()):
        both = np.frombuffer(part, dtype=np.int64)
        theirs = both[: len(mine)]
        values = both[len(mine) :]
        # The last end is no cut: `split` would leave an empty piece behind it.
        found.append(np.split(values, np.cumsum(theirs)[:-1]))
    return found
