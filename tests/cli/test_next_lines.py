"""The line that ends a training names a command that works when it is pasted, of logs and of models that find items."""

from __future__ import annotations

import shlex
from pathlib import Path

import polars as pl
import pytest

from ziggurat.cli.main import main

EVENTS = """
[[feature]]
name = "item"
kind = "categorical"
[items]
id = "item"
[roles]
group = "user"
time = "time"
[events]
max_length = 8
"""
PAIRS = """
[[feature]]
name = "user"
kind = "categorical"
[[feature]]
name = "item"
kind = "categorical"
[[label]]
name = "like"
[items]
id = "item"
[roles]
group = "user"
time = "time"
"""


@pytest.mark.parametrize(
    ("recipe", "schema"),
    [("table_sasrec", EVENTS), ("table_two_tower", PAIRS), ("table_logistic_regression", PAIRS)],
)
def test_the_next_command_works(
    recipe: str, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = range(320)
    pl.DataFrame(
        {
            "user": [f"u{number // 8}" for number in numbers],
            "item": [f"i{number * 7 % 30}" for number in numbers],
            "time": [1_700_000_000 + 60 * (number * 37 % 320) for number in numbers],
            "like": [int(number % 3 > 0) for number in numbers],
        }
    ).write_csv("my log.csv")
    Path("my.toml").write_text(schema)
    settings = ["--epochs", "1", "--threads", "1", "--model.embedding.kernel", "torch"]
    given = ["--data.train", "my log.csv", "--schema", "my.toml", "--out", "my runs/first", *settings]
    assert main(["train", recipe, *given]) == 0
    shown = capsys.readouterr().out.splitlines()
    begins = next(index for index, line in enumerate(shown) if line.startswith("next "))
    text = " ".join(line.strip() for line in shown[begins:]).partition("ziggurat ")[2].partition(" report ")[0]
    assert main(shlex.split(text)) == 0
    capsys.readouterr()
    if recipe == "table_logistic_regression":
        assert pl.read_parquet("my runs/first/scores.parquet").height == 320
    if recipe == "table_sasrec":
        assert Path("my runs/first/next.parquet").exists()
        assert main(["importance", "my runs/first"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "ziggurat evaluate 'my runs/first' --split test" in said
        assert main(["evaluate", "my runs/first", "my log.csv"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "expected: samples with history" in said
        assert "were trained on" not in said, "a refusal comes without a warning before it"
