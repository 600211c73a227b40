"""Which rows of which tables the batches of a run touch, in the order in which training touches them.

    epoch 0, batch 0 ─► … ─► batch n ─► batch n + 1 ─► … ─► batch 2n
    └── fills the cache, not counted ──┘└────────── counted ─────────┘

Training data that are smaller than half of the sample are read twice: epoch 0 fills the cache, epoch 1, in its own
order, is counted, so that no row is new. Larger data are read on from the first batch; rows that the first half has not
touched then count as misses, which they are in the first epoch and, where the cache is large, not in later ones.

Batches name the ids of a table that grows by number: they are admitted here as in training, to the same rows.

Rows that a model looks up beside its batch (sampled negatives) are not among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int64

from ziggurat.data.encoded.loader import Dataset, Loader, LoaderConfig
from ziggurat.embeddings.growing.growing_batches import GrowingBatches
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.planning.tiers.miss_ratio import RowTrace

MAX_TOUCHES = 1 << 21  # of a trace; beyond, a share of the rows is kept
_Touched = tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]


@dataclass(frozen=True, kw_only=True)
class TouchedRows:
    """Distinct rows of each batch and table, and how often the batch looks them up.

    Args:
        inputs: features and tables.
        batches: by table, one entry a batch.
        counted_from: batches from this one on are counted.
        num_samples: samples of the counted batches.
        epochs: of the training data that were read, 1 or 2.
        growing: by table that grows, what `GrowingIds.report` says of the whole sample.
    """

    inputs: InputSpec
    batches: dict[str, list[_Touched]]
    counted_from: int
    num_samples: int
    epochs: int
    growing: dict[str, dict[str, int]] = field(default_factory=dict)

    def trace(self, tables: Sequence[str], *, most_touches: int = MAX_TOUCHES) -> RowTrace:
        """Touches of tables that share one cache, table after table in each batch.

        Args:
            tables: their names.
            most_touches: beyond this many, a share of the rows stands for all.
        """
        sizes = [self.inputs.table(name).num_rows for name in tables]
        # In a cache that tables share, the rows of each are numbered on from those before it.
        first_rows = [0, *itertools.accumulate(sizes)]
        batches = []
        for parts in zip(*(self.batches[name] for name in tables), strict=True):
            rows = np.concatenate([rows + first for (rows, _), first in zip(parts, first_rows, strict=False)])
            batches.append((rows, np.concatenate([lookups for _, lookups in parts])))
        touches = sum(len(rows) for rows, _ in batches)
        return RowTrace.of_batches(
            batches,
            num_rows=first_rows[-1],
            counted_from=self.counted_from,
            share=min(1.0, most_touches / max(touches, 1)),
        )

    def rows_touched(self, table: str) -> int:
        """Different rows of a table in all batches, counted or not."""
        return len(np.unique(np.concatenate([rows for rows, _ in self.batches[table]])))

    def ages(self, table: str) -> Int64[np.ndarray, " r"]:
        """Batches since each of the different rows was used last, at the end of the sample; 0: by the last batch."""
        # From the last batch back: where a row is first is where it was used last.
        parts = [rows for rows, _ in reversed(self.batches[table])]
        numbers = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts])
        _, latest = np.unique(np.concatenate(parts), return_index=True)
        return numbers[latest]

    def per_sample(self, table: str) -> tuple[float, float]:
        """Lookups of a table, and rows that are moved for them, a sample: the mean of the counted batches."""
        counted = self.batches[table][self.counted_from :]
        lookups = sum(int(n.sum()) for _, n in counted)
        touches = sum(len(rows) for rows, _ in counted)
        return lookups / max(self.num_samples, 1), touches / max(self.num_samples, 1)


def touched_rows(dataset: Dataset, *, loader: LoaderConfig, samples: int) -> TouchedRows:
    """Read batches of training data as a run does, and keep what they touch.

    Args:
        dataset: the encoded training rows.
        loader: as the run reads them.
        samples: to read, half of them to fill the cache; of small data as many as two epochs have.
    """
    stream = Loader(dataset, config=loader)
    warm = -(-min(samples // 2, dataset.num_rows) // loader.batch_size)
    if 2 * dataset.num_rows <= samples:
        warm = stream.steps_per_epoch
    inputs = dataset.inputs
    found: dict[str, list[_Touched]] = {table.name: [] for table in inputs.tables}
    num_samples = 0
    growing = GrowingBatches(inputs)
    for number, batch in enumerate(_first(stream, 2 * warm)):
        if growing.ids:
            batch, _ = growing.admitted(batch, step=number + 1)
        for table, rows in _rows_of(batch, inputs).items():
            distinct, lookups = np.unique(rows, return_counts=True)
            found[table].append((distinct, lookups))
        if number >= warm:
            num_samples += batch.batch_size
    return TouchedRows(
        inputs=inputs,
        batches=found,
        counted_from=warm,
        num_samples=num_samples,
        epochs=2 if 2 * warm > stream.steps_per_epoch else 1,
        growing={name: ids.report() for name, ids in growing.ids.items()},
    )


def _first(stream: Loader, count: int) -> Iterator[Batch]:
    """The first batches, of epoch after epoch."""
    epochs = (stream.batches(epoch=epoch) for epoch in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), count)


def _rows_of(batch: Batch, inputs: InputSpec) -> dict[str, Int64[np.ndarray, " n"]]:
    """The rows that a batch looks up, by table; lists that are kept once count for each sample that has them."""
    batch = batch.expanded()
    parts: dict[str, list[torch.Tensor]] = {table.name: [] for table in inputs.tables}
    for index, spec in enumerate(inputs.single):
        parts[spec.table].append(batch.single[index])
    for index, spec in enumerate(inputs.jagged):
        parts[spec.table].append(batch.jagged.of(index, batch_size=batch.batch_size).values)
    # A table that this batch does not look up has rows, too: none.
    nothing = torch.empty(0, dtype=torch.int64)
    return {name: torch.cat([nothing, *rows]).numpy() for name, rows in parts.items()}
