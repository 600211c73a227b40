"""import_query: the answer of a database as one Parquet file, in bounded memory and with its types.

    database                            who answers                                 package
    none                                DuckDB in memory: SELECT … FROM 'x.csv'     duckdb
    a file of DuckDB                    DuckDB, opened for reading alone            duckdb
    a file of SQLite                    ADBC's driver                               adbc-driver-sqlite
    postgresql://…, snowflake://…, …    ADBC's driver of that name                  adbc-driver-postgresql, …

All of them give Arrow batches, so no value passes through Python. Batches are put together to row groups of 131,072
rows. Decimals become what models read: whole numbers of 64 bits where there is no fraction, else floating point.

The file appears when it is whole, with page checksums and a seal over every byte (`raw/parquet_seal.py`).

Memory: a row group, and what the database takes (DuckDB: 2 GB, then it writes to the disk beside the output).
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from ziggurat.data.raw.names import doubled
from ziggurat.data.raw.parquet_seal import seal_parquet
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, MissingFileError, ZigguratError
from ziggurat.files import replacing, temporary_beside
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.table_endings import refuse_text

ROWS_PER_GROUP = 131_072
_GROUP_BYTES = 256 << 20
_BATCH_ROWS = 16_384
_SQLITE, _DUCKDB = b"SQLite format 3\0", b"DUCK"
_DRIVERS = {"postgres": "postgresql", "grpc": "flightsql", "grpc+tls": "flightsql", "grpc+tcp": "flightsql"}
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^@]*@|((?:password|token|secret)[^=&;]*=)[^&;]*", re.I)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The answer of a database, as it stands in the file.

    Args:
        num_rows: rows of the file.
        num_bytes: its size.
        columns: name and type of each column.
    """

    num_rows: int
    num_bytes: int
    columns: dict[str, str]


def import_query(
    sql: str, *, out: str | Path, database: str = "", progress: Callable[[int], None] | None = None
) -> Imported:
    """Write what a query answers into a Parquet file.

    Args:
        sql: one query, as the database speaks it.
        out: the file; appears when it is whole, and must not exist.
        database: a file or URI, as the module says; "" asks DuckDB about the files that the query names.
        progress: called with the rows written so far.

    Raises:
        MissingDependencyError: the package of the database is not installed.
        MissingFileError: no such database file.
        ConfigError: a file that is no database, or `out` has another suffix than .parquet.
        DataError: the database refuses or fails, two columns have one name, there is no row, or `out` exists.
    """
    target = Path(out)
    _check_target(target)
    where = f"{_PASSWORD.sub(_hidden, database) or 'duckdb'}: {' '.join(sql.split())[:200]}"
    spill = temporary_beside(target)
    with _told(where), _opened(sql, database=database, spill=spill) as reader:
        schema = _plain_schema(reader.schema, where=where)
        num_rows = 0
        with replacing(target, error=DataError) as path:
            with ParquetFile(path, schema, compression="zstd", write_page_checksum=True) as writer:
                for table in _groups(reader, where=where):
                    writer.write_table(_plain(table, schema, where=where), row_group_size=ROWS_PER_GROUP)
                    num_rows += table.num_rows
                    if progress is not None:
                        progress(num_rows)
            if not num_rows:
                raise DataError(
                    expected="at least one row", found="none", where=where, ways_out="look at the query's conditions"
                )
            seal_parquet(path)
    columns = {field.name: str(field.type) for field in schema}
    return Imported(num_rows=num_rows, num_bytes=target.stat().st_size, columns=columns)


def _check_target(target: Path) -> None:
    refuse_text(target, because="it keeps the types of the database")
    if target.exists():
        raise DataError(
            expected="a file that does not exist yet",
            found="it exists",
            where=str(target),
            ways_out=("choose another name", "delete it"),
        )


@contextmanager
def _opened(sql: str, *, database: str, spill: Path) -> Iterator[pa.RecordBatchReader]:
    """The query's answer as batches."""
    with ExitStack() as stack:
        if "://" in database:
            scheme = database.split("://", 1)[0].lower()
            yield _by_adbc(sql, database, driver=_DRIVERS.get(scheme, scheme), stack=stack)
        elif database and _magic(Path(database)) == _SQLITE:
            yield _by_adbc(sql, database, driver="sqlite", stack=stack)
        else:
            duckdb = _package("duckdb", name="duckdb")
            options = {"memory_limit": "2GB", "temp_directory": str(spill)}
            stack.callback(shutil.rmtree, spill, ignore_errors=True)
            # DuckDB opens no database in memory read-only, and there is nothing in it to protect.
            connection = duckdb.connect(database or ":memory:", read_only=bool(database), config=options)
            stack.callback(connection.close)
            answer = connection.sql(sql)
            if answer is None:
                raise _no_rows_asked(sql)
            yield answer.to_arrow_reader(_BATCH_ROWS)


def _by_adbc(sql: str, database: str, *, driver: str, stack: ExitStack) -> pa.RecordBatchReader:
    package = _package(f"adbc_driver_{driver}.dbapi", name=f"adbc-driver-{driver}")
    connection = package.connect(database)
    stack.callback(connection.close)
    cursor = connection.cursor()
    stack.callback(cursor.close)
    cursor.execute(sql)
    reader = cursor.fetch_record_batch()
    if not len(reader.schema):
        raise _no_rows_asked(sql)
    return reader


def _package(module: str, *, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            expected=f"the package {name}, which asks the database",
            found=str(error),
            where="database",
            ways_out=(f"pip install {name}", "write the query's answer to CSV with the database's own tool"),
        ) from error


def _magic(path: Path) -> bytes:
    """Read the bytes that tell what kind of database a file is."""
    if not path.is_file():
        raise MissingFileError(
            expected="a database file", found="nothing there", where=str(path), ways_out="correct the path"
        )
    with path.open("rb") as file:
        start = file.read(16)
    if start != _SQLITE and start[8:12] != _DUCKDB:
        raise ConfigError(
            expected="a file of SQLite or DuckDB, or a URI such as postgresql://host/database",
            found=f"a file that begins with {start.hex(' ') or 'nothing'}",
            where=str(path),
            ways_out=("name the database", "leave --database out to ask about a CSV or Parquet file: FROM 'FILE'"),
        )
    return start


def _groups(reader: pa.RecordBatchReader, *, where: str) -> Iterator[pa.Table]:
    """Batches put together to row groups."""
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    answers = iter(reader)
    while True:
        with _told(where):  # a driver may raise an OSError, which is none of the file that is written
            batch = next(answers, None)
        if batch is None:
            break
        batches.append(batch)
        rows = rows + batch.num_rows
        size = size + batch.nbytes
        if rows >= ROWS_PER_GROUP or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(batches)
            batches = []
            rows = 0
            size = 0
    if rows:
        yield pa.Table.from_batches(batches)


def _plain_schema(schema: pa.Schema, *, where: str) -> pa.Schema:
    """The types that are written: those of the database, decimals as numbers."""
    if twice := doubled(schema.names):
        raise DataError(
            expected="a name of its own for each column",
            found=f"{', '.join(twice)} more than once",
            where=where,
            ways_out="name them in the query: SELECT a.id AS user_id, b.id AS item_id",
        )
    fields = []
    for field in schema:
        kind = field.type
        if pa.types.is_decimal(kind):
            kind = pa.float64() if kind.scale > 0 else pa.int64()
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _plain(table: pa.Table, schema: pa.Schema, *, where: str) -> pa.Table:
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as error:
        raise DataError(
            expected="whole numbers of at most 64 bits",
            found=str(error)[:300],
            where=where,
            ways_out="cast the column in the query: CAST(x AS DOUBLE), or CAST(x AS VARCHAR) for an id",
        ) from error


def _no_rows_asked(sql: str) -> DataError:
    return DataError(
        expected="a query that answers with rows",
        found=" ".join(sql.split())[:100] or "no text",
        where="sql",
        ways_out="begin with SELECT, or FROM …",
    )


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn what a database's package raises into an error in four parts."""
    try:
        yield
    except ZigguratError:
        raise
    except Exception as error:  # each package has errors of its own
        raise DataError(
            expected="a query that the database answers to its end",
            found=_PASSWORD.sub(_hidden, f"{type(error).__name__}: {error}")[:600],
            where=where,
            ways_out=("correct the query, or the name of the database", "try it in the database's own shell"),
        ) from error


def _hidden(match: re.Match[str]) -> str:
    return f"{match[1]}:…@" if match[1] is not None else f"{match[2]}…"
