"""EmbeddingTables: the lookup, sequences, what is recorded, naming, copying, and what is refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from tests.embeddings.embedding_inputs import (
    KERNELS,
    MIXED,
    PLAIN,
    EmbeddingBags,
    make_batch,
    some_loss,
    tables_or_skip,
)
from ziggurat.embeddings import (
    BatchShape,
    EmbeddingConfig,
    EmbeddingTables,
    KernelChoice,
    TableOptimizer,
    TableOptimizerKind,
)
from ziggurat.errors import BoundsError, ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.testing.batches import small_inputs

SGD = TableOptimizerKind.SGD


@KERNELS
@pytest.mark.parametrize("size", [0, 1, 40])
def test_lookup_equals_embedding_bags(kernel: KernelChoice, size: int) -> None:
    inputs = PLAIN if kernel is KernelChoice.FBGEMM else MIXED
    tables = tables_or_skip(inputs, EmbeddingConfig(dim=8, kernel=kernel))
    batch = make_batch(inputs, size=size)
    torch.testing.assert_close(tables(batch), EmbeddingBags(tables)(batch).detach())
    with torch.no_grad():
        assert torch.equal(tables(batch), tables(batch).detach())
    assert tables.output_dim == sum(tables.field_dims) == tables(batch).shape[1]


@KERNELS
def test_bfloat16_output_and_gradient(kernel: KernelChoice) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel, optimizer=SGD))
    batch = make_batch(PLAIN, size=40)
    pooled = tables(batch, dtype=torch.bfloat16)
    exact = tables(batch).detach()
    assert pooled.dtype is torch.bfloat16
    torch.testing.assert_close(pooled.float(), exact, rtol=0.01, atol=1e-3)
    gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    pooled.backward(gradient)
    bags = EmbeddingBags(tables)
    bags(batch).backward(gradient.float())
    TableOptimizer(tables).step(1.0)
    for name in tables.tables.places:
        grad = bags.weight(name).grad
        assert grad is not None
        torch.testing.assert_close(tables.table(name), bags.weight(name).detach() - grad)


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.CPP])
def test_sequences_are_padded_and_share_the_table_with_pooled_fields(kernel: KernelChoice) -> None:
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8, kernel=kernel, optimizer=SGD))
    batch = make_batch(MIXED, size=20)
    vectors, mask = tables.sequence(batch, "history")
    lengths = batch.jagged.lengths(num_features=2)[1]
    assert torch.equal(mask.sum(1), lengths)
    assert vectors.shape == (20, int(lengths.max()), 8)
    values = batch.jagged.values[int(batch.jagged.offsets[20]) :]
    assert torch.equal(vectors[mask], tables.table("item")[values])
    assert not bool(vectors[~mask].any())

    weights = EmbeddingBags(tables)
    scale = torch.arange(1.0, 9.0)
    masked = weights.weight("item") * (torch.arange(30) > 0).unsqueeze(1)
    (some_loss(weights(batch)) + (masked[values] * scale).sum()).backward()
    optimizer = TableOptimizer(tables)
    (some_loss(tables(batch)) + (vectors * scale).sum()).backward()
    squares = [float(weight.grad.square().sum()) for weight in weights.parameters() if weight.grad is not None]
    assert optimizer.grad_norm_squared() == pytest.approx(sum(squares), rel=1e-5)
    optimizer.step(0.1)
    grad = weights.weight("item").grad
    assert grad is not None
    torch.testing.assert_close(tables.table("item"), weights.weight("item").detach() - 0.1 * grad)


def test_sequences_of_an_empty_batch_and_of_empty_lists() -> None:
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8))
    for size, longest in ((0, 4), (3, 0)):
        vectors, mask = tables.sequence(make_batch(MIXED, size=size, longest=longest), "history")
        assert vectors.shape == (size, 0, 8)
        assert mask.shape == (size, 0)
        vectors.sum().backward()


@KERNELS
def test_rows_out_of_bounds_name_feature_table_and_sample(kernel: KernelChoice) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel))
    batch = make_batch(PLAIN, size=10)
    batch.single[1, 7] = 30
    with pytest.raises(BoundsError, match="'item', sample 7"):
        tables(batch)


def test_a_sequence_out_of_bounds_names_the_sample_of_the_list() -> None:
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8))
    batch = make_batch(MIXED, size=10, longest=3)
    sample = int(batch.jagged.lengths(num_features=2)[1].nonzero()[-1])
    batch.jagged.values[int(batch.jagged.offsets[10 + sample])] = 99
    with pytest.raises(BoundsError, match=f"'history', sample {sample}"):
        tables.sequence(batch, "history")


def test_backward_changes_nothing_until_step() -> None:
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8))
    before = copy.deepcopy(tables.state_dict())
    optimizer = TableOptimizer(tables)
    state = copy.deepcopy(optimizer.state_dict())
    some_loss(tables(make_batch(MIXED, size=10))).backward()
    optimizer.grad_norm_squared()
    optimizer.all_finite()
    optimizer.zero_grad()
    optimizer.step(0.1)
    assert all(torch.equal(value, before[name]) for name, value in tables.state_dict().items())
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state_dict().items() if name != "step")


def test_tables_are_neither_parameters_nor_buffers() -> None:
    """Optimizers, snapshots of buffers and broadcasts must not take them for the dense network's."""
    tables = EmbeddingTables(MIXED, EmbeddingConfig(dim=8))
    assert list(tables.parameters()) == []
    assert list(tables.buffers()) == []
    assert list(tables.state_dict()) == [f"tables.{name}.weight" for name in ("user", "item", "genres")]
    assert tables.num_weights == (50 + 30) * 8 + 9 * 4


def test_an_empty_spec() -> None:
    tables = EmbeddingTables(InputSpec(), EmbeddingConfig())
    pooled = tables(make_batch(InputSpec(), size=3))
    assert pooled.shape == (3, 0)
    pooled.sum().backward()
    optimizer = TableOptimizer(tables)
    assert optimizer.all_finite()
    assert optimizer.grad_norm_squared() == 0.0
    optimizer.step(0.1)


def test_copies_do_not_share_memory() -> None:
    for kind in (TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.ADAM_DENSE):
        tables = EmbeddingTables(MIXED, EmbeddingConfig(dim=8, optimizer=kind))
        batch = make_batch(MIXED, size=10)
        expected = tables(batch).detach().clone()
        other = copy.deepcopy(tables)
        with torch.no_grad():
            for value in tables.state_dict().values():
                value.fill_(7.0)
        assert torch.equal(other(batch).detach(), expected)
        for parameter in other.parameters():
            parameter.data.fill_(0.0)
        assert bool(other(batch).any()) is not bool(list(other.parameters())), "parameters are the storage"


def test_half_precision_weights_are_refused() -> None:
    tables = EmbeddingTables(MIXED, EmbeddingConfig(dim=8))
    with pytest.raises(ConfigError, match="float32"):
        tables.bfloat16()


@KERNELS
def test_report_and_kernel_name(kernel: KernelChoice) -> None:
    tables = tables_or_skip(PLAIN, EmbeddingConfig(dim=8, kernel=kernel))
    assert tables.kernel_name is kernel
    assert tables.report()["kernel"] == kernel.value
    auto = EmbeddingTables(PLAIN, EmbeddingConfig(dim=8))
    resolved = dataclasses.replace(auto.config, kernel=auto.kernel_name)
    assert resolved.kernel is not KernelChoice.AUTO
    assert EmbeddingTables(PLAIN, resolved).kernel_name is auto.kernel_name


@pytest.mark.parametrize(
    "settings",
    [{"dim": 0}, {"eps": 0.0}, {"weight_decay": -1.0}, {"beta2": 1.0}, {"init_std": -1.0}, {"initial_sum": -1.0}],
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EmbeddingConfig(**settings)


def test_a_kernel_that_is_taken_again_keeps_the_reason_for_it() -> None:
    """As on ranks, which agree on one: the start-up report says why it is in use, not that somebody asked for it."""
    tables = EmbeddingTables(small_inputs(num_single=1, num_jagged=0), EmbeddingConfig(dim=4), seed=0)
    tables.choose_kernel(BatchShape())
    why = tables.report()["why"]
    assert why != "as configured"
    tables.use_kernel(tables.kernel_name)
    assert tables.report()["why"] == why
    other = next(each for each in (KernelChoice.TORCH, KernelChoice.CPP) if each is not tables.kernel_name)
    tables.use_kernel(other)
    assert tables.kernel_name is other
    assert tables.report()["why"] == "as configured"
