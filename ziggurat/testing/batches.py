"""Small random inputs and batches of any shape, for tests of models and of anything that takes a `Batch`."""

from __future__ import annotations

import torch

from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec, VectorSpec
from ziggurat.features.jagged import SequenceGroup, moments_group, offsets_of

NUM_ROWS = 12


def small_inputs(
    *, num_dense: int = 3, num_single: int = 3, num_jagged: int = 1, num_vectors: int = 0, num_labels: int = 1
) -> InputSpec:
    """Inputs with so many features of each kind, a table of 12 rows for each field, vectors of 5 numbers."""
    single = tuple(SingleSpec(name=f"single{i}", table=f"single{i}") for i in range(num_single))
    jagged = tuple(JaggedSpec(name=f"jagged{i}", table=f"jagged{i}") for i in range(num_jagged))
    return InputSpec(
        dense=tuple(f"dense{i}" for i in range(num_dense)),
        single=single,
        jagged=jagged,
        vectors=tuple(VectorSpec(name=f"vector{i}", dim=5) for i in range(num_vectors)),
        tables=tuple(TableSpec(name=spec.table, num_rows=NUM_ROWS) for spec in (*single, *jagged)),
        labels=tuple(LabelSpec(name=f"label{i}") for i in range(num_labels)),
    )


def random_batch(inputs: InputSpec, batch_size: int, *, seed: int = 0, max_length: int = 4) -> Batch:
    """A batch that fits `inputs`: normal numbers, uniform rows, lists of up to `max_length` rows, labels 0 or 1.

    Times, where there are any, are as many as the rows of the first list, and rise.
    """
    generator = torch.Generator().manual_seed(seed)
    single = torch.zeros(len(inputs.single), batch_size, dtype=torch.int64)
    for index, spec in enumerate(inputs.single):
        single[index] = torch.randint(inputs.table(spec.table).num_rows, (batch_size,), generator=generator)
    lengths = torch.randint(max_length + 1, (len(inputs.jagged), batch_size), generator=generator)
    values = [
        torch.randint(inputs.table(spec.table).num_rows, (int(lengths[index].sum()),), generator=generator)
        for index, spec in enumerate(inputs.jagged)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    moments = _moments(inputs, lengths, generator=generator)
    return Batch(
        dense=torch.randn(batch_size, len(inputs.dense), generator=generator),
        single=single,
        jagged=JaggedRows(torch.cat([*values, torch.empty(0, dtype=torch.int64)]), offsets),
        vectors={spec.name: torch.randn(batch_size, spec.dim, generator=generator) for spec in inputs.vectors},
        sequences=moments,
        labels=torch.randint(2, (batch_size, len(inputs.labels)), generator=generator).float(),
        weights=torch.rand(batch_size, generator=generator) if inputs.has_weights else None,
        groups=torch.randint(5, (batch_size,), generator=generator) if inputs.has_groups else None,
        row_ids=torch.arange(batch_size),
        extras={
            spec.name: torch.randn((batch_size, spec.dim) if spec.dim else (batch_size,), generator=generator)
            for spec in inputs.extras
        },
    )


def _moments(inputs: InputSpec, lengths: torch.Tensor, *, generator: torch.Generator) -> dict[str, SequenceGroup]:
    """Rising times, as many as the first list has rows, within `max_length`."""
    found: dict[str, SequenceGroup] = {}
    for spec in inputs.moments:
        own = lengths[0].clamp(max=spec.max_length)
        steps = torch.randint(1, 100_000, (int(own.sum()),), generator=generator)
        found[spec.name] = moments_group(steps.cumsum(0), offsets_of(own))
    return found
