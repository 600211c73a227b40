"""Tables in few bits on ranks: every placement rounds as one device does; codes are not cut by columns; caches."""

from __future__ import annotations

import pytest
import torch

from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizer, TableOptimizerKind
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
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks

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


def check(rank: int, plans: list[dict[str, object]]) -> None:
    """Runs on every rank: gradients are eighths, so that sums have the same bits in any order."""
    check_caches(rank)
    batch = random_batch(INPUTS, 12, seed=1)
    for plan_json, row_format in ((plan, row_format) for plan in plans for row_format in RowFormat):
        is_adam = row_format is RowFormat.BF16
        optimizer = TableOptimizerKind.SPARSE_ADAM if is_adam else TableOptimizerKind.ROWWISE_ADAGRAD
        plan = from_json(Plan, plan_json, where="test")
        cut = any(entry.placement is Placement.COLUMN_WISE for entry in plan.tables)
        # One table of SPLIT_BF16's run in INT8, and one of FP32's in BF16: storages of their own on every rank.
        by_table = {RowFormat.SPLIT_BF16: {"item": RowFormat.INT8}, RowFormat.FP32: {"user": RowFormat.BF16}}
        single, many = (build(row_format, optimizer, by_table.get(row_format, {})) for _ in range(2))
        if cut and row_format.has_codes:
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
            batch = random_batch(INPUTS, 12, seed=step)
            wanted, found = single.fields(batch), many.fields(batch.rows(6 * rank, 6 * rank + 6))
            factors = torch.randint(-4, 5, wanted.shape, generator=torch.Generator().manual_seed(step)) / 8
            (wanted * factors).sum().backward()
            (found * factors[6 * rank : 6 * rank + 6]).sum().backward()
            for each in optimizers:
                each.step(0.05)
            for shard in (shard for group in tables.mine.groups for shard in group.shards):
                whole = single.embeddings.tables.view(shard.table)[shard.rows, shard.columns]
                assert torch.equal(tables.part(shard), whole), (kind, shard, step)
        counts = [cached.counts for cached in single.embeddings.tables.caches]
        assert sum(each.stored + each.conflicts for each in counts) > 0 or cache > 0.5
        assert sum(each.hits for each in counts) > 0
    with pytest.raises(PlanError, match=r"tables\.cache"):
        parallelize(build(RowFormat.BF16, adagrad, {}, cache=0.1), plan_of(user="column_wise"), Topology.create())


def test_ranks_round_as_one_device_does() -> None:
    plans = [
        plan_of(user="row_wise", item="data_parallel", shop="table_row_wise"),
        plan_of(user="column_wise", words="row_wise"),
    ]
    run_ranks(check, 2, [to_json(plan) for plan in plans])
