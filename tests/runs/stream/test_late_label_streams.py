"""Streams of rows and of labels in files of their own: what is trained, through kills, and from the command line."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.killing import kill_after, mark_begin, wait_for_begin
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_stream_runs import SCHEMA, START, Said, config_of, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.streams.journal import JournalFile
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.runs.stream.source import FollowConfig
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import preload
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

_context = mp.get_context("forkserver")
DAY = 86_400
REACH = 1.5 * DAY
MAX_LIFE_S = 120.0
KILLS = 12


def delayed_events(num_rows: int, *, days: int = 5, seed: int = 0) -> pl.DataFrame:
    """Rows in order of time with both: labels that are positives have a time; the last row is days behind."""
    frame = events(num_rows, days=days, seed=seed).sort("at")
    rng = np.random.default_rng(seed + 100)
    is_last = pl.int_range(num_rows) == num_rows - 1
    frame = frame.with_columns(
        at=pl.when(is_last).then(START + 11 * DAY).otherwise("at"), click=pl.when(is_last).then(1).otherwise("click")
    )
    known = pl.col("at") + pl.Series(rng.integers(0, int(REACH), num_rows))
    ids = pl.Series("id", [f"e{row}" for row in range(num_rows)])
    return frame.with_columns(ids, known=pl.when(pl.col("click") == 1).then(known))


def write_logs(base: Path, frame: pl.DataFrame, *, num_files: int = 3) -> None:
    """Write the folders `rows` and `labels`, and one file with both beside."""
    frame.write_parquet(base / "both.parquet")
    labels = frame.drop_nulls("known").sort("known").select("id", "known")
    for name, log in (("rows", frame.drop("click", "known")), ("labels", labels)):
        (base / name).mkdir()
        for number, part in enumerate(log.iter_slices(-(-log.height // num_files))):
            part.write_parquet(base / name / f"{number}.parquet")


def delay_of(policy: LabelDelay = LabelDelay.CORRECT, *, key: str = "id", **more: Any) -> DelayConfig:
    return DelayConfig(policy=policy, column="known", key=key, attribution_s=REACH, **more)


def live(base: str, name: str = "run", **more: Any) -> StreamResult:
    folder = Path(base)
    return stream_run(
        config_of(folder / "rows"),
        folder=folder / name,
        stream=StreamConfig(by="day", delay=delay_of(observe_s=DAY / 4)),
        labels=(str(folder / "labels"),),
        **more,
    )


class Rows(Hook):
    """Keeps row ids and labels of every step, by window."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, int, float]] = []

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        labels = made.batch.labels[:, 0].tolist()
        rows = made.batch.row_ids.tolist()
        window = trainer.position.window
        self.trained += [(window, row, label) for row, label in zip(rows, labels, strict=True)]


def test_two_logs_are_trained_as_one_file_with_both(tmp_path: Path) -> None:
    write_logs(tmp_path, delayed_events(500))
    ours = Rows()
    said = Said()
    live(str(tmp_path), hooks=[ours], progress=said)
    theirs = Rows()
    delay = delay_of(key="", observe_s=DAY / 4)
    stream_run(
        config_of(tmp_path / "both.parquet"),
        folder=tmp_path / "one",
        stream=StreamConfig(by="day", delay=delay),
        hooks=[theirs],
    )
    first = read_scored_windows(RunFolder(tmp_path / "run"))
    second = read_windows(tmp_path / "one/windows.jsonl")
    assert [each.name for each in first] == [each.name for each in second]
    assert sorted(ours.trained) == sorted(theirs.trained)
    for one, other in zip(first, second, strict=True):
        assert (one.rows, one.trained, one.row_sum) == (other.rows, other.trained, other.row_sum)
    assert [each.labelled for each in first[:-1]] == [each.labelled for each in second[:-1]]
    assert first[-1].labels_until == "2000-05-13 12:00:00"  # of the last row nobody knows yet
    assert not first[-1].metrics
    assert all(not each.labels_until and each.metrics.keys() == second[-2].metrics.keys() for each in first[1:-1])
    assert sum(each.trained["corrected"] for each in first) > 20
    assert verify_run(tmp_path / "run").good
    assert any("labels of 1 rows may still come" in line for line in said.lines), said.lines
    assert any("scored, labels until 2000-05-13 12:00:00" in line for line in said.lines), said.lines


def test_bits_do_not_depend_on_how_the_same_rows_are_cut_into_files(tmp_path: Path) -> None:
    """Of messages it is chance which of them are taken together, and after a kill it may be otherwise."""
    frame = delayed_events(200, days=4)
    for name, num_files in (("one", 1), ("five", 5)):
        (tmp_path / name).mkdir()
        write_logs(tmp_path / name, frame, num_files=num_files)
        live(str(tmp_path / name))
    assert_same_streams(tmp_path / "one/run", tmp_path / "five/run")
    # And of one log with both columns, of which the same rows are in the same order.
    (tmp_path / "both").mkdir()
    for number, part in enumerate(frame.iter_slices(70)):
        part.write_parquet(tmp_path / f"both/{number}.parquet")
    delay = delay_of(key="", observe_s=DAY / 4)
    for name, source in (("cut", tmp_path / "both"), ("whole", tmp_path / "one/both.parquet")):
        stream_run(config_of(source), folder=tmp_path / name, stream=StreamConfig(by="day", delay=delay))
    assert_same_streams(tmp_path / "cut", tmp_path / "whole")
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "one/run"))


def test_a_stream_goes_on_with_rows_and_labels_that_have_come_since(tmp_path: Path) -> None:
    frame = delayed_events(400)
    write_logs(tmp_path, frame, num_files=1)
    live(str(tmp_path), "whole")
    rows = pl.read_parquet(tmp_path / "rows/0.parquet")
    labels = pl.read_parquet(tmp_path / "labels/0.parquet")
    first = START + 3 * DAY
    rows.filter(pl.col("at") < first).write_parquet(tmp_path / "rows/0.parquet")
    labels.filter(pl.col("known") < first).write_parquet(tmp_path / "labels/0.parquet")
    before = live(str(tmp_path))
    assert [bool(each.labels_until) for each in before.windows] == [False, True, True]
    rows.filter(pl.col("at") >= first).write_parquet(tmp_path / "rows/1.parquet")
    labels.filter(pl.col("known") >= first).write_parquet(tmp_path / "labels/1.parquet")
    live(str(tmp_path))
    assert [each.trained for each in read_windows(tmp_path / "run/windows.jsonl")] == [
        each.trained for each in read_windows(tmp_path / "whole/windows.jsonl")
    ]
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))


def test_files_that_have_arrived_and_are_harmed_are_refused_by_name(tmp_path: Path) -> None:
    """Checksums of pages cover no footer: one flipped bit there had labels read as fewer, without an error."""
    frame = delayed_events(300)
    write_logs(tmp_path, frame, num_files=1)
    logs = {name: pl.read_parquet(tmp_path / name / "0.parquet") for name in ("rows", "labels")}
    first = START + 3 * DAY
    for name, column in (("rows", "at"), ("labels", "known")):
        early = logs[name].filter(pl.col(column) < first)
        (tmp_path / name / "0.parquet").unlink()
        for number, part in enumerate(early.iter_slices(-(-early.height // 3))):
            part.write_parquet(tmp_path / name / f"0{number}.parquet")
    live(str(tmp_path))
    for name, column in (("rows", "at"), ("labels", "known")):
        logs[name].filter(pl.col(column) >= first).write_parquet(tmp_path / name / "9.parquet")
    shutil.copytree(tmp_path / "run", tmp_path / "intact")
    live(str(tmp_path), "intact")
    kinds: dict[str, list[str]] = {}
    for path in sorted((tmp_path / "run/stream/arrived").iterdir()):
        kinds.setdefault(re.sub(r"\d+", "", path.stem), []).append(path.name)
    assert {"", "-keys", "labels-"} <= kinds.keys()
    refused = Counter[str]()
    for kind, names in kinds.items():
        for harm in ("flip", "swap", "remove"):
            if harm == "swap" and len(names) < 2:
                continue
            harmed = tmp_path / f"harmed{kind}-{harm}"
            shutil.copytree(tmp_path / "run", harmed)
            part = harmed / "stream/arrived" / names[-1]
            content = bytearray(part.read_bytes())
            content[-20] ^= 1  # in the footer
            part.unlink()
            if harm == "flip":
                part.write_bytes(content)
            elif harm == "swap":
                shutil.copy(harmed / "stream/arrived" / names[0], part)
            assert not verify_run(harmed).good
            refusal = None
            try:
                live(str(tmp_path), harmed.name)
            except CheckpointError as error:
                refusal = error
            if refusal is None:  # rows that were trained, and are kept for a checkpoint from before
                assert same(weights_of(harmed), weights_of(tmp_path / "intact"))
                continue
            assert refusal.where == str(part)
            refused[harm] += 1
    assert refused["flip"] >= 3, refused
    assert refused["swap"] >= 3, refused
    live(str(tmp_path))
    assert same(weights_of(tmp_path / "run"), weights_of(tmp_path / "intact"))
    assert verify_run(tmp_path / "run").good
    journal = JournalFile(tmp_path / "run/stream").read()
    assert journal is not None
    assert journal.digests.keys() == {path.name for path in (tmp_path / "run/stream/arrived").iterdir()}


def assert_same_streams(folder: Path, whole: Path) -> None:
    assert content_of(folder) == content_of(whole)
    assert same(weights_of(folder), weights_of(whole))
    assert (folder / "ledger.bin").read_bytes() == (whole / "ledger.bin").read_bytes()
    assert verify_run(folder).good


def test_a_stream_of_two_logs_that_dies_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_logs(tmp_path, delayed_events(400))
    live(str(tmp_path), "whole")
    rng = random.Random(4)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(lambda: live(str(tmp_path), "cut"), rng=rng, least=4, most=60, waits=True)
    assert lives > 4
    assert {"KeptRows.save", "RowSpool.write"} & moments.died_in, moments.died_in
    assert_same_streams(tmp_path / "cut", tmp_path / "whole")


def live_marked(base: str, name: str) -> None:
    mark_begin(Path(base))
    live(base, name)


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path: Path) -> None:
    preload()
    write_logs(tmp_path, delayed_events(600), num_files=4)
    live(str(tmp_path), "first")
    begin = time.monotonic()
    live(str(tmp_path), "whole")
    longest_s = time.monotonic() - begin
    rng = random.Random(6)
    kills = 0
    streams = 0
    while kills < KILLS:
        streams += 1
        name = f"cut-{streams}"
        while kills < KILLS:
            process = _context.Process(target=live_marked, args=(str(tmp_path), name))
            process.start()
            wait_for_begin(process, tmp_path)
            if not kill_after(process, rng.uniform(0.0, longest_s), longest_s=MAX_LIFE_S):
                break
            kills += 1
        live(str(tmp_path), name)
        assert_same_streams(tmp_path / name, tmp_path / "whole")
    print(f"\n{kills} kills, {streams} streams: all ended as the one that was left alone")


def test_quiet_logs_are_called_whole_where_windows_may_be(tmp_path: Path) -> None:
    """Without a record behind them labels of the last days would never be called over."""
    frame = delayed_events(300)[:-1]
    write_logs(tmp_path, frame)
    follow = FollowConfig(poll_s=0.01, settle_s=0.05, idle_close_s=0.2)
    result = live(str(tmp_path), follow=follow, hooks=[EndsIn(2)])
    assert result.ended_early
    assert [each.name for each in result.windows] == ["2000-05-01", "2000-05-02"]


class EndsIn(Hook):
    """Asks its own process to end, in a window."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        del made
        if trainer.position.window == self.number:
            self.number = 0  # a second signal would end the process at once
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("delay", "labels", "match"),
    [
        (DelayConfig(), ("labels",), "--delay wait, assume-negative or correct, with labels that have records"),
        (delay_of(key=""), ("labels",), "no --label-key"),
        (delay_of(), (), "no --labels"),
    ],
)
def test_halves_of_settings_are_refused(
    tmp_path: Path, delay: DelayConfig, labels: tuple[str, ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        stream_run(
            config_of(tmp_path / "rows"),
            folder=tmp_path / "run",
            stream=StreamConfig(by="day", delay=delay),
            labels=labels,
        )


def test_the_command_line_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_logs(tmp_path, delayed_events(300))
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    command = ["stream", "table_dlrm", "--data.train", "rows/", "--schema", "my.toml", "--by", "day", "--out", "run"]
    labels = ["--labels", "labels/", "--label-key", "id", "--label-time", "known", "--delay", "wait"]
    assert main([*command, *labels]) == 2
    assert "the seconds in which a positive may come" in capsys.readouterr().err
    assert main([*command, *labels, "--attribution-s", str(REACH)]) == 0
    log = Path("run/run.log").read_text()
    for words in ("labels of 3 new files", "by id", "labels of 1 rows may still come"):
        assert words in log, words
    assert main([*command, *labels, "--attribution-s", str(REACH)]) == 0
    capsys.readouterr()
    other = [word if word != "id" else "user" for word in labels]
    assert main([*command, *other, "--attribution-s", str(REACH)]) == 2
    assert "--label-key id, given user" in capsys.readouterr().err


def test_a_history_whose_labels_may_still_come_is_said(tmp_path: Path) -> None:
    write_logs(tmp_path, delayed_events(100, days=1)[:-1])
    result = live(str(tmp_path))
    assert [(each.name, bool(each.labels_until)) for each in result.windows] == [("2000-05-01", True)]
