"""Vectors in the text of a CSV file are those of a column of lists, and what may be read in two ways is an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import BoundsError, DataError

SCHEMA = zg.Schema(features=(zg.Vector(name="v", dim=2),))


def read(*cells: object) -> list[list[float]]:
    chunk = RawChunk.of(pl.DataFrame({"v": pl.Series(cells, strict=False)}))
    return np.asarray(parse_chunk(SCHEMA, chunk, bad_rows=BadRows()).features["v"]).tolist()


@pytest.mark.parametrize(
    "text",
    ["[0.5, -2]", "[0.5,-2]", "0.5 -2", "[ 0.5 -2.\n]", "(0.5, -2e0)", "0.5|-2", "0.5; -2", " 0.5,-2 ", "[0.5   -2.0]"],
)
def test_a_text_of_numbers_is_a_vector(text: str) -> None:
    assert read(text, None) == [[0.5, -2.0], [0.0, 0.0]]
    assert read(text, text) == read([0.5, -2.0], [0.5, -2.0])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0,5 0,2", "'0,5 0,2'"),  # commas before fractions: no vector of four, and none of two whole numbers
        ("0,5, 0,2", "'0,5, 0,2'"),
        ("[0.1, x]", "x"),
        ("[0.1, nan]", "nan"),
        ("[0.1]", "1 numbers"),
        ("[]", "0 numbers"),
        ("1 2 3", "3 numbers, '1 2 3'"),
    ],
)
def test_a_text_that_is_none_is_a_bad_row(text: str, found: str) -> None:
    with pytest.raises((DataError, BoundsError)) as wrong:
        read("0.1 0.2", text)
    assert found in wrong.value.found


def test_the_vectors_of_a_csv_file_are_guessed_and_train_the_same_as_lists(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    vectors = np.round(draw.normal(size=(400, 3)), 3).tolist()
    rest = {"user": [f"u{row % 9}" for row in range(400)], "click": [int(vector[0] > 0) for vector in vectors]}
    texts = pl.DataFrame({"v": [str(vector) for vector in vectors], "place": ["4.1, 5.2"] * 400, **rest})
    texts.write_csv(tmp_path / "rows.csv")
    pl.DataFrame({"v": vectors, **rest}).write_parquet(tmp_path / "rows.parquet")
    schema = zg.inspect_file(tmp_path / "rows.csv").schema
    assert schema.feature("v") == zg.Vector(name="v", dim=3)
    found = [
        zg.prepare(zg.DataConfig(train=(str(tmp_path / name),)), schema=schema, folder=tmp_path / "prepared").train
        for name in ("rows.csv", "rows.parquet")
    ]
    columns = [each.read_group(0)["v"].to_pylist() for each in found]
    assert columns[0] == columns[1]
    assert len(columns[0]) > 300
