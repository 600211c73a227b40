"""An evaluation says which of its rows the run was trained on: of frames and of parts of files, but not of chance."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from tests.studies.own_cache import cache_with_kernels
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.models import LogisticRegressionConfig

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item"), zg.Dense(name="price")),
    labels=(zg.Label(name="like"),),
    time="time",
)


def shop(*, has_prices: bool) -> pl.DataFrame:
    """Rows in the order of time; without prices the same rows come back again and again."""
    draw = np.random.default_rng(0)
    size = 1000
    return pl.DataFrame(
        {
            "user": [f"u{each}" for each in draw.integers(0, 4, size)],
            "item": [f"i{each}" for each in draw.integers(0, 4, size)],
            "price": draw.normal(size=size).round(4) if has_prices else np.ones(size),
            "time": np.arange(size) + 1_700_000_000,
            "like": draw.integers(0, 2, size),
        }
    )


def trained(rows: pl.DataFrame, *, folder: Path) -> zg.Run:
    model = LogisticRegressionConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)
    config = zg.RunConfig(data=zg.DataConfig(split=split), table_schema=SCHEMA, model=model, training=SETTINGS)
    zg.train_run(config, folder=folder, data=rows)
    return zg.load_run(folder)


def test_rows_of_training_are_named_in_frames_and_parts_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    rows = shop(has_prices=True)
    run = trained(rows, folder=tmp_path / "run")
    rows.slice(700, 200).write_csv(tmp_path / "part.csv")
    said: list[str] = []
    with caplog.at_level(logging.WARNING):
        for data in (rows, rows.tail(200), str(tmp_path / "part.csv"), rows.to_dict(as_series=False)):
            caplog.clear()
            run.evaluate(data)
            said.append(" ".join(caplog.messages))
        caplog.clear()
        run.importance(rows.head(300))
        said.append(" ".join(caplog.messages))
    assert "80.0% of these rows were trained on" in said[0]
    assert "trained on" not in said[1]
    assert "50.0% of these rows were trained on" in said[2]
    assert "of its own validation rows 0.0% do by chance" in said[3]
    assert "100.0% of these rows were trained on" in said[4]


def test_rows_that_are_equal_by_chance_are_not_called_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    rows = shop(has_prices=False)
    run = trained(rows, folder=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        run.evaluate(rows.tail(100))
    assert not any("trained on" in message for message in caplog.messages)
