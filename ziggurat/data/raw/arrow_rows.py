"""Arrow batches as frames, whatever file they come from: texts checked, columns that polars cannot take named.

Readers of Parquet and of Arrow's own files give batches; both take on trust that text is UTF-8. Here a row with a
broken text becomes a bad row like any other, and a column of a type that polars has not is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa
from polars.exceptions import PanicException, PolarsError

from ziggurat.data.raw.bad_rows import BadReason, BadRow, BadRows
from ziggurat.data.raw.names import doubled
from ziggurat.errors import DataError, MissingFileError, SchemaError
from ziggurat.files.store_reader import StoreReader
from ziggurat.files.stores import DataPath, StoreFile

# What pyarrow raises for damaged files. MemoryError: a damaged header can ask for any amount of memory.
READ_ERRORS = (pa.ArrowException, OSError, MemoryError, ValueError, TypeError, KeyError, OverflowError)
POLARS_ERRORS = (*READ_ERRORS, PolarsError, PanicException)


def refuse_absent(path: DataPath, *, what: str) -> None:
    """Refuse a path of this machine where no file is; stores say so themselves when a file is opened.

    Raises:
        MissingFileError: no such file.
    """
    if not isinstance(path, StoreFile) and not path.is_file():
        raise MissingFileError(expected=what, found="nothing there", where=str(path), ways_out="correct the path")


def refuse_changed(opened: object) -> None:
    """Look whether an object in a store is still the one that was opened; files of this machine pass.

    Raises:
        DataError: it was written anew meanwhile.
    """
    if isinstance(opened, StoreReader):
        opened.verify()


def check_schema(schema: pa.Schema, *, path: DataPath) -> None:
    """Refuse two columns of one name, and names that are no text.

    Raises:
        DataError: two columns share a name.
        UnicodeError: a damaged name.
    """
    for kind in schema.types:
        _check_names(kind)
    doubles = doubled(schema.names)
    if doubles:
        raise DataError(
            expected="column names without doubles",
            found=f"{doubles} more than once",
            where=str(path),
            ways_out="rename the columns",
        )


def polars_types(schema: pa.Schema) -> dict[str, pl.DataType]:
    """The polars type of every column; columns that polars has no type for are left out."""
    types: dict[str, pl.DataType] = {}
    for name in schema.names:
        try:
            types[name] = _to_polars(pa.schema([schema.field(name)]).empty_table()).schema[name]
        except POLARS_ERRORS:
            continue
    return types


def without_broken_texts(
    batch: pa.RecordBatch, rows: np.ndarray, *, path: DataPath, bad_rows: BadRows
) -> tuple[pa.RecordBatch, np.ndarray]:
    """The batch, and the numbers of its rows, without those whose text is not UTF-8; these are reported."""
    for name in batch.schema.names:
        column = batch.column(name)
        if not holds_text(column.type):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            good = np.ones(len(column), dtype=bool)
            for index in range(len(column)):
                try:
                    column.slice(index, 1).take(pa.array([0])).validate(full=True)
                except pa.ArrowInvalid:
                    good[index] = False
                    bad_rows.report(
                        BadRow(
                            path=path,
                            row=int(rows[index]),
                            line=None,
                            column=name,
                            reason=BadReason.INVALID_UTF8,
                            expected="valid UTF-8",
                            found=str(error),
                        )
                    )
            batch = batch.filter(pa.array(good))
            rows = rows[good]
    return batch, rows


def frame_of(batch: pa.RecordBatch, columns: Sequence[str], *, path: DataPath) -> pl.DataFrame:
    """The columns of a batch as polars has them.

    Raises:
        SchemaError: a column of a type that polars has not.
        DataError: polars cannot take the values.
    """
    try:
        return _to_polars(pa.Table.from_batches([batch]).select(list(columns)))
    except POLARS_ERRORS as failure:
        for name in columns:
            _try_column(batch, name, path=path)
        raise DataError(
            expected="values that polars can take",
            found=str(failure)[:500] or type(failure).__name__,
            where=f"{path}, values",
            ways_out="copy or write the file again: it is damaged",
        ) from None


def holds_text(kind: pa.DataType) -> bool:
    """Return whether a type is text, or lists or a dictionary of it."""
    if pa.types.is_dictionary(kind):
        return holds_text(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return holds_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _try_column(batch: pa.RecordBatch, name: str, *, path: DataPath) -> None:
    try:
        _to_polars(pa.table({name: batch.column(name)}))
    except POLARS_ERRORS as error:
        raise SchemaError(
            expected="a column of numbers, text, booleans, dates, or lists of these",
            found=f"type {batch.schema.field(name).type}: {str(error)[:200]}",
            where=f"{path}, column {name!r}",
            ways_out=("write the column as another type", "leave it out of the schema"),
        ) from error


def _to_polars(table: pa.Table) -> pl.DataFrame:
    return pl.DataFrame(table)


def _check_names(kind: pa.DataType) -> None:
    """Decode the names of nested fields: polars would panic over a damaged one."""
    for index in range(kind.num_fields):
        nested = kind.field(index)
        nested.name.encode()
        _check_names(nested.type)
