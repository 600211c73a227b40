"""A folder that is no export is named for what it is, with what leads from there to an export."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.errors import ExportError, MissingFileError
from ziggurat.serving.export.export_folder import read_manifest


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


@pytest.mark.parametrize(
    ("files", "named", "found", "way"),
    [
        ([], "nope", "no such folder", "make one: ziggurat export RUN --out nope"),
        (["r/checkpoints/x"], "r", "the folder of a run", "ziggurat export r --out exports/r"),
        (["r/config.json", "r/data.json"], "r", "a run that has no checkpoint yet", "ziggurat train r --resume"),
        (["my runs/a/checkpoints/x"], "my runs", "with runs in it: a", "ziggurat export 'my runs/a' --out exports/a"),
        (["e/one/export.json", "e/two/export.json"], "e", "with exports in it: one, two", "name one: e/one"),
        (["e/export.json", "e/items/i.json"], "e/items", "a part of the export e", "name the whole export: e"),
        (["e/export.json"], "e/export.json", "a part of the export e", "name the whole export: e"),
        (["d/it's.csv.gz", "d/b.txt"], "d", "a folder of data: it's.csv.gz", "ziggurat data inspect"),
        (["d/log.parquet"], "d/log.parquet", "a file", "ziggurat data inspect d/log.parquet"),
        (["d/a", "d/b", "d/c", "d/d"], "d", "other files: a, b, c and 1 more", "--out exports/first"),
        (["d/config.json"], "d", "a folder with other files: config.json", "--out exports/first"),
        (["d/a"], ".", "a folder with other files: d", "--out exports/first"),
    ],
)
def test_what_is_no_export_is_said_to_be_what_it_is(
    files: list[str], named: str, found: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(*files)
    with pytest.raises(MissingFileError) as refused:
        read_manifest(named)
    assert refused.value.found.endswith(found)
    assert any(way in each for each in refused.value.ways_out)
    assert not any("restore" in each for each in refused.value.ways_out)


def test_within_a_published_folder_nobody_is_told_to_make_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch("live/published.json", "live/publisher.lock", "live/versions/000004/export.json")
    with pytest.raises(MissingFileError, match="no such version") as refused:
        read_manifest("live/versions/000005")
    assert refused.value.ways_out == (
        "name the folder, which leads to the current one: live",
        "name another version: live/versions/000004",
    )
    Path("live/published.json").unlink()
    with pytest.raises(MissingFileError, match=r"without published\.json") as refused:
        read_manifest("live")
    assert refused.value.ways_out[-1] == "name a version: live/versions/000004"


def test_an_empty_folder_is_one(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="an empty folder"):
        read_manifest(tmp_path)


def test_an_export_that_lost_its_manifest_is_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    touch("e/chain.json")
    with pytest.raises(ExportError, match="restore it"):
        read_manifest("e")


def test_the_way_from_a_folder_of_data_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/it's.csv").write_text("user,click\n" + "a,1\nb,0\na,0\n" * 30)
    assert main(["serve", "d"]) == 2
    way = capsys.readouterr().err.partition("export that: ziggurat ")[2].splitlines()[0]
    assert main(shlex.split(way)) == 0
    assert "ziggurat train" in capsys.readouterr().out
