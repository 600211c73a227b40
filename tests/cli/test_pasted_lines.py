"""Lines that are printed to be pasted: a shell reads back what was meant, and slips have fitting ways out."""

from __future__ import annotations

import contextlib
import shlex
import signal
from pathlib import Path

import polars as pl
import pytest

from ziggurat.cli.main import main
from ziggurat.commands import in_python, pasted
from ziggurat.errors import ConfigError
from ziggurat.training.records.run_folder import RunFolder

AWKWARD = 'it\'s a $HOME {x} ~ "film"'
TABLE = pl.DataFrame({"user_id": ["a", "b", "c", "d"] * 25, "click": [0, 1, 1, 0, 0] * 20})


def ways_out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.partition("ways out:")[2]


@pytest.mark.parametrize("word", [AWKWARD, "~/x", "plain", "Another Man's Poison", "*.csv"])
def test_a_shell_reads_a_word_back(word: str) -> None:
    assert shlex.split(f"ziggurat train {pasted(word)} --resume") == ["ziggurat", "train", word, "--resume"]


@pytest.mark.parametrize(
    ("words", "in_words_of_python"),
    [
        ("--label 'my label'", 'label="my label"'),
        ("leave --out out", "leave out out"),
        ("--label and --out, in a.csv", "label and out, in a.csv"),
        ("--device auto takes the CPU", 'settings={"device": "auto"} takes the CPU'),
        ("--tables.by-table a=int8,b=bf16", 'settings={"tables.by-table": "a=int8,b=bf16"}'),
        ("--data.decimal comma --data.signs strip", 'settings={"data.decimal": "comma", "data.signs": "strip"}'),
        ("one of --training.epochs, --training.seed", "one of training.epochs, training.seed"),
        ("ziggurat report a --out b.html", "ziggurat report a --out b.html"),
    ],
)
def test_flags_become_arguments_of_python(words: str, in_words_of_python: str) -> None:
    assert in_python(words, arguments=("label", "out"), settings="settings") == in_words_of_python


def test_inspect_prints_a_command_that_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / f"{AWKWARD}.csv"
    schema = tmp_path / f"{AWKWARD}.toml"
    TABLE.write_csv(table)
    assert main(["data", "inspect", str(table), "--write-schema", str(schema)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--data.train") + 1] == str(table)
    assert words[words.index("--schema") + 1] == str(schema)


def test_the_home_folder_is_meant_where_a_shell_leaves_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    TABLE.write_csv(tmp_path / "t.csv")
    assert main(["data", "inspect", "~/t.csv", "--write-schema=~/s.toml"]) == 0
    assert (tmp_path / "s.toml").exists()
    arguments = ("train", "table_dlrm", "--data.train=~/t.csv,~/none.csv", "--schema=~/s.toml", "--out=~/run")
    assert main(list(arguments)) == 2
    assert f"{tmp_path}/none.csv" in capsys.readouterr().err
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (("--device", "gpu"), 'did you mean "cuda"?'),
        (("--data", "t x.csv"), "did you mean --data.train 't x.csv'?"),
    ],
)
def test_a_misprint_is_answered_by_what_was_meant(
    arguments: tuple[str, str], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert way in ways_out(capsys, "train", "movielens_dlrm", *arguments, "--settings")


def test_the_name_of_a_model_is_answered_by_its_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ways_out(capsys, "train", "dlrm").split("\n")[1].endswith("did you mean 'table_dlrm'?")


@pytest.mark.parametrize("rate", ["1e400", "-1e400", "inf", "nan"])
def test_a_learning_rate_that_no_float_holds_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ways_out(capsys, "train", "movielens_dlrm", f"--training.learning-rate={rate}", "--settings")


def test_serving_a_run_names_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "it's"
    (run / "checkpoints").mkdir(parents=True)
    way = ways_out(capsys, "serve", str(run)).strip().removeprefix("1. make an export of it: ")
    assert shlex.split(way) == ["ziggurat", "export", str(run), "--out", "exports/it's"]


def test_removing_a_folder_of_the_users_own_is_never_offered(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        RunFolder(tmp_path).refuse_old_run()
    assert not any("rm " in way or "--resume" in way for way in raised.value.ways_out)


def test_what_an_interrupted_training_prints_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, schema, run = (str(tmp_path / name) for name in ("it's.csv", "s.toml", "my run"))
    TABLE.write_csv(table)
    assert main(["data", "inspect", table, "--write-schema", schema]) == 0
    command = ["train", "table_dnn", "--data.train", table, "--schema", schema, "--out", run, "--epochs", "1"]

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ziggurat.runs.execute.prepare_run", interrupt)
        assert main(command) == 130
        assert "give the same command again" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("ziggurat.training.trainer.Trainer._train_on", interrupt)
        assert main(command) == 130
    words = shlex.split(capsys.readouterr().err.splitlines()[-1].partition("to go on: ")[2])
    assert main(words[1:]) == 0
    assert list((tmp_path / "my run" / "checkpoints").iterdir())


def test_ctrl_c_that_an_import_swallows_is_no_error_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_imported(*_: object, **__: object) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        raise AttributeError("module 'sympy' has no attribute 'core'")

    monkeypatch.chdir(tmp_path)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        monkeypatch.setattr("ziggurat.recipes.catalogue.recipe_named", half_imported)
        assert main(["train", "movielens_dlrm"]) == 130
        assert "interrupted; no step was trained: give the same command again" in capsys.readouterr().err
        assert main(["prepare", "movielens_dlrm"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("a mistake of ours")

    monkeypatch.setattr("ziggurat.recipes.catalogue.recipe_named", broken)
    # Code outside of the package, as that of this file is, is named in four parts, and not taken for Ctrl-C.
    assert main(["train", "movielens_dlrm"]) not in (0, 130)
    assert "a mistake of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "ending", "wanted"),
    [
        (["embeddings", "RUN", "user_id"], "xlsx", ["parquet", "csv", "tsv"]),
        (["data", "import", "--sql", "SELECT 1"], "csv", ["parquet"]),
        (["data", "cluster-by-session", "LOG", "--session", "user_id"], "csv", ["parquet"]),
    ],
)
def test_nothing_is_written_as_one_format_under_the_name_of_another(
    command: list[str], ending: str, wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TABLE.write_csv(tmp_path / "log.csv")
    words = [str(tmp_path / "log.csv") if word == "LOG" else word for word in command]
    shown = ways_out(capsys, *words, "--out", str(tmp_path / f"e x.{ending}"))
    ways = [shlex.split(line.partition(". ")[2]) for line in shown.strip().splitlines()]
    assert ways == [["--out", str(tmp_path / f"e x.{each}")] for each in wanted]
