"""Sequences: samples made of events, as files and a schema of samples, which then go the way of all raw data.

    events.parquet, schema with [events]               FOLDER/events_FINGERPRINT/{train,valid,test}.parquet
    user  item  time  rating                           user  history  history_rating  history_times  asked_at  item
    a     x      1     5      ── read, sort ──►        a     [x]      [5]             [1]            [2]       y
    a     y      2     3         (log.py), ask         a     [x y]    [5 3]           [1 2]          [3]       z
    a     z      3     4         (questions.py)

`history`, and what belongs to it, are lists of one length; `item` is what came next, and `asked_at` when. Validation
and test samples have `earlier` as well: the items that the user had before the history, each once, so that an answer
does not repeat them. The label `next_item` is always 1: a sample says what was chosen, and what was not is drawn.

Events with labels become candidates instead, several behind one history: `candidates.py`.

Sequences are made once; they are kept under a fingerprint of the raw files and of every setting that they depend on.

Memory: that of the log (`log.py`), and a few million events of lists at a time, whatever the length of a history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.data.events.candidates import (
    candidate_arrow_schema,
    candidate_schema,
    candidate_splits,
    candidate_tables,
    candidate_warnings,
    label_columns,
)
from ziggurat.data.events.event_columns import EventColumn, runs
from ziggurat.data.events.log import EventLog, read_events
from ziggurat.data.events.questions import WITHOUT_VALID, Questions, by_time, leave_one_out
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SPLITS, SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError, DataError, FileError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.events import ASKED_AT, EARLIER, HISTORY, HISTORY_TIMES, NEXT_ITEM, TrainingWindows, of_history
from ziggurat.features.schema import (
    Categorical,
    Label,
    Moments,
    MultiHot,
    Outcomes,
    Pooling,
    Schema,
    Sequence,
    table_of,
)
from ziggurat.files import Format, locked, replacing_folder, writing_to
from ziggurat.files.parquet import ParquetFile
from ziggurat.files.stores import facts_of

_FACTS = Format(name="ziggurat.events", what="what was made of events")
_FACTS_FILE = "facts.json"
_FORMAT = 3  # raise it when the same events become other samples, when other ones are refused, or other facts are kept
_EVENTS_AT_ONCE = 1 << 21
_MAX_EARLIER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Samples that were made of events.

    Args:
        config: their files.
        schema: what their columns mean.
        split: how they were split, in one line.
        warnings: what was met on the way: users left out, events out of order, equal times.
        raw_files: number of raw files, which have the events.
        left_out: files of a folder that are no data by their names.
    """

    config: DataConfig
    schema: Schema
    split: str
    warnings: tuple[str, ...]
    raw_files: int
    left_out: tuple[str, ...]


def sequence_schema(schema: Schema) -> Schema:
    """Return the schema of samples made of events: what their columns mean.

    Args:
        schema: of the events.
    """
    if schema.labels:
        return candidate_schema(schema)
    events = schema.event_settings
    items = schema.item_settings
    length = events.max_length
    of_item = [feature for feature in schema.features if feature.name in items.features]
    actions = [feature for feature in schema.features if feature.name in events.actions]
    table = table_of(schema.feature(items.id))
    lists = [Sequence(name=HISTORY, table=table, max_length=length, pooling=Pooling.NONE)]
    lists += [
        Sequence(name=of_history(each.name), table=table_of(each), max_length=length, pooling=Pooling.NONE)
        for each in (*of_item, *actions)
        if each.name != items.id
    ]
    return Schema(
        features=(
            *(Categorical(name=each.name, table=table_of(each)) for each in of_item),
            *lists,
            MultiHot(name=EARLIER, table=table, max_length=_MAX_EARLIER, pooling=Pooling.NONE),
            Moments(name=HISTORY_TIMES, max_length=length),
            Moments(name=ASKED_AT, max_length=1),
        ),
        labels=(Label(name=NEXT_ITEM, outcomes=Outcomes.POSITIVE_ONLY),),
        tables=schema.tables,
        group=schema.group,
        items=items,
    )


def sequences_of(
    config: DataConfig, schema: Schema, *, folder: Path, waiting: Callable[[], None] = lambda: None
) -> Sequences:
    """Samples of the events of raw files, made now or found in the folder.

    Of processes that want the same at the same time one makes them, and the others wait: files that were replaced by
    equal ones would be others to whoever has opened them.

    Args:
        config: the raw files, and how to split.
        schema: of the events.
        folder: where sequences are kept.
        waiting: called before another process is waited for.

    Raises:
        SchemaError, DataError: as `read_events`; no user has two events to train on.
        ConfigError: a split that events do not have, or by another column than their time.
    """
    config = config.resolved(schema)
    ways = (SplitBy.LEAVE_ONE_OUT, SplitBy.TIME, *((SplitBy.WINDOWS,) if schema.labels else ()))
    if config.split.by not in ways:
        raise ConfigError(
            expected=f"split.by = {' or '.join(ways)} for events {'with' if schema.labels else 'without'} labels",
            found=f"split.by = {config.split.by.value}",
            where="split settings, schema with [events]",
            ways_out=[f"--data.split.by {way.value}" for way in ways],
        )
    if config.split.column not in ("", schema.time):
        raise ConfigError(
            expected=f"events that are split by their own time, column {schema.time!r}",
            found=f"split.column = {config.split.column!r}",
            where="split settings, schema with [events]",
            ways_out=(
                "leave --data.split.column out",
                f'name the other column in the schema: time = "{config.split.column}"',
            ),
        )
    _refuse_no_files(config)
    source = RawSource(config.train, format=config.format, text=config.text)
    target = folder / f"events_{_fingerprint(config, schema, source)}"
    # The facts are written last, so that a folder without them is not whole.
    if not (target / _FACTS_FILE).exists():
        with writing_to(target, FileError):
            target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock"), waiting=waiting):
            if not (target / _FACTS_FILE).exists():
                _make(target, config, schema, source=source)
    return _opened(target, config, schema, source=source)


def _make(target: Path, config: DataConfig, schema: Schema, *, source: RawSource) -> None:
    bad_rows = BadRows(
        config.bad_rows, folder=target.with_name(f"{target.name}_bad_rows"), budget=config.bad_row_budget
    )
    with bad_rows, replacing_folder(target) as temporary:
        # Again, with the policy for bad rows: the first look only names the files.
        checked = RawSource(source.paths, format=config.format, bad_rows=bad_rows, text=config.text)
        log = read_events(
            checked.frames(columns=schema.columns),
            schema,
            bad_rows=bad_rows,
            date_order=config.split.date_order,
        )
        _write(log, config, schema, folder=temporary, bad_rows=bad_rows)


def find_sequences(config: DataConfig, schema: Schema, *, folder: Path) -> Sequences | None:
    """Return what `sequences_of` made of the same data before; None if it is not there. Read no raw file."""
    config = config.resolved(schema)
    source = RawSource(config.train, format=config.format, text=config.text)
    target = folder / f"events_{_fingerprint(config, schema, source)}"
    return _opened(target, config, schema, source=source) if (target / _FACTS_FILE).exists() else None


def _refuse_no_files(config: DataConfig) -> None:
    if config.train:
        return
    raise ConfigError(
        expected="at least one raw file of events",
        found="data.train is empty",
        where="data settings",
        ways_out=("name files, folders or globs: --data.train events.parquet",),
    )


def _opened(target: Path, config: DataConfig, schema: Schema, *, source: RawSource) -> Sequences:
    facts = _FACTS.read(target / _FACTS_FILE)
    files = {
        split.value: (str(target / f"{split.value}.parquet"),) if facts["rows"][split.value] else () for split in SPLITS
    }
    made = replace(config, split=SplitConfig(by=SplitBy.FILES), **files)
    return Sequences(
        # The samples are Parquet, whatever the events were, and no setting of text holds for them.
        config=replace(made, format=DataConfig().format, separator=""),
        schema=_with_seen(sequence_schema(schema), tuple(facts["seen"]), DateOrder(facts["date_order"])),
        split=facts["split"],
        warnings=tuple(facts["warnings"]),
        raw_files=len(source.paths),
        left_out=tuple(map(str, source.left_out)),
    )


def _with_seen(schema: Schema, seen: tuple[int, ...], order: DateOrder) -> Schema:
    """The schema whose times say what training has seen, and how it read dates."""
    features = tuple(each.with_seen_times(seen).with_seen_date_order(order) for each in schema.features)
    return replace(schema, features=features)


def _fingerprint(config: DataConfig, schema: Schema, source: RawSource) -> str:
    files = [facts_of(path) for path in source.paths]
    names = ("format", "separator", "decimal", "thousands", "signs", "split", "bad_rows", "bad_row_budget")
    settings = {name: value for name, value in config.to_state().items() if name in names}
    # Of the settings only those that decide what the samples are: other ones leave them as they stand.
    state = {"format": _FORMAT, "config": settings, "schema": schema.to_state(), "files": files}
    if config.split.by is SplitBy.LEAVE_ONE_OUT and not config.split.valid_fraction:
        # Samples of this setting had a validation before; all others stay as they are.
        state["validates"] = False
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


def _write(log: EventLog, config: DataConfig, schema: Schema, *, folder: Path, bad_rows: BadRows) -> None:
    made = _candidates(log, config, schema) if schema.labels else _next_items(log, config, schema)
    for name, (arrow, tables) in zip(SPLITS, made.files, strict=True):
        with ParquetFile(folder / f"{name.value}.parquet", arrow, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)
    facts = {
        "split": made.split,
        "rows": {name.value: rows for name, rows in zip(SPLITS, made.rows, strict=True)},
        "seen": made.seen,
        "date_order": log.date_order.value,
        "warnings": [*_warnings_of_log(log), *made.warnings, *_put_aside(bad_rows)],
    }
    _FACTS.write(folder / _FACTS_FILE, facts)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Output written of a log: the samples of the three splits, the times of training, and what is said of them."""

    files: list[tuple[pa.Schema, Iterator[pa.Table]]]
    rows: list[int]
    seen: list[int]
    split: str
    warnings: list[str]


def _next_items(log: EventLog, config: DataConfig, schema: Schema) -> _Made:
    split = config.split
    windows = {"max_length": schema.event_settings.max_length, "windows": schema.event_settings.windows}
    if split.by is SplitBy.LEAVE_ONE_OUT:
        parts = leave_one_out(log, **windows, validates=bool(split.valid_fraction))
        text = "leave one out: the last event of each user is the test"
        if not split.valid_fraction:
            text += WITHOUT_VALID
    else:
        fractions = (split.valid_fraction, split.test_fraction)
        parts = by_time(log, fractions=fractions, **windows)
        text = f"by time column {schema.time!r}"
    # Validation and test may lack samples; without training there is no run.
    if not len(parts[0].targets):
        raise _nothing_to_train(
            log,
            config,
            "a user with events to train on: four of them, or with a split by time two in the training period",
        )
    purposes = (Purpose.TRAINING, Purpose.EVALUATION, Purpose.EVALUATION)
    files = [
        (_arrow_schema(schema), sample_tables(log, part, schema, purpose=purpose))
        for part, purpose in zip(parts, purposes, strict=True)
    ]
    rows = [len(part.targets) for part in parts]
    seen = _seen(log, parts[0].begins, parts[0].targets)
    return _Made(files=files, rows=rows, seen=seen, split=text, warnings=list(_warnings(log, parts, schema)))


def _candidates(log: EventLog, config: DataConfig, schema: Schema) -> _Made:
    parts, text = candidate_splits(log, config.split, schema)
    if not len(parts[0].candidates):
        raise _nothing_to_train(log, config, "events with labels in the training period")
    labels = label_columns(schema)
    arrow = candidate_arrow_schema(schema, log, labels=labels)
    return _Made(
        files=[(arrow, candidate_tables(log, part, schema, labels=labels)) for part in parts],
        rows=[len(part.candidates) for part in parts],
        seen=_seen(log, parts[0].firsts, parts[0].candidates),
        split=text,
        warnings=list(candidate_warnings(log, parts, schema, by=config.split.by)),
    )


def _seen(log: EventLog, firsts: np.ndarray, lasts: np.ndarray) -> list[int]:
    """The earliest and the latest time of training, from where its histories begin and what they lead to."""
    # Times rise within a user, so the first of a history is the earliest, and the target the latest.
    return [int(log.times[firsts].min()), int(log.times[lasts].max())]


def _nothing_to_train(log: EventLog, config: DataConfig, expected: str) -> DataError:
    return DataError(
        expected=expected,
        found=f"{len(log.users):,} events of {log.num_users:,} users, none with so many",
        where=", ".join(config.train),
        ways_out=("check the column of the user: [roles] group", "name more files", "--data.split.by time"),
    )


def _warnings_of_log(log: EventLog) -> Iterator[str]:
    yield from filter(None, (log.sorted_note, log.equal_times_note, log.zones_note))


def _put_aside(bad_rows: BadRows) -> list[str]:
    return [f"{bad_rows.num_rows:,} events were put aside, in {bad_rows.folder}"] if bad_rows.num_rows else []


def _warnings(log: EventLog, parts: tuple[Questions, Questions, Questions], schema: Schema) -> Iterator[str]:
    counts = np.diff(log.bounds())
    # Of one event nothing comes next.
    if lonely := int((counts == 1).sum()):
        yield f"{lonely:,} of {log.num_users:,} users have one event: nothing can be asked of them"
    train = parts[0]
    cut = int((train.begins > train.firsts).sum())
    events = schema.event_settings
    if cut and events.windows is TrainingWindows.LAST:
        yield (
            f"{cut:,} training sequences hold the latest {events.max_length + 1:,} events of a user alone; for "
            'all of them: [events] windows = "all", or a larger max_length'
        )


def _arrow_schema(schema: Schema) -> pa.Schema:
    """Columns of the samples, in the order of `sample_tables`."""
    text = pa.dictionary(pa.int32(), pa.large_string())
    times = pa.large_list(pa.int64())
    names = [feature.name for feature in schema.features]
    fields = [(schema.group, text), *((name, text) for name in schema.item_settings.features)]
    fields += [(HISTORY, pa.large_list(text)), (EARLIER, pa.large_list(text))]
    fields += [(of_history(name), pa.large_list(text)) for name in names if name != schema.item_settings.id]
    return pa.schema([*fields, (HISTORY_TIMES, times), (ASKED_AT, times), (NEXT_ITEM, pa.float32())])


class Purpose(StrEnum):
    """Purposes that samples are made for."""

    TRAINING = "training"
    EVALUATION = "evaluation"  # with `earlier`
    PREDICTION = "prediction"  # likewise; nobody knows what comes next, nor when


def sample_tables(log: EventLog, questions: Questions, schema: Schema, *, purpose: Purpose) -> Iterator[pa.Table]:
    """The samples of some questions, a few million events of lists at a time.

    Args:
        log: the events.
        questions: what is asked; a target of PREDICTION is the place behind the user's last event.
        schema: of the events.
        purpose: what for.
    """
    is_open = purpose is Purpose.PREDICTION
    columns = {name: EventColumn(series) for name, series in log.columns.items()}
    users = pa.array(log.user_ids.to_list(), pa.large_string())
    arrow = _arrow_schema(schema)
    lengths = questions.targets - questions.begins
    # But for training, `earlier` also lists what came before the history.
    sizes = np.cumsum(lengths if purpose is Purpose.TRAINING else questions.targets - questions.firsts)
    first = 0
    while first < len(sizes):
        before = sizes[first - 1] if first else 0
        # One question at least, even if its list alone is longer than that.
        last = max(first + 1, int(np.searchsorted(sizes, before + _EVENTS_AT_ONCE, side="right")))
        some = questions.rows(first, last)
        events, offsets = runs(some.begins, some.targets)
        # The true answer is not there, and a place of the array must be.
        answers = some.targets - 1 if is_open else some.targets  # the last event stands in, and is masked
        found: dict[str, pa.Array] = {
            # Users are few and their ids long, so each sample holds a number.
            schema.group: pa.DictionaryArray.from_arrays(pa.array(log.users[answers].astype(np.int32)), users),
            HISTORY_TIMES: pa.LargeListArray.from_arrays(offsets, pa.array(log.times[events])),
            ASKED_AT: _asked_at(log.times[answers], is_open=is_open),
            NEXT_ITEM: pa.array(np.ones(len(answers), np.float32)),
        }
        found |= {name: columns[name].at(answers, hidden=is_open) for name in schema.item_settings.features}
        item = columns[schema.item_settings.id]
        found[HISTORY] = pa.LargeListArray.from_arrays(offsets, item.at(events))
        found[EARLIER] = _earlier(item, some, is_training=purpose is Purpose.TRAINING)
        for name, values in columns.items():
            if name != schema.item_settings.id:
                found[of_history(name)] = pa.LargeListArray.from_arrays(offsets, values.at(events))
        yield pa.Table.from_arrays([found[name] for name in arrow.names], schema=arrow)
        first = last


def _asked_at(times: np.ndarray, *, is_open: bool) -> pa.Array:
    """One time each, or none."""
    # Of an open question nobody knows when it will be asked: its list of times is empty.
    ends = np.zeros(len(times) + 1, np.int64) if is_open else np.arange(len(times) + 1)
    return pa.LargeListArray.from_arrays(ends, pa.array(times[:0] if is_open else times))


def _earlier(item: EventColumn, questions: Questions, *, is_training: bool) -> pa.Array:
    """Return the items that each user had before the history, each item once; empty lists for training."""
    if is_training:
        lists: list[np.ndarray] = [np.empty(0, np.int32)] * len(questions.targets)
    else:
        bounds = zip(questions.firsts.tolist(), questions.begins.tolist(), strict=True)
        # `unique` of the codes: an item counts once, however often the user had it.
        lists = [np.unique(item.codes[first:begin]) if begin > first else item.codes[:0] for first, begin in bounds]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists], dtype=np.int64)])
    codes = np.concatenate([item.codes[:0], *lists])
    return pa.LargeListArray.from_arrays(offsets, pa.DictionaryArray.from_arrays(pa.array(codes), item.texts))
