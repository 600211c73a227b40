"""Shares of unknown ids that a run takes from its validation rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from ziggurat.recipes.catalogue import table_run
from ziggurat.training.config import AS_VALIDATION, TrainingConfig
from ziggurat.training.records.run_folder import CONFIG


def test_shares_are_those_of_validation_rows_and_stand_in_the_config_of_the_run(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 3000
    user = np.where(np.arange(rows) < 2400, draw.integers(50, size=rows), 1000 + np.arange(rows))  # all new at the end
    frame = pl.DataFrame({"user": user, "item": draw.integers(9, size=rows), "time": np.arange(rows)})
    frame.with_columns(click=pl.Series(draw.integers(2, size=rows))).write_parquet(tmp_path / "rows.parquet")
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
        labels=(zg.Label(name="click"),),
        time="time",
    )
    config = table_run(zg.DLRMConfig(embedding_dim=4), schema)
    config = replace(
        config,
        data=replace(config.data, train=(str(tmp_path / "rows.parquet"),)),
        training=TrainingConfig(threads=1, max_steps=2, unknown_ids=(AS_VALIDATION,)),
    )
    zg.train_run(config, folder=tmp_path / "run")
    assert CONFIG.read(tmp_path / "run/config.json")["training"]["unknown_ids"] == ["user=0.3"]
    assert "ids made unknown" in (tmp_path / "run/startup.json").read_text()
    again = zg.train_run(config, folder=tmp_path / "run", resume=True)  # the run knows its shares
    assert again.fit.steps == 2
