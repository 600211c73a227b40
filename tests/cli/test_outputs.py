"""What a verb is told to write replaces what is there, and says so; what it reads is never replaced."""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl
import pytest

from ziggurat.cli.main import build_parser, main
from ziggurat.cli.outputs import add_output, replacing_is_said
from ziggurat.errors import FileError
from ziggurat.files import replacing_folder, ways_to_write, write_text
from ziggurat.training.records.run_folder import RunFolder

# Options that are called like outputs, and under which nothing is replaced: a run or a study there goes on or is
# refused, and a probe goes on.
CONTINUED = {
    ("ziggurat demo", "--out"),
    ("ziggurat train", "--out"),
    ("ziggurat stream", "--out"),
    ("ziggurat teacher", "--out"),
    ("ziggurat compare", "--out"),
    ("ziggurat tune", "--out"),
    ("ziggurat scale", "--out"),
    ("ziggurat cluster probe", "--out"),
    ("ziggurat images progressive", "--out"),
}


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for action in below for each in action.choices.values() for leaf in _leaves(each)] or [parser]


def test_every_output_of_every_verb_is_declared_as_one() -> None:
    missing = [
        (parser.prog, flag)
        for parser in _leaves(build_parser())
        for action in parser._actions
        for flag in action.option_strings
        if flag in ("--out", "--json", "--csv", "--plot", "--save", "--write-schema")
        and action.dest not in (parser.get_default("outputs") or ())
    ]
    assert set(missing) == CONTINUED


def test_an_older_file_is_replaced_and_the_verb_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "show", "h100x8", "--out", "cluster.toml"]) == 0
    assert "replaced" not in capsys.readouterr().out
    Path("cluster.toml").write_text("mine")
    assert main(["cluster", "show", "h100x8", "--out", "cluster.toml"]) == 0
    assert "cluster.toml was there before, and is replaced" in capsys.readouterr().out
    assert "mine" not in Path("cluster.toml").read_text()


@pytest.mark.parametrize("has_content", [False, True])
def test_only_a_folder_with_content_is_said_to_be_replaced(
    tmp_path: Path, has_content: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_output(parser, "--out")
    out = tmp_path / "out"
    out.mkdir()
    if has_content:
        (out / "old").touch()
    options = parser.parse_args(["--out", str(out)])
    options.parser = parser
    with replacing_is_said(options, []), replacing_folder(out) as temporary:
        (temporary / "new").touch()
    assert (out / "new").exists()
    assert ("is replaced" in capsys.readouterr().out) == has_content


def test_a_file_that_is_read_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"user": [1, 2], "click": [0, 1]}).write_csv("log.csv")
    content = Path("log.csv").read_bytes()
    Path("link.csv").symlink_to("log.csv")
    Path("hard.csv").hardlink_to("log.csv")
    for name in ("log.csv", "./log.csv", "link.csv", "hard.csv", str(tmp_path / "log.csv")):
        assert main(["data", "inspect", "log.csv", "--write-schema", name]) == 2
        said = capsys.readouterr().err
        assert "a file that this command reads" in said
        assert f"--write-schema {Path(name).stem}_new.csv" in said
        assert Path("log.csv").read_bytes() == content
    arguments = ["data", "cluster-by-session", "*.csv", "--session", "user", "--out", "log.csv"]
    assert main(arguments) == 2
    assert Path("log.csv").read_bytes() == content
    # The way out that the error names.
    assert main(["data", "inspect", "log.csv", "--write-schema", "log_new.csv"]) == 0


@pytest.mark.parametrize("manifest", ["config.json", "export.json"])
def test_a_file_that_a_run_or_an_export_consists_of_is_not_replaced(
    tmp_path: Path, manifest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made").mkdir()
    Path("made", manifest).write_text("{}")
    Path("made", "mine.json").write_text("{}")
    arguments = ["quantise", "made", "--json", f"made/{manifest}"]
    assert main(arguments) == 2
    assert "a file that made consists of" in capsys.readouterr().err
    main(["quantise", "made", "--json", "made/mine.json"])
    assert ("consists of" in capsys.readouterr().err) == (manifest == "export.json")


def test_a_setting_that_names_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.parquet").write_bytes(b"rows")
    for data in (["--data.train", "log.parquet"], ["--data.train=log.parquet"], ["--data.train", "a.csv,log.parquet"]):
        assert main(["compare", "table", *data, "--json", "log.parquet"]) == 2
        assert "a file that this command reads" in capsys.readouterr().err


def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.csv").write_text("user")
    with pytest.raises(FileError) as refused:
        write_text(tmp_path / "folder", "scores")
    assert refused.value.ways_out[0] == f"it is a folder: name a file in it, {tmp_path / 'folder' / 'FILE'}"
    with pytest.raises(FileError) as refused:
        write_text(tmp_path / "file.csv" / "scores.csv", "scores")
    assert refused.value.ways_out[0].startswith(f"{tmp_path / 'file.csv'} is a file, and a folder is needed there")
    assert refused.value.found == f"{tmp_path / 'file.csv'} is a file"
    with pytest.raises(FileError) as refused:
        RunFolder(tmp_path / "file.csv").refuse_unwritable()
    assert (refused.value.found, refused.value.ways_out) == ("a file", ("choose another: --out runs/file",))
    assert (tmp_path / "file.csv").read_text() == "user"


def test_a_folder_that_takes_no_files_says_what_helps_a_run_that_has_begun_and_what_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()

    def refuses(**more: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuses)
    with pytest.raises(FileError) as new:
        run.refuse_unwritable()
    assert "--out" in new.value.ways_out[0]
    run.metrics.write_text("{}")
    with pytest.raises(FileError) as begun:
        run.refuse_unwritable()
    assert f"cp -r {run.path} COPY" in begun.value.ways_out[0]
    assert not any("--out" in way for way in begun.value.ways_out)

    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    denied = PermissionError(13, "Permission denied")
    assert "ZIGGURAT_CACHE" in ways_to_write(denied, tmp_path / "cache" / "prepared" / "x.lock")[0]
    assert not any("ZIGGURAT_CACHE" in way for way in ways_to_write(denied, tmp_path / "other"))
