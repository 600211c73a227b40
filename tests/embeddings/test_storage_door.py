"""One door to tables: another storage than memory computes, trains, saves and loads the same; initial rows by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.embeddings.embedding_inputs import MIXED, make_batch, some_loss
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableInit, TableOptimizer
from ziggurat.embeddings.initial_rows import BLOCK_ROWS, initial_rows
from ziggurat.embeddings.storage import MemoryStorage, TablePart
from ziggurat.embeddings.storage.table_storage import WEIGHT, state_keys
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import BoundsError, ConfigError
from ziggurat.features.inputs import InputSpec, SingleSpec, TableSpec
from ziggurat.ops.lookup import Step, SummedGradient, TableOptimizerKind
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.tables.shards import Shard
from ziggurat.parallel.topology import Axis, RankGroup, Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.paged_storage import PagedStorage
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode

FP32 = RowFormat.FP32
RULES = [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM]


def both(kind: TableOptimizerKind, *, seed: int | None = 5) -> list[EmbeddingTables]:
    config = EmbeddingConfig(dim=8, optimizer=kind, kernel=KernelChoice.TORCH, weight_decay=0.01, initial_sum=0.1)
    return [EmbeddingTables(MIXED, config, seed=seed, make_storage=make) for make in (MemoryStorage, PagedStorage)]


def train(tables: EmbeddingTables, optimizer: TableOptimizer, *, first_step: int = 0) -> list[torch.Tensor]:
    outputs = []
    for step in range(first_step, first_step + 3):
        batch = make_batch(MIXED, size=25 if step else 0, seed=step)
        pooled = tables(batch)
        vectors, _ = tables.sequence(batch, "history")
        (some_loss(pooled) + vectors.square().sum()).backward()
        assert optimizer.all_finite()
        optimizer.step(0.1)
        outputs.append(pooled.detach())
    return outputs


@pytest.mark.parametrize("kind", RULES)
def test_a_paged_storage_trains_like_memory_and_its_checkpoint_is_the_same(
    kind: TableOptimizerKind, tmp_path: Path
) -> None:
    memory, paged = both(kind)
    optimizers = [TableOptimizer(memory), TableOptimizer(paged)]
    for one, other in zip(train(memory, optimizers[0]), train(paged, optimizers[1]), strict=True):
        assert torch.equal(one, other)
    for name in memory.tables.places:
        assert torch.equal(memory.table(name), paged.table(name)), name

    def state(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    saved = state(paged, optimizers[1])
    assert isinstance(saved["tables.user.weight"], TablePart)
    for mode, step in ((SaveMode.SYNC, 1), (SaveMode.ASYNC, 2)):
        with CheckpointStore(tmp_path / "paged", config=CheckpointConfig(mode=mode)) as store:
            store.save(step, tensors=saved, state={})
    with CheckpointStore(tmp_path / "memory") as store:
        store.save(1, tensors=state(memory, optimizers[0]), state={})
    whole = CheckpointStore(tmp_path / "paged").load(2).tensors
    for name, value in CheckpointStore(tmp_path / "memory").load().tensors.items():
        assert torch.equal(whole[name], value), name

    storages = [paged.tables.storage(index) for index in range(paged.tables.num_storages)]
    for make in (0, 1):  # into each kind of storage, from each kind of checkpoint
        for folder in ("memory", "paged"):
            fresh = both(kind, seed=None)[make]
            optimizer = TableOptimizer(fresh)
            into = state(fresh, optimizer)
            CheckpointStore(tmp_path / folder).load(into=into)
            optimizer.load_state_dict({key[6:]: value for key, value in into.items() if key.startswith("state.")})
            fresh.tables.mark_filled()
            storages += [fresh.tables.storage(index) for index in range(fresh.tables.num_storages)]
            for name in memory.tables.places:
                assert torch.equal(memory.table(name), fresh.table(name)), (make, folder, name)
            copy = both(kind)[0]
            again = TableOptimizer(copy)
            copy.load_state_dict(fresh.state_dict())
            again.load_state_dict(optimizer.state_dict())
            for one, other in zip(train(fresh, optimizer, first_step=3), train(copy, again, first_step=3), strict=True):
                assert torch.equal(one, other)
    for storage in storages:
        if isinstance(storage, PagedStorage):
            assert 0 < storage.most_rows <= max(storage.chunk_rows, 50), "checkpoints go through in chunks"


def test_chunks_bound_what_a_checkpoint_holds_of_a_storage(tmp_path: Path) -> None:
    paged = both(TableOptimizerKind.ROWWISE_ADAGRAD)[1]
    storage = paged.tables.storage(0)
    assert isinstance(storage, PagedStorage)
    storage.most_rows = 0
    with CheckpointStore(tmp_path, config=CheckpointConfig(mode=SaveMode.SYNC)) as store:
        store.save(1, tensors=paged.state_dict(), state={})
        store.load(into=paged.state_dict())
    assert storage.most_rows == storage.chunk_rows


WAYS = {
    "memory": TablesConfig(),
    "disk": TablesConfig(disk=".", memory="50%"),
    "a disk, little held": TablesConfig(disk=".", memory="1%"),
    "cache": TablesConfig(weights=RowFormat.INT8, cache=0.2),
    **{row_format.value: TablesConfig(weights=row_format) for row_format in RowFormat if row_format is not FP32},
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_no_rows_are_read_written_and_updated_whatever_keeps_them(
    way: str, kind: TableOptimizerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a table may have nothing to do in a step, on one rank or on all."""
    monkeypatch.chdir(tmp_path)
    config = EmbeddingConfig(dim=8, optimizer=kind, kernel=KernelChoice.TORCH)
    tables = EmbeddingTables(MIXED, config, seed=5, make_storage=WAYS[way].make_storage(seed=5))
    train(tables, TableOptimizer(tables))
    before = {name: tables.table(name).clone() for name in tables.tables.places}
    nothing = torch.zeros(0, dtype=torch.int64)
    step = Step(rule=config.rule, learning_rate=0.1, number=9)
    for index in range(tables.tables.num_storages):
        storage = tables.tables.storage(index)
        for key in (WEIGHT, *state_keys(kind)):
            found = storage.gather(nothing, key=key)
            assert len(found) == 0
            storage.scatter(nothing, found, key=key)
            assert storage.read(3, 0, key=key).shape == found.shape
            storage.write(3, found, key=key)
        gradient = SummedGradient(rows=nothing, sums=torch.zeros(0, storage.gather(nothing).shape[1]))
        storage.apply(tables.kernel, gradient=gradient, step=step)
    for name, rows in before.items():
        assert torch.equal(tables.table(name), rows), name


def test_bounds_are_checked_before_a_paged_storage_is_asked() -> None:
    batch = make_batch(MIXED, size=3)
    batch.single[1, 2] = 30
    for tables in both(TableOptimizerKind.SGD):
        with pytest.raises(BoundsError, match="sample 2"):
            tables(batch)


def test_a_storage_elsewhere_refuses_dense_gradients_and_another_dtype() -> None:
    with pytest.raises(ConfigError, match="tables in memory"):
        EmbeddingTables(MIXED, EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE), make_storage=PagedStorage)
    with pytest.raises(ConfigError, match="to stay"):
        both(TableOptimizerKind.SGD)[1].double()


def test_open_tables_refuse_lookups_until_drawn_or_loaded() -> None:
    config = EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH)
    tables, drawn = EmbeddingTables(MIXED, config, seed=None), EmbeddingTables(MIXED, config, seed=7)
    batch = make_batch(MIXED, size=3)
    with pytest.raises(ConfigError, match="drawn or loaded"):
        tables(batch)
    assert tables(make_batch(MIXED, size=0)).shape == (0, 28), "a warm-up without samples reads nothing"
    tables.tables.draw(7)
    assert torch.equal(tables(batch), drawn(batch))
    loaded = EmbeddingTables(MIXED, config, seed=None)
    loaded.load_state_dict(drawn.state_dict())
    assert torch.equal(loaded(batch), drawn(batch))


# ------------------------------------------------------------------------------------------------------- initial rows

BIG = InputSpec(
    single=(SingleSpec(name="big", table="big"),),
    tables=(TableSpec(name="big", num_rows=10 * BLOCK_ROWS + 77, embedding_dim=32),),
)


def alone(rank: int, world_size: int) -> Topology:
    """A rank that sees its place and talks to nobody."""
    one = RankGroup((rank,), 0)
    everybody = RankGroup(tuple(range(world_size)), rank)
    axes = {Axis.WORLD: everybody, Axis.TOWER: everybody, Axis.HOST: everybody, Axis.PEER: one, Axis.REPLICA: one}
    order = tuple(range(world_size))
    return Topology(rank=rank, tower_size=world_size, hosts=(0,) * world_size, order=order, axes=axes)


def share(rank: int, placement: Placement, *, init: TableInit) -> tuple[ShardedTables, Shard]:
    plan = Plan(world_size=4, tables=(TablePlacement(table="big", placement=placement, ranks=(2, 0, 3, 1)),))
    config = EmbeddingConfig(dim=32, init=init, kernel=KernelChoice.TORCH)
    tables = ShardedTables(BIG, config, plan=plan, topology=alone(rank, 4), seed=11)
    return tables, next(shard for shard in tables.shards["big"] if shard.rank == rank)


@pytest.mark.parametrize("init", list(TableInit))
@pytest.mark.parametrize("placement", [Placement.ROW_WISE, Placement.COLUMN_WISE])
def test_ranks_draw_what_one_device_draws(placement: Placement, init: TableInit) -> None:
    config = EmbeddingConfig(dim=32, init=init, kernel=KernelChoice.TORCH)
    whole = EmbeddingTables(BIG, config, seed=11).table("big")
    assert not bool(whole[0].any())
    for rank in range(4):
        tables, shard = share(rank, placement, init=init)
        assert torch.equal(tables.part(shard), whole[shard.rows, shard.columns])
    blocks = whole[: 10 * BLOCK_ROWS].view(10, -1)
    assert len(torch.unique(blocks[:, 100])) == 10, "blocks are drawn apart"


class _Allocated(TorchDispatchMode):
    """Bytes of all new memory that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self._seen = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            memory = result.untyped_storage()
            if memory.data_ptr() not in known:
                self.num_bytes += memory.nbytes()
        return result


@pytest.mark.parametrize("placement", [Placement.ROW_WISE, Placement.COLUMN_WISE])
def test_a_rank_with_a_quarter_of_a_table_allocates_a_quarter(placement: Placement) -> None:
    whole_bytes, block_bytes = BIG.tables[0].num_rows * 32 * 4, BLOCK_ROWS * 32 * 4
    for rank in (0, 2):
        with _Allocated() as allocated:
            share(rank, placement, init=TableInit.UNIFORM)
        assert whole_bytes / 4 <= allocated.num_bytes <= whole_bytes / 4 + block_bytes + 10_000
    with _Allocated() as allocated:
        EmbeddingTables(BIG, EmbeddingConfig(dim=32, kernel=KernelChoice.TORCH), seed=None)
    assert allocated.num_bytes < 10_000, "open tables take no memory"


def test_blocks_of_a_range_are_those_of_the_whole() -> None:
    config, shape = EmbeddingConfig(init=TableInit.NORMAL), (2 * BLOCK_ROWS + 3, 4)
    pieces = dict(initial_rows("t", shape=shape, config=config, seed=1, rows=range(4000, 4100)))
    assert list(pieces) == [4000, BLOCK_ROWS]
    last = list(initial_rows("t", shape=shape, config=config, seed=1, rows=range(2 * BLOCK_ROWS + 1, shape[0])))
    assert [(first, tuple(values.shape)) for first, values in last] == [(2 * BLOCK_ROWS + 1, (2, 4))]
    assert not list(initial_rows("t", shape=shape, config=config, seed=1, rows=range(5, 5)))
