"""What a start that died before its log left in a folder is never read by the next one, and a folder has one writer."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.runs.test_resume import SCHEMA, TINY
from ziggurat.cli.main import main
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.files import FileLock
from ziggurat.plan import Plan
from ziggurat.runs import execute
from ziggurat.runs.data_record import DataRecord
from ziggurat.runs.load import load_run
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.run_lock import RunLock
from ziggurat.training.report.startup import StartupReport

ONE_STEP = ["--training.epochs", "1", "--training.max-steps", "2", *SMALL, *TINY]


def train(data: str, out: str, *arguments: str, schema: str = "my.toml") -> int:
    command = ["train", "table_dlrm", "--data.train", data, "--schema", schema, "--out", out]
    return main([*command, *ONE_STEP, *arguments])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two data sets that share no id, and a schema."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    first = events(600)
    other = first.with_columns(pl.col("user_id").cast(pl.String) + "-other", pl.col("item").cast(pl.String) + "-other")
    first.write_parquet("first.parquet")
    other.write_parquet("other.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml")
    fewer = dataclasses.replace(SCHEMA, features=SCHEMA.features[:2])
    ziggurat.write_schema(fewer, "fewer.toml")
    return tmp_path


def die_after(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a start end as by Ctrl-C when it has written `what`."""

    def dying(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            real(*arguments, **options)
            raise KeyboardInterrupt

        return call

    if what == "config":
        monkeypatch.setattr(execute, "run_config_to_json", dying(execute.run_config_to_json))
    elif what == "vocabularies":
        monkeypatch.setattr(execute, "save_preprocessing", dying(execute.save_preprocessing))
    elif what == "data":
        monkeypatch.setattr(DataRecord, "save", dying(DataRecord.save))
    else:
        monkeypatch.setattr(StartupReport, "text", dying(StartupReport.text))


@pytest.mark.parametrize(
    ("moment", "data", "schema"),
    [
        ("vocabularies", "other.parquet", "my.toml"),
        ("data", "first.parquet", "fewer.toml"),
        ("report", "other.parquet", "my.toml"),
    ],
)
def test_another_start_into_the_folder_of_a_killed_one_is_a_start_of_its_own(
    place: Path, monkeypatch: pytest.MonkeyPatch, moment: str, data: str, schema: str
) -> None:
    with monkeypatch.context() as patch:
        die_after(moment, patch)
        assert train("first.parquet", "run") == 130
    assert not RunFolder(Path("run")).has_begun()
    assert train(data, "run", schema=schema) == 0
    assert train(data, "clean", schema=schema) == 0
    found, clean = load_run("run"), load_run("clean")
    assert found.preprocessing.fingerprint == clean.preprocessing.fingerprint
    assert found.predict(data).equals(clean.predict(data))
    assert main(["verify", "run"]) == 0


def test_a_start_that_is_given_again_or_resumed_after_two_killed_ones_is_that_of_the_settings_it_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, moment in (("first.parquet", "report"), ("other.parquet", "vocabularies")):
        with monkeypatch.context() as patch:
            die_after(moment, patch)
            assert train(data, "run") == 130
    # Its config is the other's, its data.json still the first one's.
    assert main(["train", "run", "--resume"]) == 0
    assert train("other.parquet", "clean") == 0
    assert load_run("run").predict("other.parquet").equals(load_run("clean").predict("other.parquet"))


def test_a_plan_of_a_killed_start_is_not_taken_for_the_run_s(place: Path) -> None:
    Path("run").mkdir()
    Plan(world_size=2, tables=()).save(Path("run/plan.json"))
    assert train("first.parquet", "run") == 0
    assert not Path("run/plan.json").exists()


@pytest.mark.parametrize("name", ["config.json", "preprocessing/clean.py", "plan.json", "report.html"])
def test_files_of_others_in_the_folder_of_a_run_are_never_replaced(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = place / "run" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"mine": 1}', encoding="utf-8")
    assert train("first.parquet", "run") == 2
    assert f"{Path(name).parts[0]}, which no run has written" in capsys.readouterr().err
    assert main(["train", "auto", "--data.train", "first.parquet", "--schema", "my.toml", "--out", "run"]) == 2
    with pytest.raises(ConfigError, match="which no run has written"):
        ziggurat.fit("first.parquet", schema=SCHEMA, out="run")
    assert theirs.read_text(encoding="utf-8") == '{"mine": 1}'
    assert [path.name for path in (place / "run").iterdir()] == [Path(name).parts[0]]
    (place / "run" / Path(name).parts[0]).rename(place / "moved")  # the second way out
    assert train("first.parquet", "run") == 0


def test_removing_a_folder_whose_config_is_no_run_s_is_not_offered(place: Path) -> None:
    (place / "config.json").write_text('{"mine": 1}', encoding="utf-8")
    (place / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        RunFolder(place).refuse_old_run()
    assert not any("rm " in way or "--resume" in way for way in raised.value.ways_out)


def test_vocabularies_that_are_not_those_of_the_data_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("first.parquet", "run") == 0
    assert train("other.parquet", "other") == 0
    save_preprocessing(load_preprocessing(Path("other/preprocessing")), Path("run/preprocessing"))
    with pytest.raises(CheckpointError, match="those of another start"):
        load_run("run")
    for verb in (["predict", "run", "first.parquet", "--out", "x.csv"], ["export", "run", "--out", "x"]):
        assert main(verb) == 2
        assert "those of another start" in capsys.readouterr().err
    assert main(["train", "run", "--resume", "--training.max-steps", "4"]) == 2
    assert "those of another start" in capsys.readouterr().err


def test_one_process_at_a_time_writes_to_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("first.parquet", "run") == 0
    log = Path("run/metrics.jsonl").read_bytes()
    assert not Path("run/.lock").exists()
    with RunLock(Path("run")) as lock:
        lock.acquire()
        other = RunLock(Path("run"), patience_s=0.1)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            other.acquire()
        assert not other.is_held
        assert main(["train", "run", "--resume", "--training.max-steps", "4"]) == 2
        assert "another one that does: process" in capsys.readouterr().err
        assert Path("run/metrics.jsonl").read_bytes() == log
    assert not lock.is_held
    assert main(["train", "run", "--resume", "--training.epochs", "2", "--training.max-steps", "4"]) == 0
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 4


def test_a_killed_process_holds_no_lock_and_a_deleted_file_guards_nothing(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from ziggurat.training.records.run_lock import RunLock\n"
    code += "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {process.pid} on "):
        RunLock(tmp_path, patience_s=0).acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".lock").exists()
    first, second = RunLock(tmp_path, patience_s=0), RunLock(tmp_path, patience_s=0)
    first.acquire()
    first.release()
    second.acquire()
    with pytest.raises(ConfigError):
        first.acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_folder_that_nothing_came_into_leaves_no_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path / "runs" / "a") as lock:
        lock.acquire()
        assert (tmp_path / "runs" / "a" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_refused_process_removes_in_this_moment_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = FileLock.take

    def behind_its_end(lock: FileLock) -> bool:
        monkeypatch.setattr(FileLock, "take", take)
        lock.path.parent.rmdir()
        return take(lock)

    monkeypatch.setattr(FileLock, "take", behind_its_end)
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        assert (tmp_path / "run/.lock").exists()


def test_a_run_that_ended_before_it_began_is_started_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    (run / "raw").mkdir(parents=True)
    assert main(["train", "run", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "ended before training began" in said
    assert "without --resume" in said
    assert train("first.parquet", "run") == 0
    assert main(["train", "run", "--resume"]) == 0
    (run / "config.json").unlink()
    assert main(["train", "run", "--resume"]) == 2
    assert "restore the file from a copy" in capsys.readouterr().err
