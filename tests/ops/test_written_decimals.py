"""Floats of 32 and 16 bits become the decimals that were written."""

from __future__ import annotations

import numpy as np
import polars as pl

from ziggurat.ops.written_decimals import (
    frame_with_decimals,
    with_decimals,
    written_decimals,
)


def test_every_kind_of_float_is_its_shortest_decimal() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, np.float32([0.7, -0.1, 16777216.0, 123456789.0, 3.4e38, 1e-45, -0.0, np.inf])])
    found = written_decimals(values)
    np.testing.assert_array_equal(found[:2000], [float(str(value)) for value in values[:2000]])
    np.testing.assert_array_equal(found[-8:], [0.7, -0.1, 16777216.0, 123456790.0, 3.4e38, 1e-45, -0.0, np.inf])
    assert np.array_equal(found.astype(np.float32), values, equal_nan=True)


def test_columns_keep_their_nulls_and_other_types_stay() -> None:
    price = pl.Series("price", [0.7, None, 2.0, float("nan")], dtype=pl.Float32)
    half = pl.Series("half", [0.1, None, -2.5, 65504.0], dtype=pl.Float16)
    lists = pl.Series("lists", [[0.1, None], [], None, [7.5]], dtype=pl.List(pl.Float32))
    other = pl.Series("other", [1, 2, 3, 4])
    frame = frame_with_decimals(pl.DataFrame([price, half, lists, other]))
    assert frame["price"].to_list()[:3] == [0.7, None, 2.0]
    assert frame["half"].to_list() == [0.1, None, -2.5, 65500.0]
    assert frame["lists"].to_list() == [[0.1, None], [], None, [7.5]]
    assert frame["other"].dtype == pl.Int64
    assert with_decimals(price.head(0)).dtype == pl.Float64
