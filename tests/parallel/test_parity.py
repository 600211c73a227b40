"""Every placement, tower size and number of ranks computes what one device computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.features.schema import Pooling
from ziggurat.models import DCNv2Config, DLRMConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement, Towers
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

FIELDS = ("user", "item", "shop", "genres", "tags", "words")
TOWERS = Towers(towers=(("item", "genres"), ("user",), ("tags", "shop"), ("words",)))


def inputs() -> InputSpec:
    """Single features and lists, sums and means, a shared table, tables of two sizes."""
    rows = {"user": 23, "item": 17, "shop": 5, "genres": 11, "words": 40}
    return InputSpec(
        dense=("price", "age"),
        single=(
            SingleSpec(name="user", table="user"),
            SingleSpec(name="item", table="item"),
            SingleSpec(name="shop", table="shop"),
        ),
        jagged=(
            JaggedSpec(name="genres", table="genres", pooling=Pooling.MEAN),
            JaggedSpec(name="tags", table="shop", pooling=Pooling.SUM),
            JaggedSpec(name="words", table="words", pooling=Pooling.MEAN),
        ),
        tables=tuple(TableSpec(name=name, num_rows=number) for name, number in rows.items()),
        labels=(LabelSpec(name="click"),),
        has_weights=True,
        items=Items(id="item", features=("item", "genres", "price")),
    )


def build(*, towers: Towers | None, optimizer: str, kind: str = "dlrm"):
    """A small model on the torch kernel, whose sums have one order."""
    embedding = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=TableOptimizerKind(optimizer), dim=8)
    mlp = MLPConfig(hidden_dims=(7,))
    if kind == "dlrm":
        module = TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=2.0)
        config = DLRMConfig(embedding_dim=8, embedding=embedding, bottom=mlp, top=mlp, tower_module=module)
    else:
        module = TowerModuleConfig(kind=TowerModuleKind.CROSS, compression=4.0)
        config = DCNv2Config(embedding_dim=8, embedding=embedding, tower_module=module)
    return build_model(config, inputs(), seed=3, towers=towers)


def check(rank: int, plan_json: str, case: dict) -> None:
    """Runs on every rank."""
    del rank
    from ziggurat.config import from_json

    plan = from_json(Plan, plan_json, where="test")
    towers = plan.towers if case.get("tower_modules") else None
    batch = random_batch(inputs(), case.get("batch_size", 13), seed=1)
    config = ParallelConfig(dense=DenseParallelism(case.get("dense", "ddp")))
    assert_same_as_single_device(
        lambda: build(towers=towers, optimizer=case.get("optimizer", "rowwise_adagrad"), kind=case.get("kind", "dlrm")),
        plan,
        batch=batch,
        config=config,
        tolerance=Tolerance(fields=case.get("fields", 0.0)),
        num_parts=case.get("num_parts", 1),
        ranks_per_host=case.get("ranks_per_host", 0),
        hosts=case.get("hosts", ()),
        order=case.get("order", ()),
    )


def run(world_size: int, plan: Plan, **case: object) -> None:
    from ziggurat.config import to_json

    run_ranks(check, world_size, to_json(plan), case)


def placed(world_size: int, kind: Placement, towers: Towers | None = None, tower_size: int = 0) -> Plan:
    """Tables round the ranks of their tower; the placement `kind` for all that can have it."""
    shell = Plan(world_size=world_size, tables=(), towers=towers, tower_size=tower_size)
    group = {field: range(world_size) for field in FIELDS}
    if towers is not None:
        group = {name: shell.tower_ranks(t) for t, tower in enumerate(towers.towers) for name in tower}
    spec = inputs()
    field_of_table = {field.table: field.name for field in spec.fields}
    tables = []
    for index, table in enumerate(spec.tables):
        ranks = tuple(group[field_of_table[table.name]])
        whole = kind is Placement.TABLE_WISE
        chosen = (ranks[index % len(ranks)],) if whole else ranks
        tables.append(TablePlacement(table=table.name, placement=kind, ranks=chosen))
    return dataclasses.replace(shell, tables=tuple(tables))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", list(Placement))
def test_flat_placements_equal_one_device(world_size: int, kind: Placement):
    exact = 0.0 if not kind.cuts_rows or world_size == 1 else 1e-6
    run(world_size, placed(world_size, kind), fields=exact)


@pytest.mark.parametrize("tower_size", [1, 2, 4])
def test_the_transform_alone_gives_the_same_bits_as_one_device(tower_size: int):
    run(4, placed(4, Placement.TABLE_WISE, TOWERS, tower_size))


@pytest.mark.parametrize(("world_size", "tower_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["dlrm", "dcn_v2"])
def test_tower_models_equal_one_device(world_size: int, tower_size: int, kind: str):
    plan = placed(world_size, Placement.TABLE_WISE, TOWERS, tower_size)
    run(world_size, plan, tower_modules=True, kind=kind, fields=1e-6)


@pytest.mark.parametrize("kind", [Placement.ROW_WISE, Placement.COLUMN_WISE])
def test_towers_with_cut_tables_equal_one_device(kind: Placement):
    run(4, placed(4, kind, TOWERS, 2), tower_modules=True, fields=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "sparse_adam"])
def test_other_optimizers_equal_one_device_with_cut_tables(optimizer: str):
    run(2, placed(2, Placement.COLUMN_WISE), optimizer=optimizer)


@pytest.mark.parametrize("dense", ["fsdp", "hsdp"])
def test_sharded_dense_networks_equal_one_device(dense: str):
    run(4, placed(4, Placement.TABLE_WISE, TOWERS, 2), tower_modules=True, dense=dense, fields=1e-6)


@pytest.mark.parametrize("dense", ["ddp", "fsdp", "hsdp"])
def test_an_order_of_ranks_changes_no_number(dense: str):
    """Ranks 0 and 3 share a host that the launcher does not know of, and the ring goes 0, 3, 2, 1."""
    places = {"hosts": (0, 1, 1, 0), "order": (0, 3, 2, 1)}
    run(4, placed(4, Placement.TABLE_WISE, TOWERS, 2), tower_modules=True, dense=dense, fields=1e-6, **places)


@pytest.mark.parametrize(("num_parts", "tower_size", "dense"), [(2, 2, "ddp"), (3, 1, "ddp"), (2, 2, "fsdp")])
def test_a_step_in_parts_equals_one_device(num_parts: int, tower_size: int, dense: str):
    plan = placed(4, Placement.TABLE_WISE, TOWERS, tower_size)
    run(4, plan, tower_modules=True, dense=dense, num_parts=num_parts, fields=1e-6)


def test_a_flat_step_in_parts_equals_one_device():
    run(2, placed(2, Placement.COLUMN_WISE), num_parts=2)


def test_ranks_without_tables_and_batches_smaller_than_the_world():
    plan = placed(4, Placement.TABLE_WISE)
    only = tuple(dataclasses.replace(entry, ranks=(2,)) for entry in plan.tables)
    run(4, dataclasses.replace(plan, tables=only), batch_size=2)


def test_a_difference_is_found():
    plan = placed(1, Placement.TABLE_WISE)
    calls = iter((0, 1))

    def drifting():
        model = build(towers=None, optimizer="sgd")
        with torch.no_grad():
            next(model.parameters()).add_(1e-3 * next(calls))
        return model

    with pytest.raises(AssertionError, match="differs by"):
        assert_same_as_single_device(drifting, plan, batch=random_batch(inputs(), 5))


def test_a_missing_gradient_is_found() -> None:
    """A weight that gets a gradient on one device and none on the ranks."""
    plan = placed(1, Placement.TABLE_WISE)
    builds = iter((True, False))

    def forgetful():
        model = build(towers=None, optimizer="sgd")
        if not next(builds):
            next(iter(model.top.parameters())).requires_grad_(False)
        return model

    with pytest.raises(AssertionError, match="a gradient on one side only"):
        assert_same_as_single_device(forgetful, plan, batch=random_batch(inputs(), 5))


def test_groups_whose_means_differ_cut_batches_alike() -> None:
    """A mean over rows on several ranks in one tower group only: all groups run the same number of parts."""
    plan = placed(4, Placement.TABLE_WISE, TOWERS, 2)
    tables = tuple(
        dataclasses.replace(entry, placement=Placement.ROW_WISE, ranks=(0, 1)) if entry.table == "genres" else entry
        for entry in plan.tables
    )
    run(4, dataclasses.replace(plan, tables=tables), tower_modules=True, num_parts=2, fields=1e-6)
