"""Standard streams that take nothing: an answer that is lost is an error, and what is said on the way is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.runs.test_resume import SCHEMA, TINY
from ziggurat.cli.main import main
from ziggurat.training.report.progress import LineProgress, NoProgress, show_progress

TRAIN = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--training.epochs", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a schema, and a finished run."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ZIGGURAT_CACHE", str(folder / "cache"))
        events(600).write_parquet("events.parquet")
        ziggurat.write_schema(SCHEMA, "my.toml")
        assert main([*TRAIN, "--out", "run", *SMALL, *TINY]) == 0
    return folder


@pytest.fixture
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
    return place


def test_a_full_disk_behind_standard_output_is_an_error_and_no_verdict(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:  # what is left in it leads nowhere at its end
        for stream, found in ((full, "No space left on device"), (None, "closed before")):
            monkeypatch.setattr(sys, "stdout", stream)
            assert main(["verify", "run"]) == 2
            said = capsys.readouterr().err
            assert "standard output that takes the answer" in said
            assert found in said


def test_a_reader_that_stops_ends_a_verb_as_its_signal_would(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as caught:
            main(["verify", "run"])
        assert caught.value.code == 141


@pytest.mark.slow
def test_the_status_of_a_process_whose_answer_is_lost(inside: Path) -> None:
    command = f"{sys.executable} -m ziggurat recipes"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    results = {
        target: subprocess.run(
            ["bash", "-c", f"{command} {target}"], env=environment, capture_output=True, text=True, check=False
        )
        for target in ("> /dev/full", "> /dev/full 2> /dev/full", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}")
    }
    assert [result.returncode for result in results.values()] == [2, 2, 2, 141]
    assert "Traceback" not in "".join(result.stderr for result in results.values())
    assert "No space left on device" in results["> /dev/full"].stderr


@pytest.mark.parametrize("stream", ["full", "closed", "none", "pipe"])
def test_standard_error_that_takes_nothing_ends_no_training(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full, os.fdopen(writing, "w") as pipe, (tmp_path / "x").open("w") as closed:
        closed.close()
        broken = {"full": full, "pipe": pipe, "closed": closed, "none": None}[stream]
        monkeypatch.setattr(sys, "stderr", broken)
        assert main([*TRAIN, "--out", str(tmp_path / "run"), *SMALL, *TINY]) == 0
        assert main(["train", str(tmp_path / "none"), "--resume"]) == 2
        assert isinstance(show_progress(), NoProgress if stream == "none" else LineProgress)


@pytest.mark.parametrize(
    "verb",
    [
        ["data", "inspect", "pipe.csv"],
        ["predict", "run", "pipe.csv", "--out", "out.csv"],
        ["evaluate", "run", "pipe.csv"],
        ["train", "table_dlrm", "--data.train", "pipe.csv", "--schema", "my.toml", "--out", "other"],
        ["data", "cluster-by-session", "pipe.csv", "--session", "user_id", "--out", "out.parquet"],
    ],
)
def test_a_pipe_as_a_data_file_is_refused_and_not_waited_for(
    inside: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = inside / "pipe.csv"
    if not pipe.exists():
        os.mkfifo(pipe)
    assert main(verb) == 2
    said = capsys.readouterr().err
    assert "a pipe" in said
    assert "write what comes out of it to a file" in said
