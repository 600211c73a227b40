"""Tables in the memory of the host train as those on the device, bit for bit, whatever is held of them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.embeddings.embedding_inputs import KERNELS, MIXED, PLAIN, make_batch, some_loss
from tests.ops.lookup_problems import kernel_or_skip
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.storage.host import HostStorage, device_facts
from ziggurat.embeddings.storage.host.places import Places
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import BoundsError, ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode

RULES = [TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM]


def both(config: EmbeddingConfig, *, inputs: InputSpec = MIXED, num_places: int, seed: int | None = 5) -> Any:
    """Tables on the device and on the host."""
    found = []
    for tables in (TablesConfig(), TablesConfig(device_memory="10%")):
        found.append(EmbeddingTables(inputs, config, seed=seed, make_storage=tables.make_storage(seed=5)))
    for storage in found[1].tables.storages:
        assert isinstance(storage, HostStorage)
        storage.num_places = num_places
    return found


def train(tables: EmbeddingTables, optimizer: TableOptimizer, *, first: int = 0, unannounced: int = 3) -> list[Any]:
    """Eight steps, one of them on a batch that was not announced, with an evaluation and lookups by hand between."""
    outputs, coming = [], make_batch(tables.inputs, size=25, seed=first)
    for step in range(first, first + 8):
        batch = coming
        tables.begin(batch)
        pooled = tables(batch)
        loss = some_loss(pooled)
        if tables.inputs is MIXED:
            loss = loss + tables.sequence(batch, "history")[0].square().sum()
            loss = loss + tables.vectors("item", torch.tensor([28, 29, 28])).sum()  # rows that no batch names
        coming = make_batch(tables.inputs, size=25 if step != 5 else 0, seed=step + 1)
        tables.announce(coming)
        if step == unannounced:
            coming = make_batch(tables.inputs, size=25, seed=99)
        loss.backward()
        if step % 2:
            optimizer.grad_norm_squared()
        optimizer.step(0.1)
        with torch.no_grad():
            outputs += [pooled.detach(), tables(make_batch(tables.inputs, size=9, seed=step + 50))]
    return outputs


@pytest.mark.parametrize("num_places", [1, 64])
@pytest.mark.parametrize("kind", RULES)
def test_training_on_the_host_has_the_bits_of_training_on_the_device(
    kind: TableOptimizerKind, num_places: int, tmp_path: Path
) -> None:
    config = EmbeddingConfig(dim=8, optimizer=kind, kernel=KernelChoice.TORCH, weight_decay=0.01, initial_sum=0.1)
    device, host = both(config, num_places=num_places)
    optimizers = [TableOptimizer(device), TableOptimizer(host)]
    for one, other in zip(train(device, optimizers[0]), train(host, optimizers[1]), strict=True):
        assert torch.equal(one, other)
    assert 0 < device_facts(host.tables.in_host)["device_hit_rate"] < 1
    assert device_facts(host.tables.in_host) == {}

    def state(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    for name, rows in optimizers[0].state_rows().items():
        assert torch.equal(rows.read(0, rows.num_rows), optimizers[1].state_rows()[name].read(0, rows.num_rows)), name
    for name in device.tables.places:
        assert torch.equal(device.table(name), host.table(name)), name
    with CheckpointStore(tmp_path, config=CheckpointConfig(mode=SaveMode.SYNC)) as store:
        store.save(1, tensors=state(host, optimizers[1]), state={})
    resumed = both(config, num_places=num_places, seed=None)
    outputs = []
    for tables in resumed:  # into either, and on from there
        optimizer = TableOptimizer(tables)
        into = state(tables, optimizer)
        CheckpointStore(tmp_path).load(into=into)
        optimizer.load_state_dict({key[6:]: value for key, value in into.items() if key.startswith("state.")})
        tables.tables.mark_filled()
        outputs.append(train(tables, optimizer, first=8))
    outputs.append(train(host, optimizers[1], first=8))
    for one, *others in zip(*outputs, strict=True):
        assert all(torch.equal(one, other) for other in others)


@KERNELS
def test_every_kernel_reads_and_updates_places(kernel: KernelChoice) -> None:
    kernel_or_skip(kernel)
    device, host = both(EmbeddingConfig(dim=8, kernel=kernel), inputs=PLAIN, num_places=32)
    for one, other in zip(train(device, TableOptimizer(device)), train(host, TableOptimizer(host)), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(device.table(name), host.table(name)) for name in device.tables.places)


def test_rows_of_the_present_and_the_coming_batch_keep_their_places() -> None:
    places, generator = Places(2000, num_places=64), torch.Generator().manual_seed(1)
    before, at_before = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    held: dict[int, int] = {}
    for _ in range(30):
        rows = torch.randint(0, 300, (70,), generator=generator)
        exchange = places.announce(rows)
        for row, place in zip(exchange.leaving.tolist(), exchange.left.tolist(), strict=True):
            assert held.pop(place) == row
        for row, place in zip(exchange.entering.tolist(), exchange.taken.tolist(), strict=True):
            assert place not in held
            held[place] = row
        assert max(held) < places.num_needed
        assert len(set(held.values())) == len(held)
        assert torch.equal(places.find(before), at_before), "a step is still reading there"
        found = places.find(rows)
        assert [held[place] for place in found.tolist()] == rows.tolist()
        known_rows, known_places = places.held()
        assert dict(zip(known_places.tolist(), known_rows.tolist(), strict=True)) == held
        before, at_before = rows, found
    assert places.num_needed > 1 + 64, "some rows found no way"
    assert places.num_needed < 1 + 64 + 3 * 70
    assert 0 < places.counts.hits < places.counts.rows


def test_a_row_outside_its_table_is_named_when_it_is_announced() -> None:
    _, host = both(EmbeddingConfig(dim=8, kernel=KernelChoice.TORCH), num_places=32)
    batch = make_batch(MIXED, size=3)
    batch.single[1, 2] = 30
    with pytest.raises(BoundsError, match="sample 2"):
        host.announce(batch)
    with pytest.raises(BoundsError, match="sample 2"):
        host(batch)


def test_what_is_held_is_shared_by_storages_in_proportion() -> None:
    make = TablesConfig(device_memory="1MiB").make_storage(seed=0)
    storages = [make(20_000, 4), make(60_000, 16)]
    for storage in storages:
        storage.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)
    held = [
        each.held.places.ways.num_places * each.held_row_bytes for each in storages if isinstance(each, HostStorage)
    ]
    assert 0.9 < sum(held) / (1 << 20) < 1.01
    assert "of 60,000 rows" in storages[1].describe()["held"]
    assert "fewest" not in storages[1].describe()["held"]
    tiny = TablesConfig(device_memory="1").make_storage(seed=0)(20_000, 4)
    assert "0 were asked for, and 1,024 are the fewest" in tiny.describe()["held"]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"device_memory": "much"}, "'much'"),
        ({"device_memory": "0%"}, "'0%'"),
        ({"device_memory": "auto"}, "no limit"),
        ({"device_memory": "1GiB", "disk": "."}, "--tables.disk ."),
        ({"device_memory": "1GiB", "weights": "int8"}, "int8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        TablesConfig(**settings)  # type: ignore[arg-type]


def test_tables_that_are_named_stay_on_the_device() -> None:
    tables = TablesConfig(device_memory="10%", in_memory=("user",))
    made = EmbeddingTables(MIXED, EmbeddingConfig(dim=8), make_storage=tables.make_storage(seed=0))
    kinds = {name: type(made.tables.storage(place.storage)).__name__ for name, place in made.tables.places.items()}
    assert kinds == {"user": "MemoryStorage", "item": "HostStorage", "genres": "HostStorage"}
    assert made.tables.sizes.keys() == {"user"}
