"""A hook by window from outside the package: it sees each score before the window is trained, and may leave it so."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.runs.stream.test_stream_runs import DAY, START, config_of, events, same, stream, weights_of
from tests.runs.stream.test_streams_on_ranks import config_in
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError
from ziggurat.runs.stream.run import stream_run
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.hooks.hook import Hook, hooks_named
from ziggurat.training.records.windows import WindowRecord, read_windows
from ziggurat.training.trainer import Trainer

MODULE = "examples.extensions.window_alarm"


@pytest.fixture
def alarm() -> Iterator[Any]:
    """The module, its hook listed while the test runs."""
    module = importlib.import_module(MODULE)
    Hook.add(module.WINDOW_ALARM)
    yield module
    Hook._members.pop("window_alarm", None)


class Sees(Hook):
    """Writes down which moments come, with the window and the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.records: list[WindowRecord] = []

    def on_scored(self, trainer: Trainer, record: WindowRecord) -> None:
        self.seen.append(("scored", record.name, trainer.position.step))
        self.records.append(record)
        assert read_windows(trainer.folder.windows)[-1].window == record.window

    def on_window(self, trainer: Trainer) -> None:
        self.seen.append(("trained", self.records[-1].name, trainer.position.step))


class StopsBefore(Hook):
    """Ends a stream in front of a window, on one rank."""

    def __init__(self, window: int, *, rank: int = 0) -> None:
        self.window = window
        self.rank = rank

    def on_scored(self, trainer: Trainer, record: WindowRecord) -> None:
        if record.window == self.window and trainer.team.rank == self.rank:
            trainer.stop("it looks odd")


@pytest.mark.parametrize("frozen", [False, True])
def test_each_window_is_seen_between_its_score_and_its_training(frozen: bool, tmp_path: Path) -> None:
    events(300, days=3).write_parquet(tmp_path / "events.parquet")
    sees = Sees()
    config = config_of(tmp_path / "events.parquet")
    result = stream_run(config, folder=tmp_path / "run", stream=StreamConfig(frozen=frozen), hooks=[sees])
    names = ["2000-05-01", "2000-05-02", "2000-05-03"]
    moments = [(moment, name) for moment, name, _ in sees.seen]
    if frozen:
        assert moments == [("scored", names[0]), ("trained", names[0]), ("scored", names[1]), ("scored", names[2])]
    else:
        assert moments == [(moment, name) for name in names for moment in ("scored", "trained")]
    assert [record.step for record in sees.records] == [step for moment, _, step in sees.seen if moment == "scored"]
    assert sees.records == list(result.windows)
    assert not sees.records[0].metrics
    assert sees.records[1].metrics["ne"] > 0


def stop_and_go_on(rank: int, base: str) -> tuple[list[int], list[int]]:
    """Runs on every rank: the second one stops in front of window 2."""
    config = config_in(Path(base), world_size=2)
    cut = stream_run(config, folder=Path(base) / "ranks", hooks=[StopsBefore(2, rank=1)])
    assert cut.ended_early
    went_on = stream_run(config, folder=Path(base) / "ranks")
    return [record.window for record in cut.windows], [record.window for record in went_on.windows]


def test_a_window_that_a_hook_stops_at_is_trained_by_the_next_start(tmp_path: Path) -> None:
    events(300, days=3).write_parquet(tmp_path / "events.parquet")
    file = tmp_path / "events.parquet"
    whole = stream(tmp_path / "whole", file)
    cut = stream_run(config_of(file), folder=tmp_path / "run", stream=StreamConfig(), hooks=[StopsBefore(2)])
    assert cut.ended_early
    assert [record.window for record in cut.windows] == [1, 2]
    assert cut.steps == whole.windows[1].step
    assert "it looks odd; ended at step" in (tmp_path / "run/run.log").read_text()
    stream(tmp_path / "run", file)
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))
    assert [record.window for record in read_windows(tmp_path / "run/windows.jsonl")] == [1, 2, 3]
    on_ranks = run_ranks(stop_and_go_on, 2, str(tmp_path), timeout_s=120.0)
    assert on_ranks[0] == ([1, 2], [1, 2, 3])


def test_the_alarm_ends_a_stream_whose_labels_turn_round(alarm: Any, tmp_path: Path) -> None:
    # Five days of one rule, then one of the opposite.
    frame = pl.concat([events(120, days=1, first_day=day, seed=day) for day in range(6)])
    rule = pl.col("item") % 2 == 0
    is_last = pl.col("at") >= START + 5 * DAY
    frame.with_columns(click=(rule ^ is_last).cast(pl.Int64)).write_parquet(tmp_path / "clicks.parquet")
    result = stream_run(
        config_of(tmp_path / "clicks.parquet"),
        folder=tmp_path / "run",
        stream=StreamConfig(),
        hooks=hooks_named(["window_alarm"]),
    )
    assert result.ended_early
    assert [record.window for record in result.windows] == [1, 2, 3, 4, 5, 6]
    assert "ne of 2000-05-06 is" in (tmp_path / "run/run.log").read_text()
    with pytest.raises(ConfigError, match="a factor above 1"):
        alarm.WindowAlarm(factor=0.5)
