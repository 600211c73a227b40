"""A config of the user's own works everywhere a built-in one does, and no file makes the package import it."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.end_to_end.test_many_ranks import run as on_ranks
from tests.end_to_end.test_towers import SCHEMA, TOWERS
from tests.models.own_model import OwnConfig
from ziggurat.cli.main import main
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError
from ziggurat.models import MODEL_CONFIGS, NextItemConfig
from ziggurat.models.build import kind_of
from ziggurat.recipes.catalogue import RECIPES, recipe_named, table_run
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.load import load_run
from ziggurat.training.records.run_folder import CONFIG

OWN = ["--model", "tests.models.own_model:OwnConfig"]
DATA = ["--data.train", "events.parquet", "--schema", "my.toml"]
FAST = [*SMALL, "--training.precision", "fp32", "--model.embedding.kernel", "torch"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(3000).write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml", comments=None)
    TOWERS.save("towers.json")
    return tmp_path


def test_every_verb_takes_an_own_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["train", "table_dlrm", *DATA, *FAST, *OWN, "--model.hidden", "6", "--training.epochs", "1"]
    assert main([*start, "--out", "runs/own"]) == 0
    assert json.loads((place / "runs/own/config.json").read_text())["model"]["class"] == OWN[1]
    config = load_config("runs/own", models=(OwnConfig,))
    assert isinstance(config.model, OwnConfig)
    assert config.model.hidden == 6
    assert "own" in (place / "runs/own/report.html").read_text()
    assert main(["train", "runs/own", "--resume", "--training.epochs", "2", *OWN]) == 0
    assert main(["verify", "runs/own", *OWN]) == 0
    assert main(["evaluate", "runs/own", "events.parquet", *OWN]) == 0
    assert main(["predict", "runs/own", "events.parquet", "--out", "scores.parquet", *OWN]) == 0
    assert len(pl.read_parquet("scores.parquet")) == 3000
    assert main(["towers", "partition", "runs/own", "--towers", "2", "--samples", "500", *OWN]) == 0
    plan = ["plan", "runs/own", "--cluster", "local", "--budget-s", "0.1", *OWN]
    assert main([*plan, "--save", "plan.json"]) == 0
    assert OWN[1] in capsys.readouterr().out
    simulate = ["simulate", "table_dlrm", "--schema", "my.toml", "--cluster", "h100x8", "--budget-s", "0.1", *OWN]
    assert main([*simulate, "--rows", "user_id=100", "--rows", "item=50", "--rows", "tags=20"]) == 0
    again = ["train", "--config", "runs/own/config.json", *OWN, "--training.epochs", "1", "--out", "runs/again"]
    assert main(again) == 0
    assert main(["compare", "runs/own", "runs/again", *OWN]) == 0
    compare = ["compare", "table", *DATA, *OWN, "--models", "dnn", "--seeds", "1", "--epochs", "1"]
    assert main([*compare, "--model.embedding.kernel", "torch", "--batch-size", "500"]) == 0
    assert "own" in capsys.readouterr().out


def test_an_own_model_on_ranks_with_towers(place: Path) -> None:
    towers = ["--towers", "towers.json", "--compression", "2", "--tower-size", "1"]
    start = ["train", "table_dlrm", *DATA, *FAST, *OWN, *towers, "--training.epochs", "1"]
    assert on_ranks(2, place, *start, "--out", "runs/two") == [0, 0]
    assert main(["predict", "runs/two", "events.parquet", "--out", "alone.parquet", *OWN]) == 0
    assert on_ranks(2, place, "predict", "runs/two", "events.parquet", "--out", "two.parquet", *OWN) == [0, 0]
    alone, together = pl.read_parquet("alone.parquet"), pl.read_parquet("two.parquet")
    np.testing.assert_allclose(together["click"], alone["click"], atol=1e-6)


def test_no_file_makes_the_package_import_code(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "table_dlrm", *DATA, *FAST, *OWN, "--training.epochs", "1", "--out", "runs/own"]) == 0
    (place / "hostile.py").write_text("open('imported', 'w').close()\nclass Mine: pass\n")
    monkeypatch.syspath_prepend(str(place))
    content = CONFIG.read("runs/own/config.json")
    CONFIG.write("runs/own/config.json", content | {"model": content["model"] | {"class": "hostile:Mine"}})
    for read in (load_run, load_config):
        with pytest.raises(ConfigError) as caught:
            read("runs/own")
        assert "hostile:Mine" in caught.value.found
        assert "--model hostile:Mine" in str(caught.value)
        assert "models=(Mine,)" in str(caught.value)
    assert main(["evaluate", "runs/own", "events.parquet"]) == 2
    assert "hostile" not in sys.modules
    assert not (place / "imported").exists()
    assert load_run("runs/own", models=(OwnConfig,)).step > 0  # the class is what the caller says
    assert main(["evaluate", "runs/own", "events.parquet", "--model", "hostile:Mine"]) == 2  # named, so imported
    assert (place / "imported").exists()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A config with the name of a built-in model."""

    kind: str = "dlrm"
    embedding: EmbeddingConfig = dataclasses.field(default_factory=EmbeddingConfig)


@pytest.mark.parametrize("name", ["no_colon", "no.such.module:Own", f"{__name__}:Missing", f"{__name__}:Taken", ":X"])
def test_a_name_that_is_no_config_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "runs/none", "--model", name]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError")
    assert "ways out:" in shown
    assert name.strip(":") in shown


def test_recipes_of_tables_exist_for_every_built_in_model() -> None:
    for cls in MODEL_CONFIGS:
        if cls is NextItemConfig:  # its recipes are called by its layers, and want events
            continue
        config = recipe_named(f"table_{kind_of(cls)}", schema=SCHEMA)
        assert type(config.model) is cls
        assert config == table_run(config.model, SCHEMA)
        for name in (cls.__name__, cls.__name__.removesuffix("Config")):
            assert name in ziggurat.__all__
    assert all((recipe.__doc__ or "").endswith(".") for recipe in RECIPES)
    assert table_run(OwnConfig(), SCHEMA).recipe == "table_own"
