"""EventLog: the events of all users, checked and sorted: by user, then by time, and at one time as the files have them.

    file    user b, t 5   user a, t 3   user a, t 1   user b, t 5
    log     user a, t 1   user a, t 3   user b, t 5 (first in the file)   user b, t 5

The sort is stable, so which of two events of one moment came first depends on nothing but the file; on MovieLens-1M
42 % of the users have such a pair at their end, and an unstable sort asks every fourth of them another question.

Times are whole numbers of any unit, or dates, and are kept exactly; text holds one of both, dates in all the ways of
`data/raw/dates.py`. Refused, with file and row: times in floats (one of 32 bits puts two minutes into one moment), no
time, user or item, and times that lie in the future by the clock of this machine. The unit of a whole number follows
from its size: below 10^11 seconds, below 10^14 milliseconds, … Dates count microseconds. A log that has dates in one
file and numbers in another is refused, and so is one whose times are all of 1990 or later, but in two units: it has no
order.

Where events are ranked ([[label]] in the schema) the columns of the labels are carried along as the files have them.
An event has all of its labels, and is then a candidate, or none of them, and is then history alone.

Memory: 16 bytes an event, 4 more for each feature, what carried columns take, and twice that while they are sorted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from jaxtyping import Bool, Int64

from ziggurat.data.preprocess.values.cells import Faults, canonical_text, with_nulls, wrong_type
from ziggurat.data.preprocess.values.parsing import needed_column, parse_label
from ziggurat.data.preprocess.values.time_units import far_from_seen, is_modern, of_another_unit, per_second, unit_of
from ziggurat.data.preprocess.values.times import (
    A_DATE,
    kind_of_chunk,
    microseconds_of_dates,
    with_date_order,
    without_categories,
)
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.dates import ZoneSigns
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.events import HISTORY_TIMES, EqualTimes, FutureTimes
from ziggurat.features.schema import Schema, column_of
from ziggurat.files.stores import DataPath

_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class EventLog:
    """Events sorted by user and time.

    Args:
        users: (N,) number of each event's user, rising.
        times: (N,) rising within a user.
        columns: categorical values of each feature, by its name.
        user_ids: the raw id of each user, by number.
        carried: columns as the files have them, by name.
        rows: (N,) where each event stands in the files, if rows were asked for.
        num_unsorted: events that stood in the files after a later one of their user.
        num_equal: events at the time of the one before of their user.
        zones_note: what to say of times with a zone beside times without; "" where there are none.
        date_order: of dates like 01/03/2024, as somebody said it or as the dates show; AUTO where no date needs one.
    """

    users: Int64[np.ndarray, " N"]
    times: Int64[np.ndarray, " N"]
    columns: dict[str, pl.Series]
    user_ids: pl.Series
    carried: dict[str, pl.Series] = field(default_factory=dict)
    rows: Int64[np.ndarray, " N"] | None = None
    num_unsorted: int = 0
    num_equal: int = 0
    zones_note: str = ""
    date_order: DateOrder = DateOrder.AUTO

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.user_ids)

    def has_all(self, columns: Iterable[str]) -> Bool[np.ndarray, " N"]:
        """Mark the events that have a value in each of these carried columns; none without columns."""
        found = [self.carried[name].is_not_null().to_numpy() for name in columns]
        # `reduce` of nothing would mark every event.
        return np.logical_and.reduce(found) if found else np.zeros(len(self.users), dtype=np.bool_)

    @property
    def sorted_note(self) -> str:
        """A note on events that were not in order; "" where all were."""
        if not self.num_unsorted:
            return ""
        return f"{self.num_unsorted:,} of {len(self.users):,} events stood after a later one of their user: now sorted"

    @property
    def equal_times_note(self) -> str:
        """A note on events of a user at one time; "" where there are none."""
        if not self.num_equal:
            return ""
        events = "1 event has" if self.num_equal == 1 else f"{self.num_equal:,} events have"
        return f"{events} the time of the one before of their user; their order is that of the file"

    def bounds(self) -> Int64[np.ndarray, " U+1"]:
        """Return where the events of each user begin, and where those of the last one end."""
        # One search for all users: the events are sorted by them.
        return np.searchsorted(self.users, np.arange(self.num_users + 1))


def read_events(
    chunks: Iterable[RawChunk],
    schema: Schema,
    *,
    bad_rows: BadRows,
    carried: Sequence[str] | None = None,
    date_order: DateOrder = DateOrder.AUTO,
) -> EventLog:
    """Check and sort the events of all files.

    Args:
        chunks: all events, with the columns of the schema.
        schema: with events.
        bad_rows: where events with faults go.
        carried: columns to carry along with the rows' numbers; None: the columns of the labels, without numbers.
        date_order: of dates like 01/03/2024; AUTO: as the dates show.

    Raises:
        SchemaError: a column is absent, or cannot be what it is for; times in floats, for example.
        ConfigError: dates like 01/03/2024, and none shows what stands first.
        DataError: an event without user, item or time, or in the future, or with some of its labels (policy ERROR);
            no event at all; events of one user at one time, where that is refused.
    """
    of_labels = tuple(dict.fromkeys(column_of(label) for label in schema.labels))
    names = of_labels if carried is None else tuple(dict.fromkeys(carried))
    parts: list[pl.DataFrame] = []
    zones = ZoneSigns()
    is_date: bool | None = None
    shown_order = date_order  # the last one has seen all chunks
    paths: list[DataPath] = []
    for chunk, shown_order in with_date_order(chunks, schema.time, order=date_order):
        times = without_categories(needed_column(chunk, schema.time, role="time"))
        # Of every chunk: one file may name a zone where another does not.
        zones.add(times)
        _refuse_type_of_times(times, chunk)
        is_date = kind_of_chunk(chunk, times, before=is_date)
        # Unknown only while all times so far were null, which either way reads as nothing.
        part = _read_chunk(
            chunk,
            schema,
            bad_rows,
            is_date=is_date is not False,
            order=shown_order,
            carried=names,
            is_asked=carried is not None,
        )
        if part.height:
            parts.append(part)
        if chunk.path not in paths:
            paths.append(chunk.path)
    if not parts:
        raise _no_events(paths, bad_rows)
    # Relaxed, since a column that is all null in one chunk has no type there.
    frame = pl.concat(parts, how="vertical_relaxed")
    users = frame["user:"].to_physical().to_numpy().astype(np.int64)
    # Users by their first event: the numbers of categories depend on what else the process has read.
    known, first, users = np.unique(users, return_index=True, return_inverse=True)
    rank = np.empty(len(known), dtype=np.int64)
    # The number of a user is the rank of its first event.
    rank[np.argsort(first)] = np.arange(len(known))
    users = rank[users]
    times = frame["time:"].to_numpy()
    # It is stable: equal times of a user stay in the order of the files.
    order = np.lexsort((times, users))
    # Within a user in the order of the files, to count the events that stood after a later one.
    by_user = np.argsort(users, kind="stable")
    same_user = np.diff(users[by_user]) == 0
    log = EventLog(
        users=users[order],
        times=times[order],
        columns={feature.name: frame[feature.name][order] for feature in schema.features},
        user_ids=frame["user:"][np.sort(first)].cast(pl.String),
        carried={name: frame[f"carried:{name}"][order] for name in names},
        rows=None if carried is None else frame["row:"].to_numpy()[order],
        num_unsorted=int((same_user & (np.diff(times[by_user]) < 0)).sum()),
        # Along the sorted log, where equal times of a user are neighbours.
        num_equal=int((same_user & (np.diff(times[order]) == 0)).sum()),
        zones_note=zones.note(schema.time) if zones.are_mixed else "",
        date_order=shown_order if is_date else DateOrder.AUTO,
    )
    _refuse_two_units(log)
    _refuse_equal_times(log, schema)
    return log


def compared_with_training(log: EventLog, samples: Schema) -> str:
    """Refuse a log whose times are of another unit than those that a run was trained on.

    Args:
        log: what the run is asked about.
        samples: schema of the run's samples, which says what times training has seen.

    Returns:
        What to say of times that lie far from those; "" where none does.

    Raises:
        DataError: another unit.
    """
    seen: tuple[int, ...] = next((each.seen_times for each in samples.features if each.name == HISTORY_TIMES), ())
    other = of_another_unit(log.times, seen=seen)
    if not len(other):
        return far_from_seen(log.times, seen=seen)
    at = int(other[0])
    raise DataError(
        expected=f"times in the unit of the training data: {unit_of(seen)}, from {min(seen)} to {max(seen)}",
        found=f"time {int(log.times[at])} of user {log.user_ids[int(log.users[at])]!r}, by its size "
        f"{unit_of([int(log.times[at])])}; {len(other):,} of {len(log.times):,} events are of another unit",
        where="the event log, column of the time (dates count microseconds)",
        ways_out=(
            f"write the times of the log in {unit_of(seen)}",
            "train on a log in this unit: ziggurat train … --data.train FILE",
        ),
    )


def date_order_of(samples: Schema) -> DateOrder:
    """Return how a run reads dates like 01/03/2024: as in the log that it was trained on.

    Args:
        samples: schema of the run's samples.
    """
    return next((each.seen_date_order for each in samples.features if each.name == HISTORY_TIMES), DateOrder.AUTO)


def _no_events(paths: Sequence[DataPath], bad_rows: BadRows) -> DataError:
    """The error for files without an event that can be used."""
    files = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3:,} more" if len(paths) > 3 else "")
    if not bad_rows.num_rows:
        return DataError(
            expected="at least one event",
            found="none",
            where=files or "the event log",
            ways_out="name files with events",
        )
    return DataError(
        expected="at least one event that can be used",
        found=f"none: all {bad_rows.num_rows:,} rows were put aside ({bad_rows.summary()})",
        where=files,
        ways_out=(
            f"look at {bad_rows.kept_in}: it says of each row what was expected",
            "stop at the first of them, and correct what they have in common: leave bad-rows quarantine out",
        ),
    )


def _read_chunk(
    chunk: RawChunk,
    schema: Schema,
    bad_rows: BadRows,
    *,
    is_date: bool,
    order: DateOrder,
    carried: Sequence[str],
    is_asked: bool,
) -> pl.DataFrame:
    """The usable events of a chunk: `user:`, `time:`, `row:`, `carried:…`, and the features by name."""
    chunk = with_nulls(chunk, schema.missing_texts).with_number_columns(schema.numbers)
    faults = Faults(chunk=chunk)
    columns = {"user:": _ids(chunk, schema.group, faults, role="the user")}
    for feature in schema.features:
        name = feature.name
        columns[name] = _ids(
            chunk, column_of(feature), faults, role=f"feature {name!r}", may_miss=name != schema.item_settings.id
        )
    series = without_categories(needed_column(chunk, schema.time))
    times = _times(series, faults, is_date=is_date, order=order, future=schema.event_settings.future_times)
    of_labels = {column_of(label) for label in schema.labels}
    raw = {name: needed_column(chunk, name) for name in carried}
    raw |= {name: _as_nulls(raw[name]) for name in of_labels & set(raw)}
    if not is_asked:
        _refuse_some_labels(raw, schema, faults)
        _refuse_wrong_labels(raw, schema, faults)
    columns |= {f"carried:{name}": series for name, series in raw.items()}
    frame = pl.DataFrame({"time:": times, "row:": chunk.global_rows, **columns})
    return frame.filter(pl.Series(faults.report(bad_rows))) if faults.found else frame


def _ids(chunk: RawChunk, column: str, faults: Faults, *, role: str, may_miss: bool = False) -> pl.Series:
    """The canonical texts of a column, as categories."""
    series = needed_column(chunk, column)
    texts = canonical_text(series)
    if texts is None:
        raise wrong_type(series, chunk, role=role, expected="ids: text, integers, booleans or categories")
    if not may_miss:
        for index in texts.is_null().arg_true().to_list():
            _missing(faults, index, column=column, role=role)
    # Categories: the events of a log name few ids very often, and codes of 32 bits hold them.
    return texts.cast(pl.Categorical)


def _as_nulls(series: pl.Series) -> pl.Series:
    """A carried column, whose NaN and empty texts are no values."""
    if isinstance(series.dtype, pl.Categorical | pl.Enum):
        series = series.cast(pl.String)
    if series.dtype.is_float():
        return series.fill_nan(None)
    return series.set((series == "").fill_null(False), None) if series.dtype == pl.String else series


def _refuse_some_labels(raw: Mapping[str, pl.Series], schema: Schema, faults: Faults) -> None:
    """An event has all of its labels, or none."""
    labels = {column_of(label): label.name for label in schema.labels if column_of(label) in raw}
    if len(labels) < 2:
        return
    missing = pl.DataFrame([raw[column].is_null().alias(column) for column in labels])
    for index in missing.select(pl.any_horizontal(pl.all()) & ~pl.all_horizontal(pl.all())).to_series().arg_true():
        without = [column for column in labels if missing[column][index]]
        faults.add(
            index,
            column=without[0],
            reason=BadReason.MISSING,
            expected="all labels of an event (a candidate), or none of them (history alone)",
            found=f"none for {', '.join(labels[column] for column in without)}, of {', '.join(labels.values())}",
            ways_out=("fill the column", "rank by fewer labels"),
        )


def _refuse_wrong_labels(raw: Mapping[str, pl.Series], schema: Schema, faults: Faults) -> None:
    """Refuse present values that cannot be a label, with the user's own file and row, not those of the samples."""
    for label in schema.labels:
        series = raw[column_of(label)]
        if series.dtype == pl.Null or (label.positive and series.dtype != pl.String):
            continue
        if series.null_count() and (series.dtype == pl.String or series.dtype.is_numeric()):
            stand_in = pl.lit(label.positive or "1" if series.dtype == pl.String else 1)  # absence is no fault here
            series = series.to_frame().select(pl.col(series.name).fill_null(stand_in.cast(series.dtype))).to_series()
        parse_label(label, series, faults)


def _missing(faults: Faults, index: int, *, column: str, role: str) -> None:
    faults.add(
        index,
        column=column,
        reason=BadReason.MISSING,
        expected=f"{role} of each event",
        found="nothing",
        ways_out=("take such events out",),
    )


def _refuse_type_of_times(series: pl.Series, chunk: RawChunk) -> None:
    dtype = series.dtype
    if dtype.is_integer() or dtype in (pl.String, pl.Null, pl.Date) or isinstance(dtype, pl.Datetime):
        return
    raise wrong_type(
        series,
        chunk,
        role="the time of events",
        expected="whole numbers, or dates",
        way_out="write whole seconds or milliseconds: a float of 32 bits puts two minutes into one moment",
    )


def _times(
    series: pl.Series, faults: Faults, *, is_date: bool, order: DateOrder, future: FutureTimes
) -> Int64[np.ndarray, " N"]:
    if is_date and series.dtype != pl.Null:
        numbers = microseconds_of_dates(series, order=order)
    else:
        texts = series.str.strip_chars() if series.dtype == pl.String else series
        numbers = texts.cast(pl.Int64, strict=False)
    unreadable = numbers.is_null() & series.is_not_null()
    for index in unreadable.arg_true().to_list():
        _unreadable(faults, index, series=series, is_date=is_date)
    for index in (numbers.is_null() & ~unreadable).arg_true().to_list():
        _missing(faults, index, column=series.name, role="the time")
    # Rows without a time are faults, and are gone before anybody reads the 0.
    times = numbers.fill_null(0).to_numpy().copy()
    if future is FutureTimes.REFUSE:
        for index in np.flatnonzero(_in_future(times, is_date=is_date)).tolist():
            faults.add(
                index,
                column=series.name,
                reason=BadReason.IN_FUTURE,
                expected="a time that is past by the clock of this machine",
                found=series[index],
                ways_out=(
                    "correct the time or its unit",
                    'where times are planned ones: [events] future_times = "allow"',
                ),
            )
    return times


def _unreadable(faults: Faults, index: int, *, series: pl.Series, is_date: bool) -> None:
    if is_date:
        expected = A_DATE
        way_out = "write the year first: 2024-05-31 12:00:00"
    else:
        expected = "a time as a whole number of 64 bits (seconds, milliseconds, …)"
        way_out = "write times as whole numbers, or all of them as dates"
    faults.add(
        index,
        column=series.name,
        reason=BadReason.UNPARSABLE if is_date else BadReason.NOT_AN_INTEGER,
        expected=expected,
        found=series.to_physical()[index],  # a date out of range cannot be shown
        ways_out=(way_out,),
    )


def _in_future(times: Int64[np.ndarray, " N"], *, is_date: bool) -> np.ndarray:
    """Mark the times that lie more than a day (time zones) after now, each by the unit that its size suggests."""
    # A clock of another zone is up to a day ahead of this one.
    now = int(time.time()) + _DAY_S
    return times > now * 10**6 if is_date else times // per_second(times) > now


def _refuse_two_units(log: EventLog) -> None:
    """Refuse seconds beside milliseconds, or numbers beside dates; times counted from a moment of their own pass."""
    units = per_second(log.times)
    if (units == units[0]).all() or not is_modern(log.times).all():
        # Small numbers are times counted from a moment of their own, whose unit no size tells.
        return
    # `argmax` of truths is the first true one.
    other = int(np.argmax(units != units[0]))
    first, second = (f"time {int(log.times[at])} of user {log.user_ids[int(log.users[at])]!r}" for at in (0, other))
    raise DataError(
        expected="all times of the log in one unit",
        found=f"{first} and {second}: {int(units[0]):,} and {int(units[other]):,} a second, by their sizes",
        where="the event log, column of the time (dates count microseconds)",
        ways_out=("write the times of all files in one unit", "or as dates, in all files"),
    )


def _refuse_equal_times(log: EventLog, schema: Schema) -> None:
    if schema.event_settings.equal_times is EqualTimes.FILE_ORDER or not log.num_equal:
        return
    at = int(np.flatnonzero((np.diff(log.users) == 0) & (np.diff(log.times) == 0))[0])
    raise DataError(
        expected="events of one user at different times",
        found=f"{log.num_equal:,} events at the time of another; the first: user {log.user_ids[int(log.users[at])]!r}, "
        f"time {int(log.times[at])}",
        where="[events] equal_times = refuse",
        ways_out=('equal_times = "file_order": what stands above happened before', "write finer times"),
    )
