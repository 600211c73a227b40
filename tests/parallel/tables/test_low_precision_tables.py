"""Tables in few bits on ranks: every placement rounds as one device does; caches; the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import PlanError
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import DNNConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.models.contract.model import Model
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.tables.table_shard import TableShard
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore

ROWS = {"user": 23, "item": 17, "words": 41, "shop": 7}
INPUTS = InputSpec(
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(
        JaggedSpec(name="words", table="words", pooling=Pooling.SUM),
        JaggedSpec(name="shops", table="shop", pooling=Pooling.SUM),
    ),
    tables=tuple(TableSpec(name=name, num_rows=number) for name, number in ROWS.items()),
    labels=(LabelSpec(name="click"),),
)


def build(
    row_format: RowFormat, optimizer: TableOptimizerKind, by_table: dict[str, RowFormat], *, cache: float = 0.0
) -> Model:
    embedding = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=optimizer, dim=8)
    config = DNNConfig(embedding_dim=8, embedding=embedding, deep=MLPConfig(hidden_dims=(3,)))
    made = TablesConfig(weights=row_format, by_table=by_table, cache=cache).make_storage(seed=4)
    return build_model(config, INPUTS, seed=3, make_storage=made)


def plan_of(**placements: str) -> Plan:
    ranks = {Placement.TABLE_WISE: (1,), Placement.DATA_PARALLEL: (0, 1)}
    entries = [(name, Placement(placements.get(name, "table_wise"))) for name in ROWS]
    tables = [TablePlacement(table=name, placement=kind, ranks=ranks.get(kind, (1, 0))) for name, kind in entries]
    return Plan(world_size=2, tables=tuple(tables))


def check(rank: int, plans: list[dict[str, object]], folder: str) -> None:
    """Runs on every rank: gradients are eighths, so that sums have the same bits in any order."""
    check_caches(rank)
    check_disk(rank, Path(folder))
    batch = random_batch(INPUTS, 12, seed=1)
    for plan_json, row_format in ((plan, row_format) for plan in plans for row_format in RowFormat):
        is_adam = row_format is RowFormat.BF16
        optimizer = TableOptimizerKind.SPARSE_ADAM if is_adam else TableOptimizerKind.ROWWISE_ADAGRAD
        plan = from_json(Plan, plan_json, where="test")
        cut = any(entry.placement is Placement.COLUMN_WISE for entry in plan.tables)
        # One table of SPLIT_BF16's run in INT8, and one of FP32's in BF16: storages of their own on every rank.
        by_table = {RowFormat.SPLIT_BF16: {"item": RowFormat.INT8}, RowFormat.FP32: {"user": RowFormat.BF16}}
        single, many = (build(row_format, optimizer, by_table.get(row_format, {})) for _ in range(2))
        if cut and row_format.keeps_rows_whole:
            with pytest.raises(PlanError, match="keeps rows whole"):
                parallelize(many, plan, Topology.create(tower_size=plan.ranks_per_group))
            continue
        parallel = parallelize(many, plan, Topology.create(tower_size=plan.ranks_per_group))
        optimizers = [TableOptimizer(single.embeddings), parallel.table_optimizer(many)]
        mine = slice(6 * rank, 6 * rank + 6)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            wanted, found = single.fields(batch), many.fields(batch.rows(mine.start, mine.stop))
            assert torch.allclose(found, wanted[mine], atol=1e-6)
            factors = torch.randint(-4, 5, wanted.shape, generator=generator) / 8
            (wanted * factors).sum().backward()
            (found * factors[mine]).sum().backward()
            for each in optimizers:
                each.step(0.05)
            tables = many.embeddings.tables
            assert isinstance(tables, ShardedTables)
            for group in tables.mine.groups:
                for shard in group.shards:
                    whole = single.embeddings.tables.view(shard.table)[shard.rows, shard.columns]
                    assert torch.equal(tables.part(shard), whole), (row_format, optimizer, shard, step)


def train_both(single: Model, many: Model, *, optimizers: list[Any], rank: int, step: int) -> None:
    """A step on one device, and the same on ranks, by a batch and gradients of its own."""
    batch = random_batch(INPUTS, 12, seed=step)
    wanted, found = single.fields(batch), many.fields(batch.rows(6 * rank, 6 * rank + 6))
    factors = torch.randint(-4, 5, wanted.shape, generator=torch.Generator().manual_seed(step)) / 8
    (wanted * factors).sum().backward()
    (found * factors[6 * rank : 6 * rank + 6]).sum().backward()
    for each in optimizers:
        each.step(0.05)


def check_caches(rank: int) -> None:
    """All tables on one rank: its cache is that of one device. Cut by rows, with room for all: rows are FP32."""
    adagrad = TableOptimizerKind.ROWWISE_ADAGRAD
    for kind, cache in (("table_wise", 0.1), ("row_wise", 0.9)):
        single, many = (build(RowFormat.INT8, adagrad, {}, cache=cache) for _ in range(2))
        parallel = parallelize(many, plan_of(**dict.fromkeys(ROWS, kind)), Topology.create())
        optimizers = [TableOptimizer(single.embeddings), parallel.table_optimizer(many)]
        tables = many.embeddings.tables
        assert isinstance(tables, ShardedTables)
        for step in range(4):
            train_both(single, many, optimizers=optimizers, rank=rank, step=step)
            for shard in (shard for group in tables.mine.groups for shard in group.shards):
                whole = single.embeddings.tables.view(shard.table)[shard.rows, shard.columns]
                assert torch.equal(tables.part(shard), whole), (kind, shard, step)
        counts = [cached.counts for cached in single.embeddings.tables.caches]
        assert sum(each.stored + each.conflicts for each in counts) > 0 or cache > 0.5
        assert sum(each.hits for each in counts) > 0
    with pytest.raises(PlanError, match=r"tables\.cache"):
        parallelize(build(RowFormat.BF16, adagrad, {}, cache=0.1), plan_of(user="column_wise"), Topology.create())


def check_disk(rank: int, folder: Path) -> None:
    """Each rank has its rows in a file of its own; their checkpoint is that of one device in memory."""
    config = DNNConfig(
        embedding_dim=8,
        embedding=EmbeddingConfig(kernel=KernelChoice.TORCH, init_draw=InitialDraw.ROWS, initial_sum=0.5, dim=8),
        deep=MLPConfig(hidden_dims=(3,)),
    )
    single = build_model(config, INPUTS, seed=3)
    made = TablesConfig(disk=str(folder)).make_storage(seed=3)
    many = build_model(config, INPUTS, seed=3, make_storage=made, draw_tables=False)
    plan = plan_of(user="row_wise", item="data_parallel", shop="column_wise", words="table_row_wise")
    parallel = parallelize(many, plan, Topology.create())
    tables = many.embeddings.tables
    assert isinstance(tables, ShardedTables)
    tables.draw(3)
    optimizers = [TableOptimizer(single.embeddings), parallel.table_optimizer(many)]
    for step in range(3):
        train_both(single, many, optimizers=optimizers, rank=rank, step=step)
    store = CheckpointStore(folder / "checkpoints")
    names = {name: value for name, value in many.state_dict().items() if name.startswith("embeddings")}
    store.save(1, tensors=names | optimizers[1].state_dict(), state={})
    whole = store.load().tensors
    expected = single.state_dict() | optimizers[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in whole.items())
    for name, value in names.items():
        assert isinstance(value, TableShard)
        value.rows.write(0, torch.ones(value.rows.shape))
        names[name] = value
    store.load(into=names | optimizers[1].state_dict())
    for name, value in names.items():
        assert isinstance(value, TableShard)
        box = tuple(slice(o, o + n) for o, n in zip(value.offsets, value.rows.shape, strict=True))
        assert torch.equal(value.rows.read(0, value.rows.num_rows), expected[name][box]), name


def test_ranks_round_as_one_device_does(tmp_path: Path) -> None:
    plans = [
        plan_of(user="row_wise", item="data_parallel", shop="table_row_wise"),
        plan_of(user="column_wise", words="row_wise"),
    ]
    run_ranks(check, 2, [to_json(plan) for plan in plans], str(tmp_path))


def train_with_nothing(rank: int, folder: str) -> None:
    """Runs on every rank: steps in which no table of a disk has a row to update, and one in which they have."""
    plan = plan_of(user="column_wise", item="column_wise", words="column_wise", shop="column_wise")
    embedding = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=TableOptimizerKind.ROWWISE_ADAGRAD, dim=8)
    config = DNNConfig(embedding_dim=8, embedding=embedding, deep=MLPConfig(hidden_dims=(3,)))
    found = []
    for tables in (TablesConfig(), TablesConfig(disk=folder, memory="50%")):
        model = build_model(config, INPUTS, seed=3, make_storage=tables.make_storage(seed=4))
        parallel = parallelize(model, plan, Topology.create(tower_size=plan.ranks_per_group))
        optimizer = parallel.table_optimizer(model)
        for size in (0, 6, 0):
            model.fields(random_batch(INPUTS, size, seed=rank)).sum().backward()
            optimizer.step(0.05)
        assert isinstance(model.embeddings.tables, ShardedTables)
        (local,) = (each for each in model.embeddings.tables.local if each.inputs.tables)
        found.append({name: local.table(name).clone() for name in local.tables.places})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_tables_that_are_cut_by_columns_on_a_disk_take_updates_without_rows(tmp_path: Path) -> None:
    run_ranks(train_with_nothing, 2, str(tmp_path))
