"""A folder that grows: windows are scored and trained as files come, and a signal ends the stream with a checkpoint."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import polars as pl
import pytest

from tests.runs.stream.test_stream_runs import SCHEMA, config_of, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import DataError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.stream.source import FollowConfig
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

_context = mp.get_context("forkserver")
MAX_S = 60.0


def follow(folder: str) -> None:
    base = Path(folder).parent
    stream_run(
        config_of(base / "incoming"),
        folder=folder,
        stream=StreamConfig(by="day"),
        follow=FollowConfig(poll_s=0.02, settle_s=0.1),
    )


def started(folder: Path) -> BaseProcess:
    process = _context.Process(target=follow, args=(str(folder),))
    process.start()
    return process


def until(condition: Callable[[], bool], process: BaseProcess) -> None:
    deadline = time.monotonic() + MAX_S
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(MAX_S)
    assert process.exitcode == 0


def num_windows(folder: Path) -> int:
    path = folder / "windows.jsonl"
    return len(read_windows(path)) if path.exists() else 0


@pytest.mark.slow
def test_files_that_come_are_trained_and_a_signal_ends_it_whole(tmp_path: Path) -> None:
    """In the end the same bits as where all files were there from the beginning."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    parts = [events(150, days=1, first_day=day, seed=day) for day in range(5)]
    folder = tmp_path / "run"
    process = started(folder)
    parts[0].write_parquet(incoming / "day-0.parquet")
    parts[1].write_parquet(incoming / "day-1.parquet")
    until(lambda: num_windows(folder) == 1, process)
    whole = tmp_path / "day-2.parquet"
    parts[2].write_parquet(whole)
    half = incoming / "day-2.parquet"
    half.write_bytes(whole.read_bytes()[:-100])
    time.sleep(0.3)
    assert num_windows(folder) == 1, "a half of a file is no file"
    whole.replace(half)
    until(lambda: num_windows(folder) == 2, process)
    end(process, signal.SIGTERM)
    process = started(folder)
    parts[3].write_csv(incoming / "day-3.csv")
    until(lambda: num_windows(folder) == 3, process)
    end(process, signal.SIGINT)
    parts[4].write_parquet(incoming / "day-4.parquet")
    config = config_of(incoming)
    stream_run(config, folder=folder, stream=StreamConfig(by="day"))
    stream_run(config, folder=tmp_path / "whole", stream=StreamConfig(by="day"))
    assert [record["late"] for record in content_of(folder)] == [0] * 5
    assert content_of(folder) == content_of(tmp_path / "whole")
    assert same(weights_of(folder), weights_of(tmp_path / "whole"))
    assert (folder / "ledger.bin").read_bytes() == (tmp_path / "whole/ledger.bin").read_bytes()


def test_a_row_of_the_future_does_not_call_all_windows_done(tmp_path: Path) -> None:
    rows = events(20, days=1)
    rows.write_parquet(tmp_path / "a.parquet")
    ahead = int((datetime.now(UTC) + timedelta(days=400)).timestamp())
    wrong = pl.concat([rows[:2], rows[2:3].with_columns(at=pl.lit(ahead, dtype=pl.Int64))])
    wrong.write_parquet(tmp_path / "b.parquet")
    config = config_of(tmp_path / "a.parquet")
    settings = {"config": StreamConfig(), "schema": config.table_schema}
    arrivals = Arrivals(tmp_path / "stream", data=config.data, **settings)
    latest = time.time() + 86_400
    arrivals.take([tmp_path / "a.parquet"], latest_s=latest)
    with pytest.raises(DataError, match="a day from now") as refused:
        arrivals.take([tmp_path / "b.parquet"], latest_s=latest)
    assert "b.parquet, row 2" in refused.value.where

    data = dataclasses.replace(config.data, bad_rows=BadRowPolicy.QUARANTINE)
    arrivals = Arrivals(tmp_path / "stream", data=data, **settings)
    arrivals.take([tmp_path / "b.parquet"], latest_s=latest)
    assert arrivals.journal.files[1].bad == 1
    assert not arrivals.finish_next(is_over=False)


class Asks(Hook):
    """Asks its own process to end, at a step."""

    def __init__(self, number: signal.Signals, *, step: int) -> None:
        self.number = number
        self.step = step

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if made.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_stream_inside_of_a_window_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "incoming").mkdir()
    events(600).write_parquet(tmp_path / "incoming/a.parquet")
    config = config_of(tmp_path / "incoming", checkpoint_every=0)
    before = signal.getsignal(number)
    result = stream_run(config, folder=tmp_path / "run", follow=FollowConfig(poll_s=0.01), hooks=[Asks(number, step=6)])
    assert signal.getsignal(number) is before
    assert result.ended_early
    assert result.steps in (6, 7), "the hook that asks is called behind the one that hears"
    assert CheckpointStore(tmp_path / "run/checkpoints").steps()[-1] == result.steps
    assert len(result.windows) == 2
    assert not stream_run(config, folder=tmp_path / "run").ended_early
    stream_run(config, folder=tmp_path / "whole")
    assert content_of(tmp_path / "run") == content_of(tmp_path / "whole")
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))


def test_a_stream_waits_for_its_history_and_ends_where_none_comes(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    config = config_of(tmp_path / "incoming")
    result = stream_run(config, folder=tmp_path / "run", follow=FollowConfig(poll_s=0.01))
    assert (result.ended_early, result.windows) == (True, ())
    events(100).write_parquet(tmp_path / "incoming/a.parquet")
    assert len(stream_run(config, folder=tmp_path / "run").windows) == 5


def test_the_command_line_follows_a_folder_that_is_empty_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe was to be fitted to the rows of files, and there were none."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    schema = tmp_path / "my.toml"
    schema.write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_dlrm", "--schema", str(schema), "--follow", "--out", str(tmp_path / "run")]
    assert main([*command, "--data.train", str(tmp_path / "absent")]) == 2
    assert "nothing there" in capsys.readouterr().err
    signalled = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    signalled.start()
    assert main([*command, "--data.train", str(incoming)]) == 0
    signalled.join()
    captured = capsys.readouterr()
    assert f"waiting for files: {incoming}" in captured.out + captured.err
