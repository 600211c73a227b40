"""Tables in memory: each kind is the same table, guessed as its Parquet file is, and what is none is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.errors import ConfigError, DataError, SchemaError


def columns(num_rows: int = 600) -> dict[str, Any]:
    """A dict of NumPy arrays, and one of lists."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 40, num_rows)
    price = rng.random(num_rows).astype(np.float32)
    return {
        "user": user,
        "item": np.array([f"i{number}" for number in rng.integers(0, 20, num_rows)]),
        "price": price,
        "when": np.datetime64("2024-01-01", "ms") + np.arange(num_rows).astype("timedelta64[m]"),
        "tags": [["a", "b"][: 1 + number % 2] for number in range(num_rows)],
        "bought": ((user % 3 == 0) | (price > 0.7)).astype(np.int64),
    }


FRAME = pl.DataFrame(columns())
KINDS: dict[str, Callable[[], Any]] = {
    "polars": lambda: FRAME,
    "lazy": FRAME.lazy,
    "categorical": lambda: FRAME.with_columns(pl.col("item").cast(pl.Categorical)),
    "pandas": FRAME.to_pandas,
    "pandas, shuffled and back": lambda: FRAME.to_pandas().sample(frac=1, random_state=0).sort_index(),
    "pandas, indexed by user": lambda: FRAME.to_pandas().set_index("user"),
    "arrow": FRAME.to_arrow,
    "arrow stream": lambda: pa.RecordBatchReader.from_batches(
        FRAME.to_arrow().schema, FRAME.to_arrow().to_batches(max_chunksize=100)
    ),
    "numpy": columns,
    "seconds": lambda: columns() | {"when": columns()["when"].astype("datetime64[s]")},
    "objects": lambda: columns() | {"item": columns()["item"].astype(object)},
    "tensors": lambda: columns() | {name: torch.from_numpy(columns()[name]) for name in ("price", "user")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_table_is_the_same_table_and_guessed_as_its_file_is(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind]()
    assert is_frame(data)
    found = as_polars(data)
    assert found.equals(FRAME.select(found.columns).cast({"when": found["when"].dtype}))
    FRAME.write_parquet(tmp_path / "table.parquet")
    assert inspect_file(KINDS[kind]()).schema == inspect_file(tmp_path / "table.parquet").schema


def test_rows_of_arrays_are_lists_and_half_precision_is_single() -> None:
    table = {"vector": np.arange(6, dtype=np.float16).reshape(3, 2), "lists": np.array([[1, 2], [3], []], dtype=object)}
    assert as_polars(table).schema == {"vector": pl.List(pl.Float32), "lists": pl.List(pl.Int64)}
    structured = np.array([(1, 2.0)], dtype=[("a", "i8"), ("b", "f4")])
    assert is_frame(structured)
    assert as_polars(structured).rows() == [(1, 2.0)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"good": [1, 2, 3], "mixed": np.array(["x", None, 3], dtype=object)}, "column 'mixed'"),
        (pd.DataFrame({"good": [1, 2], "mixed": [1, "x"]}), "column 'mixed'"),
        ({"long": [1, 2], "short": [1]}, "ShapeError"),
        ({"complex": np.array([1j])}, "column 'complex'"),
    ],
)
def test_what_polars_refuses_is_named_by_its_column(data: Any, found: str) -> None:
    with pytest.raises(DataError) as caught:
        inspect_file(data)
    assert found in caught.value.found
    assert "\n" not in caught.value.found


def test_a_sample_of_a_long_table_is_taken_from_all_of_it_and_counted_exactly() -> None:
    long = pl.DataFrame({"id": range(5000), "kind": ["a"] * 4000 + ["b"] * 1000, "label": [0, 1] * 2500})
    found = inspect_file(long, sample_rows=1000)
    assert (found.num_rows, found.num_sampled) == (5000, 1000)
    assert {guess.column: guess.num_distinct for guess in found.columns} == {"id": 5000, "kind": 2, "label": 2}


def test_wrong_names_and_no_tables_are_refused() -> None:
    with pytest.raises(SchemaError, match="'bougth'"):
        inspect_file(FRAME, label="bougth")
    with pytest.raises(DataError, match="rows to look at"):
        inspect_file(FRAME.head(0))
    for data in (3, ["a.parquet", "b.parquet"]):
        with pytest.raises(ConfigError, match="name of a file, or a frame"):
            inspect_file(data)
