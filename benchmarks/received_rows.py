"""Rows of a broker against the same rows in files: how many a second are received, cut into windows and in the journal.

    python -m benchmarks.received_rows --rows 400000 --rounds 5

A server of Redis on this machine holds the rows three times: an entry a row with a field a column, an entry a row as an
object of JSON, and an entry for 4,096 rows as an Arrow stream. Files are Parquet with types, and CSV. All are taken in
turns by what the verb `stream` takes rows with, into a folder of their own; the ratio to Parquet is of the same round.
Rows a second of processor time are of this process, without the server's. With `--no-hiredis` the client parses replies
in Python.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

import ziggurat as zg
from benchmarks.harness import say
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import Reader, broker_of
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.windows import StreamConfig

PORT = 7391
ROWS_OF_ENTRY = 4096
SCHEMA = zg.Schema(
    features=(
        *(zg.Categorical(name=f"c{number}") for number in range(4)),
        *(zg.Dense(name=f"n{number}") for number in range(2)),
    ),
    labels=(zg.Label(name="click"),),
    time="at",
)


def rows(count: int) -> pl.DataFrame:
    """Rows of ten days: four ids, two numbers, a label and a time."""
    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {f"c{number}": rng.integers(0, 100_000, count) for number in range(4)}
    columns |= {f"n{number}": rng.normal(size=count).round(4) for number in range(2)}
    columns |= {"click": rng.integers(0, 2, count), "at": 1_764_000_000 + np.arange(count) * 864_000 // count}
    return pl.DataFrame(columns)


def sent(frame: pl.DataFrame) -> None:
    """Send rows in three forms, each to a stream of its own."""
    import redis

    client = redis.Redis(port=PORT)
    pipeline = client.pipeline(transaction=False)
    for place, row in enumerate(frame.iter_rows(named=True), start=1):
        pipeline.xadd("fields", row)
        if place % 10_000 == 0:
            pipeline.execute()
    for place, line in enumerate(frame.write_ndjson().splitlines(), start=1):
        pipeline.xadd("json", {"json": line})
        if place % 10_000 == 0:
            pipeline.execute()
    for part in frame.iter_slices(ROWS_OF_ENTRY):
        table = part.to_arrow()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        pipeline.xadd("arrow", {"arrow": sink.getvalue().to_pybytes()})
    pipeline.execute()


def taken_from_file(path: Path, folder: Path) -> int:
    """Take the rows of a file; return how many."""
    arrivals = Arrivals(folder, config=StreamConfig(by="day"), data=DataConfig(train=(str(path),)), schema=SCHEMA)
    return arrivals.take([path]).rows


def received(key: str, folder: Path) -> int:
    """Receive the rows of a stream in a group of its own; return how many."""
    url = f"redis://127.0.0.1:{PORT}/{key}?group={folder.name}"
    data = DataConfig(train=(url,))
    arrivals = Arrivals(folder, config=StreamConfig(by="day"), data=data, schema=SCHEMA)
    broker = broker_of([url])
    assert broker is not None
    reader = Reader(name=f"ziggurat:{folder.name}")
    made = Receiving(broker, url, arrivals=arrivals, data=data, reader=reader, follows=False)
    found = made.look(latest_s=np.inf, told=lambda *_: None).rows
    made.close()
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", default=shutil.which("redis-server") or "redis-server")
    parser.add_argument("--no-hiredis", action="store_true")
    options = parser.parse_args()
    if options.no_hiredis:
        sys.modules["hiredis"] = None  # type: ignore[assignment]
    base = Path(tempfile.mkdtemp())
    words = ["--port", str(PORT), "--bind", "127.0.0.1", "--save", "", "--dir", str(base)]
    server = subprocess.Popen([options.server, *words], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        frame = rows(options.rows)
        sent(frame)
        frame.write_parquet(base / "rows.parquet")
        frame.write_csv(base / "rows.csv")
        cases: dict[str, Callable[[Path], int]] = {
            "Parquet": lambda folder: taken_from_file(base / "rows.parquet", folder),
            "CSV": lambda folder: taken_from_file(base / "rows.csv", folder),
            "Redis, fields": lambda folder: received("fields", folder),
            "Redis, JSON": lambda folder: received("json", folder),
            f"Redis, Arrow of {ROWS_OF_ENTRY:,} rows": lambda folder: received("arrow", folder),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        by_processor: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(options.rounds + 1):
            for place, (name, take) in enumerate(cases.items()):
                begin = time.perf_counter()
                begin_processor = time.process_time()
                found = take(base / f"run-{number}-{place}")
                spent_s = time.perf_counter() - begin
                assert found == options.rows, (name, found)
                if number:  # the first round warms up
                    rates[name].append(options.rows / spent_s)
                    by_processor[name].append(options.rows / (time.process_time() - begin_processor))
        for name, found in rates.items():
            ratios = [rate / other for rate, other in zip(found, rates["Parquet"], strict=True)]
            processor = statistics.median(by_processor[name])
            line = f"{name:<28} {statistics.median(found):>9,.0f} rows/s  {statistics.median(ratios):.3f} of Parquet"
            say(f"{line}  {processor:>9,.0f} rows a second of processor time")
    finally:
        server.kill()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
