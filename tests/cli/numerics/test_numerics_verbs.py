"""`ziggurat numerics formats`: the table, its file, its picture, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.format_report import FORMATS
from ziggurat.training.report import progress
from ziggurat.training.report.progress import NoProgress


def test_the_table_has_all_formats_and_its_file_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "formats.json"
    plot = tmp_path / "formats.svg"
    assert main(["numerics", "formats", "--vectors", "50", "--json", str(file), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert all(format.name in printed for format in BlockFormat.listed())
    found = {row["name"]: row for row in FORMATS.read(file)["formats"]}
    assert list(found) == [format.name for format in BlockFormat.listed()]
    assert found["mx9"]["bits_per_element"] == 9
    assert found["mx9"]["qsnr_db"] == pytest.approx(46.6, abs=0.3)
    assert found["mx9"]["family"] != found["mxfp4"]["family"]
    assert plot.stat().st_size > 10_000


def test_formats_of_the_command_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics", "formats", "mx6", "mxint8", "--vectors", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nmx") == 3  # two rows, and the line below the table


@pytest.mark.parametrize(
    ("words", "message"),
    [(["mx7"], "did you mean"), (["--vectors", "0"], "one vector"), (["--plot", "formats.txt"], "--plot formats.png")],
)
def test_mistakes_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics", "formats", *words]) != 0
    assert message in capsys.readouterr().err


def test_long_measurements_show_how_far_they_are_and_a_folder_that_takes_no_file_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[int]()
    monkeypatch.setattr(NoProgress, "update", lambda self, count, **more: done.append(count))
    monkeypatch.setattr(progress, "show_progress", NoProgress)
    assert main(["numerics", "formats", "mx6", "--vectors", "1001", "--json", "/proc/x.json"]) == 2
    assert done == [500, 1000, 1001]
    assert "choose a path in another folder: /proc takes no new files" in capsys.readouterr().err
