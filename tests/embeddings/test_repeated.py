"""A deduplicated batch is looked up to the same bits, and learned from like the plain one."""

import dataclasses

import pytest
import torch

from tests.ops.lookup_problems import kernel_or_skip
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer
from ziggurat.errors import BoundsError
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind
from ziggurat.testing.batches import random_batch, small_inputs

GROUPS = (FeatureGroup(single=(0,), jagged=(0, 2)), FeatureGroup(jagged=(3,)))
KERNELS = [KernelChoice.TORCH, KernelChoice.CPP, KernelChoice.FBGEMM]


def inputs_of(*, dims: tuple[int, ...] = (4, 4, 4, 4)) -> InputSpec:
    """Two features of one row and four lists, of both poolings, the third table shared."""
    inputs = small_inputs(num_dense=1, num_single=2, num_jagged=4)
    jagged = [
        dataclasses.replace(spec, pooling=Pooling.SUM if index % 2 else Pooling.MEAN)
        for index, spec in enumerate(inputs.jagged)
    ]
    tables = [
        dataclasses.replace(table, embedding_dim=dims[index % len(dims)]) for index, table in enumerate(inputs.tables)
    ]
    return dataclasses.replace(inputs, jagged=tuple(jagged), tables=tuple(tables))


def repeating(inputs: InputSpec, *, num_sessions: int, size: int, seed: int = 0) -> Batch:
    """A batch whose lists are those of one of so many sessions; numbers and labels differ."""
    slices = random_batch(inputs, num_sessions, seed=seed)
    session = torch.sort(torch.randint(num_sessions, (size,), generator=torch.Generator().manual_seed(seed))).values
    plain = random_batch(inputs, size, seed=seed + 1)
    lists = slices.jagged.take(session, batch_size=num_sessions)
    return dataclasses.replace(plain, jagged=lists, single=torch.stack([slices.single[0, session], plain.single[1]]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dims", [(4, 4, 4, 4), (4, 8, 4)])
def test_outputs_are_the_same_bits_and_updates_the_same_numbers(kernel: KernelChoice, dims: tuple[int, ...]) -> None:
    kernel_or_skip(kernel)
    inputs = inputs_of(dims=dims)
    plain = repeating(inputs, num_sessions=5, size=23)
    short = deduplicate(plain, GROUPS)
    assert [group.num_slices for group in short.repeated] == [5, 5]
    found = []
    for batch in (plain, short):
        tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=kernel))
        out = tables(batch)
        (out * torch.arange(out.numel()).view_as(out).remainder(7)).sum().backward()
        TableOptimizer(tables).step(0.1)
        found.append((out.detach(), [tables.table(table.name).clone() for table in inputs.tables]))
    assert torch.equal(found[0][0], found[1][0])
    for wanted, table in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(table, wanted, rtol=1e-5, atol=1e-6)


def test_dense_gradients_take_the_plain_path() -> None:
    inputs = inputs_of()
    plain = repeating(inputs, num_sessions=3, size=9)
    config = EmbeddingConfig(dim=4, optimizer=TableOptimizerKind.ADAM_DENSE)
    tables = EmbeddingTables(inputs, config)
    gradients = []
    for batch in (plain, deduplicate(plain, GROUPS)):
        tables.zero_grad()
        tables(batch).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in tables.parameters() if parameter.grad is not None])
    assert gradients[0]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["jagged0", "jagged1"])
def test_unpooled_lists_are_those_of_the_plain_batch(name: str) -> None:
    inputs = inputs_of()
    plain = repeating(inputs, num_sessions=4, size=15)
    found = []
    for batch in (plain, deduplicate(plain, GROUPS)):
        tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4))
        values, offsets = tables.unpooled(batch, name)
        (values * torch.arange(values.numel()).view_as(values).remainder(5)).sum().backward()
        TableOptimizer(tables).step(0.1)
        found.append((values.detach(), offsets, tables.table(name).clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_no_and_one_sample(size: int) -> None:
    inputs = inputs_of()
    tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4))
    plain = random_batch(inputs, size, max_length=0)
    short = deduplicate(plain, GROUPS)
    out = tables(short)
    out.sum().backward()
    assert torch.equal(out, tables(plain))
    assert [len(part) for part in tables.unpooled(short, "jagged0")] == [0, size + 1]


def test_a_row_outside_its_table_names_the_sample() -> None:
    inputs = inputs_of()
    plain = repeating(inputs, num_sessions=2, size=6)
    plain.jagged.values[-1] = 99
    short = deduplicate(plain, GROUPS)
    tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4))
    for call in (lambda: tables(short), lambda: tables.unpooled(short, "jagged3")):
        with pytest.raises(BoundsError) as caught:
            call()
        with pytest.raises(BoundsError) as wanted:
            tables(plain)
        assert caught.value.where == wanted.value.where
