"""Answers say what nothing was known of: ids of rows, and users for whom all items are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.models import MLPConfig
from ziggurat.recipes.catalogue import recipe_named

TORCH = EmbeddingConfig(kernel=KernelChoice.TORCH)
WITHOUT_ITEMS = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=(zg.Label(name="like"),)
)


def test_an_export_without_a_catalogue_names_the_unknown_ids_of_items(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = {
        "user": [f"u{each}" for each in draw.integers(0, 20, 400)],
        "item": [f"i{each}" for each in draw.integers(0, 10, 400)],
        "like": draw.integers(0, 2, 400),
    }
    model = zg.DCNv2Config(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,)), embedding=TORCH)
    config = zg.RunConfig(data=zg.DataConfig(), table_schema=WITHOUT_ITEMS, model=model, training=SETTINGS)
    zg.train_run(config, folder=tmp_path / "run", data=pl.DataFrame(rows))
    zg.export_run(tmp_path / "run", out=tmp_path / "export", config=zg.ExportConfig(golden=4, program=False))
    loaded = zg.Recommender.load(tmp_path / "export")
    answer = loaded.rank({"user": "u1"}, [{"item": "i1"}, {"item": "never seen"}])
    assert answer.notes == ("unknown ids: item 1 of 2 (50.0%)",)
    assert loaded.rank({"user": "nobody"}, [{"item": "i1"}, {"item": "i2"}]).notes == (
        "unknown ids: user 1 of 1 (100.0%)",
    )
    same = loaded.rank({"user": "u1"}, [{"item": "i1"}, {"item": "i1"}])
    assert same.notes[0].startswith("all 2 items have the same score, 0.")


def test_a_user_without_a_history_is_told_that_the_order_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = pl.DataFrame(
        {
            "user": [f"u{number // 8}" for number in range(320)],
            "item": [f"i{number * 7 % 30}" for number in range(320)],
            "time": [1_700_000_000 + 60 * number for number in range(320)],
        }
    )
    schema = zg.Schema(
        features=(zg.Categorical(name="item"),),
        group="user",
        time="time",
        items=zg.Items(id="item"),
        events=zg.Events(max_length=8),
    )
    settings = {"training.epochs": "1", "training.threads": "1", "model.embedding.kernel": "torch"}
    config = override(recipe_named("table_hstu", schema=schema), settings)
    zg.train_run(config, folder=tmp_path / "run", data=log)
    zg.export_run(tmp_path / "run", out=tmp_path / "export")
    loaded = zg.Recommender.load(tmp_path / "export")
    note = "all 3 items have the same score, 0: nothing in the request tells them apart"
    assert loaded.recommend({"user": "nobody"}, k=3).notes[-1] == note
    assert loaded.recommend({}, k=3).to_json()["notes"] == [note]
    assert loaded.recommend({"user": "u1"}, k=3).notes == ()
    pl.DataFrame({"user": ["nobody", "u1"]}).write_csv(tmp_path / "users.csv")
    out = str(tmp_path / "lists.parquet")
    assert main(["recommend", str(tmp_path / "export"), str(tmp_path / "users.csv"), "--k", "3", "--out", out]) == 0
    assert "1 user whose items all have one score" in capsys.readouterr().out
