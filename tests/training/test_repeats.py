"""Training on deduplicated batches: what is deduplicated, what the report says, and that it learns the same."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.data.encoded.test_sessions import INPUTS, session_table
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import Deduplicate, Loader, LoaderConfig, Shuffle
from ziggurat.data.source import LoaderSource
from ziggurat.models import DINConfig, DLRMConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.training.config import TrainingConfig
from ziggurat.training.repeats import deduplicate_source
from ziggurat.training.trainer import Trainer

SHARED = dataclasses.replace(
    INPUTS,
    single=(INPUTS.single[0], dataclasses.replace(INPUTS.single[1], table="jagged0")),
    tables=tuple(table for table in INPUTS.tables if table.name != "single1"),
    jagged=(dataclasses.replace(INPUTS.jagged[0], ordered=True), *INPUTS.jagged[1:]),
)
SMALL = MLPConfig(hidden_dims=(8,))
MODELS = [
    DLRMConfig(embedding_dim=4, bottom=SMALL, top=SMALL),
    DINConfig(embedding_dim=4, attention_dims=(6,), deep=SMALL),
]


def trainer_of(config, folder: Path, **loader) -> Trainer:
    settings = LoaderConfig(batch_size=64, prefetch=0, shuffle_buffer_rows=128, **loader)
    training = TrainingConfig(epochs=1, loader=settings, threads=1)
    data = MemoryDataset(session_table(256), SHARED, rows_per_group=64)
    return Trainer(build_model(config, SHARED, seed=1), config=training, train=data, folder=folder)


@pytest.mark.parametrize("config", MODELS, ids=["dlrm", "din"])
def test_a_run_learns_the_same_with_slices(config, tmp_path: Path) -> None:
    tables = []
    for deduplicate in Deduplicate:
        trainer = trainer_of(config, tmp_path / deduplicate, shuffle=Shuffle.SESSIONS, deduplicate=deduplicate)
        assert bool(trainer.feed.source.loader.groups) == (deduplicate is Deduplicate.AUTO)
        trainer.fit()
        model = trainer.model
        tables.append(torch.cat([model.embeddings.table(table.name).flatten() for table in SHARED.tables]))
    torch.testing.assert_close(*tables, rtol=1e-3, atol=1e-4)


def test_the_report_says_what_is_deduplicated_and_why_not(tmp_path: Path) -> None:
    config = MODELS[0]
    found = trainer_of(config, tmp_path / "a", shuffle=Shuffle.SESSIONS).repeats
    assert all(f"jagged{at}" in " ".join(found.values()) for at in range(3))
    assert "distinct in 64 rows (factor " in found["repeats 1"]
    assert found["repeats are used by"] == "lookups, pooling"
    assert "takes sessions apart" in trainer_of(config, tmp_path / "b").repeats["repeats"]
    assert "off" in trainer_of(config, tmp_path / "c", shuffle="sessions", deduplicate="off").repeats["repeats"]


def test_lists_that_the_prioritised_exchange_leaves_as_they_are_are_named(tmp_path: Path) -> None:
    plain = dataclasses.replace(SHARED, has_sessions=False)
    table = session_table(256)
    table = table.drop_columns([name for name in table.column_names if name.startswith("session")])
    loader = Loader(MemoryDataset(table, plain), config=LoaderConfig(shuffle=Shuffle.SESSIONS))
    model = build_model(MODELS[0], plain, seed=1)
    config = SimpleNamespace(exchange=Exchange.PRIORITISED_ALWAYS)
    parallel: Any = SimpleNamespace(topology=SimpleNamespace(world_size=2), config=config)
    found = deduplicate_source(LoaderSource(loader), model, parallel=parallel)
    assert found["repeats"].startswith("kept: exchange = prioritised_always")


def test_lanes_of_sessions_are_deduplicated(tmp_path: Path) -> None:
    trainer = trainer_of(MODELS[0], tmp_path / "a", shuffle=Shuffle.SESSION_LANES)
    assert "distinct in 64 rows (factor " in trainer.repeats["repeats 1"]


def test_the_report_names_modules_that_compute_on_slices(tmp_path: Path) -> None:
    trainer = trainer_of(MODELS[1], tmp_path / "a", shuffle=Shuffle.SESSIONS)
    assert "attentions (what depends on the history alone)" in trainer.repeats["repeats are used by"]


def test_below_the_break_even_batches_stay_plain(tmp_path: Path) -> None:
    table = session_table(256)
    for spec in SHARED.jagged:
        at = table.column_names.index(spec.name)
        values = [[row % 12, row // 12 % 12, row // 144] for row in range(256)]
        table = table.set_column(at, table.schema.field(at), pa.array(values, type=table.schema.field(at).type))
    data = MemoryDataset(table, SHARED, rows_per_group=64)
    training = TrainingConfig(epochs=1, loader=LoaderConfig(batch_size=64, shuffle=Shuffle.SESSIONS), threads=1)
    trainer = Trainer(build_model(MODELS[0], SHARED, seed=1), config=training, train=data, folder=tmp_path / "run")
    assert trainer.repeats["repeats"].startswith("kept: 64 rows have ")
    assert trainer.feed.source.loader.groups == ()
