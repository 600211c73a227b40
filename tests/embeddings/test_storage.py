"""Weights: deterministic by seed and name, one view a table, state_dict, and tables that are parameters."""

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
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableInit, TableOptimizerKind
from ziggurat.features.inputs import InputSpec, TableSpec

DENSE = TableOptimizerKind.ADAM_DENSE


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    tables = EmbeddingTables(MIXED, EmbeddingConfig(dim=8), seed=3)
    alone = InputSpec(tables=(MIXED.table("item"),))
    moved = dataclasses.replace(MIXED, tables=(TableSpec(name="new", num_rows=99), *reversed(MIXED.tables)))
    other_group = EmbeddingTables(moved, EmbeddingConfig(dim=8, optimizer=DENSE), seed=3)
    for name in ("user", "item", "genres"):
        assert torch.equal(other_group.table(name), tables.table(name))
    assert torch.equal(EmbeddingTables(alone, EmbeddingConfig(dim=8), seed=3).table("item"), tables.table("item"))
    assert not torch.equal(EmbeddingTables(alone, EmbeddingConfig(dim=8), seed=4).table("item"), tables.table("item"))


def test_initial_distributions() -> None:
    inputs = InputSpec(tables=(TableSpec(name="big", num_rows=10_000),))
    uniform = EmbeddingTables(inputs, EmbeddingConfig(dim=16)).table("big")
    assert not bool(uniform[0].any())
    assert float(uniform.abs().max()) <= 0.01
    assert float(uniform[1:].std()) == pytest.approx(0.01 / 3**0.5, rel=0.02)
    config = EmbeddingConfig(dim=16, init=TableInit.NORMAL, init_std=1e-4)
    normal = EmbeddingTables(inputs, config).table("big")
    assert not bool(normal[0].any())
    assert float(normal[1:].std()) == pytest.approx(1e-4, rel=0.02)
    assert abs(float(normal.mean())) < 2e-6


@pytest.mark.parametrize("kind", [TableOptimizerKind.ROWWISE_ADAGRAD, DENSE])
def test_state_dict_round_trip(kind: TableOptimizerKind) -> None:
    config = EmbeddingConfig(dim=8, optimizer=kind)
    saved = copy.deepcopy(EmbeddingTables(PLAIN, config, seed=1).state_dict())
    assert list(saved) == ["tables.user.weight", "tables.item.weight", "tables.site.genres.weight"]
    tables = EmbeddingTables(PLAIN, config, seed=2)
    batch = make_batch(PLAIN, size=5)
    tables.load_state_dict(saved)
    assert torch.equal(tables(batch), EmbeddingTables(PLAIN, config, seed=1)(batch)), "the lookup reads what was loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables.user.weight": None}, "Missing key"),
        ({"tables.other.weight": torch.zeros(2, 8)}, "Unexpected key"),
        ({"tables.user.weight": torch.zeros(2, 8)}, "table 'user': expected shape"),
        ({"tables.user.weight": torch.ones(50, 8)}, "padding"),
    ],
)
def test_wrong_state_is_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    tables = EmbeddingTables(PLAIN, EmbeddingConfig(dim=8))
    state = {name: value for name, value in {**tables.state_dict(), **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=message):
        tables.load_state_dict(state)


@KERNELS
@pytest.mark.parametrize("size", [0, 25])
def test_dense_gradients_equal_embedding_bags(kernel: KernelChoice, size: int) -> None:
    if kernel is KernelChoice.FBGEMM:
        pytest.skip("it has no dense gradients; test_fbgemm_traps.py")
    tables = tables_or_skip(MIXED, EmbeddingConfig(dim=8, kernel=kernel, optimizer=DENSE))
    bags = EmbeddingBags(tables)
    batch = make_batch(MIXED, size=size)
    for seed in range(2):
        some_loss(tables(batch), seed=seed).backward()
        some_loss(bags(batch), seed=seed).backward()
    vectors, _ = tables.sequence(batch, "history")
    vectors.sum().backward()
    values = batch.jagged.values[int(batch.jagged.offsets[size]) :]
    (bags.weight("item") * (torch.arange(30) > 0).unsqueeze(1))[values].sum().backward()
    named = dict(tables.named_parameters())
    assert list(named) == [f"tables.{name}.weight" for name in ("user", "item", "genres")]
    for name in ("user", "item", "genres"):
        mine, theirs = named[f"tables.{name}.weight"].grad, bags.weight(name).grad
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs)


def test_dense_tables_train_with_torch_adam_on_whole_tables() -> None:
    tables = EmbeddingTables(PLAIN, EmbeddingConfig(dim=8, optimizer=DENSE))
    bags = EmbeddingBags(tables)
    mine = torch.optim.Adam(tables.parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.Adam(bags.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        batch = make_batch(PLAIN, size=25, seed=step)
        for module, optimizer in ((tables, mine), (bags, theirs)):
            optimizer.zero_grad()
            some_loss(module(batch), seed=step).backward()
            optimizer.step()
    for name in tables.tables.places:
        torch.testing.assert_close(tables.table(name), bags.weight(name).detach())
        assert not bool(tables.table(name)[0].any()), "padding"


def test_moving_keeps_parameters_and_storage_together() -> None:
    tables = EmbeddingTables(MIXED, EmbeddingConfig(dim=8, optimizer=DENSE, kernel=KernelChoice.TORCH))
    single = tables(make_batch(MIXED, size=5)).detach()
    tables.double()
    double = tables(make_batch(MIXED, size=5))
    assert double.dtype is torch.float64
    torch.testing.assert_close(double.detach().float(), single)
    for parameter in tables.parameters():
        parameter.data.fill_(0.0)
    assert not bool(tables(make_batch(MIXED, size=5)).any())


def test_the_config_survives_json() -> None:
    config = EmbeddingConfig(dim=4, optimizer=DENSE, kernel=KernelChoice.CPP, init=TableInit.NORMAL, init_std=1e-3)
    assert from_json(EmbeddingConfig, to_json(config), where="test") == config
