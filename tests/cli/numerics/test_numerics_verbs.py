"""`ziggurat numerics formats`: the table, its file, its picture, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.format_report import FORMATS


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
