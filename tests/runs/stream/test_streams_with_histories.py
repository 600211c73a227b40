"""Streams that read a teacher's vectors of a user's earlier rows: as batch runs do, whatever is logged meanwhile."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.killing import kill_after, mark_begin, wait_for_begin
from tests.runs.stream.harmed_parts import flip, remove, remove_version
from tests.runs.stream.test_killed_streams import Moments, assert_same_streams
from tests.runs.stream.test_stream_runs import DAY, SCHEMA, START, config_of, events, weights_of
from tests.runs.stream.test_taught_streams import StopsIn, by_day
from ziggurat.cli.main import main
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.data.teachers.history import keys_of
from ziggurat.data.teachers.join import joined_histories
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids
from ziggurat.errors import ConfigError, DataError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.vector_histories import unpack_histories
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.stream.publish import PublishConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.stream.window_encoder import WindowEncoder
from ziggurat.runs.teachers.student import TeacherHistoryConfig, with_teacher
from ziggurat.testing.ranks import preload, run_ranks
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

COLUMNS = ("user", "item", "at")
BY_DAY = StreamConfig(by="day")
LENGTH = 3
COLUMN = "teacher:seer:vectors"

_context = mp.get_context("forkserver")


def logs(
    table: Path, rows: pl.DataFrame, vectors: np.ndarray, *, watermark: float, version: str, key: str = "user"
) -> Path:
    """Log vectors of some rows as one part, and scores that say nothing."""
    facts = TeacherVersion(
        teacher="seer",
        version=version,
        labels=("click",),
        are_probabilities=(True,),
        example_columns=COLUMNS,
        watermark=watermark,
        is_calendar=True,
        vectors="bf16",
        vector_dim=vectors.shape[1],
        history_key=key,
    )
    chunk = RawChunk.of(rows)
    coded = RowFormat.named("bf16").encode(torch.from_numpy(vectors).float())
    return VersionFolder.begin(table, facts).write_part(
        example_ids(chunk, COLUMNS),
        np.zeros((len(rows), 1), dtype=np.float32),
        coded.reshape(-1).view(torch.uint8).reshape(len(rows), -1).numpy(),
        keys=keys_of(chunk, key),
        times=rows["at"].to_numpy().astype(np.float64),
    )


def vectors_of(rows: pl.DataFrame, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(rows), 2)).astype(np.float32)


def student(base: Path, *, head: DistilHead = DistilHead.NONE, length: int = LENGTH, **training: Any) -> RunConfig:
    config = dataclasses.replace(config_of(base / "events.parquet", **training), distil=DistilConfig(head=head))
    history = TeacherHistoryConfig(key="user", length=length)
    return with_teacher(config, base / "teacher", history=history, is_stream=True)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Rows of five days, of which many share a second; two versions in several parts that have examples in common."""
    rows = events(400).with_columns(pl.col("at") // 1800 * 1800)
    rows.write_parquet(tmp_path / "events.parquet")
    table = tmp_path / "teacher"
    for number, day in enumerate(by_day(rows)):
        logs(table, day, vectors_of(day, seed=number), watermark=START - 60.0, version="old")
        if number >= 2:
            logs(table, day[::2], vectors_of(day[::2], seed=9), watermark=START + 1.5 * DAY, version="new")
    return tmp_path


class Reads(Hook):
    """Keeps the packed history that each row was trained with."""

    def __init__(self) -> None:
        self.words: dict[int, torch.Tensor] = {}

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        [words] = made.batch.vectors.values()
        self.words |= dict(zip(made.batch.row_ids.tolist(), words.clone(), strict=True))


def test_a_stream_reads_what_a_batch_run_reads_bit_for_bit(base: Path) -> None:
    reads = Reads()
    config = student(base, head=DistilHead.AUX_HEAD)
    result = stream_run(config, folder=base / "live", stream=BY_DAY, hooks=[reads])
    data = dataclasses.replace(config.data, split=zg.SplitConfig(by=zg.SplitBy.FILES))
    prepared = prepare_run(dataclasses.replace(config, data=data))
    [spec] = prepared.inputs.vector_histories
    assert spec.history is not None
    lengths: dict[int, int] = {}
    for index in range(len(prepared.train.group_sizes)):
        group = prepared.train.read_group(index)
        words = group.column(spec.name).combine_chunks().flatten().to_numpy().reshape(group.num_rows, -1)
        for row, expected in zip(group.column("row:").to_pylist(), words, strict=True):
            assert reads.words[row].tolist() == expected.tolist()
            lengths[row] = int(expected[0])
    assert len(lengths) == len(reads.words) == 400
    assert set(lengths.values()) == set(range(LENGTH + 1))
    # The records count them: of all rows, and of those that have a history.
    read = [window.histories["seer"] for window in result.windows]
    known = sum(length > 0 for length in lengths.values())
    assert sum(window.rows * each.share for window, each in zip(result.windows, read, strict=True)) == pytest.approx(
        known
    )
    vectors = sum(window.rows * each.share * each.length for window, each in zip(result.windows, read, strict=True))
    assert vectors == pytest.approx(sum(lengths.values()))
    assert [each.versions for each in read] == [("old",), ("old",), *[("new", "old")] * 3]
    assert read[0].age is not None
    assert 1800 <= read[0].age < DAY
    assert [window.teachers["seer"].share for window in result.windows] == [1.0] * 5
    text = (base / "live/run.log").read_text()
    assert f"history seer {read[1].share:.1%} of {read[1].length:.1f} vectors, " in text
    report = (base / "live/report.html").read_text()
    assert "had a history of vectors of teacher seer" in report
    # Files are scored by the same vectors, and the windows were.
    run = zg.load_run(base / "live")
    assert np.isfinite(run.evaluate([str(base / "events.parquet")]).metrics["log_loss"])


def test_vectors_that_hold_the_answers_do_not_leak_from_the_future(base: Path) -> None:
    """A row reads answers of earlier seconds alone, by versions of before it, whenever they were logged."""
    rows = pl.read_parquet(base / "events.parquet")
    shutil.rmtree(base / "teacher")
    answers = np.stack([rows["click"].to_numpy(), rows["at"].to_numpy() - START], axis=1).astype(np.float32)
    noon = START + 2.5 * DAY
    logs(base / "teacher", rows, answers, watermark=noon, version="seer")
    reads = Reads()
    config = student(base, length=40)
    stream_run(config, folder=base / "live", stream=BY_DAY, hooks=[reads])
    [feature] = joined_histories(config.table_schema)
    at = rows["at"].to_numpy()
    user = rows["user"].to_numpy()
    for row, words in reads.words.items():
        vectors, is_there = unpack_histories(words.unsqueeze(0), history=feature.history)
        own = vectors[0][is_there[0]].numpy()
        before = np.flatnonzero((user == user[row]) & (at < at[row])) if at[row] > noon else np.empty(0, int)
        rounded = torch.from_numpy(answers[before]).bfloat16().float().numpy()
        assert sorted(map(tuple, own)) == sorted(map(tuple, rounded))
    assert any(int(words[0]) > 3 for words in reads.words.values())


def live_beside_a_teacher(folder: str) -> None:
    """Stream to the end; behind each window that is opened the teacher logs the next ones, of a window once."""
    base = Path(folder).parent
    mark_begin(base)
    days = by_day(pl.read_parquet(base / "events.parquet"))
    encode = WindowEncoder.encode

    def and_log(self: WindowEncoder, number: int, *args: Any, **kwargs: Any) -> Any:
        found = encode(self, number, *args, **kwargs)
        for version, watermark in (("old", START - 60.0), ("new", START + 1.5 * DAY)):
            path = base / "teacher/seer" / version
            while (len(VersionFolder.open(path).parts) if path.exists() else 0) < number < len(days):
                # The newest version also scores days again that the window before had from the old one.
                part = len(VersionFolder.open(path).parts) if path.exists() else 0
                rows = days[part + 1 if version == "old" else part]
                logs(base / "teacher", rows, vectors_of(rows, seed=part), watermark=watermark, version=version)
        return found

    WindowEncoder.encode = and_log
    try:
        config = student(base, head=DistilHead.AUX_HEAD)
        stream_run(config, folder=folder, stream=StreamConfig(by="day", growing=60))
    finally:
        WindowEncoder.encode = encode


def at_the_begin(base: Path) -> None:
    """Leave of the side table what is there when the stream begins."""
    shutil.rmtree(base / "teacher")
    rows = by_day(pl.read_parquet(base / "events.parquet"))[0]
    logs(base / "teacher", rows, vectors_of(rows), watermark=START - 60.0, version="old")


def test_a_stream_that_dies_while_its_teacher_logs_vectors_ends_with_the_same_bits(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_begin(base)
    live_beside_a_teacher(str(base / "whole"))
    versions = [each.histories["seer"].versions for each in read_windows(base / "whole/windows.jsonl")]
    assert versions == [("old",), *[("new", "old")] * 4]
    at_the_begin(base)
    rng = random.Random(3)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(lambda: live_beside_a_teacher(str(base / "cut")), rng=rng, least=1, most=40)
    assert lives > 4
    assert_same_streams(base / "cut", base / "whole", num_rows=400)


@pytest.mark.slow
def test_a_stream_is_killed_beside_a_teacher_that_logs_vectors(base: Path) -> None:
    at_the_begin(base)
    begin = time.monotonic()
    live_beside_a_teacher(str(base / "whole"))
    # Of a life on this machine, as busy as it is: later ones go on, and are shorter.
    life_s = time.monotonic() - begin
    at_the_begin(base)
    preload("tests.runs.stream.test_streams_with_histories")
    rng = random.Random(1)
    kills = 0
    while True:
        process = _context.Process(target=live_beside_a_teacher, args=(str(base / "cut"),))
        process.start()
        wait_for_begin(process, base)
        if not kill_after(process, rng.uniform(0.0, life_s / 4 if kills < 12 else 300.0), longest_s=300.0):
            break
        kills += 1
    assert kills > 3
    assert_same_streams(base / "cut", base / "whole", num_rows=400)


def _log_other_vectors(part: Path) -> None:
    """Log the version anew with other vectors and the same scores."""
    version = VersionFolder.open(part.parent)
    ids, logits = version.logits_of(part)
    _, keys, times = version.owners_of(part)
    vectors = version.vectors_of(part)
    shutil.rmtree(part.parent)
    VersionFolder.begin(part.parents[2], version.facts).write_part(ids, logits, vectors ^ 1, keys=keys, times=times)


@pytest.mark.parametrize("harm", [remove, remove_version, _log_other_vectors, flip])
def test_the_vectors_of_a_half_trained_window_must_be_there(base: Path, harm: Callable[[Path], None]) -> None:
    config = student(base, checkpoint_every=1)
    cut = stream_run(config, folder=base / "live", stream=BY_DAY, hooks=[StopsIn(8)])
    assert cut.ended_early
    assert cut.windows[-1].name == "2000-05-03"
    shutil.copytree(base / "teacher", base / "kept")
    part = base / "teacher/seer/new/part-00000.parquet"
    harm(part)
    with pytest.raises(DataError, match="gone" if "remove" in harm.__name__ else "another content") as error:
        stream_run(config, folder=base / "live", stream=BY_DAY)
    assert "seer/new" in str(error.value)
    shutil.rmtree(base / "teacher")
    shutil.copytree(base / "kept", base / "teacher")
    assert len(stream_run(config, folder=base / "live", stream=BY_DAY).windows) == 5


def test_a_version_that_does_not_fit_is_refused_until_it_is_taken_away(base: Path) -> None:
    config = student(base)
    stream_run(config, folder=base / "live", stream=BY_DAY, hooks=[StopsIn(5)])
    rows = pl.read_parquet(base / "events.parquet")
    logs(base / "teacher", rows, np.ones((len(rows), 5), np.float32), watermark=START - 9.0, version="wide")
    with pytest.raises(DataError, match="5 numbers in bf16") as error:
        stream_run(config, folder=base / "live", stream=BY_DAY)
    (way,) = [way for way in error.value.ways_out if "mv " in way]
    command = way.partition(": ")[2].replace("ELSEWHERE", str(base / "elsewhere"))
    subprocess.run(["sh", "-c", command], check=True)
    assert len(stream_run(config, folder=base / "live", stream=BY_DAY).windows) == 5


def test_a_published_version_has_the_histories_of_its_moment(base: Path) -> None:
    at_the_begin(base)
    rows = pl.read_parquet(base / "events.parquet")
    days = by_day(rows)
    settings = PublishConfig(folder=str(base / "published"), keep=100, max_delta_share=100.0)
    ends: list[int] = []

    class Logs(Hook):
        """Logs a day behind each window, before it is published."""

        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            number = trainer.position.window
            if number not in ends and number < len(days):
                ends.append(number)
                logs(base / "teacher", days[number], vectors_of(days[number]), watermark=START - 60.0, version="old")

    stream_run(student(base), folder=base / "live", stream=BY_DAY, publish=settings, hooks=[Logs()])
    run = zg.load_run(base / "live")
    served = zg.Recommender.load(base / "published")
    users = [*sorted(set(rows["user"])), "nobody"]
    asked = pl.DataFrame({"user": users, "item": [1] * len(users), "age": [0.0] * len(users)})
    ranker = served.chain.needed_ranker
    found = ranker.score_rows(asked.to_dicts())[:, 0].numpy()
    wanted = run.predict(asked.with_columns(at=pl.lit(START + 90 * DAY)))
    assert isinstance(wanted, pl.DataFrame)
    assert found == pytest.approx(wanted["click"].to_numpy(), abs=1e-6)
    none = ranker.score_rows([{**row, COLUMN: []} for row in asked.to_dicts()])[:, 0].numpy()
    assert np.abs(none - found)[:-1].max() > 1e-4
    [first] = (base / "published/versions").glob("*1/ranker/histories/*/keys.npy")
    [last] = (base / "published/versions").glob("*5/ranker/histories/*/keys.npy")
    assert len(np.load(first)) < len(np.load(last)) == rows["user"].n_unique()


def on_ranks(rank: int, base: str) -> int:
    return stream_run(ranks_config(Path(base), world_size=2), folder=f"{base}/ranks", stream=BY_DAY).steps


def ranks_config(base: Path, *, world_size: int) -> RunConfig:
    config = student(base)
    model = zg.DLRMConfig(embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,)))
    loader = dataclasses.replace(config.training.loader, batch_size=32 // world_size)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, loader=loader))


def test_two_ranks_read_what_one_device_reads(base: Path) -> None:
    one = stream_run(ranks_config(base, world_size=1), folder=base / "one", stream=BY_DAY)
    assert run_ranks(on_ranks, 2, str(base), timeout_s=240.0) == [one.steps, one.steps]
    for first, second in zip(*(read_windows(base / each / "windows.jsonl") for each in ("one", "ranks")), strict=True):
        assert second.histories == first.histories
        assert second.metrics == pytest.approx(first.metrics, rel=1e-4)
    found = weights_of(base / "ranks")
    for name, weight in weights_of(base / "one").items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)


def test_the_verb_takes_a_history_and_goes_on_with_it(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    zg.write_schema(SCHEMA, "my.toml")
    given = ["stream", "table_dnn", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "live"]
    given += ["--threads", "1", "--dim", "4", "--model.embedding.kernel", "torch", "--precision", "fp32"]
    history = ["--teacher", "teacher", "--teacher-history", "user", "--teacher-history-length", "2"]
    assert main([*given, *history[2:], "--out", "none"]) == 2
    assert "and no --teacher" in capsys.readouterr().err
    assert main([*given, "--until", "2000-05-04", *history]) == 0
    assert "history seer " in capsys.readouterr().err
    rows = pl.read_parquet("events.parquet")
    logs(Path("teacher"), rows, vectors_of(rows), watermark=START + 2 * DAY, version="later")
    assert main([*given, "--until", "2000-05-04", *history]) == 0
    assert main([*given, "--until", "2000-05-04"]) == 0  # it knows what it began with
    capsys.readouterr()
    assert main([*given, "--until", "2000-05-04", *history[:-1], "3"]) == 2
    assert "length" in capsys.readouterr().err
    assert main(["evaluate", "live", "events.parquet"]) == 0
    assert main(["export", "live", "--out", "served"]) == 0


def test_a_stream_that_began_without_a_history_refuses_one(base: Path) -> None:
    plain = config_of(base / "events.parquet")
    stream_run(plain, folder=base / "live", stream=BY_DAY, hooks=[StopsIn(5)])
    with pytest.raises(ConfigError):
        stream_run(student(base), folder=base / "live", stream=BY_DAY)
