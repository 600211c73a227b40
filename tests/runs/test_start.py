"""A new model of a table starts at the share of positives; published recipes and models without a known bias do not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.features.schema import Task
from ziggurat.models import ModelConfig
from ziggurat.recipes.catalogue import recipe_named, table_run
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.start import base_rates
from ziggurat.training.config import TrainingConfig
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import STARTUP, RunFolder

SHARE = 0.02
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=(zg.Label(name="click"),)
)


def write_rows(path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "user": draw.integers(30, size=4000),
            "item": draw.integers(20, size=4000),
            "click": (draw.random(4000) < SHARE).astype(np.int64),
            "dwell": draw.normal(40_000, 9_000, size=4000),
            "worth": np.full(4000, 0.5),
        }
    )
    frame.write_parquet(path)


def run_of(folder: Path, model: ModelConfig) -> RunConfig:
    write_rows(folder / "rows.parquet")
    config = table_run(model, SCHEMA)
    loader = replace(config.training.loader, batch_size=512)
    training = replace(config.training, epochs=1, max_steps=1, log_every=1, threads=1, loader=loader)
    return replace(config, data=DataConfig(train=(str(folder / "rows.parquet"),)), training=training)


def first_loss(run: Path) -> float:
    return next(each["loss"] for each in read_records(RunFolder(run).metrics) if each["kind"] == "train")


@pytest.mark.parametrize("model", [zg.DLRMConfig(embedding_dim=4), zg.LogisticRegressionConfig(), zg.DeepFMConfig()])
def test_the_first_loss_of_a_table_is_that_of_its_share_of_positives(tmp_path: Path, model: ModelConfig) -> None:
    config = run_of(tmp_path, model)
    result = zg.train_run(config, folder=tmp_path / "run")
    entropy = -SHARE * math.log(SHARE) - (1 - SHARE) * math.log(1 - SHARE)
    assert first_loss(result.folder) < entropy + 0.06
    assert (
        "the share of positives: click 1.68%"
        in STARTUP.read(result.folder / "startup.json")["Training"]["scores start at"]
    )
    plain = replace(config, training=replace(config.training, start_at_base_rate=False))
    assert first_loss(zg.train_run(plain, folder=tmp_path / "plain").folder) > 0.5


def test_a_model_without_a_known_bias_says_that_it_starts_in_the_middle(tmp_path: Path) -> None:
    result = zg.train_run(run_of(tmp_path, zg.FinalNetConfig()), folder=tmp_path / "run")
    line = STARTUP.read(result.folder / "startup.json")["Training"]["scores start at"]
    assert line == "50 %: FinalNet names no bias of its output (Model.output_biases)"


def test_shares_follow_the_weights_of_the_loss_and_leave_numbers_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet")
    labels = (zg.Label(name="click", positive_weight=10.0), zg.Label(name="dwell", task=Task.REGRESSION))
    schema = replace(SCHEMA, labels=labels, weight="worth")
    data = zg.prepare(DataConfig(train=(str(tmp_path / "rows.parquet"),)), schema=schema, folder=tmp_path / "prepared")
    click, dwell = base_rates(data).shares
    positives = data.train.read_group(0)["label:click"].to_numpy().mean()
    assert click == pytest.approx(10 * positives / (10 * positives + 1 - positives))
    assert math.isnan(dwell)
    assert base_rates(data).logits[1] == 0.0


def test_published_protocols_start_where_they_did() -> None:
    assert not TrainingConfig().start_at_base_rate
    assert not recipe_named("frappe_bars_dlrm").training.start_at_base_rate
    assert recipe_named("table_dlrm", schema=SCHEMA).training.start_at_base_rate
