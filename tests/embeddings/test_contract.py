"""Every implementation keeps the contract of embeddings: tables, tables spread over ranks, and what wraps them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parallel.test_parity import build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import BatchShape, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.contract import EmbeddingsWrapper, innermost
from ziggurat.embeddings.tables import whole_tables
from ziggurat.errors import BoundsError, ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import PADDING_ROW
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks

GROUPS = (FeatureGroup(single=(0,), jagged=(0, 2)), FeatureGroup(jagged=(1,)))


class Passed(EmbeddingsWrapper):
    """Changes nothing."""


class WithoutUser(EmbeddingsWrapper):
    """Looks up padding in place of the first single feature."""

    def changed(self, batch: Batch) -> Batch:
        batch = batch.expanded()
        single = batch.single.clone()
        single[0] = PADDING_ROW
        return replace(batch, single=single)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda tables: tables,
    "a wrapper": Passed,
    "two wrappers": lambda tables: Passed(WithoutUser(tables)),
}


def keeps_contract(embeddings: Any, *, alone: EmbeddingTables, batch: Batch, meant: Batch) -> None:
    """Ask everything of embeddings that models and steps ask of them.

    Args:
        embeddings: on ranks, all ask alike.
        alone: tables on one device with the same rows.
        batch: to look up.
        meant: the plain batch that is looked up in its place.
    """
    wanted_BT = alone(meant).detach()
    assert embeddings.inputs == alone.inputs
    assert embeddings.config.dim == alone.config.dim
    assert sum(embeddings.field_dims) == wanted_BT.shape[1]
    assert not embeddings.has_dense_gradients
    assert list(embeddings.parameters()) == []
    assert embeddings.rounds_pooled in (True, False)
    assert set(embeddings.state_dict()) <= {f"tables.{table.name}.weight" for table in alone.inputs.tables}

    def pooled(**dtype: torch.dtype) -> torch.Tensor:
        return embeddings(batch, **dtype)

    torch.testing.assert_close(pooled(), wanted_BT, rtol=0, atol=1e-6)
    first_BT = pooled().detach()
    assert torch.equal(pooled(dtype=torch.bfloat16), first_BT.to(torch.bfloat16))
    other = random_batch(alone.inputs, 3, seed=8)
    embeddings.announce(batch, other)  # words about coming batches change no number, said or unsaid
    embeddings.begin(batch)
    assert torch.equal(pooled(), first_BT)
    embeddings.drain()
    embeddings.announce(other)
    embeddings.drain()
    assert torch.equal(pooled(), first_BT)
    for name in ("genres", "words"):
        vectors_ND, offsets_B1 = embeddings.unpooled(batch, name)
        wanted_ND, wanted_B1 = alone.unpooled(meant, name)
        assert torch.equal(vectors_ND, wanted_ND)
        assert torch.equal(offsets_B1, wanted_B1)
        slices_ND, offsets_U1, inverse_B = embeddings.unpooled_slices(batch, name)
        assert len(offsets_U1) - 1 == (len(offsets_B1) - 1 if inverse_B is None else int(inverse_B.max()) + 1)
        assert len(slices_ND) == int(offsets_U1[-1])
        padded_BLD, mask_BL = embeddings.sequence(batch, name)
        for found, expected in zip((padded_BLD, mask_BL), alone.sequence(meant, name), strict=True):
            assert torch.equal(found, expected)
    rows = torch.tensor([3, 1, 3])
    assert torch.equal(embeddings.vectors("user", rows), alone.vectors("user", rows))
    with pytest.raises(BoundsError):
        embeddings.vectors("user", torch.tensor([1_000]))
    pooled().sum().backward()  # changes nothing
    embeddings.settle()
    embeddings.settle()
    assert torch.equal(pooled(), first_BT)
    embeddings.choose_kernel(BatchShape())
    embeddings.use_kernel(KernelChoice.CPP)
    assert set(embeddings.kernel_names) <= {KernelChoice.CPP}
    assert "kernel" in embeddings.report()
    assert embeddings.facts() == {}
    torch.testing.assert_close(pooled(), wanted_BT, rtol=0, atol=1e-6)


def meant_by(batch: Batch, wrapper: str) -> Batch:
    plain = batch.expanded()
    if wrapper != "two wrappers":
        return plain
    return replace(plain, single=torch.cat([torch.zeros_like(plain.single[:1]), plain.single[1:]]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("repeats", [False, True])
def test_one_device_keeps_the_contract(wrapper: str, repeats: bool) -> None:
    alone, model = (build(towers=None, optimizer="sgd") for _ in range(2))
    batch = random_batch(inputs(), 13, seed=1)
    batch = deduplicate(batch, GROUPS) if repeats else batch
    model.embeddings = WRAPPERS[wrapper](model.embeddings)
    keeps_contract(model.embeddings, alone=alone.embeddings, batch=batch, meant=meant_by(batch, wrapper))


def check_on_ranks(rank: int, plan: Any, exchange: str) -> None:
    batches = [random_batch(inputs(), 5 + rank, seed=rank), deduplicate(random_batch(inputs(), 6, seed=rank), GROUPS)]
    topology = Topology.create(tower_size=2)
    for wrapper, wrapped in WRAPPERS.items():
        alone, model = (build(towers=None, optimizer="sgd") for _ in range(2))
        outermost = model.embeddings = wrapped(model.embeddings)
        config = ParallelConfig(exchange=Exchange(exchange))
        parallel = parallelize(model, from_json(Plan, plan, where="test"), topology, config=config)
        assert innermost(model.embeddings) is parallel.spread
        assert wrapper == "nothing" or model.embeddings is outermost is parallel.embeddings
        for batch in batches:
            keeps_contract(model.embeddings, alone=alone.embeddings, batch=batch, meant=meant_by(batch, wrapper))
        with pytest.raises(ConfigError, match="spread over ranks"):
            model.embeddings.table("user")
        with pytest.raises(ConfigError, match="ask before parallelize"):
            whole_tables(model.embeddings)
    topology.close()


@pytest.mark.parametrize(
    ("kind", "exchange"), [(Placement.TABLE_WISE, Exchange.PLAIN), (Placement.ROW_WISE, Exchange.PRIORITISED)]
)
def test_spread_tables_keep_the_contract(kind: Placement, exchange: Exchange) -> None:
    run_ranks(check_on_ranks, 2, to_json(placed(2, kind)), exchange.value)


def test_a_changed_batch_is_one_object_as_long_as_its_batch_lives() -> None:
    given: list[Batch] = []

    class Counted(WithoutUser):
        def changed(self, batch: Batch) -> Batch:
            given.append(batch)
            return super().changed(batch)

    model = build(towers=None, optimizer="sgd")
    embeddings = Counted(model.embeddings)
    batch = random_batch(inputs(), 4, seed=2)
    embeddings.announce(batch)
    embeddings.begin(batch)
    embeddings(batch)
    assert len(given) == 1
    assert len(embeddings._changed) == 1
    given.clear()
    del batch
    gc.collect()
    assert not embeddings._changed


def test_a_batch_that_stays_as_it_is_is_asked_for_once_and_not_kept() -> None:
    seen: list[int] = []

    class Seen(EmbeddingsWrapper):
        def changed(self, batch: Batch) -> Batch:
            seen.append(batch.batch_size)
            return batch

    embeddings = Seen(build(towers=None, optimizer="sgd").embeddings)
    batch = random_batch(inputs(), 4, seed=2)
    embeddings.announce(batch)
    embeddings(batch)
    embeddings.unpooled(batch, "words")
    assert seen == [4]
    del batch
    gc.collect()
    assert not embeddings._changed


def test_moved_trained_and_loaded_behind_a_wrapper() -> None:
    """A wrapper is no part of the names of weights, and what reaches the weights reaches them through it."""
    plain, model = (build(towers=None, optimizer="sgd") for _ in range(2))
    model.embeddings = Passed(model.embeddings)
    assert list(model.state_dict()) == list(plain.state_dict())
    batch = random_batch(inputs(), 13, seed=1)
    for each in (plain, model):
        each.to(torch.float64).to(torch.float32)
        each.loss(each.outputs_of(batch), batch).mean().backward()
        TableOptimizer(each.embeddings).step(0.1)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    model.load_state_dict(build(towers=None, optimizer="sgd").state_dict())
    assert not torch.equal(model.embeddings.table("user"), plain.embeddings.table("user"))


def test_what_is_no_module_cannot_be_wrapped() -> None:
    not_a_module: Any = object()
    with pytest.raises(ConfigError, match=r"object, which is none(.|\n)*nn\.Module as its base class"):
        Passed(not_a_module)
