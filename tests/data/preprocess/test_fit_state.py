"""Fitted states: parts of the rows, merged in any order and grouping, teach what all rows teach, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.preprocess.test_preprocessing import EVERYTHING, TEXT_ROWS
from ziggurat.data.encoded.dataset import EncodedDataset, write_manifest
from ziggurat.data.encoded.part_files import part_name, row_groups, write_part
from ziggurat.data.preprocess.arrow_functions import fit_table, transform_table
from ziggurat.data.preprocess.fit.fit_state import FitState, merge_states
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.schema import Categorical, Dense, Label, NumericTransform, Schema, Table

SMALL = Schema(
    features=(
        Dense(name="x", transform=NumericTransform.STANDARDISE),
        Dense(name="q", column="x", transform=NumericTransform.QUANTILE),
        Categorical(name="user"),
    ),
    labels=(Label(name="click"),),
    tables=(Table(name="user", min_count=2, max_rows=5),),
)


def rows_of(size: int, *, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "x": rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size),
            "user": rng.integers(0, 12, size),
            "click": rng.integers(0, 2, size),
            "number": np.arange(size),
        }
    )


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(TEXT_ROWS, min_size=2, max_size=30), data=st.data())
def test_any_parts_in_any_order_and_grouping(rows, data):
    frame = pl.DataFrame(rows, schema=dict.fromkeys(EVERYTHING.columns, pl.String))
    whole = Preprocessing.fit(EVERYTHING, [RawChunk.of(frame)])
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    table = frame.with_columns(number=pl.int_range(len(rows))).to_arrow()
    parts = [table.filter(pa.array(owner == part)) for part in range(4)]
    states = [fit_table(part, schema=EVERYTHING, row_column="number") for part in parts]
    states = data.draw(st.permutations(states))
    cut = data.draw(st.integers(1, 3))
    some = merge_states(states[:cut])
    (travelled,) = FitState.from_table(merge_states(states[cut:]).to_table(), schema=EVERYTHING)
    merged = merge_states([pickle.loads(pickle.dumps(travelled)), some])
    assert merged.finish().fingerprint == whole.fingerprint
    assert merged.num_rows == len(rows)


def test_functions_over_tables_are_the_whole_way(tmp_path):
    table = rows_of(500)
    parts = [table.slice(0, 100), table.slice(100, 150), table.slice(250, 250)]
    states = [fit_table(part, schema=SMALL, row_column="number") for part in parts]
    whole = Preprocessing.fit(SMALL, [RawChunk.of(pl.DataFrame(table))])
    together = pa.concat_tables([state.to_table() for state in states])
    preprocessing = merge_states(FitState.from_table(together, schema=SMALL)).finish()
    assert preprocessing.fingerprint == whole.fingerprint
    encoded = [transform_table(part, preprocessing=preprocessing, row_column="number") for part in parts]
    by_place = transform_table(parts[2], preprocessing=preprocessing, first_row=250)
    assert by_place.equals(encoded[2])
    (tmp_path / "data").mkdir()
    written = [
        write_part(tmp_path / "data" / part_name(index), row_groups([one], rows_per_group=100))
        for index, one in enumerate(encoded)
    ]
    write_manifest(tmp_path / "data", written, inputs=preprocessing.inputs, extra={})
    dataset = EncodedDataset(tmp_path / "data")
    assert dataset.group_sizes == (100, 100, 50, 100, 100, 50)
    back = pa.concat_tables([dataset.read_group(index) for index in range(6)])
    assert back.equals(pa.concat_tables(encoded))


def test_a_state_travels_as_bytes_of_batches():
    """As Spark's mapInArrow calls it: batches of a partition in, one state of it out."""

    def learn(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        states = [fit_table(pa.Table.from_batches([one]), schema=SMALL, row_column="number") for one in batches]
        yield pa.record_batch({"state": [merge_states(states).to_bytes()]})

    table = rows_of(300)
    partitions = [table.slice(start, 100).to_batches(max_chunksize=30) for start in (200, 0, 100)]
    content = [batch.column("state")[0].as_py() for one in partitions for batch in learn(iter(one))]
    merged = merge_states(FitState.from_bytes(each, schema=SMALL) for each in content)
    assert merged.finish().fingerprint == fit_table(table, schema=SMALL).finish().fingerprint
    with pytest.raises(DataError, match="fitted state"):
        FitState.from_bytes(content[0][:-200], schema=SMALL)


def test_refusals():
    table = rows_of(50)
    state = fit_table(table, schema=SMALL)
    other = Schema(features=SMALL.features[:1], labels=SMALL.labels)
    with pytest.raises(ConfigError, match="at least one state"):
        merge_states([])
    with pytest.raises(ConfigError, match="2 states of 2 schemas"):
        merge_states([state, fit_table(table, schema=other)])
    with pytest.raises(DataError, match="another schema"):
        FitState.from_table(state.to_table(), schema=other)
    with pytest.raises(DataError, match="state"):
        FitState.from_table(state.to_table().drop_columns(["keys:user"]), schema=SMALL)[0].finish()
    damaged = state.to_table().set_column(0, "head", pa.array([b"{}"]))
    with pytest.raises(DataError, match="fitted state"):
        FitState.from_table(damaged, schema=SMALL)
    with pytest.raises(DataError, match="at least one row to fit on"):
        fit_table(table.slice(0, 0), schema=SMALL).finish()
    with pytest.raises(SchemaError, match="nmber"):
        fit_table(table, schema=SMALL, row_column="nmber")
    with pytest.raises(DataError, match="whole numbers"):
        fit_table(table, schema=SMALL, row_column="x")
