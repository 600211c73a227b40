"""Fitting and encoding as plain functions over Arrow tables: for Ray Data, Spark, or a job of one's own.

    state = fit_table(table, schema=schema, row_column="number")         on many machines, a part of the rows each
    preprocessing = merge_states(states).finish()                        on one; the states may come in any order
    encoded = transform_table(table, preprocessing=preprocessing, row_column="number")       on many machines again
    part = write_part(folder / part_name(7), row_groups([encoded], rows_per_group=65_536))   data/encoded/part_files.py
    write_manifest(folder, parts, inputs=preprocessing.inputs, extra={})                     data/encoded/dataset.py

The result is equal, bit for bit, to that of one machine that sees all rows (`fit_state.py`). Every row needs a number
of its own, for the ledger that proves that each was trained once, and for samples of rows. Splitting is left to the
caller: fit on training rows alone.

`docs/guides/large-data.md` shows this with Spark; `ziggurat/bridges/ray_data.py` does it with Ray Data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.data.preprocess.fit.fit_state import FitState
from ziggurat.data.preprocess.fit.fitter import Fitter
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.parsing import parse_chunk
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import missing_column
from ziggurat.errors import DataError
from ziggurat.features.schema import Schema


def fit_table(
    table: pa.Table, *, schema: Schema, first_row: int = 0, row_column: str = "", bad_rows: BadRows | None = None
) -> FitState:
    """Learn from some training rows.

    Args:
        table: raw rows; columns that the schema does not name are ignored.
        schema: what the columns mean.
        first_row: number of the first row; those after it count on.
        row_column: column of the rows' numbers, in place of `first_row`.
        bad_rows: where rows with faults go; by default the first one is an error.

    Raises:
        SchemaError: a column is missing or of the wrong type.
        DataError: a bad row (policy ERROR).
    """
    return _fit(schema, _chunk(table, first_row, row_column), bad_rows or BadRows())


def transform_table(
    table: pa.Table,
    *,
    preprocessing: Preprocessing,
    first_row: int = 0,
    row_column: str = "",
    bad_rows: BadRows | None = None,
    with_labels: bool = True,
) -> pa.Table:
    """Raw rows to encoded rows, as they stand in an encoded data set; without the bad ones.

    Args:
        table: raw rows; columns that the schema does not name are ignored.
        preprocessing: fitted on the training rows.
        first_row: number of the first row; those after it count on.
        row_column: column of the rows' numbers, in place of `first_row`.
        bad_rows: where rows with faults go; by default the first one is an error.
        with_labels: False for data to predict.

    Raises:
        SchemaError, DataError, BoundsError: as `Preprocessing.encode`.
    """
    return preprocessing.encode(_chunk(table, first_row, row_column), bad_rows=bad_rows, with_labels=with_labels)


def _fit(schema: Schema, chunk: RawChunk, bad_rows: BadRows) -> FitState:
    parsed = parse_chunk(schema, chunk, bad_rows=bad_rows)
    fitter = Fitter(schema)
    fitter.add(parsed)
    first_row = int(parsed.global_rows.min()) if parsed.num_rows else 0
    return FitState(schema=schema, first_row=first_row, num_rows=parsed.num_rows, parts=fitter.parts())


def _chunk(table: pa.Table, first_row: int, row_column: str) -> RawChunk:
    frame = pl.DataFrame(table)
    if not row_column:
        return RawChunk.of(frame, name="table", start=first_row)
    if row_column not in frame.columns:
        raise missing_column(Path("table"), row_column, tuple(frame.columns))
    numbers = frame[row_column]
    if not numbers.dtype.is_integer() or numbers.null_count() or (len(numbers) and int(numbers.min()) < 0):  # pyright: ignore[reportArgumentType]
        raise DataError(
            expected="whole numbers from 0 on, without nulls",
            found=f"type {numbers.dtype} with {numbers.null_count()} nulls",
            where=f"row numbers, column {row_column!r}",
            ways_out=("number the rows: pyspark's monotonically_increasing_id, ray_data.with_row_numbers",),
        )
    rows = numbers.to_numpy().astype(np.int64)
    return RawChunk(frame=frame, path=Path("table"), rows=rows)
