"""Negative downsampling keeps the same rows everywhere, and corrected scores are calibrated on data as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.negatives import with_negative_rate
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.schema import NumericTransform, Task
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.training.config import Precision
from ziggurat.training.evaluation.evaluate import evaluate_batches, ordered_batches

SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="item"),
        ziggurat.Dense(name="x", transform=NumericTransform.STANDARDISE),
    ),
    labels=(ziggurat.Label(name="click"),),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """100,000 rows with 10 % clicks, and the number of each row as a feature."""
    rng = np.random.default_rng(0)
    item, k = rng.integers(0, 10, 100_000), np.arange(100_000)
    click = rng.random(100_000) < 1 / (1 + np.exp(-(item / 3 - 4)))
    pl.DataFrame({"item": item, "x": k, "click": click}).write_parquet(tmp_path / "clicks.parquet")
    return tmp_path / "clicks.parquet"


def prepared(file: Path, folder: str, **settings: object) -> PreparedData:
    config = ziggurat.DataConfig(train=(str(file),), **settings)
    return ziggurat.prepare(config, schema=SCHEMA, folder=file.parent / folder)


def rows_of(dataset: EncodedDataset) -> tuple[np.ndarray, np.ndarray]:
    batches = list(ordered_batches(dataset, batch_size=8192).batches(epoch=0))
    return np.concatenate([b.row_ids.numpy() for b in batches]), np.concatenate(
        [b.labels[:, 0].numpy() for b in batches]
    )


def test_a_share_of_the_negatives_of_training_stays(file: Path) -> None:
    whole, part = prepared(file, "whole"), prepared(file, "part", negative_rate=0.1)
    rows, labels = rows_of(whole.train)
    kept, kept_labels = rows_of(part.train)
    assert set(kept) <= set(rows)
    assert kept_labels.sum() == labels.sum()
    share = (kept_labels == 0).sum() / (labels == 0).sum()
    assert share == pytest.approx(0.1, abs=0.0055)  # five standard deviations
    assert abs(kept[kept_labels == 0].mean() / rows.mean() - 1) < 0.05  # from everywhere in the file
    for split in ("valid", "test"):
        assert np.array_equal(rows_of(getattr(whole, split))[0], rows_of(getattr(part, split))[0])
    pl.read_parquet(file).write_parquet(file.parent / "again.parquet", row_group_size=777)
    assert np.array_equal(rows_of(prepared(file.parent / "again.parquet", "again", negative_rate=0.1).train)[0], kept)
    assert "10 % of those" in "\n".join(part.summary_lines())
    assert prepared(file, "part", negative_rate=0.1).reused
    assert part.folder.name != whole.folder.name
    assert part.preprocessing.fingerprint != whole.preprocessing.fingerprint


def test_corrected_scores_are_calibrated(file: Path) -> None:
    data = prepared(file, "part", negative_rate=0.1)
    model = ziggurat.build_model(
        ziggurat.DLRMConfig(embedding_dim=4, bottom=MLPConfig(hidden_dims=(4,)), top=MLPConfig(hidden_dims=(8,))),
        data.inputs,
        seed=0,
    )
    loader = ziggurat.LoaderConfig(batch_size=256)
    config = ziggurat.TrainingConfig(epochs=4, learning_rate=0.02, threads=1, loader=loader, precision=Precision.FP32)
    trainer = ziggurat.Trainer(model, config=config, train=data.train, valid=data.valid, folder=file.parent / "run")
    trainer.fit()
    assert trainer.evaluate(data.test, split="test").metrics["calibration"] == pytest.approx(1, abs=0.1)
    label = dataclasses.replace(data.inputs.labels[0], negative_rate=1.0)
    model.inputs = dataclasses.replace(data.inputs, labels=(label,))
    batches = ordered_batches(data.test, batch_size=4096).batches(epoch=0)
    assert evaluate_batches(model, batches, inputs=data.inputs).metrics["calibration"] > 3


def test_what_cannot_be_sampled_is_refused() -> None:
    two = dataclasses.replace(SCHEMA, labels=(ziggurat.Label(name="click"), ziggurat.Label(name="buy")))
    number = dataclasses.replace(SCHEMA, labels=(ziggurat.Label(name="stars", task=Task.REGRESSION),))
    for schema in (two, number):
        with pytest.raises(SchemaError):
            with_negative_rate(schema, 0.5)
        assert with_negative_rate(schema, 1.0) == schema
    for rate in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="negative_rate"):
            ziggurat.DataConfig(train=("a",), negative_rate=rate)
        with pytest.raises(SchemaError, match="negative_rate"):
            ziggurat.Label(name="click", negative_rate=rate)
    with pytest.raises(SchemaError, match="positive_weight"):
        ziggurat.Label(name="click", positive_weight=0.0)
