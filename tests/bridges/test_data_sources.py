"""The commands of docs/guides/data-sources.md run, with the packages that it names and a local server for S3."""

from __future__ import annotations

import re
import shlex
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.bridges.test_stores import FRAME, SCHEMA, bucket, put
from ziggurat.cli.main import main
from ziggurat.data.raw.source import RawSource
from ziggurat.data.sql_import import import_query
from ziggurat.errors import DataError
from ziggurat.features.schema_io import write_schema

datasets = pytest.importorskip("datasets", reason="needs datasets: make test-bridges")
duckdb = pytest.importorskip("duckdb", reason="needs duckdb: make test-bridges")
pytest.importorskip("adbc_driver_sqlite", reason="needs adbc-driver-sqlite: make test-bridges")

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "data-sources.md"
SMALL = ["--dim", "4", "--epochs", "1"]
assert bucket  # a fixture


def commands(section: str) -> list[list[str]]:
    text = GUIDE.read_text().split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for block in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ ziggurat ")]


def run(command: list[str]) -> None:
    assert main([*command, *(SMALL if command[0] == "train" else [])]) == 0, command


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))


def test_files_in_a_store(bucket: Any, tmp_path: Path) -> None:
    for key, rows in (("logs/day_1", 900), ("logs/day_2", 600), ("later/day_9", 300), ("today/new", 200)):
        put(bucket, f"{key}.parquet", tmp_path, FRAME[:rows])
    found = commands("Files in a store")
    assert [command[0] for command in found] == ["data", "train", "evaluate", "predict"]
    for command in found:
        run(command)
    assert pl.read_parquet("scores.parquet").height == 200


def test_saved_datasets(tmp_path: Path) -> None:
    frame = FRAME[:1000]
    whole = datasets.Dataset.from_polars(frame)
    whole.save_to_disk("saved", num_shards=3)
    for command in commands("Arrow, Feather, and saved data sets"):
        run(command)
    chosen = whole.shuffle(seed=1).select(range(50))
    chosen.save_to_disk("chosen", num_shards=2)
    read = pl.concat([chunk.frame for chunk in RawSource("chosen").frames()])
    assert read.equals(chosen.to_polars())
    datasets.load_from_disk("saved").filter(lambda row: row["click"] == 1)  # leaves cache files there
    assert RawSource("saved").num_rows_hint() == 1000
    datasets.DatasetDict({"train": whole, "test": chosen}).save_to_disk("dict")
    with pytest.raises(DataError, match="dict/train"):
        RawSource("dict")
    assert RawSource("dict/test").num_rows_hint() == 50


def test_queries(tmp_path: Path) -> None:
    events = FRAME[:3000].with_columns(event_time=pl.int_range(pl.len()))
    (tmp_path / "logs").mkdir()
    events[:1500].write_csv("logs/a.csv")
    events[1500:].write_csv("logs/b.csv")
    with duckdb.connect("shop.duckdb") as made:
        made.execute("CREATE TABLE events AS SELECT * FROM 'logs/*.csv'")
    with sqlite3.connect("shop.sqlite") as made:
        made.execute("CREATE TABLE events (user TEXT, price REAL, click INTEGER, event_time INTEGER)")
        made.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", events.rows())
    for command in commands("A query of a database"):
        run(command)
    assert pl.read_parquet("clicks.parquet").height == events["click"].sum()
    assert pl.read_parquet("events.parquet").equals(events)
    assert pl.read_parquet("events_2.parquet").equals(events.drop("event_time"))
    write_schema(SCHEMA, "my.toml")
    run(["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/sql"])


def test_types_and_faults_of_databases(tmp_path: Path) -> None:
    sql = "SELECT sum(range) AS s, avg(range) AS a, 1.50 AS d, DATE '2024-01-01' AS day, [1, 2] AS l FROM range(10)"
    import_query(sql, out="types.parquet")
    found = pl.read_parquet("types.parquet")
    assert found.drop("day").rows() == [(45, 4.5, 1.5, [1, 2])]
    assert [str(kind) for kind in found.dtypes] == ["Int64", "Float64", "Float64", "Date", "List(Int32)"]
    with pytest.raises(DataError, match="nope"):
        import_query("SELECT nope FROM range(3)", out="x.parquet")
    with pytest.raises(DataError, match="row"):
        import_query("CREATE TABLE t (a INT)", out="x.parquet")
    with sqlite3.connect("mixed.sqlite") as made:
        made.execute("CREATE TABLE t (a)")
        made.executemany("INSERT INTO t VALUES (?)", [(1,)] * 3000 + [("text",)])
    with pytest.raises(DataError, match="to its end"):
        import_query("SELECT a FROM t", out="x.parquet", database="mixed.sqlite")
    with duckdb.connect("shop.duckdb") as made:
        made.execute("CREATE TABLE t AS SELECT 1 AS a")
    with pytest.raises(DataError, match="read-only"):
        import_query("INSERT INTO t VALUES (2)", out="x.parquet", database="shop.duckdb")
    assert not list(tmp_path.glob("*x.parquet*"))


def test_memory_is_bounded(tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = import_query(
        "SELECT range AS a, range * 0.5 AS b, 'u' || range % 1000 AS c FROM range(5000000)", out="l.parquet"
    )
    assert done.num_rows == 5_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10  # KiB
