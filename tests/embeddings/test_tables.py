"""EmbeddingTables and TableOptimizer against torch.nn.EmbeddingBag with dense autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling

INPUTS = InputSpec(
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


def make_batch(inputs: InputSpec, *, size: int, seed: int = 0, longest: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    single = [
        torch.randint(0, inputs.table(spec.table).num_rows, (size,), generator=generator) for spec in inputs.single
    ]
    values, lengths = [], []
    for spec in inputs.jagged:
        length = torch.randint(0, longest + 1, (size,), generator=generator)
        lengths.append(length)
        rows = inputs.table(spec.table).num_rows
        values.append(torch.randint(0, rows, (int(length.sum()),), generator=generator))
    jagged = JaggedRows.empty()
    if values:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
        jagged = JaggedRows(torch.cat(values), offsets)
    return Batch(
        dense=torch.zeros(size, 0),
        single=torch.stack(single) if single else torch.zeros(0, size, dtype=torch.int64),
        jagged=jagged,
        labels=torch.zeros(size, 0),
        row_ids=torch.arange(size),
    )


def dense_forward(inputs: InputSpec, weights: dict[str, Tensor], batch: Batch) -> Tensor:
    """The same lookup, written as a dense sum that autograd differentiates; padding reads zero and gets nothing."""
    masked = {name: weight * (torch.arange(len(weight)) > 0).unsqueeze(1) for name, weight in weights.items()}
    pooled = [masked[spec.table][batch.single[i]] for i, spec in enumerate(inputs.single)]
    size = batch.batch_size
    for j, spec in enumerate(inputs.jagged):
        vectors = []
        for b in range(size):
            first, last = (int(batch.jagged.offsets[j * size + b + k]) for k in (0, 1))
            total = masked[spec.table][batch.jagged.values[first:last]].sum(0)
            vectors.append(total / max(last - first, 1) if spec.pooling is Pooling.MEAN else total)
        pooled.append(torch.stack(vectors))
    return torch.cat(pooled, dim=1)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_recorded_gradient_is_autograds(num_batches: int) -> None:
    tables = EmbeddingTables(INPUTS, EmbeddingConfig(dim=8, optimizer=TableOptimizerKind.SGD)).double()
    optimizer = TableOptimizer(tables)
    weights = {
        name: weight.clone().requires_grad_()
        for name, weight in {n: tables.table(n) for n in tables.tables.places}.items()
    }
    for seed in range(num_batches):
        batch = make_batch(INPUTS, size=17, seed=seed)
        mine, theirs = tables(batch), dense_forward(INPUTS, weights, batch)
        torch.testing.assert_close(mine, theirs)
        target = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        (mine * target).sin().sum().backward()
        (theirs * target).sin().sum().backward()
    gradients = {name: weight.grad for name, weight in weights.items()}
    expected = sum(float(grad.square().sum()) for grad in gradients.values() if grad is not None)
    assert optimizer.grad_norm_squared() == pytest.approx(expected, rel=1e-12)
    optimizer.scale_grad(0.5)
    optimizer.step(0.1)
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(tables.table(name), weight.detach() - 0.05 * weight.grad)


def test_kernel_choice_is_kept() -> None:
    tables = EmbeddingTables(INPUTS, EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH))
    assert tables.kernel_name is KernelChoice.TORCH
