"""What gives the label away is said when data is prepared, and what does not is not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import SchemaError
from ziggurat.features.labels import MissingLabel
from ziggurat.features.schema import Categorical, Dense, Label, MultiHot, Schema, Task

RNG = np.random.default_rng(0)
ROWS = 3000
CLICK = (RNG.random(ROWS) < 0.3).astype(int)
FRAME = pl.DataFrame(
    {
        "click": CLICK,
        "user": RNG.integers(0, 100, ROWS),
        "unique": [f"r{n}" for n in range(ROWS)],  # perfect by heart, and nothing on other rows
        "noise": RNG.normal(size=ROWS),
        "hint": CLICK + RNG.normal(size=ROWS),
        "dwell": [float(n % 50 + 1) if click else None for n, click in enumerate(CLICK)],
        "outcome": [("won", "paid")[n % 2] if click else "lost" for n, click in enumerate(CLICK)],
        "after": [["thanks"] if click else [] for click in CLICK],
        "sum": 3.0 * CLICK + 0.01 * RNG.normal(size=ROWS),
    }
)
GOOD = (Categorical(name="user"), Categorical(name="unique"), Dense(name="noise"), Dense(name="hint"))
LEAKS = (Dense(name="dwell", missing=-1.0), Categorical(name="outcome"), MultiHot(name="after"), Dense(name="sum"))


def warnings(tmp_path: Path, schema: Schema, *, frame: pl.DataFrame = FRAME, valid: float = 0.2) -> tuple[str, ...]:
    frame.write_parquet(tmp_path / "a.parquet")
    split = SplitConfig(by=SplitBy.RANDOM, valid_fraction=valid, test_fraction=0.1)
    data = prepare(DataConfig(train=(str(tmp_path / "a.parquet"),), split=split), schema=schema, folder=tmp_path / "p")
    again = prepare(DataConfig(train=(str(tmp_path / "a.parquet"),), split=split), schema=schema, folder=tmp_path / "p")
    assert again.reused
    assert again.summary == data.summary
    said = [line for line in data.summary_lines() if line.startswith("warning ")]
    assert len(said) == len(data.summary.warnings)
    return data.summary.warnings


@pytest.mark.parametrize("valid", [0.2, 0.0])
def test_features_that_tell_the_label_are_named_and_others_are_not(tmp_path: Path, valid: float):
    schema = Schema(features=(*GOOD, *LEAKS), labels=(Label(name="click"),))
    found = warnings(tmp_path, schema, valid=valid)
    named = sorted(text.split("'")[1] for text in found)
    assert named == ["after", "dwell", "outcome", "sum"]
    assert all("take it out of the schema" in text for text in found)


def test_a_number_to_predict(tmp_path: Path):
    frame = FRAME.with_columns(price=pl.col("noise") * 3, copy=pl.col("noise") * 6 + 1)
    features = (Categorical(name="user"), Dense(name="copy"), Dense(name="hint"))
    schema = Schema(features=features, labels=(Label(name="price", task=Task.REGRESSION),))
    (found,) = warnings(tmp_path, schema, frame=frame)
    assert "'copy' alone predicts 'price'" in found
    assert "squared correlation 0.99" in found


def test_labels_that_are_all_equal(tmp_path: Path):
    frame = FRAME.with_columns(click=pl.lit(0))
    found = warnings(tmp_path, Schema(features=GOOD[:1], labels=(Label(name="click"),)), frame=frame)
    assert [text.split(" rows")[0].split()[-1] for text in found] == ["training", "validation"]
    assert "label 'click' is 0 in all" in found[0]
    number = Label(name="price", task=Task.REGRESSION)
    found = warnings(tmp_path, Schema(features=GOOD[:1], labels=(number,)), frame=FRAME.with_columns(price=pl.lit(7.0)))
    assert "label 'price' is 7 in all" in found[0]
    assert "R² is undefined there" in found[1]
    rare = FRAME.head(60).with_columns(click=pl.Series([1, 0] * 30), outcome=pl.Series(["won", "lost"] * 30))
    schema = Schema(features=(Categorical(name="outcome"),), labels=(Label(name="click"),))
    assert warnings(tmp_path, schema, frame=rare) == ()  # too few rows to say anything


def test_a_label_that_no_row_has(tmp_path: Path):
    frame = FRAME.with_columns(bought=pl.lit(None, dtype=pl.Int8))
    labels = (Label(name="click"), Label(name="bought", missing=MissingLabel.LEFT_OUT))
    found = warnings(tmp_path, Schema(features=GOOD[:1], labels=labels), frame=frame)
    assert [text.split(" rows")[0].split()[-1] for text in found] == ["training", "validation"]
    assert "label 'bought' is missing in all" in found[0]
    assert "nothing can be learned from it" in found[0]


@pytest.mark.parametrize("transform", ["identity", "log1p"])
def test_numbers_that_32_bits_hardly_tell_apart_are_named_and_standardised_ones_are_not(tmp_path: Path, transform: str):
    seconds = pl.Series("seconds", 1_700_000_000 + np.arange(ROWS) % 2000)
    seconds[5] = None  # the zero that stands for it is not what the others are told apart by
    frame = FRAME.with_columns(seconds, one=pl.lit(7.0), flag=pl.Series(CLICK))
    small = (Dense(name="flag"), Dense(name="noise"))
    features = (Dense(name="seconds", transform=transform), Dense(name="one", transform=transform), *small)
    schema = Schema(features=features, labels=(Label(name="stars", column="hint", task=Task.REGRESSION),))
    (collapsed, constant) = warnings(tmp_path, schema, frame=frame)
    assert "feature 'seconds' has " in collapsed
    better = {"identity": "standardise", "log1p": "log1p_standardise"}[transform]
    assert f"set transform = '{better}'" in collapsed
    assert "feature 'one' is the same number in all" in constant
    features = (Dense(name="seconds", transform=better), *small)
    assert warnings(tmp_path, replace(schema, features=features), frame=frame) == ()


def test_a_feature_of_the_label_s_own_column_is_refused(tmp_path: Path):
    schema = Schema(
        features=(Dense(name="stars", column="rating"),), labels=(Label(name="like", column="rating", positive_from=4),)
    )
    with pytest.raises(SchemaError, match="take feature 'stars' out"):
        prepare(DataConfig(train=("absent.csv",)), schema=schema, folder=tmp_path)


@pytest.mark.parametrize("transform", ["quantile_buckets", "criteo_buckets"])
def test_missing_of_numbers_that_become_rows_is_named_once_and_changes_nothing(tmp_path: Path, transform: str):
    frame = pl.DataFrame({"click": CLICK, "n": [None if n % 7 == 0 else float(n % 90) for n in range(ROWS)]})
    said = Schema(features=(Dense(name="n", transform=transform, missing=5.0),), labels=(Label(name="click"),))
    (found,) = warnings(tmp_path, said, frame=frame)
    assert found.startswith(f"missing = 5 of feature 'n' has no effect: transform {transform} ")
    silent = replace(said, features=(replace(said.features[0], missing=0.0),))
    assert warnings(tmp_path, silent, frame=frame) == ()
    chunk = RawChunk.of(frame)
    rows = [Preprocessing.fit(each, [chunk]).encode(chunk)["n"].to_pylist() for each in (said, silent)]
    assert rows[0] == rows[1]
    assert {row for row, number in zip(rows[0], frame["n"], strict=True) if number is None} == {2}  # the missing row
