"""The verb `images`: no flag is idle without a word, and ways out are flags that the command takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.pictures.made import encoded, photo
from ziggurat.cli.data.images_verb import _in_place_of
from ziggurat.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["embed", "--resolution", "160", "--scale-model", "scale.json"], "--resolution 160 and --scale-model"),
        (["scale", "--tau", "0.8", "--by-class"], "--tau 0.8 and --by-class"),
        (["scale", "--sample", "0"], "0"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    action, *flags = arguments
    out = tmp_path / ("vectors.parquet" if action == "embed" else "scale.json")
    assert main(["images", action, str(tmp_path), "--weights", "w.pth", "--out", str(out), *flags]) == 2
    assert f"found:    {found}\n" in capsys.readouterr().err


def test_copies_of_no_picture_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(photo(seed=number), "JPEG"))
    command = ["images", "progressive", str(tmp_path), "--out", str(tmp_path / "copies")]
    assert main(command) == 0
    (tmp_path / "0.jpg").unlink()
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "1 were there" in said
    assert "1 other files" in said
    assert "the first 0.jpg" in said


def test_the_way_out_of_a_resolution_leaves_the_others() -> None:
    assert _in_place_of(16, (16, 64, 224))(64) == "--resolutions 64,96,224"
    assert _in_place_of(16, (16, 224))(64) == "--resolutions 64,224"
