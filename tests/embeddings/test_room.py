"""Tables that no memory holds are refused before memory is taken."""

from __future__ import annotations

import pytest

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer
from ziggurat.embeddings import room as room_module
from ziggurat.embeddings.room import TableSize, TableUse, bytes_of
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.machine.memory import Memory
from ziggurat.planning.placement import place_tables


def inputs(**rows: int) -> InputSpec:
    return InputSpec(
        single=tuple(SingleSpec(name=name, table=name) for name in rows),
        tables=tuple(TableSpec(name=name, num_rows=count) for name, count in rows.items()),
        labels=(LabelSpec(name="click"),),
    )


HUGE = inputs(user=10**12, shop=100, item=10**11)


def have(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    memory = Memory(total_bytes=num_bytes, free_bytes=num_bytes, owner="a test")
    monkeypatch.setattr(room_module, "memory_of", lambda device: memory)


@pytest.mark.parametrize("kind", list(TableOptimizerKind))
def test_tables_beyond_memory_are_refused_by_name(kind: TableOptimizerKind) -> None:
    with pytest.raises(ConfigError) as caught:
        EmbeddingTables(HUGE, EmbeddingConfig(optimizer=kind), seed=1)
    assert caught.value.found.index("'user'") < caught.value.found.index("'item'") < caught.value.found.index("'shop'")
    assert "1,000,000,000,000 rows × 16 (weights 58.21 TiB" in caught.value.found
    assert "free of" in caught.value.expected
    assert len(caught.value.ways_out) >= 3


def test_open_tables_take_nothing_until_they_are_read() -> None:
    tables = EmbeddingTables(HUGE, EmbeddingConfig(), seed=None)
    for touch in (lambda: tables.tables.draw(1), tables.tables.state_dict):
        with pytest.raises(ConfigError, match="rows × 16"):
            touch()


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (TableOptimizerKind.SGD, 1000 * 8),
        (TableOptimizerKind.ROWWISE_ADAGRAD, 1000 * 8 + 1000),
        (TableOptimizerKind.SPARSE_ADAM, 3 * 1000 * 8),
        (TableOptimizerKind.ADAM_DENSE, 4 * 1000 * 8),
    ],
)
def test_training_counts_state_and_dense_gradients(kind: TableOptimizerKind, numbers: int) -> None:
    size = TableSize(num_rows=1000, dim=8, optimizer=kind)
    assert bytes_of([size], use=TableUse.TRAINING) == 4 * numbers
    assert bytes_of([size], use=TableUse.SCORING) == 4 * 1000 * 8


def test_optimizer_state_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = EmbeddingTables(inputs(user=1000), EmbeddingConfig(optimizer=TableOptimizerKind.SPARSE_ADAM), seed=1)
    have(monkeypatch, 100_000)
    with pytest.raises(ConfigError, match=r"125 KiB for optimizer state") as caught:
        TableOptimizer(tables)
    assert any("rowwise_adagrad" in way for way in caught.value.ways_out)


def test_a_dense_network_beyond_memory_is_refused() -> None:
    wide = DLRMConfig(embedding_dim=8, top=MLPConfig(hidden_dims=(1 << 20, 1 << 20)))
    with pytest.raises(ConfigError, match=r"last layer has 1,048,576 × 1,048,576"):
        build_model(wide, inputs(user=10, item=10), seed=1)


def test_planning_asks_no_memory() -> None:
    assert {entry.table for entry in place_tables(HUGE, dim=16, world_size=1024).tables} == {"user", "item", "shop"}
