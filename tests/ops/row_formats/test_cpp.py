"""C++ reads and writes rows in few bits as the reference does, bit for bit, for every dim, rule and rounding."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.embeddings.embedding_inputs import make_batch
from tests.ops.lookup_problems import kernel_or_skip
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.embeddings.storage import LowPrecisionStorage
from ziggurat.embeddings.storage.table_storage import state_keys
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import BoundsError
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import Step, SummedGradient
from ziggurat.ops.row_formats import Rounding, RowFormat
from ziggurat.ops.row_formats.cpp import why_not_rows

LOW = [RowFormat.BF16, RowFormat.SPLIT_BF16, RowFormat.INT8, RowFormat.INT4]
INPUTS = InputSpec(
    single=(SingleSpec(name="user", table="user"),),
    jagged=(
        JaggedSpec(name="genres", table="genres", pooling=Pooling.MEAN),
        JaggedSpec(name="words", table="user", pooling=Pooling.SUM),
    ),
    tables=(TableSpec(name="user", num_rows=60), TableSpec(name="genres", num_rows=9)),
)


def make(row_format: RowFormat, kind: TableOptimizerKind, rounding: Rounding, dim: int) -> EmbeddingTables:
    kernel_or_skip(KernelChoice.CPP)
    if why_not_rows():
        pytest.skip(why_not_rows())
    decay = 0.01 if kind is TableOptimizerKind.SPARSE_ADAM else 0.0  # without it rows are read and rounded in one pass
    config = EmbeddingConfig(dim=dim, optimizer=kind, kernel=KernelChoice.CPP, weight_decay=decay, initial_sum=0.1)
    made = TablesConfig(weights=row_format, rounding=rounding).make_storage(seed=7)
    return EmbeddingTables(INPUTS, config, seed=5, make_storage=made)


@pytest.mark.parametrize("row_format", LOW)
@pytest.mark.parametrize("dim", [2, 7, 8, 16, 32, 33, 64, 128])
def test_lookups_and_updates_are_those_of_decoded_rows(row_format: RowFormat, dim: int) -> None:
    for kind, rounding in (
        (TableOptimizerKind.ROWWISE_ADAGRAD, Rounding.STOCHASTIC),
        (TableOptimizerKind.SPARSE_ADAM, Rounding.NEAREST),
        (TableOptimizerKind.SGD, Rounding.STOCHASTIC),
        (TableOptimizerKind.ROWWISE_ADAGRAD, Rounding.NEAREST),
    ):
        fast, slow = (make(row_format, kind, rounding, dim) for _ in range(2))
        for tables in (fast, slow):
            TableOptimizer(tables)
        storage = slow.tables.storage(0)
        assert isinstance(storage, LowPrecisionStorage)
        storage._has_fast_rows = lambda kernel: False  # type: ignore[method-assign]
        for step in range(3):
            batch = make_batch(INPUTS, size=21, seed=step)
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(fast(batch, dtype=dtype), slow(batch, dtype=dtype))
            for tables in (fast, slow):
                pooled = tables(batch)
                (pooled * torch.randn(pooled.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
            optimizers = [_stepped(tables, step) for tables in (fast, slow)]
            for one, other in zip(*optimizers, strict=True):
                assert torch.equal(one, other), (kind, rounding, step)


def _stepped(tables: EmbeddingTables, step: int) -> list[torch.Tensor]:
    """Weights and state behind a step: in one walk, or by a kernel's sums and the storage's own `apply`."""
    storage, parts = tables.tables.storage(0), tables.recorded[0]
    now = Step(rule=tables.config.rule, learning_rate=0.1, number=step + 1)
    if step % 2:
        storage.apply(tables.kernel, gradient=tables.kernel.sum_gradients(parts), step=now)
    else:
        storage.update(tables.kernel, parts=parts, step=now)
    parts.clear()
    keys = ["weight", *state_keys(tables.config.optimizer)]
    return [storage.read(0, storage.num_rows, key=key).clone() for key in keys]


def test_rows_outside_and_numbers_that_are_not_finite() -> None:
    batch = make_batch(INPUTS, size=3)
    batch.single[0, 2] = 60
    for row_format, dim in itertools.product(LOW, (16, 32)):
        tables = make(row_format, TableOptimizerKind.SGD, Rounding.STOCHASTIC, dim)
        with pytest.raises(BoundsError, match="sample 2"):
            tables(batch)
        TableOptimizer(tables)
        storage = tables.tables.storage(0)
        sums = torch.zeros(2, dim)
        sums[0, 3], sums[1, 5] = torch.inf, torch.nan
        step = Step(rule=tables.config.rule, learning_rate=0.1)
        storage.apply(tables.kernel, gradient=SummedGradient(rows=torch.tensor([4, 9]), sums=sums), step=step)
        read = storage.gather(torch.tensor([4, 9, 5]))
        if row_format.keeps_rows_whole:
            assert bool(read[:2].isnan().all())
        assert not bool(read[0, 3].isfinite())
        assert bool(read[1, 5].isnan())
        assert bool(read[2].isfinite().all())


def test_halves_of_special_numbers_are_those_of_the_reference() -> None:
    tables = make(RowFormat.SPLIT_BF16, TableOptimizerKind.SGD, Rounding.STOCHASTIC, 8)
    values = torch.tensor([[0.0, -0.0, 1.0, -1e-40, 3.3e38, 65504.5, 1.00390625, -2.01171875]])
    halves = RowFormat.SPLIT_BF16.encode_trained(values, words_N=None)
    assert torch.equal(RowFormat.SPLIT_BF16.decode_trained(*halves, dim=8), values)
    storage = tables.tables.storage(0)
    storage.write(5, values)
    assert torch.equal(storage.read(5, 1), values)
