"""The planning guide is true: its commands run and print what it shows, its cluster.toml loads, its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ziggurat.cli.main import main
from ziggurat.planning.cluster.catalogue import load_cluster

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "planning.md"
EXACT = ("cluster show", "--cluster v100x2")  # no search in what they print


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.S | re.M)


def commands() -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of every console block."""
    found = []
    for block in blocks("console"):
        first, *shown = block.splitlines()
        found.append((first.removeprefix("$ ziggurat "), shown))
    return found


def agrees(line: str, printed: str) -> bool:
    """`…` stands for any text; widths of gaps do not count."""
    pattern = ".*".join(re.escape(part) for part in re.sub(r"\s+", " ", line.strip()).split("…"))
    return any(re.fullmatch(pattern, re.sub(r"\s+", " ", each.strip())) for each in printed.splitlines())


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "cluster.toml").write_text(blocks("toml")[0])
    exec(compile(blocks("python")[0], "planning.md", "exec"), {})  # writes towers.json
    return tmp_path


@pytest.mark.parametrize("number", range(len(commands())))
def test_commands_print_what_the_guide_shows(number: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a search decides, only the kind of line is compared: its first word."""
    command, shown = commands()[number]
    arguments = shlex.split(command.replace("{2..128}", "{2..4}"))
    if arguments[0] in ("plan", "simulate"):
        arguments += ["--budget-s", "0.3"]
    status = main(arguments)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert status == (2 if "PlanError" in shown else 0), printed
    lines = [line for line in shown if line.strip() not in ("", "…") and set(line.strip()) != {"─"}]
    assert lines
    for line in lines:
        if any(words in command for words in EXACT):
            assert agrees(line, printed), line
        elif command.startswith("plan"):
            assert re.search(rf"^ ?{re.escape(line.split()[0])} ", printed, re.M), line


def test_the_guides_cluster_is_what_it_says(place: Path) -> None:
    cluster = load_cluster("cluster.toml")
    assert (cluster.world_size, cluster.between.bytes_per_s) == (32, 12.5e9)


def test_the_guides_python_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[1].replace("budget_s=1.0", "budget_s=0.3"), "planning.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("plan for 64 ranks")
    assert "samples/s" in shown
