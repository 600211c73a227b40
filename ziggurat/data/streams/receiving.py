"""Receiving: messages of a broker, taken into the journal of a stream, and acknowledged behind a checkpoint.

    broker ─ read ─► pending (memory) ─ take ─► arrived/00007.parquet, stream.json: rows and position, all or nothing
      ▲                                                        │ window done ─► scored ─► trained ─► checkpoint
      └────────────────────── acknowledge, up to the first row that no checkpoint contains ◄──────────────┘

What must be on the disk when:

    1  rows and the position behind them are in the journal    before a window of them is encoded
    2  the score of the window                                 before a row of it is trained
    3  a checkpoint that contains all rows of the window       before the broker hears of it
    4  XACK or its like                                        any time later, once, twice, or never

A process that dies before 1 has lost nothing: messages are asked for again from the position in the journal. One that
dies behind it reads on from there, whatever the broker still holds to be open. So no row is lost and none is taken
twice, and which rows belong to which window is in the journal: the stream goes on to the same bits.

Messages are few at a time where a stream is followed, and every entry of the journal is written with all the others. So
rows wait in memory, for at most half a minute, until there are many of them or one of them may finish the oldest
window: nothing that a user sees comes later for it.

A broker that does not answer is asked again for as long as the stream is followed; this is said once, and so is its
end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
from jaxtyping import Int64

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.raw.bad_rows import BadRow
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import DEFAULT_CHUNK_ROWS
from ziggurat.data.streams.brokers.broker import Broker, BrokerAway, Messages, Reader, Subscription, Waiting
from ziggurat.data.streams.brokers.messages import BadMessage, Payload, Rows, rows_of
from ziggurat.data.streams.intake import Intake, ReceivedRows, Taken
from ziggurat.errors import DataError, SchemaError, UnavailableError, ZigguratError, nearest_names
from ziggurat.files.stores import StoreFile

_MOST = 16_384  # messages of a read
_FULL_ROWS = 65_536  # rows that are taken at once
_LINGER_S = 30.0
_PATIENCE_S = 60.0  # of a stream that is not followed, for a broker that does not answer
_NAP_S = 0.25
_SHOWN_NAMES = 20
_WITHOUT_ROWS = 1_000  # rows without a column that had been there before it is said


@dataclass(kw_only=True)
class _Pending:
    """Rows that were received and are in no journal yet."""

    position: str
    since: float = 0.0
    ids: list[str] = field(default_factory=list)
    parts: list[Rows] = field(default_factory=list)
    bad: list[BadMessage] = field(default_factory=list)
    lost: int = 0
    num_rows: int = 0


class Receiving:
    """Reads a broker's messages for a stream. One process does.

    Args:
        broker: whose messages they are.
        url: of the stream.
        intake: where rows, or records of labels, are taken to.
        data: how texts are read.
        reader: who reads.
        follows: whether more messages come; otherwise it ends with those that there are.
        note: called with each position before the broker is told that all up to it is in a checkpoint.
        has_begun: the broker was there before, though it may have had no message yet.
    """

    def __init__(
        self,
        broker: Broker,
        url: str,
        *,
        intake: Intake,
        data: DataConfig,
        reader: Reader,
        follows: bool,
        note: Callable[[str], None] = lambda position: None,
        has_begun: bool = False,
    ) -> None:
        self._broker = broker
        self._url = url
        self._intake = intake
        self._data = data
        self._reader = reader
        self._follows = follows
        self._note = note
        self._has_begun = has_begun or bool(intake.position)
        self._subscription: Subscription | None = None
        self._pending = _Pending(position=intake.position)
        self._away_since: float | None = None
        self._has_connected = False
        self._without = dict.fromkeys(intake.received_columns, 0)  # rows since a column was there
        # A field that messages may do without is missed by nobody.
        self._has_been = {
            column: bool(intake.position) and column not in intake.default_cells for column in self._without
        }
        self._others: dict[str, None] = {}  # fields that are no columns
        self._acknowledged = ""
        self._last_came_s = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ reading

    def look(self, *, latest_s: float, told: Callable[[str, int, int | None], None]) -> Taken:
        """Take what has come, until a window may be done or nothing more is there.

        Args:
            latest_s: as in `Arrivals.take`.
            told: called with (phase, rows, None).
        """
        total = Taken()
        is_caught_up = False
        while not self._reader.is_asked():
            messages = self._read()
            if messages is None:
                break
            is_caught_up = not messages.ids and messages.position == self._pending.position
            self._keep(messages)
            if messages.ids:
                self._last_came_s = time.monotonic()
            if self._pending.num_rows:
                told(f"receive {self._url}", total.rows + self._pending.num_rows, None)
            if self._is_due(is_caught_up=is_caught_up):
                total = total + self._take(latest_s=latest_s)
                if self._follows and self._intake.has_enough():
                    break
            if is_caught_up:
                break
        return total

    def connect(self) -> None:
        """Connect to the broker, perhaps before anything is to be read, so that what is wrong is said now."""
        if self._subscription is not None:
            return
        try:
            self._connected()
        except BrokerAway as away:
            self._note_away(away, begin=time.monotonic())

    def is_quiet(self, for_s: float) -> bool:
        """Return whether nothing has come for so many seconds from a broker that answers."""
        now = time.monotonic()
        if self._away_since is not None:
            self._last_came_s = now
        return now - self._last_came_s >= for_s

    def flush(self, *, latest_s: float) -> Taken:
        """Take what is pending now."""
        has_some = self._pending.position != self._intake.position
        return self._take(latest_s=latest_s) if has_some else Taken()

    def _is_due(self, *, is_caught_up: bool) -> bool:
        """Return whether what is pending is taken now."""
        pending = self._pending
        if pending.position == self._intake.position:
            return False
        if pending.num_rows >= _FULL_ROWS:
            return True
        if not is_caught_up:
            return False
        if not self._follows or pending.bad or time.monotonic() >= pending.since + _LINGER_S:
            return True
        return any(self._intake.would_finish(chunk) for chunk in self._chunks(pending))

    def _read(self) -> Messages | None:
        """Read messages behind those that are pending; None if the broker does not answer, and others come later."""
        begin = time.monotonic()
        while True:
            try:
                messages = self._connected().read(self._pending.position, most=_MOST)
            except BrokerAway as away:
                self._note_away(away, begin=begin)
                if self._follows or self._reader.is_asked():
                    return None
                time.sleep(_NAP_S)
                continue
            if self._away_since is not None:
                away_s = time.monotonic() - self._away_since
                self._reader.say(f"the broker of {self._url} answers again, after {away_s:.1f} s")
                self._away_since = None
            return messages

    def _connected(self) -> Subscription:
        if self._subscription is None:
            self._subscription = self._broker.subscribe(self._url, reader=self._reader, after=self._pending.position)
            self._has_connected = True
        return self._subscription

    def _note_away(self, away: BrokerAway, *, begin: float) -> None:
        """Say that the broker does not answer, once; refuse where nobody waits."""
        if self._reader.is_asked():
            return
        now = time.monotonic()
        # A stream that has begun waits for its broker; in one that begins, the URL may be wrong.
        is_new = not self._has_connected and not self._has_begun
        if is_new or (not self._follows and now - begin > _PATIENCE_S):
            raise UnavailableError(
                expected="a broker that answers",
                found=str(away),
                where=self._url,
                ways_out=(
                    *away.ways_out,
                    "start it, or correct host and port",
                    *filter(None, [self._broker.how_to_try(self._url)]),
                    "--follow waits for a broker that was there before",
                ),
            ) from away
        if self._away_since is None:
            self._away_since = now
            self._reader.say(f"the broker of {self._url} does not answer ({away}); it is asked again")

    def _keep(self, messages: Messages) -> None:
        """Add messages to those that are pending."""
        pending = self._pending
        if not pending.ids:
            pending.since = time.monotonic()
        first = len(pending.ids)
        bad: list[BadMessage] = []
        parts = list(
            rows_of(
                messages,
                columns=self._intake.received_columns,
                report=bad.append,
                default_cells=self._intake.default_cells,
            )
        )
        self._watch_columns(parts, messages)
        for rows in parts:
            pending.parts.append(Rows(frame=rows.frame, messages=rows.messages + first))
            pending.num_rows += len(rows.messages)
        for each in bad:
            pending.bad.append(replace(each, index=each.index + first))
            pending.num_rows += 1
        pending.ids += messages.ids
        pending.position = messages.position
        pending.lost += messages.lost

    def _watch_columns(self, parts: Sequence[Rows], messages: Messages) -> None:
        """Say what a producer may have misspelt: fields that no column is called after, columns that no message has."""
        others = [name for name in messages.columns if name not in self._without and name not in list(Payload)]
        new = [name for name in others if name not in self._others][:_SHOWN_NAMES]
        if new and len(self._others) < _SHOWN_NAMES:
            self._others |= dict.fromkeys(new)
            # Of rows whose labels come in another stream the schema names the label, and nothing reads it here.
            self._reader.say(f"fields that nothing reads here, left out: {', '.join(new)}")
        for rows in parts:
            for column in rows.frame.get_columns():
                name = column.name
                if column.null_count() < len(column):
                    self._has_been[name] = name not in self._intake.default_cells
                    self._without[name] = 0
                    continue
                before = self._without[name]
                self._without[name] += len(column)
                if self._has_been[name] and before < _WITHOUT_ROWS <= self._without[name]:
                    self._reader.say(f"warning: no message of the last {_WITHOUT_ROWS:,} has the field {name!r}")

    def refuse_unseen(self, chunks: Iterable[RawChunk]) -> None:
        """Refuse a history in which a column of the schema has no value: its name may be misspelt.

        Args:
            chunks: rows of the history.

        Raises:
            SchemaError: no row has a value of a column.
        """
        unseen = dict.fromkeys(self._intake.received_columns)
        for chunk in chunks:
            for name in list(unseen):
                if not chunk.has_column(name):  # the key by which labels find a row goes along with it no further
                    del unseen[name]
                    continue
                column = chunk.frame[name]
                if column.null_count() < len(column):
                    del unseen[name]
            if not unseen:
                return
        name = next(iter(unseen))
        raise SchemaError(
            expected=f"a field {name!r} in at least one message of the history",
            found="none" + (f"; other fields are {', '.join(self._others)}" if self._others else ""),
            where=self._url,
            ways_out=(
                *(f'column = "{near}" in the schema' for near in nearest_names(name, self._others)),
                "take it out of the schema",
                f"have producers send it, and {self._broker.how_to_begin_anew(self._url)}",
            ),
        )

    # ------------------------------------------------------------------------------------------------------- taking

    def _take(self, *, latest_s: float) -> Taken:
        """Take what is pending into the journal."""
        pending = self._pending
        name = f"{self._url.partition('?')[0]}#{pending.ids[0]}..{pending.ids[-1]}" if pending.ids else self._url
        numbers, messages = _row_numbers(pending)
        bad = tuple(self._bad_row(each, name=name, row=int(numbers[each.index])) for each in pending.bad)
        rows = ReceivedRows(
            name=name,
            chunks=tuple(self._chunks(pending, name=name, numbers=numbers)),
            num_read=len(messages),
            bad=bad,
            position=pending.position,
            lost=pending.lost,
            message_of=lambda row: pending.ids[messages[row]],
        )
        try:
            taken = self._intake.receive(rows, latest_s=latest_s)
        except ZigguratError as error:
            found = BadRow.of(error)
            if found is None and not isinstance(error, DataError | SchemaError):
                raise
            if found is None:  # times of another type or unit: what helps with files helps nobody here
                ways = (f"give the same command again after this: {self._broker.how_to_remove(self._url)}",)
                raise type(error)(
                    expected=error.expected, found=error.found, where=error.where, ways_out=ways
                ) from error
            entry = pending.ids[messages[found.row]]
            where = f"{self._url}, entry {entry}"
            where += f", column {found.column!r}" if found.column else ""
            ways = (
                "put such rows aside and go on: --data.bad-rows quarantine",
                f"give the same command again after this: {self._broker.how_to_remove(self._url, id=entry)}",
            )
            raise type(error)(expected=error.expected, found=error.found, where=where, ways_out=ways) from error
        self._pending = _Pending(position=pending.position)
        return taken

    def _bad_row(self, bad: BadMessage, *, name: str, row: int) -> BadRow:
        return BadRow(
            path=StoreFile(name),
            row=row,
            line=None,
            column=bad.column,
            reason=bad.reason,
            expected=bad.expected,
            found=bad.found,
        )

    def _chunks(
        self, pending: _Pending, *, name: str = "", numbers: Int64[np.ndarray, " N"] | None = None
    ) -> Iterator[RawChunk]:
        """Give rows that are pending as chunks, numbered by their place among all that are taken together."""
        together: list[Rows] = []
        for rows in [*pending.parts, None]:
            is_other = rows is None or (together and together[0].frame.schema != rows.frame.schema)
            if together and (is_other or sum(len(each.messages) for each in together) >= DEFAULT_CHUNK_ROWS):
                frame = pl.concat([each.frame for each in together])
                places = np.arange(frame.height)
                if numbers is not None:
                    places = np.concatenate([numbers[each.messages] + _within(each.messages) for each in together])
                yield RawChunk(
                    frame=frame,
                    path=StoreFile(name),
                    first_row=int(places[0]),
                    start=int(places[0]),
                    rows=places,
                    numbers=self._data.text.numbers,
                    list_separator=self._data.text.list_separator,
                )
                together = []
            if rows is not None:
                together.append(rows)

    # -------------------------------------------------------------------------------------------------- acknowledging

    def acknowledge(self, number: int) -> bool:
        """Tell the broker of all that is needed by windows up to a number alone, which a checkpoint contains.

        Args:
            number: of the window.

        Returns:
            Whether the broker knows of it, or has nothing to know.
        """
        position = self._intake.covered(number)
        if not position or position == self._acknowledged:
            return True
        if self._subscription is None:
            return False
        self._note(position)
        try:
            self._subscription.acknowledge(position)
        except BrokerAway:
            return False  # the next read says so, and the next window, or start, acknowledges these as well
        self._acknowledged = position
        return True

    def waiting(self) -> Waiting:
        """Return how far the stream is behind; nothing where the broker does not answer."""
        if self._subscription is None:
            return Waiting()
        try:
            return self._subscription.waiting(self._pending.position)
        except BrokerAway:
            return Waiting()

    def close(self) -> None:
        """End the connection; rows that are pending are asked for again by the next start."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


def _row_numbers(pending: _Pending) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " N"]]:
    """Return the number of the first row of each message, and the message of each row; a bad message is a row."""
    counts = np.zeros(len(pending.ids), dtype=np.int64)
    for rows in pending.parts:
        counts += np.bincount(rows.messages, minlength=len(counts))
    for bad in pending.bad:
        counts[bad.index] = 1
    return np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)


def _within(messages: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Return the place of each row among those of its message, which stand together."""
    return np.arange(len(messages)) - np.searchsorted(messages, messages, side="left")
