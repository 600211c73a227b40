"""AliExpress in the CSV form of comparisons: what is read, which searches validate, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.datasets.aliexpress import CATEGORIES, COLUMNS, NUMBERS, VALID_EVERY
from ziggurat.errors import DataError, MissingFileError


def rows(searches: int, *, seed: int) -> pl.DataFrame:
    """Made rows in the published form, three of each search."""
    rng = np.random.default_rng(seed)
    count = 3 * searches
    click = rng.integers(0, 2, count)
    return pl.DataFrame(
        {
            "search_id": np.repeat(np.arange(searches), 3),
            **{name: rng.integers(0, 50, count) for name in CATEGORIES},
            **{name: rng.random(count).round(6) for name in NUMBERS},
            "click": click,
            "conversion": click * rng.integers(0, 2, count),
        }
    )


def test_searches_of_the_training_file_validate_whole(tmp_path: Path) -> None:
    train = rows(400, seed=0)
    test = rows(30, seed=1)
    train.write_csv(tmp_path / "train.csv")
    test.with_columns(pl.col("click").cast(pl.Float64)).write_csv(tmp_path / "test.csv")  # 0.0 and 1.0
    for source in (tmp_path, None):
        folder = fetch("aliexpress-nl", source=source, cache=tmp_path / "cache")
        parts = {name: pl.read_parquet(folder / f"{name}.parquet") for name in ("train", "valid", "test")}
        learned, judged = (set(parts[name]["search_id"]) for name in ("train", "valid"))
        assert learned | judged == set(range(400))
        assert not learned & judged
        assert 0.5 < len(judged) * VALID_EVERY / 400 < 2
        assert parts["test"].columns == list(COLUMNS)
        assert np.array_equal(parts["test"]["conversion"], test["conversion"])
        assert np.array_equal(parts["test"]["numerical_63"], test["numerical_63"].cast(pl.Float32))
        assert np.array_equal(parts["test"]["categorical_16"], test["categorical_16"])


@pytest.mark.parametrize("change", ["column", "label", "text"])
def test_another_file_is_refused(tmp_path: Path, change: str) -> None:
    good = rows(5, seed=0)
    bad = {
        "column": good.drop("numerical_7"),
        "label": good.with_columns(click=pl.lit(2)),
        "text": good.with_columns(numerical_3=pl.lit("many")),
    }[change]
    good.write_csv(tmp_path / "train.csv")
    bad.write_csv(tmp_path / "test.csv")
    with pytest.raises(DataError, match="MTReclib prepares") as error:
        fetch("aliexpress-us", source=tmp_path, cache=tmp_path / "cache")
    assert {"column": "numerical_7", "label": "click 2,", "text": "many"}[change] in str(error.value)


def test_without_files_it_says_which_are_wanted(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"train\.csv and test\.csv of ES"):
        fetch("aliexpress-es", cache=tmp_path)
    with pytest.raises(MissingFileError, match=r"train\.csv"):
        fetch("aliexpress-es", source=tmp_path, cache=tmp_path)


def test_its_recipes_read_what_is_kept() -> None:
    for name in ("aliexpress_shared_bottom", "aliexpress_mmoe", "aliexpress_ple", "aliexpress_esmm"):
        assert zg.recipe_named(name).table_schema == schema_for("aliexpress-nl")
