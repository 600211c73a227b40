"""Run as a program, under a memory limit: damages files one after the other, reads them, and prints what came of it.

    python damaged_files.py FOLDER KIND FIRST_SEED NUM_FILES MEMORY_LIMIT_BYTES

One line of JSON a file: seed, damage, outcome ("same", "differs", or the error's type), where, found, seconds.
"""

from __future__ import annotations

import gzip
import json
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.parquet_seal import seal_parquet
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ZigguratError

SECONDS_PER_FILE = 20
SUFFIXES = {
    "sealed": ".parquet",
    "plain_parquet": ".parquet",
    "arrow_stream": ".arrow",
    "feather": ".feather",
    "csv": ".csv",
    "tsv_gz": ".tsv.gz",
    "criteo_gz": ".txt.gz",
}


def make_file(path: Path, kind: str, rng: np.random.Generator) -> None:
    """A small file of 300 rows."""
    num_rows = 300
    ids = [f"ü{i % 23}" if i % 11 else None for i in range(num_rows)]
    if kind in ("sealed", "plain_parquet", "arrow_stream", "feather"):
        table = pa.table(
            {
                "i": rng.integers(0, 1000, num_rows),
                "x": rng.random(num_rows),
                "s": ids,
                "l": [[f"t{j}" for j in range(i % 5)] for i in range(num_rows)],
                "n": pa.array([None if i % 3 else i for i in range(num_rows)], pa.int32()),
                "b": pa.array([i % 2 == 0 for i in range(num_rows)]),
            }
        )
        if kind in ("arrow_stream", "feather"):
            codec = [None, "zstd", "lz4"][int(rng.integers(3))]
            new = pa.ipc.new_stream if kind == "arrow_stream" else pa.ipc.new_file
            with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
                writer.write_table(table, max_chunksize=int(rng.integers(50, 400)))
            return
        pq.write_table(
            table,
            path,
            row_group_size=int(rng.integers(50, 400)),
            compression=str(rng.choice(["zstd", "snappy", "none", "gzip"])),
            use_dictionary=bool(rng.integers(2)),
            data_page_version=str(rng.choice(["1.0", "2.0"])),
            write_page_checksum=kind == "sealed",
        )
        if kind == "sealed":
            seal_parquet(path)
        return
    if kind == "criteo_gz":
        lines = ["\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) for _ in range(num_rows)]
    else:
        delimiter = "," if kind == "csv" else "\t"
        lines = [delimiter.join(["i", "s", "q"])]
        lines += [delimiter.join([str(i), ids[i] or "", f'"x{i} ""y"""']) for i in range(num_rows)]
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content, mtime=0) if kind.endswith("gz") else content)


def damage(content: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """The name of a damage, and the content after it."""
    data = bytearray(content)
    at = int(rng.integers(len(data)))
    size = int(rng.integers(1, 64))
    name = str(
        rng.choice(["flip", "flip", "flip", "flips", "cut", "zeros", "noise", "insert", "delete", "swap", "length"])
    )
    if name == "flip":
        data[at] ^= 1 << int(rng.integers(8))
    elif name == "flips":
        for place in rng.integers(len(data), size=size).tolist():
            data[place] ^= 1 << int(rng.integers(8))
    elif name == "cut":
        del data[at:]
    elif name == "zeros":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif name == "noise":
        data[at : at + size] = rng.bytes(len(data[at : at + size]))
    elif name == "insert":
        data[at:at] = rng.bytes(size)
    elif name == "delete":
        del data[at : at + size]
    elif name == "swap":
        data = data[at:] + data[:at]
    else:  # the footer length of Parquet, the CRC and length of gzip
        data[-8:-4] = rng.bytes(4)
    return f"{name} at {at} of {len(content)}", bytes(data)


def read_all(path: Path, folder: Path) -> pl.DataFrame | None:
    """Everything in a file, bad rows aside; None if there are no rows."""
    with BadRows(BadRowPolicy.QUARANTINE, folder=folder) as bad_rows:
        frames = [chunk.frame for chunk in RawSource(path, bad_rows=bad_rows).frames(chunk_rows=128)]
    return pl.concat(frames) if frames else None


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    first_seed, num_files, limit = (int(argument) for argument in sys.argv[3:6])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in range(first_seed, first_seed + num_files):
        rng = np.random.default_rng(seed)
        path = folder / f"file{seed}{SUFFIXES[kind]}"
        make_file(path, kind, rng)
        expected = read_all(path, folder)
        name, content = damage(path.read_bytes(), rng)
        path.write_bytes(content)
        print(json.dumps({"seed": seed, "damage": name}), flush=True)
        signal.alarm(SECONDS_PER_FILE)  # ends the process: the parent sees a line without an outcome
        start = time.perf_counter()
        where = found = ""
        try:
            frame = read_all(path, folder)
            same = frame is None if expected is None else frame is not None and frame.equals(expected)
            outcome = "same" if same else "differs"
        except ZigguratError as error:
            outcome, where, found = type(error).__name__, error.where, error.found
        signal.alarm(0)
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"outcome": outcome, "where": where, "found": found, "s": seconds}), flush=True)
        path.unlink()


if __name__ == "__main__":
    main()
