"""Tower models through the command line: train, look, resume, evaluate, predict, verify, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from ziggurat.cli.main import main
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.load import load_run

TOWERS = ziggurat.Towers(towers=(("tags", "user_id"), ("item",)), strategy="by hand")
SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="user_id"),
        ziggurat.Categorical(name="item"),
        ziggurat.Dense(name="price"),
        ziggurat.MultiHot(name="tags"),
    ),
    labels=(ziggurat.Label(name="click"),),
    time="timestamp",
)
DATA = ["--data.train", "events.parquet", "--schema", "my.toml"]


FAST = [*SMALL, "--dim", "16", "--training.precision", "fp32", "--model.embedding.kernel", "torch"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests here, so that kernels are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(cache))
    events(3000).write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml", comments=None)
    TOWERS.save("towers.json")
    return tmp_path


def run(*arguments: str) -> None:
    assert main(list(arguments)) == 0


def test_the_whole_story(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "table_dlrm", *DATA, "--towers", "towers.json", "--compression", "4", "--out", "runs/a", *FAST)
    config = load_config("runs/a")
    assert config.towers == TOWERS
    startup = json.loads((place / "runs/a/startup.json").read_text())["Towers"]
    assert startup["grouping"] == "2 towers, strategy by hand"
    assert startup["tower 0"] == "tags, user_id: 32 numbers in, 8 out, compression 4.00, 128 weights"
    assert "tags, user_id" in (place / "runs/a/report.html").read_text()

    (place / "towers.json").unlink()  # the run has its own copy
    trained = load_run("runs/a")
    assert trained.model.towers is not None
    assert trained.model.field_dims == (4, 4, 4)
    assert any(name.startswith("towers.modules_of_towers.1.") for name in trained.model.state_dict())

    run("evaluate", "runs/a", "events.parquet", "--json", "out.json")
    assert json.loads((place / "out.json").read_text())["metrics"]["auc"] > 0.6
    run("predict", "runs/a", "events.parquet", "--out", "scores.parquet")
    scores = pl.read_parquet("scores.parquet")["click"].to_numpy()
    np.testing.assert_allclose(scores[:50], trained.scores(events(3000)[:50])[:, 0], rtol=1e-5)
    run("verify", "runs/a")
    run("report", "runs/a")
    assert "every row exactly once" in capsys.readouterr().out


def test_resumed_is_as_if_never_stopped(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["train", "table_dcn_v2", *DATA, "--towers", "towers.json", *FAST]
    kind = ["--model.tower-module.kind", "fm", "--compression", "8"]
    run(*start, *kind, "--training.epochs", "2", "--out", "runs/whole")
    run(*start, *kind, "--training.epochs", "1", "--out", "runs/cut")
    run("train", "runs/cut", "--resume", "--training.epochs", "2")
    whole, cut = (load_run(f"runs/{name}") for name in ("whole", "cut"))
    assert whole.config.model == cut.config.model
    assert whole.step == cut.step
    left, right = whole.model.state_dict(), cut.model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)

    ziggurat.Towers(towers=(("item",), ("tags", "user_id"))).save("others.json")
    assert main(["train", "runs/cut", "--resume", "--towers", "others.json"]) == 2
    assert "towers.towers: " in capsys.readouterr().err
    before = (place / "runs/cut/config.json").read_text()
    assert main(["train", "runs/cut", "--resume", "--compression", "4"]) == 2
    assert "model.tower-module.compression: 8.0 in the run, 4.0 given" in capsys.readouterr().err
    assert (place / "runs/cut/config.json").read_text() == before
    run("train", "runs/cut", "--resume", "--towers", "towers.json", "--compression", "8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compression", "4"], "add --towers FILE"),
        (["--model.tower-module.compression", "4"], "give the towers: --towers FILE"),
        (["--towers", "nowhere.json"], "nowhere.json"),
        (["--towers", "towers.json", "--compression", "5"], "N = 16: 1, 2, 4, 8, 16"),
        (["--towers", "towers.json", "--compression", "much"], "tower-module.compression"),
        (["--towers", "towers.json", "--compression", "2", "--model.tower-module.kind", "identity"], "kind = linear"),
        (["--towers", "strange.json"], "unknown: age"),
        (["--towers", "doubled.json"], "every feature once"),
    ],
)
def test_contradictions_are_refused_before_data_is_read(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
    (place / "strange.json").write_text('{"towers": [["tags", "user_id", "age"], ["item"]]}')
    (place / "doubled.json").write_text('{"towers": [["tags", "user_id"], ["item", "tags"]]}')
    assert main(["train", "table_dlrm", *DATA, "--dim", "16", *arguments, "--out", "runs/a"]) == 2
    assert words in capsys.readouterr().err
    assert not (place / "runs").exists()
    assert not (place / "cache/prepared").exists()


def test_logistic_regression_has_no_towers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["train", "movielens_logistic_regression", "--out", "runs/a", "--towers", "towers.json"]
    assert main(recipe) == 2
    assert "dlrm, dcn_v2, dnn, wukong, dhen" in capsys.readouterr().err
    assert main([*recipe, "--compression", "4"]) == 2
    assert "dlrm, dcn_v2, dnn, wukong, dhen" in capsys.readouterr().err


def test_settings_show_the_towers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "table_dlrm", *DATA, "--towers", "towers.json", "--compression", "4", "--settings")
    shown = capsys.readouterr().out
    assert "--model.tower-module.compression" in shown
    assert "by hand" in shown
