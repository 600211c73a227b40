"""Commands that are printed where modules of the user's were imported: they import them, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.commands import take_extensions, with_extensions


def test_each_command_names_the_modules() -> None:
    take_extensions(["my_kind", "other module"], verbs=["report", "train", "data"])
    try:
        words = "ziggurat --extension my_kind --extension 'other module'"
        assert with_extensions("next  ziggurat report runs/a --baseline") == f"next  {words} report runs/a --baseline"
        assert with_extensions("torchrun -m ziggurat train x; ziggurat data inspect F") == (
            f"torchrun -m {words} train x; {words} data inspect F"
        )
        for line in (f"{words} report runs/a", "tests/ziggurat report", "ziggurat --help", "see docs of ziggurat"):
            assert with_extensions(line) == line
    finally:
        take_extensions([], verbs=[])
    assert with_extensions("ziggurat report runs/a") == "ziggurat report runs/a"


def test_errors_of_a_run_with_an_extension_print_commands_that_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_alone.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["--extension", "mine_alone", "train", "dlrm"]) == 2
    assert "ziggurat --extension mine_alone recipes" in capsys.readouterr().err
    assert main(["train", "dlrm"]) == 2
    assert "ziggurat recipes" in capsys.readouterr().err
