"""A table of 10⁹ rows is made, trained, saved and resumed inside 2 GiB of memory, for what its changed rows cost."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.training.checkpoint import CheckpointStore

NUM_ROWS, DIM, BATCH, STEPS = 10**9, 16, 512, 20
INPUTS = InputSpec(
    tables=(TableSpec(name="id", num_rows=NUM_ROWS),),
    single=(SingleSpec(name="id", table="id"),),
    labels=(LabelSpec(name="y"),),
)
_context = mp.get_context("spawn")


def batch(step: int) -> Batch:
    generator = np.random.default_rng(step)
    hot = np.clip((NUM_ROWS ** generator.random(BATCH // 2)).astype(np.int64), 1, NUM_ROWS - 1)
    ids = np.concatenate([hot, generator.integers(1, NUM_ROWS, BATCH // 2)])
    single = torch.from_numpy(ids).view(1, -1)
    return dataclasses.replace(
        Batch.empty(INPUTS),
        dense=torch.zeros(BATCH, 0),
        single=single,
        labels=torch.zeros(1, BATCH),
        row_ids=torch.arange(BATCH),
    )


def live(folder: str, first: int, outputs: mp.SimpleQueue[list[float]]) -> None:
    """Train from a step on, from the checkpoint of that step, with 5,000 rows held; save half way."""
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
    torch.set_num_threads(1)
    config = EmbeddingConfig(dim=DIM, kernel=KernelChoice.TORCH, init_draw=InitialDraw.ROWS)
    make = TablesConfig(disk=folder, memory="400KB").make_storage(seed=1)
    tables = EmbeddingTables(INPUTS, config, seed=None if first else 1, make_storage=make)
    optimizer, store = TableOptimizer(tables), CheckpointStore(Path(folder) / "checkpoints")

    def state() -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    if first:
        into = state()
        assert store.load(into=into).step == first
        optimizer.load_state_dict({name[6:]: value for name, value in into.items() if name.startswith("state.")})
        tables.tables.mark_filled()
    found = []
    for step in range(first, 2 * STEPS):
        out = tables(batch(step))
        tables.announce(batch(step + 1))
        found.append(float(out.detach().double().sum()))
        (out - 1.0).square().sum().backward()
        optimizer.step(0.05)
        if step + 1 == STEPS and not first:
            store.save(STEPS, tensors=state(), state={})
    outputs.put(found[-STEPS:])


@pytest.mark.slow
def test_a_billion_rows_are_made_trained_saved_and_resumed_in_little_memory(tmp_path: Path) -> None:
    outputs: mp.SimpleQueue[list[float]] = _context.SimpleQueue()
    found = []
    for first in (0, STEPS):
        process = _context.Process(target=live, args=(str(tmp_path), first, outputs))
        process.start()
        process.join(600)
        assert process.exitcode == 0
        found.append(outputs.get())
    assert found[0] == found[1]
    (file,) = (tmp_path / "checkpoints").glob(f"*{STEPS}/rank-*")
    assert file.stat().st_size < 100 * BATCH * STEPS
