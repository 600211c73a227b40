"""The same awkward table as CSV, Parquet and JSON Lines: the same schema, the same settings, the same encoded data."""

from __future__ import annotations

import shlex
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ziggurat.config import override
from ziggurat.data.inspect.inspect_file import Inspection, inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare

RNG = np.random.default_rng(1)
ROWS = 300
PRICES = RNG.integers(90, 9000, ROWS).tolist()
HISTORIES = [RNG.integers(1, 31, RNG.integers(0, 7)).tolist() for _ in range(ROWS)]
TIMES = [(datetime(2024, 1, 1) + timedelta(hours=row)).isoformat() for row in range(ROWS)]
GENRES = ("Drama | Comedy", "Drama|Comedy", "Drama", "Comedy | Action | Drama")
GERMAN = str.maketrans(",.", ".,")

# By kind of trouble: one more column, and a word of the warning that must be there; "" where nothing needs a word.
KINDS: dict[str, tuple[str, list, str]] = {
    "thousands": ("price", [f"{each:,}" for each in PRICES], "--data.thousands comma"),
    "german": ("price", [f"{each / 7:,.2f}".translate(GERMAN) for each in PRICES], "--data.decimal comma"),
    "currency": ("price", [f"${each / 70:,.2f}" for each in PRICES], "--data.signs strip"),
    "percent": ("price", [f"{each / 100}%" for each in PRICES], "--data.signs strip"),
    "outcomes": ("saw", [row % 7 % 2 for row in range(ROWS)], "0 or 1, as the label"),
    "some": ("buy", [row % 3 % 2 if row % 2 else None for row in range(ROWS)], "known of 50.0%"),
    "weights": ("weight", [each / 7 for each in PRICES], 'weight = "weight" under [roles]'),
    "minus one": ("shop_id", [-1 if row % 9 == 0 else row % 31 for row in range(ROWS)], "-1 stands in"),
    "padded": ("hist_items", [each + [0] * (8 - len(each)) for each in HISTORIES], "filled up to 8 with '0'"),
    "padded before": ("hist_items", [[0] * (8 - len(each)) + each for each in HISTORIES], "filled up to 8"),
    "spaces": ("genres", [GENRES[row % 4] for row in range(ROWS)], "ids have spaces around them"),
    "zones": ("time", [time + ("Z" if row % 2 else "") for row, time in enumerate(TIMES)], "name a time zone"),
    "seconds": ("t", [1_700_000_000 + 60 * row for row in range(ROWS)], ""),
    "line ends": ("note", [("a\nb", "c", "d\r\ne")[row % 3] for row in range(ROWS)], ""),
    "letters": ("naïve é", [("ü", "日本", "🎉", "a")[row % 4] for row in range(ROWS)], ""),
    "large ids": ("thing_id", [2**60 + row % 31 for row in range(ROWS)], ""),
    "truths": ("is_new", [row % 5 % 2 == 0 for row in range(ROWS)], ""),
}


def _written(kind: str, suffix: str, folder: Path) -> Path:
    name, values, _ = KINDS[kind]
    frame = pl.DataFrame({"user_id": RNG.integers(0, 40, ROWS), "click": [row // 3 % 2 for row in range(ROWS)]})
    frame = pl.DataFrame({"user_id": [row * 7 % 40 for row in range(ROWS)], "click": frame["click"], name: values})
    path = folder / f"t.{suffix}"
    if suffix == "parquet":
        frame.write_parquet(path)
    elif suffix == "jsonl":
        frame.write_ndjson(path)
    else:
        lists = [each for each, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
        frame = frame.with_columns(pl.col(lists).cast(pl.List(pl.String)).list.join("|"))
        frame.write_csv(path, separator=";" if kind == "german" else ",")
    return path


def _config(path: Path, found: Inspection) -> DataConfig:
    flags = found.settings()
    config = DataConfig(train=(str(path),))
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        config = override(config, {flag.removeprefix("--data."): value})
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_an_awkward_table_is_the_same_in_every_format(kind: str, tmp_path: Path) -> None:
    name, _, words = KINDS[kind]
    seen = set()
    for suffix in ("csv", "parquet", "jsonl"):
        path = _written(kind, suffix, tmp_path)
        found = inspect_file(path)
        assert not words or any(words in warning for warning in found.warnings), (suffix, found.warnings)
        assert name in found.schema.columns
        assert shlex.join(found.settings()) == " ".join(found.settings())
        data = prepare(_config(path, found), schema=found.schema, folder=tmp_path / f"prepared-{suffix}")
        assert sum(split.rows for split in data.summary.splits.values()) == ROWS
        kinds = tuple((feature.name, feature.kind) for feature in found.schema.features)
        tables = tuple((each, tuple(known.ids)) for each, known in data.preprocessing.vocabularies.items())
        numbers = tuple(sorted((each, repr(state)) for each, state in data.preprocessing.numbers.items()))
        seen.add((kinds, tables, numbers))
    assert len(seen) == 1


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_texts_that_all_are_numbers_are_named(suffix: str, tmp_path: Path) -> None:
    texts = ["NULL" if row % 17 == 0 else f"{each / 7:.3f}" for row, each in enumerate(PRICES)]
    frame = pl.DataFrame(
        {"user_id": [row % 40 for row in range(ROWS)], "price": texts, "version": ["1.50", "2a"] * 150}
    )
    frame = frame.with_columns(click=pl.int_range(ROWS) // 3 % 2)
    path = tmp_path / f"t.{suffix}"
    frame.write_parquet(path) if suffix == "parquet" else frame.write_ndjson(path)
    (note,) = (warning for warning in inspect_file(path).warnings if "column of text" in warning)
    assert note.startswith("'price' is a column of text, and all its texts are numbers")
    assert 'kind = "dense"' in note
