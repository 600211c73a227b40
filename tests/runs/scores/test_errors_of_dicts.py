"""Errors of a dict of columns to score speak of its keys and values, and their ways out work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.data.raw.written_numbers import DecimalMark, ThousandsMark
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, SchemaError
from ziggurat.models import LogisticRegressionConfig
from ziggurat.runs.load import Run

SCHEMA = zg.Schema(features=(zg.Categorical(name="user"), zg.Dense(name="price")), labels=(zg.Label(name="like"),))


def trained(tmp_path: Path, **written: Any) -> Run:
    """A run on a few rows."""
    rows = {"user": ["ann", "bob"] * 100, "price": [1.0, 2.0, 3.0, 4.0] * 50, "like": [1, 0, 0, 1] * 50}
    model = LogisticRegressionConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    config = zg.RunConfig(data=zg.DataConfig(**written), table_schema=SCHEMA, model=model, training=SETTINGS)
    zg.train_run(config, folder=tmp_path / "run", data=rows)
    return zg.load_run(tmp_path / "run")


def test_a_key_that_is_absent_and_a_value_that_is_no_number(tmp_path: Path) -> None:
    run = trained(tmp_path)
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


def test_missing_marks_and_numbers_among_texts_of_a_dict(tmp_path: Path) -> None:
    run = trained(tmp_path, decimal=DecimalMark.COMMA, thousands=ThousandsMark.POINT)
    expected = run.scores({"user": ["ann", None], "price": [1.234, 3.0]})
    for missing in (float("nan"), np.nan, pd.NA, None):
        assert run.scores({"user": ["ann", missing], "price": [1.234, 3]}) == pytest.approx(expected)
        of_pandas = pd.Series(["ann", missing], dtype=object)
        assert run.scores({"user": of_pandas, "price": [1.234, 3]}) == pytest.approx(expected)
    mixed = {"user": ["ann", None], "price": [1.234, "3,0"]}
    assert run.scores(mixed) == pytest.approx(expected), "a number stays the number that it is"
    assert run.predict(mixed)["like"] == pytest.approx(expected[:, 0])  # type: ignore[index]
    no_price = run.scores({"user": ["ann", None], "price": [None, 3.0]})
    assert run.scores({"user": ["ann", None], "price": [pd.NA, 3.0]}) == pytest.approx(no_price)
    with pytest.raises(SchemaError) as absent:
        run.scores({"user": ["ann", 5], "prise": [object(), "3"]})
    assert "rename 'prise' to 'price'" in str(absent.value)


def test_what_is_no_dict_of_columns_is_refused_with_a_way_that_works(tmp_path: Path) -> None:
    run = trained(tmp_path)
    row = {"user": "ann", "price": 2.0}
    with pytest.raises(DataError, match=r"pl\.DataFrame\(rows\)"):
        run.scores([row, row])
    assert run.scores(pl.DataFrame([row, row])).shape == (2, 1)
    with pytest.raises(DataError, match="columns by name, with a value for each row") as nothing:
        run.scores(None)
    assert "files" not in str(nothing.value)
    with pytest.raises(DataError, match="now 'user' 2, 'price' 3"):
        run.scores({"user": ["ann", "bob"], "price": [1.0, 2.0, 3.0]})
    with pytest.raises(SchemaError, match="the keys 'user', 'price', which the run was trained on") as empty:
        run.scores({})
    assert "found:    no keys" in str(empty.value)
