"""The workload's rows on disk: our encoded data set, and one plain Parquet file for FuxiCTR. Made once, in `build/`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import ROOT, say
from benchmarks.workload import RawBatch, Workload, make_batches

NUM_ROWS = 1_000_000


def encoded_rows(workload: Workload, *, num_rows: int = NUM_ROWS) -> Path:
    """Folder of an `EncodedDataset` with the workload's rows (page checksums and manifest as in a real run)."""
    from benchmarks.ours import inputs_of
    from ziggurat.data.encoded.dataset import EncodedWriter

    shape = "multi-hot" if workload.multi_hot else "one-hot"
    folder = ROOT / "build" / "benchmarks" / f"encoded-{shape}-{num_rows}"
    if not (folder / "manifest.json").exists():
        say(f"  writing {num_rows:,} {shape} rows of encoded Parquet")
        shutil.rmtree(folder, ignore_errors=True)
        inputs = inputs_of(workload)
        with EncodedWriter(folder, inputs) as writer:
            for start, raw in _batches(workload, num_rows):
                columns: dict[str, object] = {name: raw.dense[:, n] for n, name in enumerate(inputs.dense)}
                columns |= {f"c{n}": _column(ids) for n, ids in enumerate(raw.ids)}
                columns |= {"label:click": raw.label_sets[0], "row:": start + np.arange(len(raw.dense))}
                writer.append(pa.table(columns))
    return folder


def fuxictr_rows(workload: Workload, *, num_rows: int = NUM_ROWS) -> Path:
    """One Parquet file with the same rows, columns n0…, c0…, click."""
    path = ROOT / "build" / "benchmarks" / f"fuxictr-{num_rows}.parquet"
    if not path.exists():
        say(f"  writing {num_rows:,} rows of Parquet for FuxiCTR")
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = []
        for _, raw in _batches(workload, num_rows):
            columns = {f"n{n}": raw.dense[:, n] for n in range(workload.num_dense)}
            columns |= {f"c{n}": ids[:, 0].astype(np.int32) for n, ids in enumerate(raw.ids)}
            tables.append(pa.table(columns | {"click": raw.label_sets[0]}))
        temporary = path.with_suffix(".partial")
        pq.write_table(pa.concat_tables(tables), temporary)
        temporary.rename(path)
    return path


def _batches(workload: Workload, num_rows: int) -> list[tuple[int, RawBatch]]:
    size = 8192
    generator = replace(workload, batch_size=size, num_batches=-(-num_rows // size))
    return [(number * size, raw) for number, raw in enumerate(make_batches(generator))]


def _column(ids: np.ndarray) -> pa.Array:
    if ids.shape[1] == 1:
        return pa.array(ids[:, 0].astype(np.int32))
    offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * ids.shape[1])
    values = pa.array(ids.reshape(-1).astype(np.int32))
    item = pa.field("item", pa.int32(), nullable=False)
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(item))
