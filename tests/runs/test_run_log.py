"""What a run says: ten lines on the screen, everything in run.log and with --verbose, warnings always."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.runs.test_resume import SCHEMA, TINY
from ziggurat.cli.main import main
from ziggurat.errors import DataError, TopologyError, ZigguratError
from ziggurat.models import LossSums
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.run_folder import RunFolder, read_evaluation
from ziggurat.training.records.said import KeptProgress
from ziggurat.training.report.progress import NoProgress


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains on a text file, whose number of rows is an estimate until it was read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(900).drop("tags").write_csv("events.csv")
    ziggurat.write_schema(SCHEMA, "my.toml")
    files = ["--data.train", "events.csv", "--schema", "my.toml", "--training.epochs", "4"]
    return ["train", "table_dlrm", *files, *SMALL, *TINY]


def test_ten_lines_by_default_and_the_rest_in_the_log(train: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*train, "--out", "run"]) == 0
    said = capsys.readouterr()
    progress = re.compile(r"warning|[^:]+: [\d,]+(/[\d,]+|$)")  # a slow machine shows that it lives
    lines = [line for line in (said.err + said.out).splitlines() if not progress.match(line)]
    heads = [line.split(maxsplit=1)[0] for line in lines if not line.startswith(" ")]
    assert heads == ["data", "model", "machine", "kernel", "valid", "test", "steps", "end", "next", "report"]
    assert re.search(r"^test +auc \d\.\d{5} ± \d\.\d{5}", said.out, re.MULTILINE)
    log = Path("run/run.log").read_text()
    for part in ("Embedding kernels", "dense network", "  valid  auc", "accuracy"):
        assert part in log
        assert part not in said.err + said.out
    stored = read_evaluation(RunFolder(Path("run")).evaluation("test"))
    assert stored["half_widths"]["auc"] > 0


def test_verbose_says_everything_and_no_count_is_one_short(
    train: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*train, "--out", "run", "--verbose"]) == 0
    said = capsys.readouterr().err
    assert "Embedding kernels" in said
    assert said.count("  valid  auc") == 4
    counted = re.findall(r": ([\d,]+)/([\d,]+) \(", said)
    assert counted
    assert all(done == total for done, total in counted)


class Counts(Hook):
    """Counts steps."""


def test_a_run_names_its_hooks_and_says_where_it_goes_on_with_others(
    train: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*train, "--out", "run", "--training.epochs", "1"]) == 0
    capsys.readouterr()
    config = ziggurat.load_run("run").config
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=2))
    ziggurat.train_run(config, folder="run", resume=True, hooks=[Counts()])
    log = Path("run/run.log").read_text()
    assert f"with hooks (none), and goes on with {Counts()!r}" in log
    assert main(["train", "run", "--resume", "--training.epochs", "3"]) == 0
    assert f"with hooks {Counts()!r}, and goes on with (none)" in capsys.readouterr().err
    assert main(["train", "run", "--resume", "--training.epochs", "4"]) == 0
    assert "hooks" not in capsys.readouterr().err


def test_a_run_that_goes_on_adds_to_its_log_and_keeps_what_stood_there(
    train: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/run.log").write_text("notes of my own\n")
    assert main([*train, "--out", "run"]) == 0
    first = Path("run/run.log").read_text()
    assert first.startswith("notes of my own\n")
    more = ["--training.epochs", "5", "--training.early-stop.patience", "0"]
    assert main(["train", "run", "--resume", *more]) == 0
    assert Path("run/run.log").read_text().startswith(first)
    assert "resumed at step" in Path("run/run.log").read_text()


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    said: list[str] = []

    class Heard(NoProgress):
        def say(self, text: str) -> None:
            said.append(text)

    (tmp_path / "run.log").mkdir()
    kept = KeptProgress(Heard(), path=tmp_path / "run.log")
    kept.open()
    for _ in range(3):
        kept.say("a line")
    assert said == [said[0], "a line", "a line", "a line"]
    assert said[0].startswith("warning: ")
    assert "run.log is not written any more" in said[0]


def failure(kind: type[ZigguratError] = DataError) -> ZigguratError:
    return kind(expected="one thing", found="another", where="here", ways_out=("this", "that"))


def without_times(path: Path) -> str:
    return re.sub(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", path.read_text())


def test_a_run_that_fails_ends_its_log_with_the_error_each_time(tmp_path: Path) -> None:
    def loss(*_: object) -> LossSums:
        raise failure()

    frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
    config = ziggurat.table_run(ziggurat.LogisticRegressionConfig(), ziggurat.inspect_file(frame).schema)
    path = RunFolder(tmp_path / "run").said
    for number in (1, 2):
        with pytest.raises(DataError, match="found:    another"):
            ziggurat.train_run(config, folder=tmp_path / "run", data=frame, loss=loss, resume=number == 2)
        said = without_times(path)
        assert said.count("DataError\n") == number
        assert said.endswith(f"\nDataError\n{failure()}\n")


def test_on_ranks_the_one_that_fails_writes_its_error(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    ranks = [KeptProgress(NoProgress(), path=path) for _ in range(3)]
    ranks[0].open()
    ranks[0].say("model")

    def fail(rank: int, error: Exception) -> None:
        with pytest.raises(type(error)), ranks[rank].keeping_error(rank=rank):
            raise error

    fail(1, ValueError("a loss of one's own"))
    fail(0, failure(TopologyError))
    fail(2, failure(TopologyError))  # that a rank is gone is said by the first rank
    assert without_times(path) == (
        f"model\nrank 1: ValueError\na loss of one's own\nrank 0: TopologyError\n{failure(TopologyError)}\n"
    )


def test_an_error_of_all_ranks_stands_in_the_log_once(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("")
    first, second = (KeptProgress(NoProgress(), path=path) for _ in range(2))
    with pytest.raises(DataError), first.keeping_error(rank=1), second.keeping_error(rank=0):
        raise failure()
    assert without_times(path) == f"rank 0: DataError\n{failure()}\n"


def test_a_start_that_is_refused_leaves_no_log(tmp_path: Path) -> None:
    kept = KeptProgress(NoProgress(), path=tmp_path / "run.log")
    with pytest.raises(DataError), kept.keeping_error(rank=None):
        raise failure()
    assert not list(tmp_path.iterdir())
