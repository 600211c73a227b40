"""A value is the same whatever type of column carried it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.source import RawSource
from ziggurat.features.schema import Categorical, Dense, Label, NumericTransform, Schema
from ziggurat.serving.request_rows import frame_of

TENTHS = [0.1, 0.3, 0.7, 0.7, 0.9, 0.3, 1.1, 0.7, 2.0, 0.1] * 8


def test_fractions_of_32_bits_are_the_decimals_that_were_written(tmp_path: Path) -> None:
    """0.7 in 32 bits is 0.699999988: below a threshold of 0.7, and in another bucket than the 0.7 of a request."""
    schema = Schema(
        features=(
            Dense(name="bucket", column="x", transform=NumericTransform.QUANTILE_BUCKETS, num_buckets=8),
            Dense(name="rank", column="x", transform=NumericTransform.QUANTILE),
            Categorical(name="id", column="x"),
        ),
        labels=(Label(name="like", column="x", positive_from=0.7),),
    )
    frame = pl.DataFrame({"x": TENTHS})
    frame.write_csv(tmp_path / "rows.csv")
    frame.write_parquet(tmp_path / "wide.parquet")
    frame.cast(pl.Float32).write_parquet(tmp_path / "narrow.parquet")
    names = ("narrow.parquet", "wide.parquet", "rows.csv")
    chunks = {name: next(RawSource([str(tmp_path / name)]).frames(columns=("x",))) for name in names}
    fitted = {name: Preprocessing.fit(schema, [chunk]) for name, chunk in chunks.items()}
    assert len({each.fingerprint for each in fitted.values()}) == 1
    narrow = fitted["narrow.parquet"]
    tables = [narrow.encode(chunk) for chunk in chunks.values()]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])
    assert sum(tables[0]["label:like"].to_pylist()) / len(TENTHS) == pytest.approx(0.6)
    rows = narrow.batch(frame_of([{"x": value} for value in TENTHS], schema))
    assert rows.single.tolist() == narrow.batch(frame.cast(pl.Float32)).single.tolist()
