"""TableOptimizer: several steps against torch's optimizers, guards, accumulation, state, and bits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from tests.embeddings.embedding_inputs import (
    KERNELS,
    MIXED,
    PLAIN,
    EmbeddingBags,
    make_batch,
    some_loss,
    tables_or_skip,
)
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.errors import CheckpointError, ConfigError

ADAGRAD = TableOptimizerKind.ROWWISE_ADAGRAD
KINDS = (TableOptimizerKind.SGD, ADAGRAD, TableOptimizerKind.SPARSE_ADAM)


def train(tables: EmbeddingTables, optimizer: TableOptimizer, *, first: int, last: int) -> None:
    for step in range(first, last):
        some_loss(tables(make_batch(tables.inputs, size=30, seed=step)), seed=step).backward()
        optimizer.step(0.1)


def weights_of(tables: EmbeddingTables) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tables.state_dict().items()}


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.CPP])
@pytest.mark.parametrize("kind", [TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM])
def test_training_equals_torch(kernel: KernelChoice, kind: TableOptimizerKind) -> None:
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8, kernel=kernel, optimizer=kind))
    bags = EmbeddingBags(tables, sparse=kind is TableOptimizerKind.SPARSE_ADAM)
    maker = torch.optim.SGD if kind is TableOptimizerKind.SGD else torch.optim.SparseAdam
    theirs = maker(bags.parameters(), lr=0.1)
    optimizer = TableOptimizer(tables)
    for step in range(4):
        batch = make_batch(MIXED, size=30, seed=step)
        theirs.zero_grad()
        some_loss(bags(batch), seed=step).backward()
        theirs.step()
        some_loss(tables(batch), seed=step).backward()
        optimizer.step(0.1)
    for name in tables.tables.places:
        torch.testing.assert_close(tables.table(name), bags.weight(name).detach(), rtol=1e-4, atol=1e-5)


@KERNELS
@pytest.mark.parametrize("dim", [4, 16])
def test_rowwise_adagrad_equals_its_formula_on_dense_gradients(kernel: KernelChoice, dim: int) -> None:
    inputs = PLAIN if kernel is KernelChoice.FBGEMM else MIXED
    tables = tables_or_skip(inputs, EmbeddingConfig(dim=dim, kernel=kernel, initial_sum=0.01))
    bags = EmbeddingBags(tables).double()
    sums = {name: torch.full((place.num_rows,), 0.01).double() for name, place in tables.tables.places.items()}
    optimizer = TableOptimizer(tables)
    for step in range(3):
        batch = make_batch(inputs, size=30, seed=step)
        bags.zero_grad()
        some_loss(bags(batch), seed=step).backward()
        for name, accumulated in sums.items():
            weight = bags.weight(name)
            assert weight.grad is not None
            accumulated += weight.grad.square().mean(1)
            weight.data -= 0.1 * weight.grad / (accumulated.sqrt() + 1e-8).unsqueeze(1)
        some_loss(tables(batch), seed=step).backward()
        optimizer.step(0.1)
    state = optimizer.state_dict()
    for name, accumulated in sums.items():
        torch.testing.assert_close(tables.table(name).double(), bags.weight(name).detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[f"{name}.sum"].double(), accumulated, rtol=1e-4, atol=1e-5)


@KERNELS
def test_accumulation_norm_scale_and_one_step(kernel: KernelChoice) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel, optimizer=TableOptimizerKind.SGD))
    bags, optimizer = EmbeddingBags(tables), TableOptimizer(tables)
    for seed in range(3):
        batch = make_batch(PLAIN, size=17, seed=seed)
        some_loss(tables(batch), seed=seed).backward()
        some_loss(bags(batch), seed=seed).backward()
        gradients = [parameter.grad for parameter in bags.parameters()]
        expected = sum(float(grad.double().square().sum()) for grad in gradients if grad is not None)
        assert optimizer.grad_norm_squared() == pytest.approx(expected, rel=1e-5)
    optimizer.scale_grad(0.5)
    optimizer.scale_grad(0.5)
    assert optimizer.grad_norm_squared() == pytest.approx(expected / 16, rel=1e-5)
    optimizer.step(0.1)
    for name in tables.tables.places:
        grad = bags.weight(name).grad
        assert grad is not None
        torch.testing.assert_close(tables.table(name), bags.weight(name).detach() - 0.025 * grad)
    weights = weights_of(tables)
    optimizer.step(0.1)
    assert all(torch.equal(value, weights[name]) for name, value in tables.state_dict().items()), "applied twice"
    assert optimizer.grad_norm_squared() == 0.0


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.CPP])
@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_the_norm_changes_no_bit(kernel: KernelChoice, kind: TableOptimizerKind) -> None:
    results = []
    for ask in (False, True):
        tables = tables_or_skip(MIXED, EmbeddingConfig(dim=16, kernel=kernel, optimizer=kind))
        optimizer = TableOptimizer(tables)
        some_loss(tables(make_batch(MIXED, size=30))).backward()
        if ask:
            optimizer.grad_norm_squared()
        optimizer.step(0.1)
        results.append(weights_of(tables))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@KERNELS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [0, 2])
def test_gradients_that_are_not_finite_are_seen(kernel: KernelChoice, bad: float, field: int) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel))
    optimizer = TableOptimizer(tables)
    batch = make_batch(PLAIN, size=30)
    lengths = batch.jagged.lengths(num_features=1)[0]
    sample = int(((batch.single[0] > 0) & (lengths > 2)).nonzero()[0])
    pooled = tables(batch)
    gradient = torch.ones_like(pooled)
    gradient[sample, field * 8 + 3] = bad
    pooled.backward(gradient)
    assert not optimizer.all_finite()
    assert not math.isfinite(optimizer.grad_norm_squared())
    optimizer.zero_grad()
    assert optimizer.all_finite()


def test_a_nan_that_reaches_no_row_is_no_alarm() -> None:
    """The gradient of an empty list's output goes nowhere; a dense gradient would be finite too."""
    tables = EmbeddingTables(PLAIN, EmbeddingConfig(dim=8))
    optimizer = TableOptimizer(tables)
    batch = make_batch(PLAIN, size=30)
    sample = int((batch.jagged.lengths(num_features=1)[0] == 0).nonzero()[0])
    pooled = tables(batch)
    gradient = torch.ones_like(pooled)
    gradient[sample, 17] = math.nan
    pooled.backward(gradient)
    assert optimizer.all_finite()


def test_a_sum_that_overflows_is_seen() -> None:
    tables = EmbeddingTables(PLAIN, EmbeddingConfig(dim=8))
    optimizer = TableOptimizer(tables)
    batch = make_batch(PLAIN, size=30)
    batch.single[0] = 5
    for value, finite in ((1e37, True), (2e37, False)):
        pooled = tables(batch)
        pooled.backward(torch.full_like(pooled, value))
        assert optimizer.all_finite() is finite
        optimizer.zero_grad()
    pooled = tables(batch)
    pooled.backward(torch.ones_like(pooled))
    optimizer.scale_grad(1e38)
    assert not optimizer.all_finite(), "30 · 1e38 overflows"


@KERNELS
def test_padding_is_never_trained(kernel: KernelChoice) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel, initial_sum=0.5))
    optimizer = TableOptimizer(tables)
    train(tables, optimizer, first=0, last=3)
    for name in tables.tables.places:
        assert not bool(tables.table(name)[0].any())
        assert float(optimizer.state_dict()[f"{name}.sum"][0]) == 0.5


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.CPP])
@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_same_bits_on_any_number_of_threads(kernel: KernelChoice, kind: TableOptimizerKind) -> None:
    results, threads = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 2):
            torch.set_num_threads(num_threads)
            tables = tables_or_skip(MIXED, EmbeddingConfig(dim=16, kernel=kernel, optimizer=kind))
            optimizer = TableOptimizer(tables)
            train(tables, optimizer, first=0, last=4)
            results.append({**weights_of(tables), **optimizer.state_dict()})
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_moves_between_kernels(kind: TableOptimizerKind) -> None:
    """Train on one kernel, save, load into each other one, go on: the same as never stopping, up to rounding."""
    whole = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH, optimizer=kind))
    whole_optimizer = TableOptimizer(whole)
    train(whole, whole_optimizer, first=0, last=3)
    saved = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole_optimizer.state_dict())
    train(whole, whole_optimizer, first=3, last=6)
    for kernel in (KernelChoice.TORCH, KernelChoice.CPP, KernelChoice.FBGEMM):
        if kernel is KernelChoice.FBGEMM and kind is TableOptimizerKind.SPARSE_ADAM:
            continue
        tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel, optimizer=kind), seed=1)
        optimizer = TableOptimizer(tables)
        tables.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(tables, optimizer, first=3, last=6)
        for name, value in {**tables.state_dict(), **optimizer.state_dict()}.items():
            expected = {**whole.state_dict(), **whole_optimizer.state_dict()}[name]
            if kernel is KernelChoice.TORCH:
                assert torch.equal(value, expected)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_state_of_other_tables_is_refused_whole() -> None:
    optimizer = TableOptimizer(EmbeddingTables(PLAIN, EmbeddingConfig(dim=8)))
    good = copy.deepcopy(optimizer.state_dict())
    for change in ({"user.sum": torch.ones(3)}, {"extra.sum": torch.ones(3)}, {"item.sum": None}):
        state = {name: value for name, value in {**good, **change}.items() if value is not None}
        state["site.genres.sum"] = torch.ones(9)
        with pytest.raises(CheckpointError, match=next(iter(change))):
            optimizer.load_state_dict(state)
        assert all(torch.equal(value, good[name]) for name, value in optimizer.state_dict().items())


def test_dense_tables_have_no_table_optimizer() -> None:
    with pytest.raises(ConfigError, match="torch optimizer"):
        TableOptimizer(EmbeddingTables(PLAIN, EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE)))
