"""Tables in memory: frames of polars and pandas, Arrow tables and dicts of arrays, through one door.

    polars.DataFrame, LazyFrame ┐
    pandas.DataFrame            │                    ┌─► looked into, scored       as they are, without a file
    Arrow tables, readers, …    ├─ as_polars ─► frame ┤
    dict of NumPy arrays, lists │                    └─► trained on                kept with the run, as Parquet
    a structured NumPy array    ┘

Whatever has `__arrow_c_stream__` (relations of DuckDB, tables of Ibis and others) is taken too. A column means the same
in memory as in a file: a categorical one is its texts, rows of an array are lists, half precision is single precision.
An index of pandas that has a name is a column; one without is not, as in `to_parquet` and back.

pandas is never imported here unless the caller's own frame is one of pandas. Cost: columns of numbers are not copied
where polars can read them in place; one column at a time is looked at again where polars refuses the table.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sized
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from ziggurat.data.raw.written_numbers import WrittenColumns, WrittenNumbers
from ziggurat.errors import DataError
from ziggurat.files.parquet import write_table

if TYPE_CHECKING:  # an option: who has a frame of it has it
    import pandas

FRAMES = "a frame (polars, pandas, Arrow, a dict of columns)"


def is_frame(data: object) -> bool:
    """Return whether data is a table in memory, and not the names of files."""
    if isinstance(data, pl.DataFrame | pl.LazyFrame | pa.Table | Mapping):
        return True
    is_structured = isinstance(data, np.ndarray) and data.dtype.names is not None
    return is_structured or hasattr(data, "columns") or hasattr(data, "__arrow_c_stream__")


def is_pandas(data: object) -> TypeGuard[pandas.DataFrame]:
    """Return whether data is a frame of pandas."""
    # Who has a frame of pandas has imported it; others need not wait for the import.
    loaded = sys.modules.get("pandas")
    return loaded is not None and isinstance(data, loaded.DataFrame)


def as_polars(data: object, *, where: str = "data to score", written: WrittenColumns | None = None) -> pl.DataFrame:
    """Return a table in memory as a polars frame.

    In a dict, NaN, None and NA among texts are missing values, and with `written` numbers among texts are texts.

    Args:
        data: see the module docstring.
        where: it was given, for the error.
        written: how the reader of the texts expects numbers in them, by column; None: numbers among texts are refused.

    Raises:
        DataError: it is nothing that polars can take; names the column.
    """
    try:
        found = _frame_of(data, written)
        problem = ""
        objects = [] if found is None else [name for name, dtype in found.schema.items() if dtype == pl.Object]
        if objects:
            found = None
            problem = f"column {objects[0]!r} of objects of Python"
    except Exception as error:  # polars, pyarrow and pandas raise whatever they like
        found = None
        problem = f"{_refused_column(data)}{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    if found is None:
        raise DataError(
            expected="a frame of polars or pandas, an Arrow table, or a dict of equally long columns",
            found=f"a {type(data).__name__} of {type(data).__module__}" + (f", {problem}" if problem else ""),
            where=where,
            ways_out=_ways_to_a_frame(data),
        )
    return _with_types_of_files(found)


def _ways_to_a_frame(data: object) -> tuple[str, ...]:
    if isinstance(data, list | tuple) and data and all(isinstance(each, Mapping) for each in data):
        return ("rows as dicts: make a frame of them first, pl.DataFrame(rows) or pd.DataFrame(rows)",)
    if isinstance(data, Mapping):
        lengths = {name: len(values) for name, values in data.items() if isinstance(values, Sized)}
        lengths = {name: length for name, length in lengths.items() if not isinstance(data[name], str)}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name!r} {length}" for name, length in list(lengths.items())[:10])
            return (f"give each key as many values as there are rows; now {shown}",)
    if not is_frame(data):
        return ("columns by name, with a value for each row: {'user': ['u1', 'u2'], 'price': [1.5, None]}",)
    return ("let each column have values of one kind: numbers, texts, times, or lists of these",)


def _frame_of(data: Any, written: WrittenColumns | None = None) -> pl.DataFrame | None:
    if isinstance(data, pl.DataFrame):
        return data
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, Mapping):
        columns: dict[str, Any] = {}
        for name, values in data.items():
            columns[str(name)] = _column_of(values, None if written is None else written.of(str(name)))
        return pl.DataFrame(columns)
    if is_pandas(data):
        has_name = any(name is not None for name in data.index.names)
        return pl.from_pandas(data, include_index=has_name)
    is_structured = isinstance(data, np.ndarray) and data.dtype.names is not None
    if is_structured or isinstance(data, pa.Table) or hasattr(data, "__arrow_c_stream__"):
        return pl.DataFrame(data)
    return None


def _column_of(values: Any, written: WrittenNumbers | None) -> Any:
    """One column of a dict as polars takes it."""
    is_of_objects = is_pandas_series(values) and values.dtype == object
    is_of_objects = is_of_objects or (isinstance(values, np.ndarray) and values.dtype.kind == "O")
    if isinstance(values, list | tuple) or is_of_objects:
        return _of_one_kind(list(values), written)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "mM":
        return values
    # polars has no unit of time above the millisecond.
    if np.datetime_data(values.dtype)[0] in ("s", "m", "h"):
        return values.astype("datetime64[ms]" if values.dtype.kind == "M" else "timedelta64[ms]")
    return values


def is_pandas_series(data: object) -> TypeGuard[pandas.Series]:
    """Return whether data is a column of pandas."""
    loaded = sys.modules.get("pandas")
    return loaded is not None and isinstance(data, loaded.Series)


def _of_one_kind(values: list[object], written: WrittenNumbers | None) -> list[object]:
    """Return values with None for each mark of pandas that says missing, as texts where texts are among numbers."""
    kinds = {type(each) for each in values}
    if any(kind.__name__ in ("NAType", "NaTType") for kind in kinds):
        values = [None if type(each).__name__ in ("NAType", "NaTType") else each for each in values]
    is_text = any(issubclass(kind, str) for kind in kinds)
    if not is_text and kinds & {list, tuple, np.ndarray}:
        return [None if isinstance(each, float) and math.isnan(each) else each for each in values]
    if not is_text or all(issubclass(kind, str) for kind in kinds):
        return values
    return [_as_text(each, written) for each in values]


def _as_text(value: object, written: WrittenNumbers | None) -> object:
    """Return a number as the text that is read as this number, None for NaN, and anything else as it is."""
    if isinstance(value, float | np.floating) and math.isnan(value):
        return None
    if written is None:
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return written.text_of(float(value))
    return value


def _refused_column(data: object) -> str:
    """The column that polars does not take, if it is one alone."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(data, Mapping):
        parts = ((name, {name: values}) for name, values in data.items())
    elif is_pandas(data):
        parts = ((name, data[[name]]) for name in data.columns)
    for name, part in parts:
        try:
            _frame_of(part)
        except Exception:  # the same errors, of one column
            return f"column {name!r}, "
    return ""


def _with_types_of_files(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the types that its columns would have if they had been read from a file."""
    types = {name: _type_of_files(dtype) for name, dtype in frame.schema.items()}
    changes = [pl.col(name).cast(dtype) for name, dtype in types.items() if dtype != frame.schema[name]]
    return frame.with_columns(changes) if changes else frame


def _type_of_files(dtype: pl.DataType) -> pl.DataType:
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return pl.String()
    if isinstance(dtype, pl.Array | pl.List):
        inner = dtype.inner if isinstance(dtype.inner, pl.DataType) else dtype.inner()
        return pl.List(_type_of_files(inner))
    return pl.Float32() if dtype == pl.Float16 else dtype


def write_frame(frame: pl.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a frame as Parquet with checksums of its pages, which readers of ours verify.

    Raises:
        OSError: it cannot be written.
    """
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    write_table(table, path)
