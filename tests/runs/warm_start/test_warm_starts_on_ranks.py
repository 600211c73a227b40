"""A warm start on two ranks: the first weights are those of one device, whatever the parent was trained on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.runs.warm_start.test_warm_starts import config_of, events
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore


def config_in(base: Path, file: str, *, warm: str = "") -> RunConfig:
    config = config_of({"warm-start.optimizers": "true", "warm-start.run": str(base / warm) if warm else ""})
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(str(base / file),)))


def on_ranks(rank: int, base: str) -> None:
    """Train a child of the run of one device, and a child of that one on ranks too."""
    place = Path(base)
    train_run(config_in(place, "new.parquet", warm="parent"), folder=place / "ranks")
    train_run(config_in(place, "old.parquet", warm="ranks"), folder=place / "again")


def test_two_ranks_begin_as_one_device_does(tmp_path: Path) -> None:
    events(400).write_parquet(tmp_path / "old.parquet")
    events(400, seed=3, first_user=15).write_parquet(tmp_path / "new.parquet")
    train_run(config_in(tmp_path, "old.parquet"), folder=tmp_path / "parent")
    train_run(config_in(tmp_path, "new.parquet", warm="parent"), folder=tmp_path / "one")
    run_ranks(on_ranks, 2, str(tmp_path), timeout_s=120.0)
    train_run(config_in(tmp_path, "old.parquet", warm="ranks"), folder=tmp_path / "back")
    for ranks, one in (("ranks", "one"), ("again", "back")):
        ours = CheckpointStore(tmp_path / one / "checkpoints").load(0).tensors
        theirs = CheckpointStore(tmp_path / ranks / "checkpoints").load(0).tensors
        for name, tensor in ours.items():
            if not name.startswith("rng."):
                assert torch.equal(theirs[name], tensor), (ranks, name)
        assert "table_optimizer.user.sum" in ours
