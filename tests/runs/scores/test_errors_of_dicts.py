"""Errors of a dict of columns to score speak of its keys and values, and their ways out work."""

from __future__ import annotations

from pathlib import Path

import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, SchemaError
from ziggurat.models import LogisticRegressionConfig

SCHEMA = zg.Schema(features=(zg.Categorical(name="user"), zg.Dense(name="price")), labels=(zg.Label(name="like"),))


def test_a_key_that_is_absent_and_a_value_that_is_no_number(tmp_path: Path) -> None:
    rows = {"user": ["ann", "bob"] * 100, "price": [1.0, 2.0, 3.0, 4.0] * 50, "like": [1, 0, 0, 1] * 50}
    model = LogisticRegressionConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    config = zg.RunConfig(data=zg.DataConfig(), table_schema=SCHEMA, model=model, training=SETTINGS)
    zg.train_run(config, folder=tmp_path / "run", data=rows)
    run = zg.load_run(tmp_path / "run")
    with pytest.raises(SchemaError) as absent:
        run.scores({"user": ["ann", "bob"]})
    assert "the key 'price'" in str(absent.value)
    assert "keys user" in str(absent.value)
    assert "file" not in str(absent.value)
    assert run.scores({"user": ["ann", "bob"], "price": [None, None]}).shape == (2, 1)
    with pytest.raises(DataError) as wrong:
        run.scores({"user": ["ann", "bob"], "price": ["3", "x"]})
    assert "key 'price', value 1 of the list" in str(wrong.value)
    assert "--data" not in str(wrong.value)
    assert run.scores({"user": ["ann", "bob"], "price": ["3", None]}).shape == (2, 1)
