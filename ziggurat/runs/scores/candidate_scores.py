"""Scores for an event log: every event in, for each the scores that a ranker gives it from what its user did before.

    run.predict(["events.parquet"], out="scores.parquet")    row │ like
    user  item  rating  time                                 ────┼──────
    a     x     5       1                                      0 │ 0.81    from what was before, `candidates` at a time,
    a     y     2       2                                      1 │ 0.40    as in training
    a     z     –       9     nobody knows what becomes of     2 │ 0.77    open: both from x and y,
    a     w     –       9     these two                        3 │ 0.12    and not from each other

An event is open if none of its labels and none of its actions has a value. Open events that no other one of the user
lies between are candidates of one question, however many they are; they stand in no history. Without labels in the data
and without actions in the schema nothing is open. Events that happened but have no label, and are history alone in
training, are asked apart from those that have: they move no question of these.

Ids that the run does not know are counted, as for any prediction. Memory: that of the log, and about 2^18 events of
lists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from ziggurat.data.events.candidates import Asked, asked_together, candidate_tables, label_columns
from ziggurat.data.events.log import EventLog, compared_with_training, date_order_of, read_events
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.source import RawSource
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import column_of
from ziggurat.runs.scores.given_data import files_in
from ziggurat.runs.scores.next_items import predict_next
from ziggurat.runs.scores.output import check_output, refuse_own_input, write_frames
from ziggurat.runs.scores.scoring import ROW, chunks_of_frame, collecting_bad_rows, like, output_schema, own_rows
from ziggurat.training.evaluation.evaluate import gathered_scores_of
from ziggurat.training.report.progress import Progress

if TYPE_CHECKING:
    from ziggurat.runs.load import Run

_EVENTS_AT_ONCE = 1 << 18


def predict_of_events(
    run: Run,
    data: object,
    *,
    out: str | Path | None,
    keep: Sequence[str],
    bad_rows: BadRowPolicy,
    progress: Progress | None,
) -> object:
    """Implement `Run.predict` for a run on events: next items of users, or with labels a score for each event.

    Raises:
        ConfigError: a suffix that is not known, or columns that cannot be kept.
        SchemaError, DataError: as reading events; times of another unit than those of the run's training.
    """
    if not run.config.table_schema.labels:
        return predict_next(run, data, out=out, keep=keep, bad_rows=bad_rows, progress=progress)
    schema = output_schema(run, data, keep=keep)
    if out is not None:
        check_output(out, schema)
        refuse_own_input(out, data, trained=[Path(path) for path in run.config.data.train])
    log = _log_of(run, data, keep=keep, bad_rows=bad_rows, progress=progress)
    far = compared_with_training(log, run.preprocessing.schema)
    for note in filter(None, (log.sorted_note, far)):  # candidates are asked for at one time
        run.warn(note, progress)
    scores = _scores(run, log, progress=progress)
    found = _frame(log, scores, schema=schema, keep=keep) if run.team.is_first else pl.DataFrame(schema=schema)
    if out is None:
        return like(found, data) if is_frame(data) else found
    return write_frames(iter([found]), out, schema=schema) if run.team.is_first else len(log.users)


def _log_of(
    run: Run, data: object, *, keep: Sequence[str], bad_rows: BadRowPolicy, progress: Progress | None
) -> EventLog:
    schema = run.config.table_schema
    with collecting_bad_rows(run, bad_rows, progress=progress) as collector:
        labels = label_columns(schema)
        needed = (*(column_of(feature) for feature in schema.features), schema.group, schema.time)
        if is_frame(data):
            frame = as_polars(data, written=run.written)
            known = list(frame.columns)
            chunks = chunks_of_frame(frame, text=run.reading.text)
        else:
            source = RawSource(files_in(data), format=run.reading.format, bad_rows=collector, text=run.reading.text)
            known = list(source.columns())
            columns = dict.fromkeys([*needed, *(name for name in labels if name in known), *keep])
            chunks = source.frames(columns=tuple(columns))
        carried = [name for name in (*labels, *keep) if name in known]
        date_order = date_order_of(run.preprocessing.schema)
        return read_events(chunks, schema, bad_rows=collector, carried=carried, date_order=date_order)


def _happened(run: Run, log: EventLog) -> np.ndarray:
    """(N,) events that have a label or an action; all of them where nothing could tell."""
    schema = run.config.table_schema
    tells = [log.carried[name] for name in label_columns(schema) if name in log.carried]
    tells += [log.columns[name] for name in schema.event_settings.actions]
    if not tells:
        return np.ones(len(log.users), dtype=np.bool_)
    return np.logical_or.reduce([series.is_not_null().to_numpy() for series in tells])


def _scores(run: Run, log: EventLog, *, progress: Progress | None) -> np.ndarray:
    """(N, labels) of the log's events; zeros on ranks but the first."""
    schema = run.config.table_schema
    happened = _happened(run, log)
    labels = label_columns(schema)
    parts = np.cumsum(happened)
    is_candidate = happened & log.has_all(labels if all(name in log.carried for name in labels) else ())
    known = [np.flatnonzero(is_candidate), np.flatnonzero(happened & ~is_candidate)]
    open_places = np.flatnonzero(~happened)
    events = schema.event_settings
    # Where training asks for one candidate at a time its context may be its own, and not that of the first open one.
    is_apart = events.candidates == 1 and bool(events.context)
    asked = [
        *(asked_together(log, each, parts=np.zeros_like(each), most=events.candidates) for each in known),
        asked_together(log, open_places, parts=parts[open_places], most=1 if is_apart else 0),
    ]
    scores = np.zeros((len(log.users), len(schema.labels)), dtype=np.float64)  # of numbers; holds FP32 as it is
    for each in asked:
        begins: list[int] = []
        batches = _batches(run, log, each, happened=happened, begins=begins)
        gathered = gathered_scores_of(run.model, batches, progress=progress, process_group=run.team.process_group)
        for number, (rows, found) in enumerate(gathered):
            if run.team.is_first:
                scores[each.candidates[begins[number] + rows]] = found
    return scores


def _batches(run: Run, log: EventLog, asked: Asked, *, happened: np.ndarray, begins: list[int]) -> Iterator[Batch]:
    """Candidates with their histories, each history once; `begins` hears where each batch begins."""
    first = 0
    inputs = run.preprocessing.inputs
    lists = FeatureGroup(jagged=tuple(range(len(inputs.jagged))))
    tables = candidate_tables(
        log, asked, run.config.table_schema, labels=(), happened=happened, at_once=_EVENTS_AT_ONCE
    )
    for table in tables:
        begins.append(first)
        first += table.num_rows
        encoded = run.preprocessing.encode(RawChunk.of(pl.DataFrame(table), name="candidates"), with_labels=False)
        yield deduplicate(own_rows(run, encoded), [lists])


def _frame(log: EventLog, scores: np.ndarray, *, schema: pl.Schema, keep: Sequence[str]) -> pl.DataFrame:
    assert log.rows is not None, "asked for"
    order = np.argsort(log.rows, kind="stable")
    columns: dict[str, pl.Series] = {ROW: pl.Series(log.rows[order], dtype=pl.Int64)}
    columns |= {name: log.carried[name].gather(order).cast(schema[name]) for name in keep}
    names = [name for name in schema if name != ROW and name not in keep]
    columns |= {name: pl.Series(scores[order, at]).cast(schema[name]) for at, name in enumerate(names)}
    return pl.DataFrame(columns, schema=schema)
