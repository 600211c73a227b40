"""What an export takes from the event log of its run: the catalogue, users with their histories, rows to compare on.

    events.parquet ─► read, sort ─►  events    user, item and what describes it, time     catalogue, what users have had
                                     users     one row a user: the whole history          known users, as they are now
                                     samples   as the run was trained on                  comparison with the run

The three are written into a temporary folder, with the columns that the samples of the run have: requests name the same
columns. Memory: that of the log (`data/events/log.py`).

A ranker on events that orders what the run finds reads the same histories: users and events then have its columns too
(what else was done, what else describes an item, the context of the latest event).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from ziggurat.data.events.candidates import asked_together, candidate_tables, label_columns
from ziggurat.data.events.event_columns import EventColumn
from ziggurat.data.events.log import EventLog, date_order_of, read_events
from ziggurat.data.events.questions import leave_one_out, open_questions
from ziggurat.data.events.sequences import Purpose, sample_tables, sequence_schema
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.errors import DataError
from ziggurat.features.events import ASKED_AT, TrainingWindows
from ziggurat.features.schema import NUM_RESERVED_ROWS, Schema, table_of
from ziggurat.files.parquet import ParquetFile
from ziggurat.models.sequence.next_item import NextItem
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.histories_of_ranker import context_columns, schema_for_both, with_context
from ziggurat.runs.load import Run
from ziggurat.runs.scores.embeddings import ids_of_table

_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EventsWanted:
    """The parts of a log that an export takes.

    Args:
        folder: where files are written; the caller removes it.
        keep: further columns of the events for the catalogue.
        num_rows: samples to compare on, about.
        ranker: events of a run that orders what this one finds, whose columns users and events have as well; or None.
    """

    folder: Path
    keep: Sequence[str] = ()
    num_rows: int = 1
    ranker: Schema | None = None


def event_data(run: Run, *, config: DataConfig, bad_rows: BadRows, wanted: EventsWanted) -> RunData:
    """The samples of a run on events, with its users and events beside them.

    Args:
        run: on an event log.
        config: of the log, with real paths.
        bad_rows: where events with faults go.
        wanted: which parts.

    Raises:
        SchemaError, DataError: as `read_events`; no user has two events.
    """
    schema = run.config.table_schema
    samples = run.preprocessing.schema
    labels = label_columns(schema)
    ranker = wanted.ranker
    whole = schema if ranker is None else schema_for_both(schema, ranker, where=f"{run.folder}, its event log")
    context = {} if ranker is None else context_columns(ranker)
    keep = [name for name in wanted.keep if whole.items is None or name not in whole.items.features]
    carried = tuple(dict.fromkeys([*labels, *keep, *context.values()]))
    raw = RunData(config=config, schema=schema, bad_rows=bad_rows).source()
    chunks = raw.frames(columns=tuple(dict.fromkeys([*whole.columns, *carried])))
    date_order = date_order_of(samples)
    log = read_events(chunks, whole, bad_rows=bad_rows, carried=carried, date_order=date_order)

    def written(name: str, tables: Iterator[pa.Table], of: Schema) -> RunData:
        path = wanted.folder / f"{name}.parquet"
        _write(tables, path, log=log)
        return RunData(config=DataConfig(train=(str(path),)), schema=of, bad_rows=bad_rows)

    events = written("events", _events(log, whole, keep=keep), replace(samples, time=ASKED_AT))
    if labels:
        return replace(written("samples", _limited(_candidates(log, schema), wanted.num_rows), samples), events=events)
    length = whole.event_settings.max_length
    _, _, asked = leave_one_out(log, max_length=length, windows=TrainingWindows.LAST)
    last = sample_tables(log, asked, whole, purpose=Purpose.EVALUATION)
    last = _limited(with_context(last, log, context, places=asked.targets), wanted.num_rows)
    now = sample_tables(log, open_questions(log, max_length=length), whole, purpose=Purpose.PREDICTION)
    users = written("users", with_context(now, log, context, places=log.bounds()[1:] - 1), samples)
    known = {each.name for each in samples.features}
    more = () if ranker is None else tuple(each for each in sequence_schema(ranker).features if each.name not in known)
    return replace(written("samples", last, samples), events=events, users=users, more=more)


def known_items(run: Run) -> pl.Series | None:
    """The ids of the items that a next-item model met in training; None for other models."""
    if not isinstance(run.model, NextItem):
        return None
    items = run.preprocessing.schema.item_settings
    rows = run.model.item_counts[NUM_RESERVED_ROWS:].nonzero().squeeze(1)
    return ids_of_table(run, table_of(run.preprocessing.schema.feature(items.id))).gather(rows.cpu().numpy())


def _candidates(log: EventLog, schema: Schema) -> Iterator[pa.Table]:
    labels = label_columns(schema)
    places = np.flatnonzero(log.has_all(labels))
    asked = asked_together(log, places, parts=np.zeros_like(places), most=schema.event_settings.candidates)
    return candidate_tables(log, asked, schema, labels=labels, at_once=_ROWS_AT_ONCE)


def _events(log: EventLog, schema: Schema, *, keep: Sequence[str]) -> Iterator[pa.Table]:
    """User, item, what describes it and the columns to keep, and when."""
    columns = {name: EventColumn(log.columns[name]) for name in schema.item_settings.features}
    users = pa.array(log.user_ids.to_list(), pa.large_string())
    for first in range(0, len(log.users), _ROWS_AT_ONCE):
        places = np.arange(first, min(first + _ROWS_AT_ONCE, len(log.users)))
        found = {schema.group: pa.DictionaryArray.from_arrays(pa.array(log.users[places].astype(np.int32)), users)}
        found |= {name: column.at(places) for name, column in columns.items()}
        found |= {name: log.carried[name].gather(places).to_arrow() for name in keep}
        yield pa.table(found | {ASKED_AT: pa.array(log.times[places])})


def _limited(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The tables until there are so many rows."""
    left = [num_rows]

    def counted(table: pa.Table) -> bool:
        left[0] -= table.num_rows
        # A table is taken as long as rows are wanting before it: the last one is taken whole.
        return left[0] + table.num_rows > 0

    return takewhile(counted, tables)


def _write(tables: Iterator[pa.Table], path: Path, *, log: EventLog) -> None:
    first = next(tables, None)
    if first is None:
        raise DataError(
            expected="a user with two events, or an event with labels, to compare the export with its run",
            found=f"{len(log.users):,} events of {log.num_users:,} users, none of these",
            where="the event log of the run",
            ways_out="check whether the files are still those of the training",
        )
    with ParquetFile(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
