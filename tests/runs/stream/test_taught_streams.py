"""Streams with teachers: joined as the side table is when a window is opened, never from the future, and resumed so."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.runs.stream.harmed_parts import flip, remove, remove_version
from tests.runs.stream.test_killed_streams import Moments, assert_same_streams
from tests.runs.stream.test_stream_runs import DAY, SCHEMA, START, config_of, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids
from ziggurat.errors import DataError
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.stream.source import StreamWindows
from ziggurat.runs.stream.window_encoder import WindowEncoder
from ziggurat.runs.teachers.student import with_teacher
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.distillation import DistilConfig, Student
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.records.windows import read_windows
from ziggurat.training.trainer import Trainer

COLUMNS = ("user", "item", "at")
AUX = DistilConfig(head="aux-head", adapter=True, gradient_scaling=2.0)  # pyright: ignore[reportArgumentType]


def knows(
    table: Path, answers: pl.DataFrame, *, watermark: float, version: str, teacher: str = "seer", logit: float = 9.0
) -> Path:
    """Log what a teacher that knows the answers says of some rows."""
    facts = TeacherVersion(
        teacher=teacher,
        version=version,
        labels=("click",),
        are_probabilities=(True,),
        example_columns=COLUMNS,
        watermark=watermark,
        is_calendar=True,
    )
    logits = np.where(answers["click"].to_numpy() == 1, logit, -logit).astype(np.float32).reshape(-1, 1)
    return VersionFolder.begin(table, facts).write_part(example_ids(RawChunk.of(answers), COLUMNS), logits, None)


def student(base: Path, *files: Path, distil: DistilConfig = AUX, **training: Any) -> RunConfig:
    config = config_of(*(files or (base / "events.parquet",)), **training)
    return with_teacher(dataclasses.replace(config, distil=distil), base / "teacher")


def by_day(rows: pl.DataFrame) -> list[pl.DataFrame]:
    day = (rows["at"].to_numpy() - START) // DAY
    return [rows.filter(pl.Series(day == each)) for each in range(int(day.max()) + 1)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Rows of five days, and a teacher of before them that has scored three days of four in two versions."""
    rows = events(600)
    rows.write_parquet(tmp_path / "events.parquet")
    days = by_day(rows)
    table = tmp_path / "teacher"
    knows(table, pl.concat(days[:2]), watermark=START - 60.0, version="old", logit=1.0)
    knows(table, days[2][::2], watermark=START - 60.0, version="old", logit=1.0)
    knows(table, days[2], watermark=START + DAY * 1.5, version="new", logit=2.0)
    return tmp_path


class Seen(Hook):
    """Keeps what each step was taught, by row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: dict[int, float] = {}
        terms = Student.terms

        def kept(this: Student, outputs: Any, batch: Any) -> Any:
            told = batch.extras["teacher_seer_click"].reshape(-1).tolist()
            self.scores |= dict(zip(batch.row_ids.tolist(), told, strict=True))
            return terms(this, outputs, batch)

        monkeypatch.setattr(Student, "terms", kept)


def test_a_window_is_joined_with_the_newest_version_before_each_row(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day"))
    rows = pl.read_parquet(base / "events.parquet")
    days = (rows["at"].to_numpy() - START) // DAY
    strength = {0: 1.0, 1: 1.0, 2: 2.0}
    assert sorted(seen.scores) == list(range(600))
    for row, score in seen.scores.items():
        told = strength.get(int(days[row]))
        if told is None:
            assert np.isnan(score)
        else:
            sign = 1.0 if rows["click"][row] else -1.0
            assert score == pytest.approx(1 / (1 + np.exp(-sign * told)))
    records = read_windows(base / "live/windows.jsonl")
    taught = [record.teachers["seer"] for record in records]
    assert [each.share for each in taught] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [each.versions for each in taught] == [("old",), ("old",), ("new",), (), ()]
    third = rows.filter(pl.Series(days == 2))["at"].to_numpy()
    assert taught[2].age == pytest.approx(np.median(third - (START + 1.5 * DAY)))
    assert taught[2].oldest == pytest.approx(third.max() - (START + 1.5 * DAY))
    assert taught[3].age is None
    text = (base / "live/run.log").read_text()
    assert "teacher seer 100.0%, " in text
    assert "teacher seer 0.0%" in text
    assert text.count("warning: seer has scored no row of 2000-05-04") == 1
    assert "teacher seer" in (base / "live/report.html").read_text()


def test_rows_that_wait_for_their_labels_are_taught_when_they_are_trained(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pl.read_parquet(base / "events.parquet").with_columns(known=pl.col("at") + DAY // 2)
    rows.write_parquet(base / "events.parquet")
    seen = Seen(monkeypatch)
    delay = DelayConfig(policy=LabelDelay.WAIT, column="known")
    stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day", delay=delay))
    days = (rows["at"].to_numpy() - START) // DAY
    taught = {int(days[row]) for row, score in seen.scores.items() if not np.isnan(score)}
    untaught = {int(days[row]) for row, score in seen.scores.items() if np.isnan(score)}
    assert taught == {0, 1, 2}  # rows of the afternoon of day 2 are trained with day 3, by what was said of them
    assert untaught == {3, 4}


def test_a_teacher_that_knows_the_answers_does_not_leak_from_the_future(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a version that is there from the begin on, nor by one that is logged while the stream runs."""
    days = by_day(pl.read_parquet(base / "events.parquet"))
    shutil.rmtree(base / "teacher")
    noon = START + 2.5 * DAY
    knows(base / "teacher", pl.concat(days), watermark=noon, version="first")
    late = START + 4.25 * DAY
    opened = StreamWindows.open

    def opening(self: StreamWindows, number: int) -> Any:
        if number == 4 and not (base / "teacher/seer/second").exists():
            knows(base / "teacher", pl.concat(days), watermark=late, version="second", logit=3.0)
        return opened(self, number)

    monkeypatch.setattr(StreamWindows, "open", opening)
    seen = Seen(monkeypatch)
    stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day"))
    at = pl.read_parquet(base / "events.parquet")["at"].to_numpy()
    for row, score in seen.scores.items():
        certain = max(score, 1 - score)
        if at[row] <= noon:
            assert np.isnan(score)
        else:
            assert certain == pytest.approx(1 / (1 + np.exp(-9.0 if at[row] <= late else -3.0)))
    assert any(at[row] == late or at[row] > late for row in seen.scores)


def test_scores_of_a_window_see_nothing_of_its_teacher(base: Path) -> None:
    """Only what is trained before a window may know answers: its own are told after it was scored."""
    days = by_day(pl.read_parquet(base / "events.parquet"))
    shutil.rmtree(base / "teacher")
    knows(base / "teacher", days[0][:1], watermark=START - 60.0, version="one")
    distil = DistilConfig(head="single-head", loss_weight=5.0)  # pyright: ignore[reportArgumentType]
    stream_run(student(base, distil=distil), folder=base / "blind", stream=StreamConfig(by="day"))
    knows(base / "teacher", days[2], watermark=START - 60.0, version="one")
    stream_run(student(base, distil=distil), folder=base / "told", stream=StreamConfig(by="day"))
    blind = read_windows(base / "blind/windows.jsonl")
    told = read_windows(base / "told/windows.jsonl")
    assert [each.metrics for each in told[:3]] == [each.metrics for each in blind[:3]]
    assert told[3].metrics != blind[3].metrics


def live(base: Path, name: str, **changes: Any) -> None:
    stream_run(student(base, **changes), folder=base / name, stream=StreamConfig(by="day", growing=60))


def test_a_stream_that_dies_while_its_teacher_logs_ends_with_the_same_bits(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that was opened is joined as it was then, whatever has come since; the next one with what is there."""
    days = by_day(pl.read_parquet(base / "events.parquet"))
    table = base / "teacher"
    shutil.copytree(table, base / "as-it-was")
    opened = WindowEncoder.encode

    def encode(self: WindowEncoder, number: int, *args: Any, **kwargs: Any) -> Any:
        found = opened(self, number, *args, **kwargs)
        # Behind each window that was opened the teacher logs the rows of the next: a window sees what was there before.
        if 2 <= number < 5 and not (table / f"seer/v{number}").exists():
            knows(table, days[number], watermark=START + (number - 1) * DAY, version=f"v{number}", logit=number)
            knows(table, days[number - 1], watermark=START + (number - 2) * DAY, version=f"u{number}", logit=5.0)
        return found

    monkeypatch.setattr(WindowEncoder, "encode", encode)
    live(base, "whole")
    shutil.rmtree(table)
    shutil.copytree(base / "as-it-was", table)
    rng = random.Random(5)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(lambda: live(base, "cut"), rng=rng, least=1, most=26)
    assert lives > 6
    assert_same_streams(base / "cut", base / "whole", num_rows=600)
    versions = [each.teachers["seer"].versions for each in read_windows(base / "whole/windows.jsonl")]
    assert versions == [("old",), ("old",), ("new",), ("v3",), ("v4",)]
    first, second = (_student_weights(base / each) for each in ("whole", "cut"))
    assert len(first) > 6  # heads and adapters, and what their optimizer keeps
    assert same(first, second)


def _student_weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = CheckpointStore(folder / "checkpoints").load().tensors
    return {name: value for name, value in tensors.items() if ".student." in name}


class StopsIn(Hook):
    """Ends a stream inside of a window."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if made.step == self.step:
            trainer.stop("enough")


def _log_another(part: Path) -> None:
    """Log the version anew, with other scores: its own list has the digests of these."""
    version = VersionFolder.open(part.parent)
    ids, logits = version.logits_of(part)
    shutil.rmtree(part.parent)
    VersionFolder.begin(part.parents[2], version.facts).write_part(ids, logits + 1, None)


def _copy_by_another_program(part: Path) -> None:
    pl.read_parquet(part).write_parquet(part)


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (remove, "gone"),
        (remove_version, "gone"),
        (_log_another, "another content"),
        (_copy_by_another_program, "another content"),
        (flip, "another content"),
    ],
)
def test_what_a_half_trained_window_was_joined_with_must_be_there(
    base: Path, harm: Callable[[Path], None], found: str
) -> None:
    config = student(base, checkpoint_every=1)
    cut = stream_run(config, folder=base / "live", stream=StreamConfig(by="day"), hooks=[StopsIn(10)])
    assert cut.ended_early
    assert cut.windows[-1].name == "2000-05-03"
    shutil.copytree(base / "teacher", base / "kept")
    part = base / "teacher/seer/new/part-00000.parquet"
    harm(part)
    with pytest.raises(DataError, match=found) as error:
        stream_run(config, folder=base / "live", stream=StreamConfig(by="day"))
    assert "seer/new" in str(error.value)
    # What the lists of versions and of parts refuse is refused whatever the window.
    assert ("2000-05-03" in str(error.value)) is (harm in (remove, _log_another))
    # The way out: the part as it was; that an old version was taken away by now matters to nobody.
    shutil.rmtree(base / "teacher")
    shutil.copytree(base / "kept", base / "teacher")
    shutil.rmtree(base / "teacher/seer/old")
    (base / "teacher/versions.json").unlink()
    assert len(stream_run(config, folder=base / "live", stream=StreamConfig(by="day")).windows) == 5


def _add(part: Path) -> None:
    shutil.copy(part, part.with_name("part-00007.parquet"))


def _truncate(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-9])


def _take_from_another_version(part: Path) -> None:
    shutil.copy(part.parents[1] / "new/part-00000.parquet", part)


@pytest.mark.parametrize("harm", [remove, flip, _add, _truncate, _take_from_another_version])
def test_a_window_that_opens_for_the_first_time_is_joined_with_whole_versions_alone(
    base: Path, harm: Callable[[Path], None]
) -> None:
    config = student(base)
    shutil.copytree(base / "teacher", base / "kept")
    harm(base / "teacher/seer/old/part-00000.parquet")
    with pytest.raises(DataError, match=r"seer/old/part-0000\d\.parquet"):
        stream_run(config, folder=base / "live", stream=StreamConfig(by="day"))
    shutil.rmtree(base / "teacher")
    shutil.copytree(base / "kept", base / "teacher")
    assert len(stream_run(config, folder=base / "live", stream=StreamConfig(by="day")).windows) == 5


def test_a_teacher_that_comes_later_is_named_and_left_out(base: Path) -> None:
    cut = stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day"), hooks=[StopsIn(6)])
    assert cut.ended_early
    days = by_day(pl.read_parquet(base / "events.parquet"))
    knows(base / "teacher", pl.concat(days), watermark=START - 60.0, version="one", teacher="other")
    result = stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day"))
    assert [list(each.teachers) for each in result.windows] == [["seer"]] * 5
    assert "other" in (base / "live/run.log").read_text()


def test_a_version_that_knows_examples_by_columns_that_are_not_kept_is_refused(base: Path) -> None:
    facts = TeacherVersion(
        teacher="seer",
        version="other",
        labels=("click",),
        are_probabilities=(True,),
        example_columns=("session",),
        watermark=START - 60.0,
        is_calendar=True,
    )
    rows = pl.read_parquet(base / "events.parquet").with_columns(session=pl.int_range(600))
    rows.write_parquet(base / "events.parquet")
    config = student(base)
    stream_run(config, folder=base / "live", stream=StreamConfig(by="day"), hooks=[StopsIn(6)])
    ids = example_ids(RawChunk.of(rows), ("session",))
    VersionFolder.begin(base / "teacher", facts).write_part(ids, np.zeros((600, 1), dtype=np.float32), None)
    with pytest.raises(DataError, match="session"):
        stream_run(config, folder=base / "live", stream=StreamConfig(by="day"))
    shutil.rmtree(base / "teacher/seer/other")  # the way out: into another folder
    (base / "teacher/versions.json").unlink()
    assert len(stream_run(config, folder=base / "live", stream=StreamConfig(by="day")).windows) == 5


def test_examples_may_be_known_by_a_column_that_no_feature_reads(base: Path) -> None:
    shutil.rmtree(base / "teacher")
    rows = pl.read_parquet(base / "events.parquet").with_columns(session=pl.int_range(600))
    rows.write_parquet(base / "events.parquet")
    facts = TeacherVersion(
        teacher="seer",
        version="one",
        labels=("click",),
        are_probabilities=(True,),
        example_columns=("session",),
        watermark=START - 60.0,
        is_calendar=True,
    )
    ids = example_ids(RawChunk.of(rows[::3]), ("session",))
    VersionFolder.begin(base / "teacher", facts).write_part(ids, np.zeros((200, 1), dtype=np.float32), None)
    result = stream_run(student(base), folder=base / "live", stream=StreamConfig(by="day"))
    assert sum(each.rows * each.teachers["seer"].share for each in result.windows) == pytest.approx(200)


def on_ranks(rank: int, base: str) -> int:
    return stream_run(
        ranks_config(Path(base), world_size=2), folder=f"{base}/ranks", stream=StreamConfig(by="day")
    ).steps


def ranks_config(base: Path, *, world_size: int) -> RunConfig:
    """Without dropout, of which each rank would draw its own; the global batch is that of one device."""
    config = student(base)
    model = zg.DLRMConfig(embedding_dim=4, bottom=zg.MLPConfig(hidden_dims=(8,)), top=zg.MLPConfig(hidden_dims=(8,)))
    loader = dataclasses.replace(config.training.loader, batch_size=32 // world_size)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, loader=loader))


def test_two_ranks_are_taught_as_one_device_is(base: Path) -> None:
    one = stream_run(ranks_config(base, world_size=1), folder=base / "one", stream=StreamConfig(by="day"))
    assert run_ranks(on_ranks, 2, str(base), timeout_s=120.0) == [one.steps, one.steps]
    ours, theirs = (read_windows(base / each / "windows.jsonl") for each in ("one", "ranks"))
    for first, second in zip(ours, theirs, strict=True):
        assert second.teachers == first.teachers
        assert second.metrics == pytest.approx(first.metrics, rel=1e-4)
    found = weights_of(base / "ranks")
    for name, weight in weights_of(base / "one").items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)


def test_a_teacher_that_weighs_nothing_changes_no_bit(base: Path) -> None:
    """Rows, order, scores and weights are those of a stream without one."""
    none = DistilConfig(head="aux-head", loss_weight=0.0)  # pyright: ignore[reportArgumentType]
    stream_run(student(base, distil=none), folder=base / "taught", stream=StreamConfig(by="day"))
    stream_run(config_of(base / "events.parquet"), folder=base / "plain", stream=StreamConfig(by="day"))
    assert same(weights_of(base / "taught"), weights_of(base / "plain"))
    taught = [
        {name: value for name, value in line.items() if name != "teachers"} for line in content_of(base / "taught")
    ]
    plain = [{name: value for name, value in line.items() if name != "teachers"} for line in content_of(base / "plain")]
    assert taught == plain


def test_the_verb_takes_a_teacher_and_goes_on_with_it(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    zg.write_schema(SCHEMA, "my.toml")
    given = ["stream", "table_dnn", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "live"]
    given += ["--threads", "1", "--dim", "4", "--model.embedding.kernel", "torch", "--precision", "fp32"]
    assert main([*given, "--until", "2000-05-04", "--teacher", "teacher", "--distil", "aux-head"]) == 0
    assert "teacher seer 100.0%" in capsys.readouterr().err
    knows(Path("teacher"), by_day(pl.read_parquet("events.parquet"))[3], watermark=START - 60.0, version="more")
    # The same command, and one that leaves out what the stream knows.
    again = [*given, "--until", "2000-05-04"]
    assert main([*again, "--teacher", "teacher", "--distil", "aux-head"]) == 0
    assert main(again) == 0
    capsys.readouterr()
    assert main([*given, "--out", "other", "--teacher", "teacher"]) == 2
    assert "--distil aux-head" in capsys.readouterr().err
    # Nothing of the teacher is wanted from who scores files.
    assert main(["evaluate", "live", "events.parquet"]) == 0
