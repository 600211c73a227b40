"""What a database answers is written whole, with its types, or not at all; databases themselves: tests/bridges."""

from __future__ import annotations

import decimal
import importlib.util
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ziggurat.data import sql_import
from ziggurat.data.raw.parquet_seal import Seal
from ziggurat.data.sql_import import import_query
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, MissingFileError

Answer = Callable[[pa.RecordBatchReader | None], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sets what a database in the place of DuckDB answers."""

    def set_answer(reader: pa.RecordBatchReader | None) -> None:
        result = None if reader is None else SimpleNamespace(to_arrow_reader=lambda rows: reader)
        connection = SimpleNamespace(sql=lambda sql: result, close=lambda: None)
        monkeypatch.setitem(sys.modules, "duckdb", SimpleNamespace(connect=lambda *_, **__: connection))

    return set_answer


def reader(table: pa.Table, *, fails_after: int = 1 << 30) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(table.to_batches(max_chunksize=100)):
            if number == fails_after:
                raise OSError("the server went away, postgresql://me:geheim@host/shop")
            yield batch

    return pa.RecordBatchReader.from_batches(table.schema, batches())


TABLE = pa.table({"id": [f"u{i}" for i in range(1000)], "n": range(1000), "at": pa.array(range(1000), pa.date32())})


def test_rows_types_and_row_groups(answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_import, "ROWS_PER_GROUP", 300)
    answer(reader(TABLE))
    told: list[int] = []
    done = import_query("SELECT", out=tmp_path / "x.parquet", progress=told.append)
    assert pq.read_table(tmp_path / "x.parquet").equals(TABLE)
    assert done.num_rows == 1000
    assert done.columns == {"id": "string", "n": "int64", "at": "date32[day]"}
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 4
    assert told == [300, 600, 900, 1000]
    assert Seal.find(tmp_path / "x.parquet") is not None


def test_decimals_become_numbers(answer: Answer, tmp_path: Path) -> None:
    whole = pa.array([decimal.Decimal(3), None], pa.decimal128(38, 0))
    price = pa.array([decimal.Decimal("1.25"), decimal.Decimal("-2.50")], pa.decimal128(10, 2))
    answer(reader(pa.table({"sum": whole, "price": price})))
    import_query("SELECT", out=tmp_path / "x.parquet")
    expected = {"sum": [3, None], "price": [1.25, -2.5]}
    assert pl.read_parquet(tmp_path / "x.parquet").to_dict(as_series=False) == expected
    answer(reader(pa.table({"sum": pa.array([decimal.Decimal(2**64)], pa.decimal128(38, 0))})))
    with pytest.raises(DataError, match="CAST"):
        import_query("SELECT", out=tmp_path / "y.parquet")


def test_a_database_that_fails_midway_leaves_nothing(answer: Answer, tmp_path: Path) -> None:
    answer(reader(TABLE, fails_after=5))
    with pytest.raises(DataError, match="to its end") as raised:
        import_query("SELECT", out=tmp_path / "x.parquet")
    assert "went away" in raised.value.found
    assert "geheim" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (TABLE.slice(0, 0), "at least one row"),
        (pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), "name of its own"),
        (None, "answers with rows"),
    ],
)
def test_what_is_no_table_is_refused(answer: Answer, tmp_path: Path, table: Any, expected: str) -> None:
    answer(None if table is None else reader(table))
    with pytest.raises(DataError, match=expected):
        import_query("SELECT", out=tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


def test_names_of_files_and_databases(answer: Answer, tmp_path: Path) -> None:
    answer(reader(TABLE))
    (tmp_path / "there.parquet").touch()
    (tmp_path / "text.db").write_text("id,n\n")
    with pytest.raises(DataError, match="does not exist yet"):
        import_query("SELECT", out=tmp_path / "there.parquet")
    with pytest.raises(ConfigError, match=r"--out \S*/x\.parquet"):
        import_query("SELECT", out=tmp_path / "x.csv")
    with pytest.raises(MissingFileError):
        import_query("SELECT", out=tmp_path / "x.parquet", database=str(tmp_path / "none.duckdb"))
    with pytest.raises(ConfigError, match="SQLite or DuckDB"):
        import_query("SELECT", out=tmp_path / "x.parquet", database=str(tmp_path / "text.db"))


@pytest.mark.skipif(importlib.util.find_spec("duckdb") is not None, reason="the packages are there")
def test_absent_packages_are_named(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "shop.sqlite").execute("CREATE TABLE t (a)").connection.commit()
    wanted = {"": "duckdb", str(tmp_path / "shop.sqlite"): "adbc-driver-sqlite", "grpc://host": "adbc-driver-flightsql"}
    for database, package in wanted.items():
        with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
            import_query("SELECT 1", out=tmp_path / "x.parquet", database=database)
