"""Lists that are stored once: a null stands for a list that equals the one of the row before.

    rows of a row group     [5 9]  [5 9]  [5 9]  [3]  []  []
    in the file             [5 9]  null   null   [3]  []  null
    as read for batches     values 5 9 3, and where each row's list starts: 0 0 0 2 3 3

Most of the time of reading is Parquet's decoding of every value of every list (docs/experiments). In data whose
sessions lie together (`clustering.py`) lists repeat from row to row, so the file has each run of them once, and reading
gives Arrow's list views, several of which may lie at the same place (RecD, arXiv 2211.05239, section 4.2, does the same
in its reader). Whoever wants plain lists gets them by `plain_lists`.

A null is never a value here: encoded lists have none (`records.encoded_schema`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.slices import gather_segments
from ziggurat.ops.rows import share_lists


def is_repeated(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Mark the lists that are the same as those before them, by where they start and end."""
    found = np.zeros(len(starts), dtype=np.bool_)
    found[1:] = (starts[1:] == starts[:-1]) & (lengths[1:] == lengths[:-1])
    return found


def store_once(group: pa.Table) -> pa.Table:
    """A row group with a null for each list that equals the one before; columns without such stay as they are."""
    arrays = []
    fields = []
    for field, column in zip(group.schema, group.columns, strict=True):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_list(field.type):
            array = _once(array)
            field = field.with_nullable(True)
        arrays.append(array)
        fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _once(array: pa.ListArray) -> pa.Array:
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.to_numpy(zero_copy_only=True)
    if values.dtype == np.int64:  # moments: compared as two halves each
        starts = share_lists(values.view(np.int32), 2 * offsets) // 2
    else:
        starts = share_lists(values, offsets)
    lengths = np.diff(offsets)
    repeats = is_repeated(starts, lengths)
    if not repeats.any():
        return array
    kept = ~repeats
    ends = np.concatenate([[0], np.cumsum(lengths * kept)]).astype(np.int32)
    stored = pa.array(gather_segments(values, starts[kept], lengths[kept]))
    return pa.ListArray.from_arrays(pa.array(ends), stored, type=array.type, mask=pa.array(repeats))


def shared_lists(stored: pa.Table) -> pa.Table:
    """Columns as a file has them, lists with nulls as list views: rows whose lists repeat share them.

    Raises:
        ValueError: the first row of a column has no list.
    """
    arrays = [_shared(column) for column in stored.columns]
    return pa.Table.from_arrays(arrays, names=stored.column_names)


def plain_lists(stored: pa.Table, *, schema: pa.Schema) -> pa.Table:
    """Columns as a file has them, every list written out.

    Raises:
        ValueError: the first row of a column has no list, or the columns are not those of the schema.
    """
    if stored.schema.names != schema.names:
        raise ValueError(f"columns {stored.schema.names}")
    arrays = []
    for field, column in zip(schema, stored.columns, strict=True):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_list(field.type) and array.null_count:
            array = array.take(pa.array(_rows_of(array)))
        if array.null_count or (array.type != field.type and not pa.types.is_list(field.type)):
            raise ValueError(f"column {field.name} of type {array.type} with {array.null_count} nulls")
        if pa.types.is_list(field.type):
            array = pa.ListArray.from_arrays(array.offsets, array.values, type=field.type)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _shared(column: pa.ChunkedArray) -> pa.Array:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if not pa.types.is_list(array.type) or not array.null_count:
        return array
    rows = _rows_of(array)
    offsets = array.offsets.to_numpy()
    sizes = np.diff(offsets)[rows].astype(np.int32)
    return pa.ListViewArray.from_arrays(pa.array(offsets[rows]), pa.array(sizes), array.values)


def _rows_of(array: pa.ListArray) -> np.ndarray:
    """Return for each row the row whose list it has."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    if len(valid) and not valid[0]:
        raise ValueError("a row group that begins with the list of a row before it")
    # A null stands for the list of the nearest row above that has one.
    return np.maximum.accumulate(np.where(valid, np.arange(len(valid)), 0))
