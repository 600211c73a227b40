"""Numbers of 62 bits of ids whose table grows: exact from raw ids to batches, beside rows of other tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.preprocess.values.vocabulary import hash_series
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.growing import NUM_NUMBERS
from ziggurat.features.schema import (
    MISSING_ROW,
    NUM_RESERVED_ROWS,
    UNKNOWN_ROW,
    Categorical,
    Encoding,
    Label,
    Moments,
    MultiHot,
    Schema,
    Table,
)

EDGES = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 2, 2**63 - 1, -1, -(2**63)]
SCHEMA = Schema(
    features=(
        Categorical(name="user"),
        Categorical(name="colour"),
        MultiHot(name="few"),
        MultiHot(name="friends", table="user"),
        MultiHot(name="tags"),
        Moments(name="moments"),
    ),
    labels=(Label(name="click"),),
    tables=(
        Table(name="user", encoding=Encoding.GROWING, num_rows=50),
        Table(name="tags", encoding=Encoding.GROWING, num_rows=9),
    ),
)


def raw(num_rows: int, *, seed: int = 0) -> pl.DataFrame:
    draw = np.random.default_rng(seed)
    lists = [[int(each) for each in draw.choice(EDGES, draw.integers(0, 4))] for _ in range(num_rows)]
    users: list[int | None] = [EDGES[index % len(EDGES)] for index in range(num_rows)]
    users[3] = None
    words, times = pl.List(pl.String), [[10**10 + each for each in range(index % 4)] for index in range(num_rows)]
    return pl.DataFrame(
        {
            "user": pl.Series(users, dtype=pl.Int64),
            "colour": [f"c{index % 3}" for index in range(num_rows)],
            "few": pl.Series([[f"f{each}" for each in range(index % 3)] for index in range(num_rows)], dtype=words),
            "friends": pl.Series(lists, dtype=pl.List(pl.Int64)),
            "tags": pl.Series([[f"t{index % 4}"] * (index % 2) for index in range(num_rows)], dtype=words),
            "moments": pl.Series(times, dtype=pl.List(pl.Int64)),
            "click": draw.integers(0, 2, num_rows),
        }
    )


def numbers(ids: pl.Series) -> np.ndarray:
    texts = canonical_text(ids)
    assert texts is not None
    found = (hash_series(texts) % np.uint64(NUM_NUMBERS)).astype(np.int64) + NUM_RESERVED_ROWS
    found[ids.is_null().to_numpy()] = MISSING_ROW
    return found


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_ids_of_64_bits_are_told_apart_from_raw_files_to_batches(tmp_path: Path, suffix: str) -> None:
    frame = raw(120)
    path = tmp_path / f"raw.{suffix}"
    if suffix == "csv":
        schema = Schema(
            features=(Categorical(name="user"), Categorical(name="colour")),
            labels=SCHEMA.labels,
            tables=SCHEMA.tables[:1],
        )
        frame.select("user", "colour", "click").write_csv(path)
    else:
        schema = SCHEMA
        frame.write_parquet(path)
    made = prepare(DataConfig(train=(str(path),)), schema=schema, folder=tmp_path / "prepared")
    inputs = made.preprocessing.inputs
    expected = numbers(frame["user"])
    assert len(set(expected.tolist())) == len(EDGES) + 1
    seen = np.zeros(frame.height, dtype=bool)
    for dataset in filter(None, (made.train, made.valid, made.test)):
        config = LoaderConfig(batch_size=16, shuffle_buffer_rows=40, prefetch=0)
        for batch in Loader(dataset, config=config).batches(epoch=0):
            rows = batch.row_ids.numpy()
            seen[rows] = True
            assert batch.single[0].tolist() == expected[rows].tolist()
            if suffix == "csv":
                continue
            size = batch.batch_size
            assert int(batch.single[1].max()) < 3 + NUM_RESERVED_ROWS
            friends, few = batch.lists(1)[0], batch.lists(0)[0]
            assert friends.values.tolist() == numbers(frame["friends"][rows.tolist()].explode().drop_nulls()).tolist()
            assert friends.offsets.diff().tolist() == frame["friends"][rows.tolist()].list.len().to_list()
            assert few.offsets.diff().tolist() == (rows % 3).tolist()
            assert batch.sequences["moments"].offsets.diff().tolist() == (rows % 4).tolist()
            assert size == len(rows)
    assert seen.all()
    chunk = RawChunk(frame=frame, path=path, first_row=0, start=0)
    encoded = made.preprocessing.encode(chunk)
    batch = table_to_batch(encoded, inputs)
    assert batch.single[0].tolist() == expected.tolist()
    if suffix == "parquet":
        ids = numbers(frame["friends"].explode().drop_nulls())
        assert batch.lists(1)[0].values.tolist() == ids.tolist()
        known = np.unique(expected[expected >= NUM_RESERVED_ROWS])[:5]
        grown = made.preprocessing.with_grown({"user": GrownVocabulary.of(known)})
        mapped = table_to_batch(grown.encode(chunk), grown.inputs)
        row_of = {int(number): row + NUM_RESERVED_ROWS for row, number in enumerate(known)} | {0: 0, 1: 1, 2: 2}
        assert mapped.single[0].tolist() == [row_of.get(int(each), UNKNOWN_ROW) for each in expected]
        assert mapped.lists(1)[0].values.tolist() == [row_of.get(int(each), UNKNOWN_ROW) for each in ids]
