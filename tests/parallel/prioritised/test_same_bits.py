"""The prioritised exchange gives the weights and the optimizer state of the plain one, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.storage.cached.storage import CACHE
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import Embedded, Model, Outputs, TowerLayer, TowerModuleConfig, TowerModuleKind, build_model
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind
from ziggurat.ops.row_cache import NO_CACHE, CachePolicy, CacheSize
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement, Towers
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

TOWERS = Towers(towers=(("item", "seen", "genres"), ("user", "tags", "shop")))
HISTORY_TOWERS = Towers(towers=((*TOWERS.towers[0], "history"), TOWERS.towers[1]))
KERNELS = (KernelChoice.TORCH, KernelChoice.CPP)
OPTIMIZERS = (TableOptimizerKind.SGD, TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SPARSE_ADAM)


@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """Settings of `OwnModel`."""

    kind: str = "reads_sequences"
    embedding_dim: int = 8
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(
        default_factory=lambda: TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=2.0)
    )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None) -> OwnModel:
        return OwnModel(inputs, embeddings=embeddings, towers=towers)


class OwnModel(Model):
    """An MLP on pooled fields, and on sums of un-pooled lists."""

    def __init__(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        listed = sum(inputs.table(spec.table).embedding_dim or 8 for spec in inputs.sequences)
        self.mlp = nn.Linear(len(inputs.dense) + sum(self.field_dims) + listed, 5)
        self.head = nn.Linear(5, 1)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        sums = []
        for sequence in embedded.sequences.values():
            samples = torch.repeat_interleave(torch.arange(len(embedded.dense)), sequence.offsets.diff())
            total = sequence.values.new_zeros(len(embedded.dense), sequence.values.shape[1])
            sums.append(total.index_add(0, samples, sequence.values))
        return Outputs(logits=self.head(torch.tanh(self.mlp(torch.cat([embedded.dense, embedded.fields, *sums], 1)))))


@dataclass(frozen=True)
class Case:
    """One configuration.

    With `disjoint` no two batches in a row read the same row. At `bad_step` a loss is NaN, and the step is skipped.
    With `doubts` bounds never prove that gradients are finite, so that all of them are waited for. With `changes` some
    steps look ahead and others do not.
    """

    seed: int
    placements: dict[str, Placement]
    optimizer: TableOptimizerKind = TableOptimizerKind.ROWWISE_ADAGRAD
    kernel: KernelChoice = KernelChoice.TORCH
    wire: WireFormat = WireFormat.FP32
    towers: bool = False
    sequences: bool = False
    ranks_per_host: int = 0
    disjoint: bool = False
    clip_norm: float = 0.0
    weight_decay: float = 0.0
    bad_step: int = -1
    doubts: bool = False
    changes: bool = False
    row_format: RowFormat = RowFormat.FP32
    cache: CacheSize = NO_CACHE
    steps: int = 7


def inputs_of(case: Case) -> InputSpec:
    """Two features on one table in either order, a table of single features and lists, sums and means, two widths."""
    rows = {"item": 61, "user": 47, "shop": 31, "genres": 37}
    singles = [SingleSpec(name="item", table="item"), SingleSpec(name="user", table="user")]
    singles += [SingleSpec(name="shop", table="shop"), SingleSpec(name="seen", table="item")]
    if case.seed % 2:
        singles.reverse()
    lists = [JaggedSpec(name="genres", table="genres", pooling=Pooling.MEAN)]
    lists += [JaggedSpec(name="tags", table="shop", pooling=Pooling.SUM)]
    if case.sequences:
        lists += [JaggedSpec(name="history", table="item", pooling=Pooling.NONE)]
    dims = {"genres": 4 if case.seed % 3 == 0 and not case.towers else 0}
    return InputSpec(
        dense=("price",),
        single=tuple(singles),
        jagged=tuple(lists),
        tables=tuple(TableSpec(name=n, num_rows=r, embedding_dim=dims.get(n, 0)) for n, r in rows.items()),
        labels=(LabelSpec(name="click"),),
    )


def plan_of(case: Case, world_size: int) -> Plan:
    towers = (HISTORY_TOWERS if case.sequences else TOWERS) if case.towers else None
    shell = Plan(world_size=world_size, tables=(), towers=towers, tower_size=world_size // 2 if case.towers else 0)
    tower_of = {"item": 0, "genres": 0, "user": 1, "shop": 1}
    tables = []
    for number, (table, kind) in enumerate(case.placements.items()):
        ranks = tuple(shell.tower_ranks(tower_of[table])) if case.towers else tuple(range(world_size))
        if kind is Placement.DATA_PARALLEL and case.towers:
            kind = Placement.TABLE_WISE
        chosen = (ranks[number % len(ranks)],) if kind is Placement.TABLE_WISE else ranks
        tables.append(TablePlacement(table=table, placement=kind, ranks=chosen))
    return dataclasses.replace(shell, tables=tuple(tables))


def batches(case: Case, inputs: InputSpec, *, rank: int) -> Iterator[Batch]:
    """Batches of this rank: of several sizes, some empty; with `disjoint` odd and even steps share no row."""
    for step in range(case.steps):
        generator = random.Random(f"{case.seed} {step} {rank}")
        size = generator.choice((0, 1, 3, 8, 8, 13))
        batch = random_batch(inputs, size, seed=1000 * case.seed + 10 * step + rank)
        if case.disjoint:
            single, values = (rows % 15 * 2 + 1 + step % 2 for rows in (batch.single, batch.jagged.values))
            batch = dataclasses.replace(batch, single=single, jagged=JaggedRows(values, batch.jagged.offsets))
        if step == case.bad_step:
            batch = dataclasses.replace(batch, dense=batch.dense * float("nan"))
        yield batch


def train(case: Case, world_size: int, exchange: Exchange) -> tuple[dict[str, torch.Tensor], Any]:
    """Train some steps, with evaluations and reads of the state in between; everything that a checkpoint has."""
    inputs, plan = inputs_of(case), plan_of(case, world_size)
    config = OwnConfig(
        embedding=EmbeddingConfig(
            kernel=case.kernel, optimizer=case.optimizer, dim=8, weight_decay=case.weight_decay, initial_sum=0.1
        )
    )
    tables = TablesConfig(weights=case.row_format, cache=case.cache.share, cache_policy=case.cache.policy)
    make_storage = tables.make_storage(seed=4)
    model = build_model(config, inputs, seed=3, towers=plan.towers, make_storage=make_storage)
    topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=case.ranks_per_host)
    wires = WireConfig(between_towers=case.wire, in_tower=case.wire)
    parallel = parallelize(model, plan, topology, config=ParallelConfig(wire=wires, exchange=exchange))
    step = TrainStep(
        model,
        TrainingConfig(precision=Precision.FP32, table_learning_rate=0.1, clip_norm=case.clip_norm),
        parallel=parallel,
    )
    embeddings: Any = model.embeddings
    ahead: Any = parallel.prioritised
    if case.doubts and ahead is not None:
        ahead.bound = lambda: (float("inf"), 1)
    todo = [*batches(case, inputs, rank=topology.rank), None]
    found: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(todo[:-1]):
        assert batch is not None
        if case.changes and ahead is not None:
            ahead.is_on = random.Random(f"{case.seed} {number}").random() < 0.6
        result = step(batch, factor=1.0 / (1 + number), upcoming=todo[number + 1])
        found[f"loss {number}"] = torch.tensor(result.loss if result.finite else -1.0)
        if number % 3 == 1:
            with torch.no_grad():
                found[f"logits {number}"] = model(random_batch(inputs, 4, seed=topology.rank)).detach().clone()
    step.settle()
    embeddings.drain()
    for group in embeddings.tables.mine.groups:
        for shard in group.shards:
            found[f"table {shard.table}"] = embeddings.tables.part(shard).clone()
    for number, optimizer in enumerate(step.table_optimizer._all):  # type: ignore[union-attr]
        for name, rows in optimizer.state_rows().items():
            found[f"state {number} {name}"] = rows.read(0, rows.num_rows).clone()
    for number, cache in enumerate(embeddings.tables.caches):
        found[f"cache {number}"] = cache.read(0, cache.num_rows, key=CACHE)
        found[f"counts of cache {number}"] = torch.tensor(dataclasses.astuple(cache.counts))
    found |= {f"dense {name}": value.detach().clone() for name, value in model.named_parameters()}
    return found, None if ahead is None else (ahead.counts.cells, ahead.counts.waited)


def compare(rank: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Train every case with both; raise where a bit differs; cells and how many of them collided."""
    torch.manual_seed(rank)
    counts = []
    for case in cases:
        world_size = torch.distributed.get_world_size()
        wanted, _ = train(case, world_size, Exchange.PLAIN)
        found, counted = train(case, world_size, Exchange.PRIORITISED_ALWAYS)
        assert found.keys() == wanted.keys()
        wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not wrong, f"{case}: {wrong} differ"
        counts.append(counted)
    return counts


def drawn(seed: int) -> Case:
    """A random configuration."""
    draw = random.Random(seed)
    kinds = (Placement.ROW_WISE, Placement.TABLE_WISE, Placement.COLUMN_WISE, Placement.DATA_PARALLEL)
    return Case(
        seed=seed,
        placements={table: draw.choice(kinds) for table in ("item", "user", "shop", "genres")},
        optimizer=draw.choice(OPTIMIZERS),
        kernel=draw.choice(KERNELS),
        wire=draw.choice((WireFormat.FP32, WireFormat.FP32, WireFormat.BF16)),
        towers=draw.random() < 0.3,
        sequences=draw.random() < 0.5,
        ranks_per_host=draw.choice((0, 1)),
        disjoint=draw.random() < 0.3,
        clip_norm=draw.choice((0.0, 0.0, 0.0, 0.05)),
        weight_decay=draw.choice((0.0, 0.0, 0.01)),
        bad_step=draw.choice((-1, -1, 3)),
        doubts=draw.random() < 0.2,
        changes=draw.random() < 0.3,
        row_format=draw.choice((RowFormat.FP32, RowFormat.FP32, RowFormat.BF16, RowFormat.SPLIT_BF16)),
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_configurations_train_to_the_same_bits(world_size: int):
    cases = [drawn(seed + world_size) for seed in range(5 if world_size == 2 else 2)]
    run_ranks(compare, world_size, cases)


def cached(seed: int) -> Case:
    """A random configuration whose rows lie behind caches of 32 rows, most of which change from step to step."""
    draw = random.Random(seed)
    kinds = (Placement.ROW_WISE, Placement.ROW_WISE, Placement.TABLE_WISE, Placement.DATA_PARALLEL)
    return dataclasses.replace(
        drawn(seed),
        placements={table: draw.choice(kinds) for table in ("item", "user", "shop", "genres")},
        row_format=draw.choice((RowFormat.INT8, RowFormat.INT4, RowFormat.BF16)),
        cache=CacheSize(share=0.1, policy=draw.choice(tuple(CachePolicy))),
        disjoint=draw.random() < 0.5,
        steps=12,
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_caches_of_hot_rows_hold_the_same_rows(world_size: int):
    cases = [cached(seed + 10 * world_size) for seed in range(6 if world_size == 2 else 2)]
    counts = run_ranks(compare, world_size, cases)
    assert all(cells > waited for rank in counts for cells, waited in rank), "some rows travel ahead"


def test_rows_collide_as_the_batches_make_them():
    """All rows of disjoint batches travel ahead; those of batches that read the same rows wait, every one."""
    spread: dict[str, Placement] = dict.fromkeys(("item", "user", "shop", "genres"), Placement.ROW_WISE)
    disjoint = Case(seed=1, placements=spread, disjoint=True)
    counts = run_ranks(compare, 2, [disjoint, dataclasses.replace(disjoint, disjoint=False, steps=9)])
    cells = [[sum(rank[case][number] for rank in counts) for number in range(2)] for case in range(2)]
    assert cells[0][0] > 50
    assert cells[0][1] == 0
    assert 0 < cells[1][1] < cells[1][0]
