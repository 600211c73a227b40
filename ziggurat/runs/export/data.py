"""What an export takes from the raw data of its run: the catalogue, known users, what each has had, and sample rows.

All of it is read in chunks, in the order of the files. Memory: the items and users, and 12 bytes an event for what
users have had; the raw rows are not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch

from ziggurat.data.catalogue import catalogue_of, item_columns, read_catalogue
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.preprocessing import numeric_columns
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.preprocess.values.cells import Faults, canonical_strings, canonical_text, read_ids, with_nulls
from ziggurat.data.preprocess.values.times import kind_of_times, time_keys, with_date_order
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.written_numbers import WrittenColumns
from ziggurat.data.teachers.join import TeacherJoin
from ziggurat.errors import ConfigError
from ziggurat.features.events import EARLIER
from ziggurat.features.items import Items
from ziggurat.features.kinds import feature_of_ids
from ziggurat.features.schema import Feature, Schema, column_of
from ziggurat.files.stores import DataPath
from ziggurat.runs.export.typed_columns import typed_columns
from ziggurat.runs.teachers.rows import raw_columns, with_histories
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, ItemColumns, KnownUsers, NumberOfId

_USER = "user of the export"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The raw files of a run, and how they are read.

    Args:
        config: with real paths (`runs.execute.raw_files`).
        schema: of the run.
        bad_rows: where rows with faults go.
        events: of a run on events, whose rows are samples: the events themselves; None: the rows are.
        users: of such a run: one row a user, as they are now; None: as the rows say last.
        more: features that the rows have beside those of the schema, for requests to a ranker behind the run.
        join: gives rows the histories of their users; None: the run reads none.
    """

    config: DataConfig
    schema: Schema
    bad_rows: BadRows
    events: RunData | None = None
    users: RunData | None = None
    more: tuple[Feature, ...] = ()
    join: TeacherJoin | None = None

    def source(self, paths: Sequence[str | DataPath] = ()) -> RawSource:
        """All rows of the run, or other files that are read in the same way."""
        data = self.config
        named = (*data.train, *data.valid, *data.test) if data.split.by is SplitBy.FILES else data.train
        return data.source([*(paths or named)], bad_rows=self.bad_rows)

    def written(self, schemas: Sequence[Schema] = ()) -> WrittenColumns:
        """Return how numbers are written in the files: as its own schema says, then as those of further models do."""
        written = WrittenColumns(files=self.config.text.numbers).with_own(self.schema.numbers)
        for schema in schemas:
            written = written.with_own(schema.numbers)
        return written

    def samples(self, *, num_rows: int) -> Iterator[RawChunk]:
        """About so many rows with labels, the first ones of each file."""
        source = self.source()
        schema = self.schema
        quota = -(-num_rows // len(source.paths))
        columns = raw_columns((*schema.columns, *map(column_of, self.more)), join=self.join)
        for path in source.paths:
            left = quota
            numbers = numeric_columns(schema)
            frames = self.source([path]).frames(columns=columns, numbers=numbers, chunk_rows=1 << 14)
            for raw in with_histories(frames, self.join):
                chunk = raw.with_number_columns(schema.numbers)
                mask = np.arange(chunk.num_rows) < left
                yield chunk if mask.all() else chunk.filter(mask)
                left -= chunk.num_rows
                if left <= 0:
                    break


def make_catalogue(
    data: RunData, *, schemas: Sequence[Schema], keep: Sequence[str], items: Sequence[str]
) -> ItemCatalogue:
    """The catalogue of the items that the schemas describe.

    Args:
        data: of the run whose item ids count.
        schemas: of the models, the first one with items; columns of the item features of all are taken.
        keep: further columns, for filters; of `items`, all are taken where none are named.
        items: files with one row an item, or none: what was last seen of each item in the data.

    Raises:
        SchemaError, DataError: as `data/catalogue.py`.
        ConfigError: the items of a further model have columns that the files, or the run's event log, do not have.
    """
    of_log = data.events is not None
    data = data.events or data
    described = [schema for schema in schemas if schema.items is not None]
    columns = tuple(dict.fromkeys(name for schema in described for name in item_columns(schema)))
    more = [name for name in dict.fromkeys((*columns, *keep)) if name not in item_columns(described[0])]
    if items:
        frame = read_catalogue(data.source(items), schema=described[0])
        if absent := [name for name in more if name not in frame.columns]:
            raise ConfigError(
                expected=f"a catalogue with the columns {', '.join((*columns, *keep))}",
                found=f"none called {', '.join(map(repr, absent))}",
                where=", ".join(items),
                ways_out=("add the column", "leave --items out: the catalogue is then made from the run's data"),
            )
        if keep:  # what else the files say of items is nobody's business
            frame = frame.select(list(dict.fromkeys((*columns, *keep))))
    else:
        if of_log and (absent := [name for name in more if name not in data.source().columns()]):
            raise ConfigError(
                expected=f"an event log with all that describes items for the ranker: {', '.join(more)}",
                found=f"no column {', '.join(absent)}",
                where="ziggurat export, --ranker",
                ways_out=("train both runs on one table", "give a catalogue that has the columns: --items FILE"),
            )
        date_order = data.config.split.date_order
        frame = catalogue_of(data.source(), schema=described[0], keep=more, date_order=date_order)
    source = data.source(items)
    is_text = all(source.is_text(path) for path in source.paths)
    frame = typed_columns(frame, schemas=described, is_text=is_text, written=data.written(schemas))
    return ItemCatalogue(frame, columns=ItemColumns(id=columns[0], features=columns))


def with_user_feature(schema: Schema, *, others: Sequence[Schema], finds_items: bool) -> Schema | None:
    """The schema with a feature that names the user, called `_USER`; None where no column is known to do so.

    It is the column by which samples are grouped, if a model looks users up by it or finds items for each group:
    a group that no model knows may also be a request.
    """
    column = schema.group
    reads = any(each.is_id and column_of(each) == column for other in others for each in other.features)
    if not column or not (reads or finds_items):
        return None
    return dataclasses.replace(schema, features=(*schema.features, feature_of_ids(_USER, column=column)))


def make_users(
    data: RunData, *, schemas: Sequence[Schema], catalogue: ItemCatalogue, finds_items: bool
) -> KnownUsers | None:
    """Collect the users of the data: their columns as they were last, and the items that they have had.

    Also counts the events of each item, into the catalogue.

    Args:
        data: of the run.
        schemas: of the models; columns that are none of the item's are taken.
        catalogue: items.
        finds_items: the run finds items for each group, so that the group is the user.
    """
    schema = data.schema
    named = with_user_feature(schema, others=schemas, finds_items=finds_items)
    user_ids = None
    frame = pl.DataFrame()
    if named is not None:
        of_users = data.users or data
        there = set(of_users.source().columns())
        names = {column_of(each) for other in schemas for each in other.features} & there
        names -= {*catalogue.columns.features, EARLIER}  # what users have had is kept beside their columns
        mine = [each.name for each in schema.features if column_of(each) in names]
        as_items = dataclasses.replace(named, items=Items(id=_USER, features=tuple(mine)))
        source = of_users.source()
        date_order = of_users.config.split.date_order
        frame = catalogue_of(source, schema=as_items, keep=sorted(names), date_order=date_order)
        frame = _with_numbers(frame, schemas=schemas, written=of_users.written(schemas))
        ids = canonical_text(frame[schema.group])
        assert ids is not None, "read as ids before"
        user_ids = NumberOfId(ids)
    users, items, times = _events(data.events or data, users=user_ids, catalogue=catalogue)
    catalogue.events = np.bincount(items, minlength=len(catalogue)).astype(np.int64)
    if user_ids is None:
        return None
    most_active = np.argsort(-np.bincount(users, minlength=frame.height), kind="stable")
    place = np.empty_like(most_active)
    place[most_active] = np.arange(len(most_active))
    users = place[users]
    # The last key counts first: by user, then the latest event, and of equal times the later row.
    latest_first = np.lexsort((-np.arange(len(users)), -times, users))
    users = users[latest_first]
    items = items[latest_first]
    _, first = np.unique(users * len(catalogue) + items, return_index=True)  # each item of a user once
    # np.unique has sorted by item: back to the order of users and times.
    first.sort()
    users = users[first]
    items = items[first]
    offsets = np.zeros(frame.height + 1, dtype=np.int64)
    np.cumsum(np.bincount(users, minlength=frame.height), out=offsets[1:])
    return KnownUsers(
        frame[most_active.tolist()],
        id_column=schema.group,
        offsets=torch.from_numpy(offsets),
        items=torch.from_numpy(items.astype(np.int32)),
    )


def _with_numbers(frame: pl.DataFrame, *, schemas: Sequence[Schema], written: WrittenColumns) -> pl.DataFrame:
    """Turn texts with marks in columns of numbers into numbers: who reads an export knows no marks of files."""
    if written.is_plain:
        return frame
    columns = {column_of(each) for schema in schemas for each in schema.features if each.reads_numbers}
    texts = [name for name in frame.columns if name in columns and frame.schema[name] == pl.String]
    return frame.with_columns(written.of(name).cast(frame[name]) for name in texts)


def _events(
    data: RunData, *, users: NumberOfId | None, catalogue: ItemCatalogue
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, item and time of every row whose item is in the catalogue (and whose user is known)."""
    schema = data.schema
    column = catalogue.columns.id
    wanted = tuple(dict.fromkeys(filter(None, (column, schema.group if users else "", schema.time))))
    known_items = NumberOfId(catalogue.ids)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    is_date: bool | None = None
    chunks = data.source().frames(columns=wanted)
    for chunk, order in with_date_order(chunks, schema.time, order=data.config.split.date_order):
        item = known_items.looked_up(_keys(chunk, column, schema).to_list())
        user = np.zeros_like(item)
        if users is not None:
            user = users.looked_up(_keys(chunk, schema.group, schema).to_list())
        times = np.zeros(chunk.num_rows)
        if schema.time:
            if is_date is None:
                is_date = kind_of_times(chunk.frame[schema.time], file=str(chunk.path))
            times = time_keys(chunk, schema.time, bad_rows=data.bad_rows, is_date=bool(is_date), order=order)
            times = np.nan_to_num(times, nan=-np.inf)
        mine = (item >= 0) & (user >= 0)
        found.append((user[mine], item[mine], times[mine]))
    users_of, items_of, times_of = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return users_of, items_of, times_of


def _keys(chunk: RawChunk, column: str, schema: Schema) -> pl.Series:
    """Canonical ids of a column."""
    clean = with_nulls(chunk, schema.missing_texts)
    series = canonical_strings(clean.frame, [column]).get(column, clean.frame[column])
    return read_ids(series, faults=Faults(chunk=clean), role="an id")
