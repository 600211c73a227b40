"""Ranks on unlike processors train one model: other last bits of drawn weights are taken, other weights refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from ziggurat.errors import ConfigError
from ziggurat.models import DLRMConfig, Init, MLPConfig, Model, build_model
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import small_inputs
from ziggurat.testing.ranks import run_ranks

MLP = MLPConfig(hidden_dims=(32, 16))


def drawn(seed: int = 3) -> Model:
    """A model with normal and with uniform numbers, all of its tables drawn."""
    return build_model(
        DLRMConfig(embedding_dim=8, bottom=MLP, top=MLP, init=Init.XAVIER_NORMAL), small_inputs(), seed=seed
    )


def write(path: str) -> None:
    """Runs in a process with other instructions."""
    np.savez(path, **{name: value.detach().numpy() for name, value in drawn().state_dict().items()})


def draw_elsewhere(path: Path) -> None:
    """Draw the model as a processor without AVX2 does."""
    subprocess.run(
        [sys.executable, "-c", f"from {__name__} import write; write({str(path)!r})"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        check=True,
        cwd=Path(__file__).parents[2],
    )


def spread(rank: int, path: str, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights before and after; rank 1 has drawn them with other instructions."""
    model = drawn()
    if rank == 1:
        with np.load(path) as stored:
            model.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored.files})
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tables = tuple(
        TablePlacement(table=spec.name, placement=Placement.named("data_parallel"), ranks=(0, 1))
        for spec in model.inputs.tables
    )
    config = ParallelConfig(dense=DenseParallelism(how))
    parallelize(model, Plan(world_size=2, tables=tables), Topology.create(), config=config)
    after = {name: whole(value) for name, value in model.named_parameters()}
    for shard in model.embeddings.tables.mine.copies.shards:
        after[f"embeddings.tables.{shard.table}.weight"] = model.embeddings.tables.part(shard)
    return {n: v.numpy() for n, v in before.items()}, {n: v.detach().numpy().copy() for n, v in after.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_weights_of_unlike_processors_become_those_of_the_first_rank(tmp_path: Path, how: str) -> None:
    draw_elsewhere(tmp_path / "weights.npz")
    (before, after), (other, other_after) = run_ranks(spread, 2, str(tmp_path / "weights.npz"), how)
    unlike = [name for name in before if not np.array_equal(before[name], other[name])]
    if not unlike:
        pytest.skip("this processor draws as one without AVX2 does")
    assert any("embeddings" in name for name in unlike)
    assert any("embeddings" not in name for name in unlike)
    for name, value in after.items():
        assert np.array_equal(value, other_after[name]), name
        assert np.array_equal(value, before[name]), name


def refused(rank: int) -> str:
    """What another seed on the second rank is refused with."""
    model = drawn(seed=3 + rank)
    plan = Plan(
        world_size=2,
        tables=tuple(
            TablePlacement(table=spec.name, placement=Placement.named("table_wise"), ranks=(0,))
            for spec in model.inputs.tables
        ),
    )
    try:
        parallelize(model, plan, Topology.create())
    except ConfigError as error:
        return str(error)
    return ""


def test_weights_of_another_seed_are_refused_on_every_rank() -> None:
    for text in run_ranks(refused, 2):
        assert "weight top" in text
        assert "rank 1 of 2, unlike rank 0: weights, in parallelize" in text
