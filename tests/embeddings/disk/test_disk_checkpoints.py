"""A checkpoint of tables on a disk holds the changed rows, and fits tables on a disk and in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.embeddings.disk.test_disk_storage import made, train
from tests.embeddings.embedding_inputs import MIXED
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.storage import TablePart
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_file import RowFile
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
    (file,) = (tmp_path / "checkpoints" / "step-000000000001").glob("rows-*")
    assert file.stat().st_size < 1000
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        store.load(1)


@pytest.mark.parametrize("num_places", [0, 5])
def test_saving_and_loading_move_the_changed_rows_once_and_held_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_places: int
) -> None:
    moved = {"read": 0, "write": 0}

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(RowFile, name)

        def call(file: RowFile, rows: np.ndarray, *values: Any) -> Any:
            moved[name] += len(rows)
            return plain(file, rows, *values)

        return call

    config = EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH, init_draw=InitialDraw.ROWS)
    _, disk = made(tmp_path, memory="100%", config=config, num_places=num_places)
    optimizer, fresh = TableOptimizer(disk), EmbeddingTables(
        MIXED, config, seed=None, make_storage=TablesConfig(disk=str(tmp_path), memory="100%").make_storage(seed=0)
    )  # fmt: skip
    for index in range(fresh.tables.num_storages):
        fresh.tables.storage(index).num_places = num_places or None  # type: ignore[attr-defined]
    train(disk, optimizer)
    for index in range(disk.tables.num_storages):
        disk.tables.storage(index).disk.flush()  # type: ignore[attr-defined]
    state = state_of(disk, optimizer)
    store, again = CheckpointStore(tmp_path / "checkpoints"), TableOptimizer(fresh)
    for name in moved:
        monkeypatch.setattr(RowFile, name, counted(name))
    store.save(1, tensors=state, state={})
    changed = sum(
        len(storage.changed_rows(range(storage.num_rows)))
        for index in range(disk.tables.num_storages)
        for storage in [disk.tables.storage(index)]
        if isinstance(storage, DiskStorage)
    )
    held = 0 if num_places else changed
    assert moved["write"] == 0
    assert changed - held - 100 < moved["read"] <= changed - held
    moved.update(read=0, write=0)
    store.load(into=state_of(fresh, again))
    for index in range(fresh.tables.num_storages):
        fresh.tables.storage(index).disk.flush()  # type: ignore[attr-defined]
    assert moved["read"] == 0
    assert changed - held - 100 < moved["write"] <= changed - held
    monkeypatch.undo()
    found, expected = numbers(state_of(fresh, again)), numbers(state)
    assert all(torch.equal(found[name], expected[name]) for name in expected if name != "state.step")
