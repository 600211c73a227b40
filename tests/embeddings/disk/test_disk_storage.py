"""Tables on a disk train as those in memory, bit for bit, whatever is held of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.embeddings.embedding_inputs import MIXED, make_batch, some_loss
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.storage.disk import DiskStorage, held_facts
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, FileError
from ziggurat.ops.lookup import TableOptimizerKind

RULES = [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM]


def made(folder: Path, *, memory: str, config: EmbeddingConfig, num_places: int = 0) -> list[EmbeddingTables]:
    """Tables in memory and on a disk."""
    found = []
    for tables in (TablesConfig(), TablesConfig(disk=str(folder), memory=memory)):
        found.append(EmbeddingTables(MIXED, config, seed=5, make_storage=tables.make_storage(seed=5)))
    for index in range(found[1].tables.num_storages):
        storage = found[1].tables.storage(index)
        assert isinstance(storage, DiskStorage)
        if num_places:
            storage.num_places = num_places  # fewer than a batch has rows
    return found


def train(tables: EmbeddingTables, optimizer: TableOptimizer) -> list[torch.Tensor]:
    outputs = []
    for step in range(6):
        batch = make_batch(MIXED, size=25 if step else 0, seed=step)
        pooled = tables(batch)
        vectors, _ = tables.sequence(batch, "history")
        (some_loss(pooled) + vectors.square().sum()).backward()
        if step % 2:
            optimizer.grad_norm_squared()
        optimizer.step(0.1)
        tables.announce(make_batch(MIXED, size=25, seed=step + 1))
        outputs.append(pooled.detach())
    return outputs


@pytest.mark.parametrize("num_places", [0, 1, 7])
@pytest.mark.parametrize("kind", RULES)
def test_training_on_a_disk_has_the_bits_of_training_in_memory(
    tmp_path: Path, kind: TableOptimizerKind, num_places: int
) -> None:
    draw = InitialDraw.ROWS if num_places else InitialDraw.BLOCKS
    kernel = KernelChoice.CPP if num_places else KernelChoice.TORCH
    config = EmbeddingConfig(dim=8, optimizer=kind, kernel=kernel, weight_decay=0.01, initial_sum=0.1, init_draw=draw)
    memory, disk = made(tmp_path, memory="50%", config=config, num_places=num_places)
    optimizers = [TableOptimizer(memory), TableOptimizer(disk)]
    for one, other in zip(train(memory, optimizers[0]), train(disk, optimizers[1]), strict=True):
        assert torch.equal(one, other)
    assert 0 <= held_facts(disk.tables.on_disk)["disk_hit_rate"] < 1
    assert held_facts(disk.tables.on_disk) == {}
    for name in memory.tables.places:
        assert torch.equal(memory.table(name), disk.table(name)), name
    for name, rows in optimizers[0].state_rows().items():
        assert torch.equal(rows.read(0, rows.num_rows), optimizers[1].state_rows()[name].read(0, rows.num_rows)), name
    again = EmbeddingTables(MIXED, config, seed=None)
    again.load_state_dict(disk.state_dict())
    assert all(torch.equal(again.table(name), memory.table(name)) for name in memory.tables.places)


def test_memory_is_shared_by_storages_in_proportion(tmp_path: Path) -> None:
    make = TablesConfig(disk=str(tmp_path), memory="1MiB").make_storage(seed=0)
    small, large = make(20_000, 4), make(60_000, 16)
    assert isinstance(small, DiskStorage)
    assert isinstance(large, DiskStorage)
    held = [each.cached.num_places * each.held_row_bytes for each in (small, large)]
    assert 0.9 < sum(held) / (1 << 20) <= 1
    assert "thousand rows/s read" in small.describe()["measured"]
    assert small.cached.num_places / 20_000 == pytest.approx(large.cached.num_places / 60_000, rel=0.01)
    assert "fewest" not in small.describe()["held_in_memory"]


@pytest.mark.parametrize(("memory", "asked"), [("1", "0 were"), ("1%", "300 were")])
def test_rows_that_are_held_beyond_what_was_asked_for_are_said(tmp_path: Path, memory: str, asked: str) -> None:
    make = TablesConfig(disk=str(tmp_path), memory=memory).make_storage(seed=0)
    held = make(30_000, 4).describe()["held_in_memory"]
    assert held.startswith("1,024 of 30,000 rows")
    assert held.endswith(f": {asked} asked for, and 1,024 are the fewest")
    few = make(1_000, 4).describe()["held_in_memory"]
    assert few.startswith("1,000 of 1,000 rows")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"disk": ".", "memory": "much"}, "'much'"),
        ({"disk": ".", "memory": "0GiB"}, "'0GiB'"),
        ({"disk": ".", "memory": "101%"}, "'101%'"),
        ({"memory": "1GiB"}, "1GiB alone"),
        ({"memory": "1GiB"}, "--tables.memory 10%"),
        ({"disk": ".", "weights": "int8"}, "int8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        TablesConfig(**settings)  # type: ignore[arg-type]


def test_tables_that_are_only_read_lie_elsewhere_where_their_folder_takes_no_files(tmp_path: Path) -> None:
    for folder in (Path("/proc"), tmp_path / "none"):  # not even root makes a file in /proc
        tables = TablesConfig(disk=str(folder))
        read = tables.make_storage(seed=0, is_trained=False)(8, 4)
        read.write(0, torch.ones(8, 4))
        assert torch.equal(read.read(0, 8), torch.ones(8, 4))
        with pytest.raises(FileError, match=str(folder)):
            tables.make_storage(seed=0)(8, 4)
    there = TablesConfig(disk=str(tmp_path)).make_storage(seed=0, is_trained=False)(8, 4)
    assert isinstance(there, DiskStorage)
    assert there.disk.folder == tmp_path


def test_dense_gradients_and_missing_folders_are_refused(tmp_path: Path) -> None:
    tables = TablesConfig(disk=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="adam_dense"):
        tables.check(EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE), tables=["a"])
    with pytest.raises(FileError, match="make the folder"):
        EmbeddingTables(MIXED, EmbeddingConfig(), seed=1, make_storage=tables.make_storage(seed=1))
