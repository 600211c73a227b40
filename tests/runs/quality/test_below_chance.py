"""A result below chance is explained by what the rows show: each likely reason is made, trained and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.features.schema import Task
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.execute import RunResult, train_run
from ziggurat.runs.quality.below_chance import BelowChance
from ziggurat.training.config import TrainingConfig
from ziggurat.training.evaluation.evaluate import Evaluation, unknown_text
from ziggurat.training.metrics.suspicion import suspicious
from ziggurat.training.records.run_folder import RunFolder, read_evaluation
from ziggurat.training.report.progress import NoProgress

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item"), zg.Dense(name="clock")),
    labels=(zg.Label(name="click"),),
)
NUM_ITEMS = 20


class Said(NoProgress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def rows(num_rows: int, *, seed: int, turned: bool = False) -> pl.DataFrame:
    """Clicks that follow from the item alone."""
    draw = np.random.default_rng(seed)
    item = draw.integers(NUM_ITEMS, size=num_rows)
    logits = 4.0 * (item / NUM_ITEMS - 0.5)
    click = (draw.random(num_rows) < 1 / (1 + np.exp(-logits))) != turned
    user = draw.integers(10, size=num_rows)
    return pl.DataFrame({"user": user, "item": item, "clock": draw.random(num_rows), "click": click.astype(np.int64)})


def trained(folder: Path, test: pl.DataFrame) -> tuple[RunResult, list[str]]:
    """Train on honest rows, and judge on others; the warnings of the test rows."""
    folder.mkdir(exist_ok=True)
    frames = {"train": rows(2000, seed=0), "valid": rows(300, seed=1), "test": test}
    paths: dict[str, tuple[str, ...]] = {}
    for split, frame in frames.items():
        frame.write_parquet(folder / f"{split}.parquet")
        paths[split] = (str(folder / f"{split}.parquet"),)
    data = DataConfig(
        train=paths["train"], valid=paths["valid"], test=paths["test"], split=SplitConfig(by=SplitBy.FILES)
    )
    config = table_run(zg.LogisticRegressionConfig(), SCHEMA)
    training = TrainingConfig(epochs=2, threads=1, table_learning_rate=0.1)
    said = Said()
    config = zg.RunConfig(data=data, table_schema=SCHEMA, model=config.model, training=training)
    result = train_run(config, folder=folder / "run", progress=said)
    return result, [line for line in said.lines if line.startswith("warning: test auc")]


def few(folder: Path) -> pl.DataFrame:
    """Three rows of each class, of which most are the wrong way round."""
    item = [1, 8, 13, 6, 11, 18]
    return pl.DataFrame({"user": [1] * 6, "item": item, "clock": [0.5] * 6, "click": [1, 1, 1, 0, 0, 0]})


def turned(folder: Path) -> pl.DataFrame:
    return rows(1000, seed=2, turned=True)


def of_new_items(folder: Path) -> pl.DataFrame:
    """Items that nobody saw; the few old ones are disliked now."""
    frame = rows(1000, seed=3)
    is_old = np.arange(1000) % 5 == 0
    contrary = (frame["item"].to_numpy() < NUM_ITEMS // 2).astype(np.int64)
    item = np.where(is_old, frame["item"].to_numpy(), frame["item"].to_numpy() + 1000)
    return frame.with_columns(item=item, click=np.where(is_old, contrary, frame["click"].to_numpy()))


def partly_turned() -> pl.DataFrame:
    """Five in seven rows the wrong way round: below chance, and far from the opposite of training."""
    return pl.concat([rows(3000, seed=4, turned=True), rows(1200, seed=6)])


def of_another_time(folder: Path) -> pl.DataFrame:
    return partly_turned().with_columns(clock=pl.col("clock") + 7.0)


def sorted_by_the_label(folder: Path) -> pl.DataFrame:
    frame = partly_turned()
    is_kept = (frame["click"].to_numpy() == 0) | (np.arange(frame.height) % 4 == 0)
    return frame.filter(pl.Series(is_kept))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (few, "too few rows to tell it from chance: 3 positives and 3 negatives"),
        (turned, "the label is probably turned round here"),
        (of_new_items, "ids that training had not seen: item 80.0% (split: "),
        (of_another_time, "clock lies outside the range of the training rows in 100.0% of these"),
        (sorted_by_the_label, "they may be sorted by the label"),
    ],
)
def test_a_warning_below_chance_names_the_likely_reason(
    tmp_path: Path, make: Callable[[Path], pl.DataFrame], reason: str
) -> None:
    result, warnings = trained(tmp_path, make(tmp_path))
    assert result.evaluations["test"].metrics["auc"] < 0.5
    (warning,) = warnings
    assert reason in warning


def test_rows_that_chance_chose_are_not_sent_to_a_random_split(tmp_path: Path) -> None:
    """Every user stands in one row, so that most of those of a random split are new."""
    draw = np.random.default_rng(0)
    frame = pl.DataFrame({"user": np.arange(400), "item": draw.integers(5, size=400)})
    frame = frame.with_columns(clock=draw.random(400), click=draw.integers(2, size=400))
    frame.write_parquet(tmp_path / "rows.parquet")
    config = DataConfig(train=(str(tmp_path / "rows.parquet"),), split=SplitConfig(by=SplitBy.RANDOM))
    prepared = zg.prepare(config, schema=SCHEMA, folder=tmp_path / "prepared")
    evaluation = Evaluation(num_rows=40, metrics={"auc": 0.1}, curves={}, unknown={"user": 1.0})
    asked = BelowChance(split="test", evaluation=evaluation, prepared=prepared, evaluate=lambda rows: {"auc": 0.5})
    (line,) = asked.lines()
    assert "train on more rows of each user" in line
    assert "--data.split.by random" not in line


def test_a_model_that_has_not_learned_its_own_rows_does_not_blame_others(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pl.DataFrame({"clock": draw.random(400), "heat": draw.normal(size=400)})
    frame.write_parquet(tmp_path / "rows.parquet")
    schema = zg.Schema(features=(zg.Dense(name="clock"),), labels=(zg.Label(name="heat", task=Task.REGRESSION),))
    config = DataConfig(train=(str(tmp_path / "rows.parquet"),), split=SplitConfig(by=SplitBy.RANDOM))
    prepared = zg.prepare(config, schema=schema, folder=tmp_path / "prepared")
    evaluation = Evaluation(num_rows=40, metrics={"rmse": 6.0, "r2": -1.5}, curves={})

    def line(of_training: float) -> str:
        asked = BelowChance(
            split="valid", evaluation=evaluation, prepared=prepared, evaluate=lambda rows: {"r2": of_training}
        )
        (found,) = asked.lines()
        return found

    assert "training rows have -1.70000, so the model has not learned them yet" in line(-1.7)
    assert "do they differ" not in line(-1.7)
    assert "do they differ from the training rows?" in line(0.4)


def test_no_reason_leaves_the_questions_of_before() -> None:
    (line,) = suspicious({"auc": 0.4}, split="test", reasons={"auc": ""})
    assert line.endswith("is the label turned round, or does this split differ from the training rows?")


def test_unknown_ids_stand_beside_the_metrics_and_in_the_report(tmp_path: Path) -> None:
    frame = rows(400, seed=5).with_columns(user=pl.Series(np.where(np.arange(400) % 4 == 0, 3, 77)))
    result, _ = trained(tmp_path, frame)
    assert result.evaluations["test"].unknown == {"user": 0.75}
    assert result.evaluations["valid"].unknown == {}
    kept = read_evaluation(RunFolder(result.folder).evaluation("test"))
    assert kept["unknown"] == {"user": 0.75}
    page = result.report.read_text()
    assert "test: ids that training had not seen: user 75.0%" in page
    assert "unknown in test" not in page.split("Final evaluation")[1]


def test_features_without_unknown_ids_are_not_named() -> None:
    assert unknown_text({"user": 0.9, "item": 0.02, "hour": 0.0001}) == (
        "ids that training had not seen: user 90.0%, item 2.0%"
    )
    assert unknown_text({}) == ""
    assert "unknown" not in Evaluation(num_rows=3, metrics={}, curves={}).to_json()
