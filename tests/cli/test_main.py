"""The command line: its flags are frozen, errors have four parts, and settings reach the config."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from ziggurat.cli.main import build_parser, main
from ziggurat.config import to_json
from ziggurat.recipes.catalogue import recipe_named

FROZEN = {
    "demo": {"--out", "--no-ranks"},
    "train": {
        *("--config", "--schema", "--towers", "--compression", "--out", "--resume", "--settings"),
        *("--plan", "--tower-size", "--dense", "--wire"),
    },
    "evaluate": {"--bad-rows", "--step", "--json"},
    "predict": {"--bad-rows", "--step", "--out"},
    "data inspect": {"--write-schema", "--label", "--separator"},
    "data fetch": {"--source"},
    "towers partition": {
        "--towers",
        "--strategy",
        "--balance",
        "--tolerance",
        "--memory-limit-bytes",
        "--seed",
        "--samples",
        "--out",
    },
    "compare": {
        *("--models", "--seeds", "--trials", "--protocol", "--source", "--rows", "--threads", "--max-epochs"),
        *("--out", "--json"),
    },
    "scale": {
        *("--compute", "--points", "--data", "--rows", "--seeds", "--source", "--threads", "--out", "--json"),
    },
    "plan": {
        *("--cluster", "--towers", "--compare", "--save", "--schema", "--compression", "--rows", "--list-length"),
        *("--budget-s", "--seed", "--costs"),
    },
    "simulate": {
        *("--cluster", "--towers", "--plot", "--schema", "--compression", "--rows", "--list-length", "--budget-s"),
        "--seed",
    },
    "cluster show": {"--out"},
    "cluster probe": {"--minutes", "--out", "--samples"},
    "recipes": set(),
    "report": set(),
    "verify": set(),
    "doctor": set(),
    "bench": {"--json", "--quick"},
}


def flags(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    own: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= flags(child, f"{prefix} {name}".strip())
        else:
            own |= {option for option in action.option_strings if option not in ("-h", "--help", "--version")}
    return found or {prefix: own}


def test_flags_are_frozen() -> None:
    """A new flag is a decision: settings of runs belong into configs, which need none."""
    assert flags(build_parser()) == FROZEN


def test_help_is_fast_and_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert time.process_time() - begin < 0.5
    assert "ziggurat train movielens_dlrm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "movielens_dlmr"], "did you mean 'movielens_dlrm'"),
        (["train"], "ziggurat recipes"),
        (["train", "table_dlrm"], "data inspect"),
        (["train", "movielens_dlrm", "--training.epoch", "2"], "'epochs'"),
        (["train", "movielens_dlrm", "--training.epochs", "many"], "int"),
        (["train", "movielens_dlrm", "--training.epochs"], "a value after --training.epochs"),
        (["train", "movielens_dlrm", "epochs=2"], "begins with --"),
        (["train", "nowhere", "--resume"], "config.json"),
        (["evaluate", "nowhere", "data.parquet"], "config.json"),
        (["report", "nowhere"], "metrics.jsonl"),
        (["towers", "partition", "nowhere", "--towers", "2"], "config.json"),
        (["towers", "partition", "nowhere", "--towers", "0"], "num_towers"),
        (["doctor", "--colour"], "--colour"),
    ],
)
def test_errors_have_four_parts(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    for part in ("expected: ", "found:    ", "where:    ", "ways out:\n  1. "):
        assert part in shown
    assert words in shown


def test_settings_shows_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "movielens_dlrm", "--model.embedding-dim=32", "--training.epochs", "7", "--settings"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.strip().startswith("--")}
    assert rows["--model.embedding-dim"] == "32"
    assert rows["--training.epochs"] == "7"


def test_the_value_of_a_setting_is_not_taken_for_a_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_json(recipe_named("movielens_dlrm"))))
    assert main(["train", "--config", str(config), "--training.epochs", "7", "--settings"]) == 0
    assert any(line.split()[::2] == ["--training.epochs", "7"] for line in capsys.readouterr().out.splitlines())


def test_recipes_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    from ziggurat.recipes.catalogue import RECIPES

    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for recipe in RECIPES:
        assert recipe.__name__ in shown
