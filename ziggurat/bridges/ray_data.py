"""Preparing with Ray Data: as many machines as there are, and rows from wherever Ray reads them.

    import ray
    from ziggurat.bridges.ray_data import fit, with_row_numbers, write_encoded

    rows = with_row_numbers(ray.data.read_parquet("s3://clicks/2026/"))
    preprocessing = fit(rows, schema=schema, row_column="row")
    write_encoded(rows, folder="/shared/train", preprocessing=preprocessing, row_column="row")

    blocks ─► fit_table ─► states ─► merged on Ray ─► merged here ─► Preprocessing     equal, bit for bit, to that of
    blocks ─► transform_table ─► one Parquet file a block ─► manifest, written here    one machine that sees all rows

What is written is an `EncodedDataset`, for `Loader` and `train_run`'s parts, and appears when it is whole. Fit on
training rows alone: split with Ray (`filter`) before. Rows with faults are errors, which Ray shows with their four
parts; clean them with Ray. Vocabularies must fit into the memory of each worker.

Needs ray[data] (tested with 2.60.0), which is none of the dependencies of this package. A guide:
docs/guides/large-data.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.dataset import DEFAULT_ROWS_PER_GROUP, EncodedDataset, write_manifest
from ziggurat.data.encoded.part_files import row_groups, write_part
from ziggurat.data.preprocess.arrow_functions import fit_table, transform_table
from ziggurat.data.preprocess.encode_parts import EncodedPart
from ziggurat.data.preprocess.fit.fit_state import FitState, merge_states
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.errors import DataError, MissingDependencyError
from ziggurat.features.schema import Schema
from ziggurat.files import publish, temporary_beside

try:
    import ray  # pyright: ignore[reportMissingImports]
    import ray.data  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise MissingDependencyError(
        expected="Ray Data beside ziggurat",
        found=f"{type(error).__name__}: {error}",
        where="import ziggurat.bridges.ray_data",
        ways_out=(
            "pip install 'ray[data]==2.60.0'",
            "benchmarks/setup.sh makes an environment that has it (.venv-bench)",
            "many processes prepare files without Ray: torchrun --nproc-per-node N -m ziggurat prepare",
        ),
    ) from error

ROW = "row"
_MERGED_TOGETHER = 16  # states that a task merges
_DEFAULT_ROWS_PER_FILE = 8 * DEFAULT_ROWS_PER_GROUP


def with_row_numbers(rows: ray.data.Dataset, *, column: str = ROW) -> ray.data.Dataset:
    """The rows of a Ray data set with their numbers, 0, 1, 2 …, in a new column.

    Reads the data set once and keeps it in Ray's object store. The numbers are those of the order in which Ray has the
    rows; ask Ray to keep it (`preserve_order`) if they must be the same the next time.
    """
    blocks = rows.to_arrow_refs()
    num_rows = ray.remote(_num_rows)
    numbered = ray.remote(_numbered)
    sizes = ray.get([num_rows.remote(block) for block in blocks])
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return ray.data.from_arrow_refs(
        [numbered.remote(block, start, column) for block, start in zip(blocks, starts, strict=True)]
    )


def _num_rows(table: pa.Table) -> int:
    return table.num_rows


def _numbered(table: pa.Table, start: int, column: str) -> pa.Table:
    return table.append_column(column, pa.array(np.arange(start, start + table.num_rows)))


def fit(rows: ray.data.Dataset, *, schema: Schema, row_column: str = ROW) -> Preprocessing:
    """Fit on the training rows of a Ray data set.

    Args:
        rows: a `ray.data.Dataset` with the columns of the schema.
        schema: what they mean.
        row_column: column of the rows' numbers; each must be another one.

    Raises:
        DataError: there is no row.
        ray.exceptions.RayTaskError: a worker met a bad row or a missing column; its text is the error in four parts.
    """

    def learn(table: pa.Table) -> pa.Table:
        return fit_table(table, schema=schema, row_column=row_column).to_table()

    def merge(table: pa.Table) -> pa.Table:
        return merge_states(FitState.from_table(table, schema=schema)).to_table()

    states = rows.map_batches(learn, batch_format="pyarrow", batch_size=None, zero_copy_batch=True)
    merged = states.map_batches(merge, batch_format="pyarrow", batch_size=_MERGED_TOGETHER)
    found: list[FitState] = []
    for reference in merged.to_arrow_refs():
        found += FitState.from_table(ray.get(reference), schema=schema)
    if not found:
        raise DataError(
            expected="at least one row to fit on",
            found="an empty Ray data set",
            where="ray_data.fit",
            ways_out="check the paths and the filters that come before",
        )
    return merge_states(found).finish()


def transform(
    rows: ray.data.Dataset, *, preprocessing: Preprocessing, row_column: str = ROW, with_labels: bool = True
) -> ray.data.Dataset:
    """The encoded rows of a Ray data set, as another one.

    Args:
        rows: a `ray.data.Dataset` with the columns of the schema.
        preprocessing: fitted on the training rows.
        row_column: column of the rows' numbers.
        with_labels: False for data to predict.
    """
    known = ray.put(preprocessing)

    def encode(table: pa.Table) -> pa.Table:
        return transform_table(table, preprocessing=ray.get(known), row_column=row_column, with_labels=with_labels)

    return rows.map_batches(encode, batch_format="pyarrow", batch_size=None)


def write_encoded(
    rows: ray.data.Dataset,
    *,
    folder: str | Path,
    preprocessing: Preprocessing,
    row_column: str = ROW,
    rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
    rows_per_file: int = _DEFAULT_ROWS_PER_FILE,
) -> EncodedDataset:
    """Encode a Ray data set and write it as an `EncodedDataset`, its files by many workers at the same time.

    Args:
        rows: a `ray.data.Dataset` with the columns of the schema.
        folder: where it appears when it is whole; must not exist, and be the same for all machines.
        preprocessing: fitted on the training rows.
        row_column: column of the rows' numbers.
        rows_per_group: rows of a row group, the unit of reading.
        rows_per_file: rows of a file.

    Raises:
        DataError: the folder exists, or there is no row.
        ray.exceptions.RayTaskError: as `fit`.
    """
    target = Path(folder).absolute()
    if target.exists():
        raise DataError(
            expected="a folder that does not exist yet",
            found="it exists",
            where=str(target),
            ways_out=("choose another folder", "delete it"),
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(target)
    temporary.mkdir()
    known, place = ray.put(preprocessing), str(temporary)

    def write(table: pa.Table) -> pa.Table:
        encoded = transform_table(table, preprocessing=ray.get(known), row_column=row_column)
        first = int(encoded.column("row:")[0].as_py()) if encoded.num_rows else 0
        part = write_part(
            Path(place) / f"part-{first:015}.parquet", row_groups([encoded], rows_per_group=rows_per_group)
        )
        note = json.dumps(EncodedPart(part=part, counters={}).to_json())
        return pa.table({"first": [first], "note": [note]})

    try:
        notes = rows.map_batches(write, batch_format="pyarrow", batch_size=rows_per_file).take_all()
        written = [EncodedPart.from_json(json.loads(each["note"])).part for each in sorted(notes, key=_first)]
        parts = [part for part in written if part.group_rows]
        write_manifest(temporary, parts, inputs=preprocessing.inputs, extra={})
        publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return EncodedDataset(target)


def _first(note: Mapping[str, int]) -> int:
    return note["first"]
