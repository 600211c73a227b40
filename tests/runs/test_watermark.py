"""The watermark of a run is never before the newest row that its weights have learned from, whoever trained it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.streams.windows import Clock, StreamConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.ops.lookup import KernelChoice
from ziggurat.precision import Precision
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.runs.teachers.student import with_teacher
from ziggurat.runs.watermark import stream_watermark
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.training.records.run_folder import PRODUCTS, WARM_START, RunFolder
from ziggurat.training.records.windows import WindowRecord, WindowsFile, read_windows

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click"),),
    time="at",
)
DAY = 86_400
FIRST = 1_767_225_600  # 2026-01-01


def day(number: int, *, count: int = 240) -> pl.DataFrame:
    """Rows from the begin of a day to its last six minutes, half a second behind the whole one."""
    n = pl.int_range(count, eager=True)
    frame = pl.DataFrame({"user": n * 7 % 40, "item": n * 11 % 25})
    at = FIRST + number * DAY + n * 360 + 0.5
    return frame.with_columns(click=(n * 13 % 5 == 0).cast(pl.Int64), at=at)


def newest(number: int) -> float:
    return FIRST + number * DAY + 239 * 360 + 0.5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(5):
        day(number).write_parquet(f"td{number}.parquet")
    return tmp_path


def config_of(*files: str, **settings: str) -> zg.RunConfig:
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.table_run(zg.DNNConfig(embedding_dim=4, embedding=embedding), SCHEMA)
    # All rows are trained on, so the newest row of the files is that of the run.
    split = zg.SplitConfig(by=zg.SplitBy.RANDOM, valid_fraction=0.1, test_fraction=0.0)
    data = replace(config.data, train=files, split=split)
    training = replace(config.training, threads=1, precision=Precision.FP32, epochs=1)
    return override(replace(config, data=data, training=training), settings)


def trained(*files: str, out: str, parent: str = "") -> None:
    zg.train_run(config_of(*files), folder=out, warm_start=parent or None)


def watermark(run: str, *, out: str = "", **settings: Any) -> float:
    logged = log_teacher(zg.load_run(run), "td4.parquet", out=out or f"teach-{run}", vectors="none", **settings)
    return logged.facts.watermark


def test_a_teacher_that_began_from_a_later_one_teaches_behind_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the commands: tA has trained days 0 and 1, from weights that know day 3."""
    zg.write_schema(SCHEMA, "my.toml")
    usual = ["--schema", "my.toml", "--dim", "4", "--epochs", "1", "--threads", "1", "--precision", "fp32"]
    usual += ["--model.embedding.kernel", "torch", "--data.split.by", "random"]
    assert main(["train", "table_dnn", "--data.train", "td[0123].parquet", "--out", "tC", *usual]) == 0
    given = ["--data.train", "td[01].parquet", "--out", "tA", "--warm-start", "tC"]
    assert main(["train", "table_dnn", *given, *usual]) == 0
    capsys.readouterr()
    assert main(["teacher", "log", "tA", "td?.parquet", "--out", "teach", "--name", "big"]) == 0
    assert "watermark  2026-01-04" in capsys.readouterr().out
    assert watermark("tC") == watermark("tA") > newest(2)


def test_an_ancestor_that_is_gone_stays_known(folder: Path) -> None:
    """Grandparent, its files and the parent go; the youngest knows when the grandparent's rows ended."""
    trained("td3.parquet", out="a")
    trained("td0.parquet", out="b", parent="a")
    trained("td1.parquet", out="c", parent="b")
    shutil.rmtree("a")
    shutil.rmtree("b")
    Path("td3.parquet").unlink()
    assert watermark("c") == newest(3)
    assert [each["watermark"] for each in WARM_START.read(Path("c/warm_start.json"))["ancestors"]] == [
        newest(0),
        newest(3),
    ]
    assert "its newest row: 2026-01-01 23:54:00.500" in Path("c/run.log").read_text()


def test_an_ancestor_of_which_nothing_is_known_wants_a_moment(folder: Path) -> None:
    trained("td3.parquet", out="a")
    Path("td3.parquet").unlink()
    trained("td0.parquet", out="b", parent="a")
    assert "its newest row: not known" in Path("b/run.log").read_text()
    trained("td1.parquet", out="c", parent="b")
    for run in ("b", "c"):
        with pytest.raises(ConfigError, match="newest row was not known then") as refused:
            watermark(run)
        assert any("--watermark" in way for way in refused.value.ways_out)
    assert watermark("c", watermark="2026-01-04T23:54:00.5") == newest(3)


def test_a_moment_before_the_known_newest_row_is_refused(folder: Path) -> None:
    """Its scores of the rows between would know the answers, and teach them."""
    trained("td3.parquet", out="a")
    trained("td0.parquet", out="b", parent="a")
    with pytest.raises(ConfigError, match="not before the newest row") as refused:
        watermark("b", watermark="2026-01-04T23:54:00.4")
    (way,) = [way for way in refused.value.ways_out if "--watermark 2" in way]
    assert watermark("b", watermark=way.rpartition(" ")[2]) == newest(3)
    assert watermark("b", out="later", watermark="2026-01-05") == FIRST + 4 * DAY
    # The rows of the run alone are known to be of the first day.
    Path("td3.parquet").unlink()
    trained("td1.parquet", out="c", parent="a")
    assert watermark("c", watermark="2026-01-03") == FIRST + 2 * DAY
    with pytest.raises(ConfigError, match=r"2026-01-02 23:54:00\.500"):
        watermark("c", watermark="2026-01-02T12:00")


def test_a_moment_that_counts_otherwise_than_the_rows_is_refused(folder: Path) -> None:
    trained("td3.parquet", out="a")
    trained("td0.parquet", out="b", parent="a")
    with pytest.raises(ConfigError, match="counts as the times of the rows do") as refused:
        watermark("b", watermark="1000")
    # What it names leads on: the newest row of all ancestors.
    assert watermark("b", watermark=refused.value.ways_out[0].rpartition(" ")[2]) == newest(3)


def test_a_run_whose_raw_files_are_gone_wants_a_moment(folder: Path) -> None:
    trained("td0.parquet", out="a")
    Path("td0.parquet").unlink()
    with pytest.raises(DataError, match=r"td0\.parquet") as refused:
        watermark("a")
    assert "restore the raw files" in refused.value.ways_out
    assert any("--watermark" in way for way in refused.value.ways_out)
    assert watermark("a", watermark="2026-01-01T23:54:00.5") == newest(0)


def test_a_warm_start_of_an_older_version_wants_a_moment(folder: Path) -> None:
    trained("td3.parquet", out="a")
    trained("td0.parquet", out="b", parent="a")
    record = WARM_START.read(Path("b/warm_start.json"))
    for each in record["ancestors"]:
        del each["watermark"]
        del each["is_calendar"]
    WARM_START.write(Path("b/warm_start.json"), record)
    with pytest.raises(ConfigError, match="--watermark"):
        watermark("b")
    Path("b/warm_start.json").unlink()
    with pytest.raises(ConfigError, match=r"without warm_start\.json"):
        watermark("b")


def test_files_that_are_gone_from_a_pattern_are_missed(folder: Path) -> None:
    """Rows that were divided by files are known by their names alone: of the newest file nothing would be left."""
    config = config_of("td[13].parquet")
    split = zg.SplitConfig(by=zg.SplitBy.FILES)
    data = replace(config.data, train=("td1.parquet", "td3.parquet"), valid=("td0.parquet",), split=split)
    zg.train_run(replace(config, data=data), folder="a")
    assert watermark("a") == newest(3)
    shutil.copy("td0.parquet", "td3.parquet")
    with pytest.raises(DataError, match="gone, or another file"):
        watermark("a", out="again")


def streamed(out: str, *files: str) -> None:
    stream_run(config_of(*files), folder=out, stream=StreamConfig(by="day"))


def test_a_stream_knows_until_when_it_has_trained(folder: Path) -> None:
    streamed("s", "td0.parquet", "td1.parquet", "td2.parquet")
    assert watermark("s") == newest(2)
    first = read_windows(Path("s/windows.jsonl"))
    assert first[0].watermark == "2026-01-01 23:54:00.500"
    assert stream_watermark(RunFolder(Path("s")), step=first[1].step).time == newest(0)


def test_a_run_that_began_from_a_stream_knows_its_windows(folder: Path) -> None:
    streamed("s", "td0.parquet", "td1.parquet", "td2.parquet")
    trained("td0.parquet", out="b", parent="s")
    shutil.rmtree("s")
    assert watermark("b") == newest(2)


def record_of(number: int, text: str, **facts: Any) -> WindowRecord:
    return WindowRecord(window=number, name=str(number), step=10 * (number - 1), rows=5, watermark=text, **facts)


def test_a_record_of_an_older_stream_counts_to_the_end_of_its_second(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    file = WindowsFile(run.windows, last_step=0)
    file.append(record_of(1, "2026-01-01 00:00:09"))
    assert FIRST + 9.999 < stream_watermark(run, step=5).time < FIRST + 10
    file.append(record_of(2, "2026-01-01 00:00:12", has_fractions=True))
    assert stream_watermark(run, step=20).time == FIRST + 12
    file.append(record_of(3, ""))
    with pytest.raises(ConfigError, match="window 3"):
        stream_watermark(run, step=30)
    with pytest.raises(ConfigError, match="no record"):
        stream_watermark(run, step=0)


def test_windows_that_are_only_scored_teach_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    file = WindowsFile(run.windows, last_step=0)
    file.append(record_of(1, "100"))
    file.append(record_of(2, "200", is_trained=False))
    found = stream_watermark(run, step=99)
    assert (found.time, found.is_calendar) == (100, False)


def packed(run: str, out: str, test: str) -> None:
    assert main(["quantise", run, "--data", test, "--products", "int8", "--out", out]) == 0


def test_a_packed_run_knows_what_the_run_that_it_was_made_of_knows(folder: Path) -> None:
    trained("td3.parquet", out="a")
    trained("td0.parquet", out="b", parent="a")
    packed("b", "b8", "td4.parquet")
    shutil.rmtree("a")
    shutil.rmtree("b")
    assert watermark("b8") == newest(3)
    streamed("s", "td0.parquet", "td1.parquet", "td2.parquet")
    packed("s", "s8", "td4.parquet")
    shutil.rmtree("s")
    assert watermark("s8") == newest(2)
    record = PRODUCTS.read(Path("s8/products.json"))
    del record["watermark"]  # as an older version packed it
    PRODUCTS.write(Path("s8/products.json"), record)
    with pytest.raises(ConfigError, match="packed run without a record"):
        watermark("s8", out="again")


def test_a_student_of_a_teacher_is_no_older_than_what_taught_it(folder: Path) -> None:
    """Rows are joined with versions of before alone, so the student's own rows say until when its teacher knows."""
    trained("td1.parquet", out="big")
    watermark("big")
    log_teacher(zg.load_run("big"), ["td0.parquet", "td2.parquet"], out="teach-big", vectors="none")
    for file, is_taught in (("td0.parquet", False), ("td2.parquet", True)):
        config = replace(config_of(file), distil=DistilConfig(head=DistilHead.AUX_HEAD))
        prepared = prepare_run(with_teacher(config, "teach-big"))
        scores = prepared.train.read_group(0).column("extra:teacher_big_click").to_numpy()
        assert np.isfinite(scores).any() == is_taught


def test_rows_that_were_put_aside_do_not_move_the_watermark_of_a_window(folder: Path) -> None:
    """A row that cannot be read is not trained, however late it is."""
    late = day(1).tail(1).with_columns(at=pl.col("at") + 300.0, click=pl.lit(7, dtype=pl.Int64))
    pl.concat([day(1), late]).write_parquet("td1.parquet")
    config = config_of("td0.parquet", "td1.parquet", **{"data.bad-rows": "quarantine"})
    stream_run(config, folder="s", stream=StreamConfig(by="day"))
    records = read_windows(Path("s/windows.jsonl"))
    assert [each.bad for each in records] == [0, 1]
    assert records[1].watermark == "2026-01-02 23:54:00.500"


def test_rows_behind_a_watermark_with_a_fraction_are_not_taught(folder: Path) -> None:
    """The watermark that a command shows is one that the next command takes."""
    trained("td0.parquet", out="big")
    shown = Clock(per_second=1).shown(newest(0))
    assert watermark("big", watermark=shown) == newest(0) == watermark("big", out="again")
