"""Candidates: events with labels as samples to rank, several behind one history, from the log of all events.

    user     e_0  e_1  e_2  e_3  e_4  e_5  e_6            candidates = 2
             └────────────────┘  └───┘                    question: e_4 and e_5, asked when e_4 happened
                  history       candidates                history: what was before e_4, so never e_4 for e_5

A sample is one candidate with its labels; those of one question have one history, one context (that of the first of
them) and one time, so nothing of a sample was made by what came after its question began. Questions never reach over
the end of a split or of a window.

Every event that has the labels is a candidate of exactly one split, but for those with fewer than `min_history` events
of their user before them, whatever kind. Events without labels (a like, in a log whose label
is how much of a track was played) are history alone.

    leave one out   the last candidate of each user is the test, the one before it validates (users with two, three)
    by time         as of all data with times
    windows         time in parts of one length: the last is the test, the one before it validates, the others train in
                    their order, each in an order of its own inside

`pools` gives every pool its own share of a history: the latest of each, together in the order of time. With `reach`
they are among so many events right before the question.

Memory: that of the log, and a few million events of lists at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from ziggurat.data.events.event_columns import EventColumn, runs
from ziggurat.data.events.log import EventLog
from ziggurat.data.events.questions import WITHOUT_VALID, time_cuts
from ziggurat.data.mixing import splitmix64
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.events import ASKED_AT, HISTORY, HISTORY_TIMES, QUESTION, of_history
from ziggurat.features.schema import Categorical, Moments, Pooling, Schema, column_of, table_of
from ziggurat.features.schema import Sequence as ListFeature

_EVENTS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Candidates and the questions they belong to, as positions in the log.

    Args:
        candidates: (M,) events, question after question.
        questions: (M,) the number of each one's question, from 0, rising.
        begins: (Q,) the first candidate of each question: its history ends before it.
        firsts: (Q,) first event of the user.
    """

    candidates: Int64[np.ndarray, " M"]
    questions: Int64[np.ndarray, " M"]
    begins: Int64[np.ndarray, " Q"]
    firsts: Int64[np.ndarray, " Q"]

    def take(self, order: Int64[np.ndarray, " K"]) -> Asked:
        """These questions, in this order."""
        ends = np.searchsorted(self.questions, order, side="right")
        places, offsets = runs(np.searchsorted(self.questions, order), ends)
        return Asked(
            candidates=self.candidates[places],
            questions=np.repeat(np.arange(len(order)), np.diff(offsets)),
            begins=self.begins[order],
            firsts=self.firsts[order],
        )


def candidate_schema(schema: Schema) -> Schema:
    """Return the schema of samples made of candidates: what their columns mean.

    Args:
        schema: of the events, with labels.
    """
    events = schema.event_settings
    items = schema.item_settings
    length = events.max_length
    single = [schema.feature(name) for name in (*items.features, *events.context)]
    listed = [schema.feature(name) for name in (*items.features, *events.actions) if name != items.id]
    table = table_of(schema.feature(items.id))
    lists = [ListFeature(name=HISTORY, table=table, max_length=length, pooling=Pooling.NONE)]
    lists += [
        ListFeature(name=of_history(each.name), table=table_of(each), max_length=length, pooling=Pooling.NONE)
        for each in listed
    ]
    return Schema(
        features=(
            *(Categorical(name=each.name, table=table_of(each)) for each in single),
            *lists,
            Moments(name=HISTORY_TIMES, max_length=length),
            Moments(name=ASKED_AT, max_length=1),
        ),
        labels=schema.labels,
        tables=schema.tables,
        group=schema.group,
        session=QUESTION,
        items=items,
        numbers=schema.numbers,
    )


def label_columns(schema: Schema) -> tuple[str, ...]:
    """The raw columns of the labels, each once."""
    return tuple(dict.fromkeys(column_of(label) for label in schema.labels))


def asked_together(
    log: EventLog, places: Int64[np.ndarray, " M"], *, parts: Int64[np.ndarray, " M"], most: int
) -> Asked:
    """Questions of these events: consecutive ones of a user and part, so many at a time.

    Args:
        log: the events.
        places: of the candidates, rising.
        parts: rising for the candidates of a user; a question has candidates of one part.
        most: candidates of a question; 0: all of the user and part.
    """
    users = log.users[places]
    number = np.arange(len(places))
    starts = np.ones(len(places), dtype=np.bool_)
    # A question is of one user, and none reaches over the border between two parts.
    starts[1:] = (np.diff(users) != 0) | (np.diff(parts) != 0)
    if most:
        # The place within its user and part, counted from 0: every `most`-th candidate begins a question.
        starts |= (number - np.maximum.accumulate(np.where(starts, number, 0))) % most == 0
    return Asked(
        candidates=places,
        questions=np.cumsum(starts) - 1,
        begins=places[starts],
        firsts=log.bounds()[:-1][users[starts]],
    )


def candidate_splits(log: EventLog, split: SplitConfig, schema: Schema) -> tuple[tuple[Asked, Asked, Asked], str]:
    """Questions of training, validation and test, and the split in one line.

    Args:
        log: with the columns of the labels.
        split: leave one out, by time, or by windows.
        schema: of the events.

    Raises:
        DataError: no event has labels.
        ConfigError: too few distinct times or windows.
    """
    places = np.flatnonzero(log.has_all(label_columns(schema)))
    if not len(places):
        raise DataError(
            expected="events with labels: candidates to rank",
            found=f"{len(log.users):,} events, none with a value in {', '.join(label_columns(schema))}",
            where="the event log",
            ways_out=("fill the columns of the labels", "take the labels out, and train a next-item model"),
        )
    places = _with_history(log, places, at_least=schema.event_settings.min_history)
    times = log.times[places]
    most = schema.event_settings.candidates
    if split.by is SplitBy.WINDOWS:
        return _by_windows(log, places, window=schema.event_settings.window, most=most)
    if split.by is SplitBy.LEAVE_ONE_OUT:
        parts = _from_the_end(log.users[places])
        text = "leave one out: the last candidate of each user is the test"
        if not split.valid_fraction:
            parts = np.where(parts == 1, 0, parts)
            text += WITHOUT_VALID
    else:
        valid_from, test_from = time_cuts(log, fractions=(split.valid_fraction, split.test_fraction))
        parts = (times >= valid_from).astype(np.int64) + (times >= test_from)
        text = f"by time column {schema.time!r}"
    found = [asked_together(log, places[parts == at], parts=parts[parts == at], most=most) for at in range(3)]
    return (found[0], found[1], found[2]), text


def _with_history(log: EventLog, places: Int64[np.ndarray, " M"], *, at_least: int) -> Int64[np.ndarray, " K"]:
    """Return those of these events that have so many events of their user before them."""
    before = places - log.bounds()[:-1][log.users[places]]
    kept = places[before >= at_least]
    if len(kept):
        return kept
    raise DataError(
        expected=f"a candidate with {at_least:,} events of its user before it: [events] min_history",
        found=f"{len(places):,} candidates, with {int(before.max()):,} events before them at most",
        where="the event log",
        ways_out=("a smaller min_history", "a log over a longer time"),
    )


def _from_the_end(users: np.ndarray) -> np.ndarray:
    """The split of each candidate: 2 for the last of a user with two or more, 1 for that before it, of three."""
    counts = np.bincount(users, minlength=int(users.max(initial=0)) + 1)
    # How many candidates of the user come later; candidates stand user by user, in the order of time.
    behind = np.cumsum(counts)[users] - 1 - np.arange(len(users))
    return np.where((behind == 0) & (counts[users] > 1), 2, np.where((behind == 1) & (counts[users] > 2), 1, 0))


def _by_windows(log: EventLog, places: np.ndarray, *, window: int, most: int) -> tuple[tuple[Asked, Asked, Asked], str]:
    if not window:
        raise ConfigError(
            expected="[events] window, the length of a window in the unit of the times, for --data.split.by windows",
            found="window = 0",
            where="schema, events",
            ways_out=("window = 86400: a day, where times are seconds", "--data.split.by time"),
        )
    # Counted from the first event, so that windows do not hang on where the unit of time begins.
    numbers = (log.times[places] - int(log.times.min())) // window
    known = np.unique(numbers)
    if len(known) < 3:
        raise ConfigError(
            expected="candidates in three windows or more: to train, to validate, to test",
            found=f"{len(known)} windows of length {window:,}",
            where="split by windows",
            ways_out=("a shorter window: [events] window", "more data", "--data.split.by time"),
        )
    # The last windows that have candidates: empty ones would leave nothing to test on.
    chosen = (numbers < known[-2], numbers == known[-2], numbers == known[-1])
    train, valid, test = (asked_together(log, places[some], parts=numbers[some], most=most) for some in chosen)
    of_question = (log.times[train.begins] - int(log.times.min())) // window
    # Windows stay in the order of time; within one, a hash mixes the questions alike on every machine.
    train = train.take(np.lexsort((splitmix64(np.arange(len(train.begins))), of_question)))
    text = f"windows of {window:,}: {len(known) - 2:,} train in their order, the next validates, the last is the test"
    return (train, valid, test), text


def history_pools(log: EventLog, schema: Schema, *, happened: np.ndarray | None = None) -> list[np.ndarray]:
    """The events of each pool, rising; one pool of all where the schema names none.

    Args:
        log: the events.
        schema: with events.
        happened: (N,) events that may be in a history; None: all.
    """
    every = np.arange(len(log.users)) if happened is None else np.flatnonzero(happened)
    if not schema.event_settings.pools:
        return [every]
    column = EventColumn(log.columns[schema.event_settings.pool_by])
    found = [column.places_of(value) for value in schema.event_settings.pools]
    return found if happened is None else [places[happened[places]] for places in found]


def candidate_arrow_schema(schema: Schema, log: EventLog, *, labels: Sequence[str]) -> pa.Schema:
    """Columns of the samples.

    Args:
        schema: of the events.
        log: with the carried columns.
        labels: those that the samples have.
    """
    text = pa.dictionary(pa.int32(), pa.large_string())
    times = pa.large_list(pa.int64())
    events = schema.event_settings
    items = schema.item_settings
    fields = [(name, text) for name in (schema.group, *items.features, *events.context)]
    fields += [(HISTORY, pa.large_list(text))]
    others = [name for name in (*items.features, *events.actions) if name != items.id]
    fields += [(of_history(name), pa.large_list(text)) for name in others]
    fields += [(HISTORY_TIMES, times), (ASKED_AT, times), (QUESTION, pa.int64())]
    return pa.schema([*fields, *((name, log.carried[name].to_arrow().type) for name in labels)])


def candidate_tables(
    log: EventLog,
    asked: Asked,
    schema: Schema,
    *,
    labels: Sequence[str],
    happened: np.ndarray | None = None,
    at_once: int = _EVENTS_AT_ONCE,
) -> Iterator[pa.Table]:
    """The samples of some questions, a few million events of lists at a time.

    Args:
        log: the events.
        asked: the candidates.
        schema: of the events.
        labels: carried columns that the samples have.
        happened: (N,) events that may be in a history; None: all.
        at_once: events of lists of a table; more only where one sample has more.
    """
    arrow = candidate_arrow_schema(schema, log, labels=labels)
    columns = {name: EventColumn(series) for name, series in log.columns.items()}
    users = pa.array(log.user_ids.to_list(), pa.large_string())
    pools = history_pools(log, schema, happened=happened)
    share = schema.event_settings.max_length // len(pools)
    begins, ends = _pool_bounds(pools, asked, share=share, reach=schema.event_settings.reach)
    sizes = np.cumsum((ends - begins).sum(axis=0)[asked.questions])
    first = 0
    total = len(asked.candidates)
    while first < total:
        before = sizes[first - 1] if first else 0
        last = min(total, max(first + 1, int(np.searchsorted(sizes, before + at_once, side="right"))))
        numbers = asked.questions[first:last]
        some = slice(numbers[0], numbers[-1] + 1)
        candidates = asked.candidates[first:last]
        kept, offsets = _joined(pools, begins[:, some], ends[:, some])
        mine = numbers - numbers[0]
        at, offsets = runs(offsets[:-1][mine], offsets[1:][mine])
        events = kept[at]
        asked_from = asked.begins[numbers]
        found: dict[str, pa.Array] = {
            schema.group: pa.DictionaryArray.from_arrays(pa.array(log.users[candidates].astype(np.int32)), users),
            HISTORY: pa.LargeListArray.from_arrays(offsets, columns[schema.item_settings.id].at(events)),
            HISTORY_TIMES: pa.LargeListArray.from_arrays(offsets, pa.array(log.times[events])),
            ASKED_AT: pa.LargeListArray.from_arrays(np.arange(last - first + 1), pa.array(log.times[asked_from])),
            QUESTION: pa.array(numbers),
        }
        found |= {name: columns[name].at(candidates) for name in schema.item_settings.features}
        found |= {name: columns[name].at(asked_from) for name in schema.event_settings.context}
        for name in (*schema.item_settings.features, *schema.event_settings.actions):
            if name != schema.item_settings.id:
                found[of_history(name)] = pa.LargeListArray.from_arrays(offsets, columns[name].at(events))
        found |= {name: log.carried[name].gather(candidates).to_arrow() for name in labels}
        yield pa.Table.from_arrays([found[name] for name in arrow.names], schema=arrow)
        first = last


def _pool_bounds(pools: Sequence[np.ndarray], asked: Asked, *, share: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the history of each question begins and ends in each pool: (P, Q) each."""
    earliest = np.maximum(asked.firsts, asked.begins - reach) if reach else asked.firsts
    ends = np.stack([np.searchsorted(places, asked.begins) for places in pools])
    firsts = np.stack([np.searchsorted(places, earliest) for places in pools])
    return np.maximum(firsts, ends - share), ends


def _joined(pools: Sequence[np.ndarray], begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The events of each question's history in the order of time, one after the other, and where each begins."""
    events = []
    owners = []
    for places, first, last in zip(pools, begins, ends, strict=True):
        at, offsets = runs(first, last)
        events.append(places[at])
        owners.append(np.repeat(np.arange(len(first)), np.diff(offsets)))
    lengths = (ends - begins).sum(axis=0)
    found = np.concatenate(events)
    if len(pools) > 1:
        # Positions in the log rise with time within a user, so sorting them brings the pools into one order of time.
        found = found[np.lexsort((found, np.concatenate(owners)))]
    return found, np.concatenate([[0], np.cumsum(lengths)])


def candidate_warnings(log: EventLog, parts: Iterable[Asked], schema: Schema, *, by: SplitBy) -> Iterator[str]:
    """Yield warnings of what was met: events that are not asked about, or in no pool; a window that nothing uses."""
    asked = sum(len(part.candidates) for part in parts)
    labelled = int(log.has_all(label_columns(schema)).sum())
    if rest := len(log.users) - labelled:
        yield f"{rest:,} of {len(log.users):,} events have no labels: they are in histories alone"
    if early := labelled - asked:
        least = schema.event_settings.min_history
        yield f"{early:,} of {labelled:,} events with labels have fewer than {least:,} before them: no candidates"
    if schema.event_settings.pools:
        inside = sum(len(places) for places in history_pools(log, schema))
        yield f"{inside:,} of {len(log.users):,} events are in a pool, the others are in no history"
    if schema.event_settings.window and by is not SplitBy.WINDOWS:
        yield f"[events] window = {schema.event_settings.window:,} is not used: --data.split.by windows would"
