"""Catalogue: one row for each item, with the raw columns that describe it.

    movie_id             year  genres                  price        ◄── columns of the schema's item features, and more
    Alien (1979)         1979  ["Action", "Sci-Fi"]    3.99

A catalogue is what an index is built from, what filters read, and what the item half of a model encodes. It comes from
the events themselves (`catalogue_of`: what was last seen of each item) or from a file of the user's own, one row an
item (`read_catalogue`). Items are told apart by the canonical text of their id, as everywhere (`values/cells.py`),
and stand in the order of these texts, so neither the order of files nor the size of chunks changes a catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from ziggurat.data.preprocess.values.cells import Faults, canonical_strings, read_ids, with_nulls
from ziggurat.data.preprocess.values.times import kind_of_times, time_keys, with_date_order
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import missing_column
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.items import Items
from ziggurat.features.schema import Schema, column_of

_KEY, _TIME = "key:", "time:"


def require_items(schema: Schema) -> Items:
    """The items of a schema.

    Raises:
        SchemaError: the schema does not say which features describe the item.
    """
    if schema.items is None:
        names = [feature.name for feature in schema.features if feature.is_id]
        example = names[-1] if names else "item_id"
        raise SchemaError(
            expected="a schema that says which features describe the item",
            found="no items",
            where="schema",
            ways_out=(
                f'in TOML: [items], and below it id = "{example}", features = ["{example}"]',
                f'in Python: Schema(…, items=Items(id="{example}", features=("{example}",)))',
            ),
        )
    return schema.items


def item_columns(schema: Schema) -> tuple[str, ...]:
    """The raw columns of the item features, that of the id first."""
    items = require_items(schema)
    names = (items.id, *items.features)
    return tuple(dict.fromkeys(column_of(schema.feature(name)) for name in names))


def catalogue_of(
    source: RawSource, *, schema: Schema, keep: Sequence[str] = (), date_order: DateOrder = DateOrder.AUTO
) -> pl.DataFrame:
    """Return what was last seen of each item: in time where the schema has a time, else in the order of the rows.

    Args:
        source: the events, all of them or those of a time.
        schema: says which features describe the item.
        keep: further columns, for filters and people.
        date_order: of dates like 01/03/2024, as in `SplitConfig`.

    Raises:
        SchemaError: the schema has no items, or a column is absent or of another type than it was.
        DataError: a damaged file, or an id or time that cannot be read.
    """
    columns: tuple[str, ...] = tuple(dict.fromkeys((*item_columns(schema), *keep)))
    wanted = (*columns, schema.time) if schema.time and schema.time not in columns else columns
    latest: pl.DataFrame | None = None
    is_date: bool | None = None
    for chunk, order in with_date_order(source.frames(columns=wanted), schema.time, order=date_order):
        keyed = _keyed(chunk, schema=schema, columns=columns)
        if schema.time:
            if is_date is None:
                is_date = kind_of_times(chunk.frame[schema.time], file=str(chunk.path))
            times = time_keys(chunk, schema.time, bad_rows=source.bad_rows, is_date=bool(is_date), order=order)
            keyed = keyed.with_columns(pl.Series(_TIME, np.where(np.isnan(times), -np.inf, times)))
        else:
            keyed = keyed.with_columns(pl.lit(0.0).alias(_TIME))
        latest = _latest(latest, keyed.drop_nulls(_KEY), chunk)
    if latest is None:
        raise _no_items("no row", ", ".join(map(str, source.paths[:3])))
    return latest.sort(_KEY).select(columns)


def read_catalogue(source: RawSource, *, schema: Schema) -> pl.DataFrame:
    """A catalogue of the user's own, with all its columns: one row an item.

    Args:
        source: its files.
        schema: says which features describe the item.

    Raises:
        SchemaError: the schema has no items, or the files lack a column of an item feature.
        DataError: an item without id, or one that stands twice.
    """
    columns = item_columns(schema)
    parts = []
    for chunk in source.frames():
        missing = [name for name in columns if not chunk.has_column(name)]
        if missing:
            raise missing_column(chunk.path, missing[0], chunk.columns, others=missing[1:])
        keyed = _keyed(chunk, schema=schema, columns=chunk.columns)
        absent = keyed[_KEY].is_null()
        if absent.any():
            raise _wrong_row(chunk.where(int(absent.arg_true()[0]), column=columns[0]), "an id", "nothing")
        parts.append(keyed)
    if not parts:
        raise _no_items("no row", ", ".join(map(str, source.paths[:3])))
    frame = _stacked(parts, where=str(source.paths[0]))
    twice = frame.filter(pl.col(_KEY).is_duplicated())
    if twice.height:
        found = f"{twice[_KEY][0]!r:.80} more than once ({twice[_KEY].n_unique():,} such items)"
        raise _wrong_row(f"{source.paths[0]}, column {columns[0]!r}", "each item once", found)
    return frame.sort(_KEY).drop(_KEY)


def _keyed(chunk: RawChunk, *, schema: Schema, columns: Sequence[str]) -> pl.DataFrame:
    """The columns of a chunk, and the canonical id of each row's item."""
    clean = with_nulls(chunk, schema.missing_texts)
    name = item_columns(schema)[0]
    faults = Faults(chunk=clean)
    series = canonical_strings(clean.frame, [name]).get(name, clean.frame[name])
    keys = read_ids(series, faults=faults, role="the id of the item")
    if faults.found:
        faults.report(BadRows())
    return clean.frame.select(columns).with_columns(keys.alias(_KEY))


def _latest(before: pl.DataFrame | None, frame: pl.DataFrame, chunk: RawChunk) -> pl.DataFrame:
    both = frame if before is None else _stacked([before, frame], where=str(chunk.path))
    # Stable, so that of equal times the later row stays last and is kept.
    return both.sort(_TIME, maintain_order=True).unique(_KEY, keep="last", maintain_order=True)


def _stacked(parts: Sequence[pl.DataFrame], *, where: str) -> pl.DataFrame:
    try:
        return pl.concat(parts, how="vertical_relaxed")
    except PolarsError as error:
        raise SchemaError(
            expected="the same columns, of the same types, in all files",
            found=str(error)[:200],
            where=where,
            ways_out=("convert the files to one form", "name a catalogue of one file"),
        ) from error


def _no_items(found: str, where: str) -> DataError:
    return DataError(expected="at least one item", found=found, where=where, ways_out="name other files")


def _wrong_row(where: str, expected: str, found: str) -> DataError:
    return DataError(
        expected=expected,
        found=found,
        where=where,
        ways_out=("correct the row", "let the catalogue be taken from the events: name no file of items"),
    )
