"""A checkpoint of tables on a disk holds the changed rows, and fits tables on a disk and in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.embeddings.disk.test_disk_storage import made, train
from tests.embeddings.embedding_inputs import MIXED
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.storage import TablePart
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.training.checkpoint import CheckpointStore, DamagedCheckpointError


def state_of(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
    return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}


def numbers(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value.rows.read(0, value.rows.num_rows) if isinstance(value, TablePart) else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("kind", [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SPARSE_ADAM])
def test_a_checkpoint_goes_on_bit_for_bit_on_a_disk_and_in_memory(tmp_path: Path, kind: TableOptimizerKind) -> None:
    (tmp_path / "rows").mkdir()
    config = EmbeddingConfig(
        dim=8, optimizer=kind, kernel=KernelChoice.TORCH, initial_sum=0.1, init_draw=InitialDraw.ROWS
    )
    memory, disk = made(tmp_path / "rows", memory="20%", config=config)
    optimizers = [TableOptimizer(memory), TableOptimizer(disk)]
    train(memory, optimizers[0])
    train(disk, optimizers[1])
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, tensors=state_of(disk, optimizers[1]), state={})
    train(disk, optimizers[1])  # written back after the checkpoint, which does not change
    disk.tables.storage(0).flush()  # type: ignore[attr-defined]
    store.verify(1)
    on_disk = TablesConfig(disk=str(tmp_path / "rows"), memory="20%")
    fresh = {
        "disk": EmbeddingTables(MIXED, config, seed=None, make_storage=on_disk.make_storage(seed=0)),
        "memory": EmbeddingTables(MIXED, config, seed=None),
        "used": disk,
    }
    expected = numbers(state_of(memory, optimizers[0]))
    for where, tables in fresh.items():
        optimizer = optimizers[1] if where == "used" else TableOptimizer(tables)
        into = state_of(tables, optimizer)
        assert store.load(into=into).step == 1
        optimizer.load_state_dict({name[6:]: value for name, value in into.items() if name.startswith("state.")})
        tables.tables.mark_filled()
        found = numbers(state_of(tables, optimizer))
        assert all(torch.equal(found[name], expected[name]) for name in expected), where
        fresh[where] = tables
    whole = store.load().tensors
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    train(memory, optimizers[0])
    again = TableOptimizer(fresh["disk"])
    into = state_of(fresh["disk"], again)
    store.load(into=into)
    again.load_state_dict({name[6:]: value for name, value in into.items() if name.startswith("state.")})
    train(fresh["disk"], again)
    expected, found = numbers(state_of(memory, optimizers[0])), numbers(state_of(fresh["disk"], again))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_few_changed_rows_is_small_and_every_flip_is_noticed(tmp_path: Path) -> None:
    config = EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH, init_draw=InitialDraw.ROWS)
    _, disk = made(tmp_path, memory="20%", config=config)
    optimizer = TableOptimizer(disk)
    storage = disk.tables.storage(0)
    storage.scatter(torch.tensor([3]), torch.ones(1, storage.dim))
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, tensors=state_of(disk, optimizer), state={})
    (file,) = (tmp_path / "checkpoints" / "step-000000000001").glob("rank-*")
    assert file.stat().st_size < 1000
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        store.load(1)
