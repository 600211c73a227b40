"""Windows that are scored at their end and judged when their labels are complete: by a plain loop, fed live, killed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_late_label_streams import DAY, Rows, assert_same_streams, delay_of, delayed_events
from tests.runs.stream.test_stream_runs import START, Said, config_of, content_of, same, weights_of
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import CheckpointError
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.stream import waiting_windows
from ziggurat.runs.stream.publish import PublishConfig, PublishWindows
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.stream.source import FollowConfig, StreamWindows
from ziggurat.runs.stream.window_encoder import window_folder
from ziggurat.runs.verify import verify_run
from ziggurat.runs.watermark import stream_watermark
from ziggurat.serving.export.published_folder import read_pointer
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import AverageOver
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import WindowRecord, WindowsFile, read_windows
from ziggurat.training.trainer import Trainer

OBSERVE = DAY / 4
AGAIN = 1 << 60


def lessons_of(frame: pl.DataFrame) -> list[tuple[int, int, float]]:
    """(window, row, label) of all that is trained, row by row from the definition; in any order."""
    days = sorted({(at - START) // DAY for at in frame["at"]})
    found: list[tuple[int, int, float]] = []

    def trained(moment: float, row: int, label: float) -> None:
        # A day without rows is no window: what may be trained in it is trained with the next.
        for number, day in enumerate(days, start=1):
            if (moment - START) // DAY <= day:
                found.append((number, row, label))
                return

    for row, (at, click, known) in enumerate(frame.select("at", "click", "known").iter_rows()):
        observed = at + OBSERVE
        if click and known <= observed:
            trained(observed, row, 1.0)
            continue
        trained(observed, row, 0.0)
        if click:
            trained(known, row, 1.0)
    return found


class Scores(Hook):
    """Keeps what the weights say of each window at the moment at which it is scored, by row."""

    def __init__(self) -> None:
        self.of_window: dict[int, dict[int, float]] = {}
        self.labelled: list[WindowRecord] = []

    def on_scored(self, trainer: Trainer, record: WindowRecord) -> None:
        data = EncodedDataset(window_folder(RunFolder(trainer.folder.path), record.window))
        found: dict[int, float] = {}
        trainer.model.eval()
        for batch in ordered_batches(data, batch_size=64).batches(epoch=0):
            assert torch.isnan(batch.labels).all()
            with torch.no_grad():
                scores = torch.sigmoid(trainer.model(batch))[:, 0].tolist()
            found |= dict(zip(batch.row_ids.tolist(), scores, strict=True))
        self.of_window[record.window] = found

    def on_labelled(self, trainer: Trainer, record: WindowRecord) -> None:
        del trainer
        self.labelled.append(record)


def log_loss_and_auc(scores: dict[int, float], frame: pl.DataFrame) -> tuple[float, float]:
    """In FP64, pair by pair."""
    clicks = frame["click"].to_list()
    loss = [-np.log(score if clicks[row] else 1.0 - score) for row, score in scores.items()]
    positives = [score for row, score in scores.items() if clicks[row]]
    negatives = [score for row, score in scores.items() if not clicks[row]]
    wins = [(one > other) + 0.5 * (one == other) for one in positives for other in negatives]
    return float(np.mean(loss)), float(np.mean(wins))


class Feeds(Said):
    """Gives the next file whenever the stream waits, and ends it when there is none."""

    def __init__(self, turns: list[Callable[[], None]]) -> None:
        super().__init__()
        self.turns = turns

    def say(self, text: str) -> None:
        super().say(text)
        if not text.startswith("waiting for"):
            return
        if self.turns:
            self.turns.pop(0)()
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def parts_of(log: pl.DataFrame, num: int, *, seed: int) -> list[pl.DataFrame]:
    cuts = [0, *np.sort(np.random.default_rng(seed).integers(1, log.height, num - 1)).tolist(), log.height]
    return [log[first:last] for first, last in itertools.pairwise(cuts) if last > first]


def turns_of(base: Path, frame: pl.DataFrame, *, seed: int, num_parts: int = 9) -> list[Callable[[], None]]:
    """Both logs file by file, each in its order, either of them ahead at random; the files are those of every seed."""
    labels = frame.drop_nulls("known").sort("known").select("id", "known")
    logs = {"rows": frame.drop("click", "known"), "labels": labels}
    turns: list[Callable[[], None]] = []
    queues: dict[str, list[Callable[[], None]]] = {}
    for name, log in logs.items():
        (base / name).mkdir(parents=True)
        queues[name] = []
        for number, part in enumerate(parts_of(log, num_parts, seed=3)):
            path = base / name / f"{number:02}.parquet"
            queues[name].append(lambda part=part, path=path: part.write_parquet(path))
    order = [name for name, queue in queues.items() for _ in queue][1:]
    random.Random(seed).shuffle(order)
    # Labels before the first row wait in their files, and nothing is said that would bring the next one.
    turns += [queues[name].pop(0) for name in ("rows", *order)]
    return turns


def fed(base: Path, frame: pl.DataFrame, *, seed: int, hooks: list[Hook]) -> tuple[StreamResult, Feeds]:
    feeds = Feeds(turns_of(base, frame, seed=seed))
    result = stream_run(
        config_of(base / "rows"),
        folder=base / "run",
        stream=StreamConfig(by="day", delay=delay_of(observe_s=OBSERVE)),
        labels=(str(base / "labels"),),
        follow=FollowConfig(poll_s=0.005, settle_s=0.0),
        progress=feeds,
        hooks=hooks,
    )
    return result, feeds


def test_scores_and_lessons_are_those_of_a_plain_loop_however_the_logs_are_interleaved(tmp_path: Path) -> None:
    frame = delayed_events(250, days=6)
    expected = sorted(lessons_of(frame))
    weights: list[dict[str, torch.Tensor]] = []
    waited_in_all = 0
    for seed in range(2):
        scores = Scores()
        rows = Rows()
        result, feeds = fed(tmp_path / str(seed), frame, seed=seed, hooks=[scores, rows])
        records = read_windows(tmp_path / str(seed) / "run/windows.jsonl")
        # Of the last row, which is days ahead, no window comes after it.
        assert [each.name for each in records] == [f"2000-05-0{day}" for day in range(1, 7)]
        trained = sorted((window, row % AGAIN, label) for window, row, label in rows.trained)
        assert trained == [each for each in expected if each[0] <= 6]
        for record in records[1:]:
            loss, auc = log_loss_and_auc(scores.of_window[record.window], frame)
            assert record.metrics["log_loss"] == pytest.approx(loss, rel=1e-5)
            assert record.metrics["auc"] == pytest.approx(auc, rel=1e-9)
        assert [each.metrics for each in scores.labelled] == [
            record.metrics for record in records if record.window in {each.window for each in scores.labelled}
        ]
        waited = sum("scored, labels until" in line for line in feeds.lines)
        assert waited == sum("labels complete" in line and "history" not in line for line in feeds.lines)
        waited_in_all += waited
        assert [each.window for each in result.windows] == list(range(1, 7))
        assert not list((tmp_path / str(seed) / "run/stream/answers").iterdir())
        assert verify_run(tmp_path / str(seed) / "run").good
        weights.append(weights_of(tmp_path / str(seed) / "run"))
    # Where labels are ahead no window waits.
    assert waited_in_all >= 1
    assert all(same(each, weights[0]) for each in weights)


def write_phase(base: Path, frame: pl.DataFrame, *, phase: int) -> None:
    """Write what has come by the end of day 2 + phase; some labels come a day late."""
    until = [START + day * DAY for day in (0, 2, 3, 4, 5, 100)]
    first, last = until[phase : phase + 2]
    for name in ("rows", "labels"):
        (base / name).mkdir(parents=True, exist_ok=True)
    rows = frame.filter((pl.col("at") >= first) & (pl.col("at") < last)).drop("click", "known")
    came = pl.when(pl.int_range(pl.len()) % 9 == 0).then(pl.col("known") + DAY).otherwise("known")
    labels = frame.drop_nulls("known").sort("known").with_columns(came=came)
    labels = labels.filter((pl.col("came") >= first) & (pl.col("came") < last)).select("id", "known")
    for name, part in (("rows", rows), ("labels", labels)):
        if not (base / name / f"{phase}.parquet").exists():
            part.write_parquet(base / name / f"{phase}.parquet")


def phase_config(base: Path) -> RunConfig:
    return config_of(base / "rows", average_over=AverageOver.WINDOW)


def live(base: Path, name: str, *, config: RunConfig | None = None, **more: Any) -> StreamResult:
    return stream_run(
        config or phase_config(base),
        folder=base / name,
        stream=StreamConfig(by="day", delay=delay_of(observe_s=OBSERVE)),
        labels=(str(base / "labels"),),
        **more,
    )


PHASES = 5


def all_phases(base: Path, frame: pl.DataFrame, name: str = "run", **more: Any) -> list[list[WindowRecord]]:
    """The records of all windows after each phase."""
    found: list[list[WindowRecord]] = []
    for phase in range(PHASES):
        write_phase(base, frame, phase=phase)
        live(base, name, **more)
        found.append(read_scored_windows(RunFolder(base / name)))
    return found


def test_a_window_is_judged_once_by_the_scores_of_its_end(tmp_path: Path) -> None:
    frame = delayed_events(400)
    phases = all_phases(tmp_path, frame)
    assert [sum(bool(each.labels_until) for each in records) for records in phases] == [2, 2, 2, 2, 1]
    first = {each.window: each for records in phases for each in reversed(records) if each.labels_until}
    for record in phases[-1][1:-1]:
        waited = first[record.window]
        assert not waited.metrics
        assert (waited.step, waited.rows, waited.unknown, waited.trained, waited.row_sum) == (
            record.step,
            record.rows,
            record.unknown,
            record.trained,
            record.row_sum,
        )
        assert (
            set(record.metrics) == set(record.averaged) == {"auc", "log_loss", "ne", "accuracy", "calibration", "ece"}
        )
    assert content_of(tmp_path / "run")[-1]["window"] == 5
    assert "wait for labels: 2000-05-12 until 2000-05-13 12:00:00" in (tmp_path / "run/report.html").read_text()
    # What waits counts: a window that was trained, and whose labels may still come, has rows that weights know.
    run = RunFolder(tmp_path / "run")
    assert stream_watermark(run, step=10_000).time == START + 11 * DAY
    assert verify_run(tmp_path / "run").good
    assert "behind the end of their window: " in (tmp_path / "run/run.log").read_text()


def test_versions_get_the_metrics_of_their_windows_when_labels_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = delayed_events(300)
    publish = PublishConfig(folder=str(tmp_path / "live"))
    known: list[list[bool]] = []
    for phase, dies in enumerate((False, False, False, True)):
        write_phase(tmp_path, frame, phase=phase)
        with monkeypatch.context() as patch:
            if dies:  # between the line of a window and the pointer
                patch.setattr(PublishWindows, "on_labelled", lambda *_: None)
            live(tmp_path, "run", publish=publish)
        known.append([bool(each.metrics) for each in read_pointer(tmp_path / "live").versions])
    records = {each.window: each for each in read_scored_windows(RunFolder(tmp_path / "run"))}
    num_judged = sum(bool(each.metrics) for each in records.values())
    assert known[0] == [False] * len(known[0]), "the history, and windows that wait"
    assert any(known[2])
    assert sum(known[3]) < num_judged
    live(tmp_path, "run", publish=publish)
    versions = read_pointer(tmp_path / "live").versions
    assert [each.metrics for each in versions] == [
        records[each.window].averaged or records[each.window].metrics for each in versions
    ]
    assert sum(bool(each.metrics) for each in versions) == num_judged


class MomentsOfScores(Moments):
    """Those at which scores that wait are written, known and judged, alone."""

    CALLS = (
        (waiting_windows, "write_answers"),
        (StreamWindows, "keep_answers"),
        (WindowsFile, "append"),
    )


def test_a_stream_that_dies_at_each_moment_of_its_scores_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = delayed_events(150)
    for base in (tmp_path / "whole", tmp_path / "cut"):
        write_phase(base, frame, phase=0)
        live(base, "run")
        for phase in (1, 2, 3):
            write_phase(base, frame, phase=phase)
    live(tmp_path / "whole", "run")
    deaths = 0
    with monkeypatch.context() as patch:
        moments = MomentsOfScores(patch)
        for left in itertools.count(1):
            moments.left = left
            try:
                live(tmp_path / "cut", "run")
                break
            except KeyboardInterrupt:
                deaths += 1
                moments.wait()
    assert deaths > 5
    assert len(moments.died_in) == 3
    assert_same_streams(tmp_path / "cut/run", tmp_path / "whole/run")


@pytest.mark.slow
def test_a_stream_that_dies_while_windows_wait_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = delayed_events(200)
    all_phases(tmp_path / "whole", frame)
    rng = random.Random(4)
    lives = 0
    waiting = 0
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        for phase in range(PHASES):
            write_phase(tmp_path / "cut", frame, phase=phase)
            while True:
                moments.left = rng.randint(8, 90)
                lives += 1
                try:
                    live(tmp_path / "cut", "run")
                    moments.left = 0
                    break
                except KeyboardInterrupt:
                    moments.wait()
                    waiting += any((tmp_path / "cut/run/stream/answers").glob("*.parquet"))
    assert lives > PHASES + 3
    assert waiting > 1
    assert "KeptRows.save" in moments.died_in
    assert_same_streams(tmp_path / "cut/run", tmp_path / "whole/run")
    names = [
        sorted(path.name for path in (tmp_path / each / "run/stream/answers").iterdir()) for each in ("cut", "whole")
    ]
    assert names[0] == names[1] == ["000006.parquet"]


def test_scores_that_are_harmed_are_refused_by_name_and_taken_when_they_are_restored(tmp_path: Path) -> None:
    frame = delayed_events(200)
    write_phase(tmp_path, frame, phase=0)
    live(tmp_path, "run")
    path = tmp_path / "run/stream/answers/000002.parquet"
    content = path.read_bytes()
    middle = len(content) // 3
    harms = {
        "other bytes": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "other bytes than": content[:-7],
        "no such file": None,
    }
    for found, harmed in harms.items():
        path.unlink()
        if harmed is not None:
            path.write_bytes(harmed)
        assert not verify_run(tmp_path / "run").good
        with pytest.raises(CheckpointError, match="the scores that window 2 was given at its end") as refused:
            live(tmp_path, "run")
        assert found in refused.value.found
        assert refused.value.where == str(path)
        assert any("from a copy" in way for way in refused.value.ways_out)
        path.write_bytes(content)
    assert verify_run(tmp_path / "run").good
    for phase in (1, 2):
        write_phase(tmp_path, frame, phase=phase)
    live(tmp_path, "run")
    records = read_scored_windows(RunFolder(tmp_path / "run"))
    assert [bool(each.metrics) for each in records] == [False, True, False, False]


def without_dropout(base: Path, *, world_size: int) -> RunConfig:
    config = config_of(base / "rows")
    model = zg.DLRMConfig(embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,)))
    loader = dataclasses.replace(config.training.loader, batch_size=32 // world_size)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, loader=loader))


class Labelled(Hook):
    """Keeps the windows whose labels became complete; called on every rank."""

    def __init__(self) -> None:
        self.windows: list[int] = []

    def on_labelled(self, trainer: Trainer, record: WindowRecord) -> None:
        del trainer
        assert record.window == 1 or record.metrics
        self.windows.append(record.window)


def phase_on_ranks(rank: int, base: str) -> list[int]:
    hook = Labelled()
    config = without_dropout(Path(base), world_size=2)
    live(Path(base), "ranks", config=config, hooks=[hook])
    return hook.windows


def test_two_ranks_score_and_judge_as_one_device_does(tmp_path: Path) -> None:
    frame = delayed_events(200)
    told: list[list[int]] = []
    for phases in ([0], [1, 2]):
        for phase in phases:
            write_phase(tmp_path, frame, phase=phase)
        live(tmp_path, "one", config=without_dropout(tmp_path, world_size=1))
        first, second = run_ranks(phase_on_ranks, 2, str(tmp_path), timeout_s=120.0)
        assert first == second
        told.append(first)
    assert told == [[], [1, 2]]
    ours = read_scored_windows(RunFolder(tmp_path / "one"))
    theirs = read_scored_windows(RunFolder(tmp_path / "ranks"))
    for first, second in zip(ours, theirs, strict=True):
        assert dataclasses.replace(second, metrics={}, timing={}) == dataclasses.replace(first, metrics={}, timing={})
        assert second.metrics == pytest.approx(first.metrics, rel=1e-3)
    assert verify_run(tmp_path / "ranks").good
