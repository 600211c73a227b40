"""Small inputs, batches for them, and the same lookup written with torch.nn.EmbeddingBag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ops.lookup_problems import kernel_or_skip
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling

# Shared tables, both poolings, two dims (FBGEMM takes it only without the shared table).
MIXED = InputSpec(
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(
        JaggedSpec(name="genres", table="genres", pooling=Pooling.MEAN),
        JaggedSpec(name="history", table="item", pooling=Pooling.SUM, ordered=True),
    ),
    tables=(
        TableSpec(name="user", num_rows=50),
        TableSpec(name="item", num_rows=30),
        TableSpec(name="genres", num_rows=9, embedding_dim=4),
    ),
)
PLAIN = InputSpec(
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(JaggedSpec(name="genres", table="site.genres", pooling=Pooling.MEAN),),
    tables=(
        TableSpec(name="user", num_rows=50),
        TableSpec(name="item", num_rows=30),
        TableSpec(name="site.genres", num_rows=9),
    ),
)
KERNELS = pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.CPP, KernelChoice.FBGEMM])


def tables_or_skip(inputs: InputSpec, config: EmbeddingConfig, *, seed: int = 0) -> EmbeddingTables:
    if config.kernel is not KernelChoice.AUTO:
        kernel_or_skip(config.kernel)
    return EmbeddingTables(inputs, config, seed=seed)


def make_batch(inputs: InputSpec, *, size: int, seed: int = 0, longest: int = 4) -> Batch:
    """Random rows, padding among them, and lists of 0 … `longest` rows."""
    generator = torch.Generator().manual_seed(seed)
    single = torch.zeros(len(inputs.single), size, dtype=torch.int64)
    for index, spec in enumerate(inputs.single):
        single[index] = torch.randint(0, inputs.table(spec.table).num_rows, (size,), generator=generator)
    values, lengths = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
    for spec in inputs.jagged:
        lengths.append(torch.randint(0, longest + 1, (size,), generator=generator))
        num_rows = inputs.table(spec.table).num_rows
        values.append(torch.randint(0, num_rows, (int(lengths[-1].sum()),), generator=generator))
    return Batch(
        dense=torch.zeros(size, 0),
        single=single,
        jagged=JaggedRows(torch.cat(values), torch.cat(lengths).cumsum(0)),
        labels=torch.zeros(size, 0),
        row_ids=torch.arange(size),
    )


class EmbeddingBags(nn.Module):
    """The peer: one nn.EmbeddingBag a table, padding excluded from gradients by padding_idx on single fields."""

    def __init__(self, tables: EmbeddingTables, *, sparse: bool = False) -> None:
        super().__init__()
        self.inputs = tables.inputs
        self.weights = nn.ParameterDict(
            {name.replace(".", "-"): tables.table(name).clone() for name in tables.tables.places}
        )
        self.sparse = sparse

    def weight(self, table: str) -> nn.Parameter:
        return self.weights[table.replace(".", "-")]

    def forward(self, batch: Batch) -> Tensor:
        size, pooled = batch.batch_size, []
        for index, spec in enumerate(self.inputs.single):
            rows, offsets = batch.single[index], torch.arange(size + 1)
            pooled.append(self._bag(spec.table, rows, offsets))
        for index, spec in enumerate(self.inputs.jagged):
            offsets = batch.jagged.offsets[index * size : (index + 1) * size + 1]
            rows = batch.jagged.values[int(offsets[0]) : int(offsets[-1])]
            bags = self._bag(spec.table, rows, offsets - offsets[0])
            # padding_idx would shorten the mean, so the division is by the whole length here
            lengths = offsets.diff().clamp(min=1).unsqueeze(1)
            pooled.append(bags / lengths if spec.pooling is Pooling.MEAN else bags)
        return torch.cat(pooled, dim=1)

    def _bag(self, table: str, rows: Tensor, offsets: Tensor) -> Tensor:
        return nn.functional.embedding_bag(
            rows,
            self.weight(table),
            offsets,
            mode="sum",
            include_last_offset=True,
            padding_idx=0,
            sparse=self.sparse,
        )


def some_loss(pooled: Tensor, *, seed: int = 0) -> Tensor:
    """A loss whose gradient differs for every number of the output."""
    target = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(seed))
    return (pooled * target).sin().sum()
