"""A stream on ranks: the windows, rows and, but for the order of sums, the numbers of one device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ziggurat as zg
from tests.runs.stream.test_stream_runs import config_of, events, weights_of
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

NUM_ROWS = 500


class StopsAt(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if made.step == self.step:
            trainer.stop("enough")


def config_in(base: Path, *, world_size: int, **changes: Any) -> RunConfig:
    """Without dropout, of which each rank would draw its own; the global batch is that of one device."""
    config = config_of(base / "events.parquet", **changes)
    model = zg.DLRMConfig(embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,)))
    loader = dataclasses.replace(config.training.loader, batch_size=32 // world_size)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, loader=loader))


def on_ranks(rank: int, base: str, growing: int) -> tuple[int, bool]:
    config = config_in(Path(base), world_size=2)
    stream = StreamConfig(by="day", growing=growing)
    cut = stream_run(config, folder=Path(base) / "ranks", stream=stream, hooks=[StopsAt(7)])
    assert cut.ended_early
    result = stream_run(config, folder=Path(base) / "ranks", stream=stream)
    return result.steps, result.is_first


@pytest.mark.parametrize("growing", [0, 60])
def test_two_ranks_stream_as_one_device_does(tmp_path: Path, growing: int) -> None:
    events(NUM_ROWS, days=4).write_parquet(tmp_path / "events.parquet")
    one = stream_run(
        config_in(tmp_path, world_size=1), folder=tmp_path / "one", stream=StreamConfig(by="day", growing=growing)
    )
    assert run_ranks(on_ranks, 2, str(tmp_path), growing, timeout_s=120.0) == [(one.steps, True), (one.steps, False)]
    ours = read_windows(tmp_path / "one/windows.jsonl")
    theirs = read_windows(tmp_path / "ranks/windows.jsonl")
    for first, second in zip(ours, theirs, strict=True):
        assert dataclasses.replace(second, metrics={}, timing={}) == dataclasses.replace(first, metrics={}, timing={})
        assert second.metrics == pytest.approx(first.metrics, rel=1e-4)
    ledger = read_ledger(tmp_path / "ranks/ledger.bin")
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(NUM_ROWS))
    assert verify_run(tmp_path / "ranks").good
    found = weights_of(tmp_path / "ranks")
    for name, weight in weights_of(tmp_path / "one").items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)
