"""Arrivals: raw files as they come, each read once, their rows kept by window until they are trained.

    files ─► each file once (by its content) ─► arrived/00007.parquet, a row group for each window of each chunk
                                        └► journal: files, windows, where the rows of each window lie (`journal.py`)

Raw files need not be in order of time: a file of ratings by user has rows of every month in every chunk. So each file
is read once, its rows are dealt to their windows, and a window is read from where its rows were put. A window is *done*
when a row of a later one has arrived, or when no more files come. Rows of a window that is done are *late*.

A file is known by the SHA-256 of its content: one that arrives again, under its own name or another, is left out and
counted; one that has changed since its rows were taken is an error. Nothing is taken twice: rows are in the journal
together with their file, whole or not at all, and what a killed process wrote without it is written again.

Rows of a broker (`receiving.py`) come without a file. They are known by the broker's position behind them, which enters
the journal together with them. Records of such rows are folded into one when the rows are gone: there is no end of
them.

Where labels are known later than their rows (`label_delay.py`), rows are kept once more, by the window in which they
may be trained: scored rows of a window are its pieces, trained ones its lessons. Lessons of windows to come wait in the
journal, and so on the disk, for as long as labels take.

Where labels have records of their own (`awaiting_labels.py`), rows wait until these have gone beyond the end of their
window. Then they are dealt as rows of a file that had both, each lesson when what it needs is known.

Cost: raw files are read once more for their digest; the disk holds the raw rows that are not trained yet, compressed by
LZ4. With windows of N rows the times of all files that arrive at once are in memory, 24 bytes a row.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int64

from ziggurat.commands import pasted
from ziggurat.data.preprocess.build import ProgressCallback
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.order_of_dates import order_of_dates, shown_order
from ziggurat.data.preprocess.values.parsing import refuse_wrong_types
from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.awaiting_labels import Arriving, AwaitingLabels, Truth, naming_roles
from ziggurat.data.streams.intake import ReceivedRows, Taken
from ziggurat.data.streams.journal import ArrivedFile, Change, Journal, Piece, Window
from ziggurat.data.streams.kept_rows import KeptRows
from ziggurat.data.streams.label_delay import delayed_label, label_times, lessons, positives_of
from ziggurat.data.streams.late_labels import refuse_unreadable_keys, report_unreadable
from ziggurat.data.streams.new_files import NewFile, content_digest, record_of_copy, torn_names
from ziggurat.data.streams.row_spool import RowSpool
from ziggurat.data.streams.windows import HISTORY, LEFT_OUT, UNREADABLE, Clock, Cut, LateRows, StreamConfig
from ziggurat.data.teachers.growing import JoinedPart
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.label_state import LabelState
from ziggurat.features.schema import Schema
from ziggurat.files import digest_of
from ziggurat.files.stores import DataPath, facts_of

LATE = "late rows"


class Arrivals:
    """The raw rows of a stream, by window. One process holds it.

    Args:
        folder: of journal and rows; made if it is absent.
        config: how rows are cut.
        data: how files are read.
        schema: whose columns are kept.
        has_begun: whether a row was trained. Before that, what arrived under other settings is taken anew.
        also: columns to keep beside those of the schema; a stream that has begun keeps those that it began with.

    Raises:
        ConfigError: the folder holds a stream with other settings.
        CheckpointError: its journal is damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: StreamConfig,
        data: DataConfig,
        schema: Schema,
        has_begun: bool = True,
        also: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._data = data
        self._schema = schema
        self._config = config
        self._kept = KeptRows(folder, data=data)
        # Infinity until `take` gives another: then no row is too late for the clock.
        self._latest_s = np.inf
        self._newest_s = -np.inf  # of the files of one `take`
        self._is_by_row = False  # rows are those of messages
        self._cut: Cut | None = None
        self._date_order = data.split.date_order
        also = [name for name in dict.fromkeys(also) if name not in schema.columns]
        reading = _reading(data, schema, also=also)
        found = self._kept.found
        # Nothing was trained on it, so it costs only another read of the files.
        if found is not None and not has_begun and (found.config, found.reading) != (config, reading):
            self._kept.clear()
            found = None
        if found is not None:
            _refuse_other_settings(found.config, config, where=str(self._kept.path))
            self._kept.begin(found)
            if found.clock is not None:
                self._cut = Cut.of(config, found.clock)
        else:
            self._kept.begin(Journal(config=config, reading=reading, also=also))
            self._refuse_no_time()
        config.delay.check(schema, by=config.by, is_by_time=not config.rows)
        self._refuse_idle_late()
        # Of labels that have records of their own; None where rows have their labels.
        self._awaiting: AwaitingLabels | None = None
        if config.delay.has_records:
            self._awaiting = AwaitingLabels(self._kept, config=config, schema=schema, data=data, columns=self.columns)
        self._look_up_journal()
        # Until files are looked at for the first time: see `_begin_anew_if_changed`.
        self._may_begin_anew = not has_begun

    def _look_up_journal(self) -> None:
        """Make what is asked of the journal again and again quick to find."""
        # A folder that is followed may have thousands of files, each of which is asked for at every look.
        self._by_place: dict[str, list[ArrivedFile]] = {}
        self._digests: set[str] = set()
        self._num_rows = 0
        for file in (*self.journal.files, *self.journal.copies):
            self._remember(file)
        for file in self.journal.label_files:
            self._remember(replace(file, rows=0))
        if self._awaiting is not None:
            self._awaiting.begin(self._cut)
        self._num_dealt = self.journal.num_dealt  # with the rows of files that are being taken

    def _remember(self, file: ArrivedFile) -> None:
        self._num_rows += file.rows
        if file.position:
            return  # known by the position
        self._by_place.setdefault(file.place, []).append(file)
        self._digests.add(file.sha256)

    @property
    def journal(self) -> Journal:
        """Everything that is known of the stream."""
        return self._kept.journal

    @property
    def num_rows(self) -> int:
        """Rows of all files that have arrived."""
        return self._num_rows

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the raw columns that are kept."""
        return tuple(dict.fromkeys((*_columns(self._schema, self._config), *self.journal.also)))

    @property
    def num_waiting(self) -> int:
        """Rows that wait for the window in which they may be trained, once for each time that they are."""
        return sum(piece.rows for pieces in self.journal.lessons.values() for piece in pieces)

    @property
    def last_waiting(self) -> str:
        """The name of the last window in which one of these rows may be trained; "" where none waits."""
        keys = [int(key) for key, pieces in self.journal.lessons.items() if pieces]
        return self._cut.name(max(keys)) if keys and self._cut is not None else ""

    @property
    def num_held(self) -> int:
        """Rows whose label may still come, as a record of its own."""
        return 0 if self._awaiting is None else self._awaiting.num_rows

    @property
    def cut(self) -> Cut | None:
        """Return how times are cut into windows; None before the first row."""
        return self._cut

    @property
    def awaiting(self) -> AwaitingLabels | None:
        """Return the rows whose labels have records of their own; None where rows have their labels."""
        return self._awaiting

    # ------------------------------------------------------------------------------------------------------ files

    def take(
        self,
        paths: Sequence[DataPath],
        *,
        labels: Sequence[DataPath] = (),
        latest_s: float = np.inf,
        progress: ProgressCallback | None = None,
        closes: bool = True,
    ) -> Taken:
        """Take the rows of those files that have not arrived before.

        Args:
            paths: all files that are there, in the order in which new ones are to be taken.
            labels: all files with records of labels; they are taken behind the rows.
            latest_s: seconds since 1970; rows later than that have a wrong clock, and are bad rows.
            progress: called with (phase, rows done, rows in all or None).
            closes: close the windows whose end both logs have passed; False: `close_windows` does, when messages that
                are there were taken, too.

        Raises:
            DataError: a file has changed since its rows were taken; a bad row (policy ERROR); times in another unit.
            SchemaError: a file lacks a column of the schema.
        """
        self._latest_s = latest_s
        self._newest_s = -np.inf
        self._begin_anew_if_changed([*paths, *labels])
        told: ProgressCallback = progress or (lambda phase, done, total: None)
        counts = Counter(self.journal.label_counts)
        new, copies = self._new_files(paths)
        found = self._take_files(new, copies, told=told) if new or copies else Taken()
        if self._awaiting is None:
            return found
        found = self._with_labels(found, labels, awaiting=self._awaiting, told=told)
        if closes:
            self.close_windows()
        return replace(found, label_counts=dict(Counter(self.journal.label_counts) - counts))

    def _take_files(self, new: Sequence[NewFile], copies: list[ArrivedFile], *, told: ProgressCallback) -> Taken:
        """Take the rows of new files, and note which files are copies of others."""
        # Here and not in the constructor: a stream that has taken nothing leaves no folder.
        self._kept.rows.mkdir(parents=True, exist_ok=True)
        if self._cut is None and self._has_time and new:
            with naming_roles(self._schema, self._config):
                self._date_order = self._order_of_dates([file.path for file in new])
        dealt = self._dealt([self._opener(file.path) for file in new]) if self._config.rows else None
        before = len(self.journal.files)
        for file in new:
            self._take_file(file, dealt=dealt, told=told)
            # Windows of rows are dealt over all files that arrive at once, so that these are taken all or none.
            if dealt is None:
                # With a power cut goes what is not on the disk yet, and its files are read again.
                self._kept.save(durable=False)
        self._kept.apply(Change(copies=copies, num_dealt=self._num_dealt if dealt is not None else None))
        self._kept.save()
        for copy in copies:
            self._remember(copy)
        taken = self.journal.files[before:]
        return Taken(
            files=len(taken),
            rows=sum(file.rows for file in taken),
            late=sum(file.late for file in taken),
            left_out=sum(file.left_out for file in taken),
            bad=sum(file.bad for file in taken),
            again=tuple(copy.path for copy in copies),
            newest_s=self._newest_s,
            torn=torn_names(new),
        )

    def _order_of_dates(self, paths: Sequence[DataPath]) -> DateOrder:
        try:
            return order_of_dates(self._data, paths, column=self._schema.time)
        except SchemaError:
            # A file without the time may lack more, which one error names.
            for path in paths:
                next(iter(self._data.source([path], bad_rows=BadRows()).frames(columns=self._read_columns)), None)
            raise

    def _new_files(self, paths: Sequence[DataPath]) -> tuple[list[NewFile], list[ArrivedFile]]:
        """Return the files that have not arrived before, and copies of files that have."""
        new: list[NewFile] = []
        new_digests: set[str] = set()
        copies: list[ArrivedFile] = []
        for path in paths:
            facts = facts_of(path)
            digest = self._digest_if_new(path, facts=facts)
            if digest is None:
                continue
            # Files of this very call count as well: two copies may arrive together.
            if digest in new_digests or digest in self._digests:
                copies.append(record_of_copy(path, facts=facts, sha256=digest))
                continue
            new.append(NewFile(path=path, facts=facts, sha256=digest))
            new_digests.add(digest)
        return new, copies

    def knows(self, path: DataPath) -> bool:
        """Return whether a file of this name was taken, or left out because its content was."""
        # The place is the first of the facts, without links, so two names of one file are one.
        return facts_of(path)[0] in self._by_place

    def _digest_if_new(self, path: DataPath, *, facts: tuple[str, int, int | str]) -> str | None:
        """Return the SHA-256 of a file whose name is new, perhaps a copy; None where the file is known.

        Raises:
            DataError: a file has changed since its rows were taken, or since it was left out as a copy of such a file.
        """
        place, num_bytes, tag = facts
        known = self._by_place.get(place, [])
        # Size and tag decide without reading the file; the digest of a large one takes minutes.
        is_as_it_was = any((file.num_bytes, file.tag) == (num_bytes, str(tag)) for file in known)
        if is_as_it_was:
            return None
        digest = content_digest(path)
        # The same content was written again, as `touch` or a copy does: nothing is new.
        if any(file.sha256 == digest for file in known):
            return None
        if known:
            raise DataError(
                expected="files that stay as they were when their rows were taken",
                found=f"other content: {num_bytes:,} bytes, {known[-1].num_bytes:,} bytes then",
                where=str(path),
                ways_out=(
                    "restore the file as it was",
                    "give rows that are new a file of their own, and leave this one away",
                    "begin the stream anew: --out ANOTHER_FOLDER",
                ),
            )
        return digest

    def _begin_anew_if_changed(self, paths: Sequence[DataPath]) -> None:
        """Forget all files where one of them is not as it was, and nothing was trained on them yet.

        So whoever corrects a row, or takes a file out, after a first try that failed gives the same command again.
        """
        if not self._may_begin_anew:
            return
        # Later changes are errors: training may have begun by then.
        self._may_begin_anew = False
        given = {(place, num_bytes, str(tag)) for place, num_bytes, tag in map(facts_of, paths)}
        known = (*self.journal.files, *self.journal.label_files)
        # Messages that were taken with them are not asked for again by a reader that is behind them.
        if any(file.position for file in known):
            return
        if all((file.place, file.num_bytes, file.tag) in given for file in known):
            return
        journal = Journal(config=self._config, reading=self.journal.reading, also=self.journal.also)
        self._kept.clear()
        self._kept.begin(journal)
        self._cut = None
        self._look_up_journal()

    def _opener(self, path: DataPath) -> _Opener:
        """Return how a file is opened for each look at its rows."""
        return lambda bad_rows: self._data.source([path], bad_rows=bad_rows)

    def _take_file(self, file: NewFile, *, dealt: _Dealt | None, told: ProgressCallback) -> None:
        """Read a file, and put its rows where they belong."""
        path = file.path
        found = self._read_rows(self._opener(path), name=path.name, dealt=dealt, told=told)
        file.refuse_changed()
        place, num_bytes, tag = file.facts
        arrived = ArrivedFile(
            path=str(path),
            place=place,
            num_bytes=num_bytes,
            tag=str(tag),
            sha256=file.sha256,
            first_row=self.num_rows,
            rows=found.num_read,
            late=found.counts.late,
            left_out=found.counts.left_out,
            bad=found.bad,
        )
        self._enter(arrived, found, dealt=dealt)

    def receive(self, rows: ReceivedRows, *, latest_s: float = np.inf) -> Taken:
        """Take rows of a broker, and the position behind them with them.

        Args:
            rows: those right behind `position`.
            latest_s: as in `take`.

        Raises:
            DataError: a bad row (policy ERROR); times in another unit.
        """
        self._latest_s = latest_s
        self._newest_s = -np.inf
        self._kept.rows.mkdir(parents=True, exist_ok=True)

        def opened(bad_rows: BadRows) -> ReceivedRows:
            for bad in rows.bad:
                bad_rows.report(bad)
            return rows

        if self._cut is None and self._has_time and self._date_order is DateOrder.AUTO:
            self._date_order = shown_order(rows.chunks, self._schema.time)
        # Messages have a writer each: one that writes times otherwise is a bad row, and no error of all.
        self._is_by_row = True
        dealt = self._dealt([opened]) if self._config.rows else None
        found = self._read_rows(
            opened,
            name=rows.name,
            dealt=dealt,
            told=lambda phase, done, total: None,
            message_of=rows.message_of,
        )
        arrived = rows.arrived(
            bad=found.bad, first_row=self.num_rows, late=found.counts.late, left_out=found.counts.left_out
        )
        self._enter(arrived, found, dealt=dealt)
        if dealt is not None:
            self._kept.apply(Change(num_dealt=self._num_dealt))
        self._kept.save()
        return Taken(
            files=1,
            rows=arrived.rows,
            late=arrived.late,
            left_out=arrived.left_out,
            bad=arrived.bad,
            newest_s=self._newest_s,
            lost=arrived.lost,
        )

    @property
    def received_columns(self) -> tuple[str, ...]:
        """Return the columns that messages with rows may have."""
        return self._read_columns

    @property
    def default_cells(self) -> Mapping[str, str]:
        """Return nothing: a field that a row lacks is a missing value."""
        return {}

    @property
    def position(self) -> str:
        """The position of the broker behind the rows that were received; "" before the first."""
        return self.journal.files[-1].position if self.journal.files else ""

    def covered(self, number: int) -> str:
        """Return the broker's position up to which all rows belong to windows up to a number, or to none.

        Args:
            number: of a window.
        """
        first = self.journal.first_needed(number)
        return self.journal.file(first - 1).position if first else ""

    def close_windows(self) -> None:
        """Close the windows whose end both logs have passed, where labels have records of their own."""
        if self._awaiting is not None:
            self._awaiting.close(cut=self._cut, is_over=False)

    def would_finish(self, chunk: RawChunk) -> bool:
        """Return whether rows that were received, and not taken, may finish the oldest open window, or begin the first.

        Args:
            chunk: of such rows.
        """
        journal = self.journal
        if self._cut is None:
            return True
        if self._awaiting is not None:
            return self._awaiting.would_pass(self._times_of(chunk), cut=self._cut)
        if not journal.open:
            return True
        if self._config.rows:
            in_last = journal.num_dealt % self._config.rows
            return journal.open[0].key == HISTORY or in_last + chunk.num_rows >= self._config.rows
        windows = self._cut.windows(self._times_of(chunk))
        return bool((windows[windows < LEFT_OUT] > journal.open[0].key).any())

    def has_enough(self) -> bool:
        """Return whether rows of a later window than the oldest that is open have come."""
        if self._awaiting is not None:
            return self._awaiting.have_rows_passed(cut=self._cut)
        return len(self.journal.open) > 1

    def _times_of(self, chunk: RawChunk) -> Float64[np.ndarray, " N"]:
        """Return the times of rows, where the first row has shown how they are read; NaN where one cannot be read."""
        assert self._cut is not None, "the first row has shown it"
        clock = self._cut.clock
        return readable_times(chunk.frame[clock.column], order=clock.date_order, is_date=clock.is_date)

    def _read_rows(
        self,
        opener: _Opener,
        *,
        name: str,
        dealt: _Dealt | None,
        told: ProgressCallback,
        message_of: Callable[[int], str] | None = None,
    ) -> _Read:
        """Read rows, and write them by window; nothing of them is in the journal yet."""
        number = self.journal.num_files
        folder = self.folder / f"file-{number:05}"
        # A process that was killed while it read these rows has left its bad rows there.
        shutil.rmtree(folder, ignore_errors=True)
        counts = _Counts()
        with BadRows(
            self._data.bad_rows, folder=folder, budget=self._data.bad_row_budget, message_of=message_of
        ) as bad_rows:
            source = opener(bad_rows)
            total = source.num_rows_hint()
            with RowSpool(self._kept.rows, number=number) as spool:
                deal = self._hold if self._awaiting is not None else self._deal
                for chunk in self._frames(source, columns=self._read_columns):
                    if self._has_types(chunk, bad_rows=bad_rows):
                        deal(chunk, spool, bad_rows=bad_rows, dealt=dealt, counts=counts)
                    told(f"read {name}", counts.rows, total)
            bad = bad_rows.num_rows
        return _Read(num_read=source.num_read, bad=bad, counts=counts, pieces=spool.pieces)

    def _has_types(self, chunk: RawChunk, *, bad_rows: BadRows) -> bool:
        """Return whether the columns of a chunk have types that the schema can read, now: rows that are taken stay.

        Rows of a file stay together, so that the file is refused; of messages each has a writer, and is a bad row.

        Raises:
            SchemaError: a column of a file has another type.
        """
        if not chunk.num_rows:
            return True
        try:
            refuse_wrong_types(self._schema, chunk, with_labels=not self._config.delay.has_records)
            if self._config.delay.has_records:
                refuse_unreadable_keys(chunk, self._config.delay.key)
            return True
        except SchemaError as error:
            if not self._is_by_row:
                raise SchemaError(
                    expected=error.expected,
                    found=error.found,
                    where=error.where,
                    ways_out=(
                        "correct the file, and give the same command again: nothing of it was taken",
                        f"take it out of the folder: mv {pasted(str(chunk.path))} ELSEWHERE",
                        "correct the schema, and begin the stream anew: --out ANOTHER_FOLDER",
                    ),
                ) from error
            report_unreadable(chunk, error, bad_rows=bad_rows)
            return False

    def _frames(self, source: _Source, *, columns: Sequence[str]) -> Iterator[RawChunk]:
        with naming_roles(self._schema, self._config):
            yield from source.frames(columns=columns)

    def _enter(self, arrived: ArrivedFile, found: _Read, *, dealt: _Dealt | None) -> None:
        """Enter rows and their record into the journal together: only now, when they were read whole."""
        dropped = found.counts.late if self._config.late is LateRows.DROP else 0
        if self._awaiting is None:
            self._place(arrived, found.pieces, found.counts, dropped=dropped)
        else:
            arriving = found.counts.arriving
            self._awaiting.place(arrived, found.pieces, arriving, dropped=dropped, cut=self._cut)
        self._remember(arrived)
        if dealt is not None:
            # What was dealt is one array over all files of the call; the next file goes on in it.
            dealt.first_row += arrived.rows

    def _deal(
        self, chunk: RawChunk, spool: RowSpool, *, bad_rows: BadRows, dealt: _Dealt | None, counts: _Counts
    ) -> None:
        """Write the rows of a chunk, those of each window together."""
        cut = self._cut_for(chunk)
        counts.rows += chunk.num_rows
        if cut.clock.column:
            times = cut.clock.times(chunk, bad_rows=bad_rows, latest_s=self._latest_s, by_row=self._is_by_row)
            windows = cut.windows(times)
            if cut.clock.per_second:
                # NaN of rows that were put aside counts as no time.
                newest = float(np.fmax.reduce(times, initial=-np.inf))
                self._newest_s = max(self._newest_s, newest / cut.clock.per_second)
        else:
            times = np.zeros(chunk.num_rows)
            windows = np.zeros(chunk.num_rows, dtype=np.int64)
        known = np.empty(0)
        is_positive = np.empty(0, dtype=np.bool_)
        if self._config.delay.is_on:
            known, is_positive = self._labels(chunk, times, clock=cut.clock, bad_rows=bad_rows, by_row=self._is_by_row)
            windows = np.where(np.isnan(known), UNREADABLE, windows)
        if dealt is not None:
            # Rows without a readable time keep their mark, and take no place in a window.
            readable = windows != UNREADABLE
            windows[readable] = dealt.windows[dealt.first_row + chunk.file_rows[readable]]
        is_late = self._is_late(windows, times)
        counts.late += int(is_late.sum())
        counts.left_out += int((windows == LEFT_OUT).sum())
        windows = np.where(is_late, _LATE, windows)
        if self._config.rows:
            # Marks of rows that are in no window are all of this size or beyond it, on either side.
            for window in np.unique(windows[np.abs(windows) < LEFT_OUT]).tolist():
                # Kept per window, since a window that is done sets the time before which rows are late.
                counts.newest[window] = max(counts.newest.get(window, -np.inf), float(times[windows == window].max()))
        wanted = windows < LEFT_OUT
        if self._config.late is LateRows.DROP:
            wanted &= windows != _LATE
        if wanted.any():
            spool.write(chunk.filter(wanted), windows[wanted])
        if self._config.delay.is_on:
            known = np.where(wanted, known, np.nan)
            times = np.where(wanted, times, np.nan)
            self._deal_lessons(chunk, times, known, is_positive, spool, counts=counts)

    def _labels(
        self, chunk: RawChunk, times: np.ndarray, *, clock: Clock, bad_rows: BadRows, by_row: bool
    ) -> tuple[Float64[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
        """Return when labels are known, as times of the column (NaN of bad rows), and which of them are positives."""
        delay = self._config.delay
        is_positive = positives_of(chunk, self._schema, delayed_label(self._schema, delay.label))
        known = label_times(
            chunk,
            times,
            is_positive,
            # One unit for both columns: a label time in another one is found as a time in another one is.
            clock=replace(clock, column=delay.column),
            schema=self._schema,
            config=delay,
            bad_rows=bad_rows,
            by_row=by_row,
        )
        return known, is_positive

    def known_labels(self, chunk: RawChunk, window: Window) -> Bool[np.ndarray, " N"]:
        """Return which rows have a label that is known at the end of the window that they are scored in.

        Args:
            chunk: of `chunks`.
            window: that it is of, in a stream whose labels are known later than its rows.
        """
        cut = self._cut_for(chunk)
        clock = cut.clock
        times = readable_times(chunk.frame[clock.column], order=clock.date_order, is_date=clock.is_date)
        # Row by row: what the first rows of the file show of their kind is not to be judged again by a part of them.
        known, _ = self._labels(chunk, times, clock=clock, bad_rows=BadRows(), by_row=True)
        return cut.windows(known) <= window.key

    def _deal_lessons(
        self,
        chunk: RawChunk,
        times: Float64[np.ndarray, " N"],
        known: Float64[np.ndarray, " N"],
        is_positive: Bool[np.ndarray, " N"],
        spool: RowSpool,
        *,
        counts: _Counts,
    ) -> None:
        """Write rows by the windows in which they may be trained."""
        cut = self._cut_for(chunk)
        per_second = cut.clock.per_second
        for lesson in lessons(times / per_second, known / per_second, is_positive, config=self._config.delay):
            windows = cut.windows(lesson.at_s * per_second)
            is_in_time = lesson.mask & (windows < LEFT_OUT)
            counts.unlearned += int((lesson.mask & ~is_in_time).sum())
            if is_in_time.any():
                spool.write(chunk.filter(is_in_time), windows[is_in_time], state=lesson.state)

    def _is_late(self, windows: Int64[np.ndarray, " N"], times: np.ndarray) -> np.ndarray:
        """Mark rows of windows that are done."""
        journal = self.journal
        if not journal.done:
            return np.zeros(len(windows), dtype=np.bool_)
        if self._config.rows:
            if not self._has_time:
                return np.zeros(len(windows), dtype=np.bool_)
            # Rows of before the stream come late as soon as anything was done, for the history is the first window.
            is_old = windows == HISTORY
            if journal.done_until is not None:
                is_old = is_old | (times < journal.done_until)
            return is_old & (windows < LEFT_OUT)
        # Keys rise with time, and windows are done in order, so one comparison is enough.
        return windows <= journal.done[-1].key

    def _place(self, file: ArrivedFile, pieces: Iterable[tuple[int, Piece]], counts: _Counts, *, dropped: int) -> None:
        """Add a file and its pieces to the windows that they belong to."""
        late: list[Piece] = []
        by_key: dict[int, Window] = {}
        of_lessons: dict[str, list[Piece]] = {}
        for key, piece in pieces:
            self._kept.need([piece.part])
            if piece.state is not None:
                of_lessons.setdefault(str(key), []).append(piece)
                continue
            if key == _LATE:
                late.append(piece)
                continue
            if key not in by_key:
                # The first row has shown how time is cut.
                by_key[key] = Window(key=key, name="" if self._cut is None else self._cut.name(key))
            by_key[key].add([piece])
        change = Change(
            clock=self._cut.clock if self._cut is not None and self.journal.clock is None else None,
            file=file,
            arrived=list(by_key.values()),
            late=late,
            dropped=dropped,
            newest={str(key): time for key, time in counts.newest.items()},
            lessons=of_lessons,
            unlearned=counts.unlearned,
        )
        self._kept.apply(change)

    # ----------------------------------------------------------------------------------- labels in files of their own

    @property
    def _read_columns(self) -> tuple[str, ...]:
        """Return the columns that are read of rows: with the key by which their labels find them, and without these."""
        return self.columns if self._awaiting is None else self._awaiting.read_columns

    def _hold(
        self, chunk: RawChunk, spool: RowSpool, *, bad_rows: BadRows, dealt: _Dealt | None, counts: _Counts
    ) -> None:
        """Write the rows of a chunk by their windows, in which they wait for their labels."""
        assert dealt is None, "windows are those of the calendar"
        assert self._awaiting is not None, "labels have records of their own"
        cut = self._cut_for(chunk)
        counts.rows += chunk.num_rows
        times = cut.clock.times(chunk, bad_rows=bad_rows, latest_s=self._latest_s, by_row=self._is_by_row)
        newest = float(np.fmax.reduce(times, initial=-np.inf))
        self._newest_s = max(self._newest_s, newest / cut.clock.per_second)
        counts.arriving.newest = max(counts.arriving.newest, newest)
        windows = cut.windows(times)
        counts.left_out += int((windows == LEFT_OUT).sum())
        wanted = windows < LEFT_OUT
        is_late = wanted & self._awaiting.are_late(windows)
        counts.late += int(is_late.sum())
        if self._config.late is LateRows.DROP:
            wanted &= ~is_late
        if wanted.any():
            self._awaiting.hold(
                chunk.filter(wanted),
                times[wanted],
                windows[wanted],
                spool=spool,
                bad_rows=bad_rows,
                arriving=counts.arriving,
            )

    def _with_labels(
        self,
        taken: Taken,
        labels: Sequence[DataPath],
        *,
        awaiting: AwaitingLabels,
        told: ProgressCallback,
    ) -> Taken:
        """Take files of labels.

        Args:
            taken: the rows that were taken before.
            labels: files of labels.
            awaiting: the rows that wait for them.
            told: see `take`.
        """
        before = len(self.journal.label_files)
        again = list(taken.again)
        torn = taken.torn
        # Before the first row nobody knows in which unit times are: records wait in their files.
        if self._cut is not None:
            new, copies = self._new_files(labels)
            for file in new:
                arrived = awaiting.take(file, cut=self._cut, latest_s=self._latest_s, told=told)
                self._remember(replace(arrived, rows=0))
            if copies:
                self._kept.apply(Change(copies=copies))
                self._kept.save()
            for copy in copies:
                self._remember(copy)
            again += [copy.path for copy in copies]
            torn += torn_names(new)
        files = self.journal.label_files[before:]
        num_bad = sum(file.bad for file in files)
        return replace(
            taken,
            bad=taken.bad + num_bad,
            bad_labels=num_bad,
            again=tuple(again),
            label_files=len(files),
            labels=sum(file.rows for file in files),
            torn=torn,
        )

    # ---------------------------------------------------------------------------------------------------- windows

    def finish_next(self, *, is_over: bool) -> bool:
        """Call the oldest open window done, if it is; return whether it is.

        Args:
            is_over: no more files come, so that the newest window is done, too.
        """
        journal = self.journal
        if is_over and self._awaiting is not None:
            self._awaiting.close(cut=self._cut, is_over=True)
        oldest = self._next_done(is_over=is_over)
        if oldest is None:
            return False
        num_dealt = None
        if self._config.rows and oldest.key != HISTORY:
            # Where the last rows did not fill it: those that come later belong to the next one.
            num_dealt = max(journal.num_dealt, oldest.key * self._config.rows)
        done_until = None
        newest = journal.newest.get(str(oldest.key))
        if newest is not None and np.isfinite(newest):
            done_until = max(newest, -np.inf if journal.done_until is None else journal.done_until)
        last = None if journal.open else Window(key=oldest.key, name=oldest.name)
        self._kept.apply(Change(is_done=True, last=last, by_state=True, num_dealt=num_dealt, done_until=done_until))
        self._kept.save()
        if self._awaiting is not None:
            self._awaiting.settle(cut=self._cut)
        return True

    def upcoming(self, number: int, *, is_over: bool) -> Window | None:
        """Return a window as it would be if it were called done now; None where it would not be. Nothing changes.

        Args:
            number: from 1 on, at most one more than there are windows that are done.
            is_over: no more files come.
        """
        done = self.journal.done
        if number <= len(done):
            return done[number - 1].as_rows()
        return self._next_done(is_over=is_over) if number == len(done) + 1 else None

    def _next_done(self, *, is_over: bool) -> Window | None:
        """The oldest open window with the late rows that go along with it, if it is done; a copy."""
        journal = self.journal
        # The oldest alone may be finished: windows are trained in the order of time.
        if journal.open:
            oldest = journal.open[0]
            if not is_over and not self._is_done(oldest):
                return None
        elif is_over and journal.late:
            # Late rows wait for a window to go along with; where none will come they get one of their own.
            key = journal.done[-1].key if journal.done else HISTORY
            # Windows of rows go on counting; of time, rows that are late take the last key again.
            oldest = Window(key=key + bool(self._config.rows), name=LATE)
        else:
            return None
        return journal.with_late(oldest)

    def _is_done(self, window: Window) -> bool:
        is_full = bool(self._config.rows) and window.key != HISTORY
        if is_full:
            return window.rows >= self._config.rows
        if self.journal.released is not None and window.key <= self.journal.released:
            return True  # it was closed, and rows of no other window are before
        return len(self.journal.open) > 1

    def chunks(self, window: Window) -> Iterator[RawChunk]:
        """The rows of a window that is done, in the order in which they arrived, late ones last; in bounded chunks.

        Args:
            window: of the journal.

        Raises:
            CheckpointError: what was kept of them is damaged or gone.
        """
        for _, chunk in self._kept.chunks(window.pieces):
            yield chunk if self._awaiting is None else self._awaiting.unlabelled(chunk)

    def lessons(self, window: Window) -> Iterator[tuple[LabelState, RawChunk]]:
        """The rows that a window which is done is trained on, with what is known of their labels; in bounded chunks.

        Args:
            window: of the journal of a stream whose labels are known later than its rows.

        Raises:
            CheckpointError: what was kept of them is damaged or gone.
        """
        for state, chunk in self._kept.chunks(window.lessons):
            assert state is not None, "a lesson has a state"
            yield state, chunk

    def labels_until(self, number: int) -> str:
        """Return the moment until which labels of a window may come, for people; "" where none comes any more.

        Args:
            number: of a window that is done.
        """
        window = self.journal.done[number - 1]
        if self._awaiting is None or self._cut is None or not window.awaits or window.truth:
            return ""
        return self._cut.clock.shown(self._awaiting.labels_until(window))

    def truth(self, number: int) -> Truth | None:
        """Return the labels of the rows of a window that came in records of their own; None where more may come.

        Args:
            number: of a window that is done.

        Raises:
            CheckpointError: they are damaged or gone.
        """
        assert self._awaiting is not None, "labels have records of their own"
        return self._awaiting.truth(number)

    def keep_answers(self, number: int, digest: str) -> None:
        """Write down what the scores of a window are known by, before a row of it is trained.

        Args:
            number: of a window whose labels come later.
            digest: of its scores; "" once they wait no more.
        """
        self._kept.apply(Change(answered_window=number, answers=digest))
        self._kept.save()

    def keep_joined(self, number: int, parts: Sequence[JoinedPart]) -> None:
        """Write down what the rows of a window were joined with, before one of them is trained."""
        self._kept.apply(Change(joined_window=number, joined=list(parts)))
        self._kept.save()

    def keep_counted(self, number: int, digest: str) -> None:
        """Write down what the counts of a window are known by, once they are kept.

        Args:
            number: of the window.
            digest: of the counts.
        """
        if self.journal.done[number - 1].counted == digest:
            return
        self._kept.apply(Change(counted_window=number, counted=digest))
        # With a power cut may go what nobody has compared with yet.
        self._kept.save(durable=False)

    def counted(self, number: int) -> str:
        """Return what the counts of a window are known by; "" of one that was not counted."""
        return self.journal.done[number - 1].counted

    def forget(self, number: int) -> None:
        """Remove the rows of all windows up to a number: they are trained, and no checkpoint needs them again."""
        journal = self.journal
        if number <= journal.forgotten:
            return
        gone = Counter(
            piece.part
            for window in journal.done[journal.forgotten : number]
            for piece in (*window.pieces, *window.lessons)
        )
        gone.update(window.truth for window in journal.done[journal.forgotten : number] if window.truth)
        self._kept.apply(Change(forgotten=number))
        self._kept.save_without(gone)

    # ---------------------------------------------------------------------------------------------------- details

    @property
    def _has_time(self) -> bool:
        return bool(self._schema.time)

    def _cut_for(self, chunk: RawChunk) -> Cut:
        # The first chunk that arrives shows the unit of times; all later ones are held to it.
        if self._cut is None:
            clock = Clock.of(chunk, self._schema.time, date_order=self._date_order)
            self._cut = Cut.of(self._config, clock)
        return self._cut

    def _refuse_no_time(self) -> None:
        if not self._config.rows and not self._has_time:
            Cut.of(self._config, Clock())

    def _refuse_idle_late(self) -> None:
        """Refuse to leave late rows out where no row is ever late."""
        if self._config.late is LateRows.DROP and not self._has_time:
            raise ConfigError(
                expected="rows that can be late: of windows of the calendar, or with a time",
                found=f"--late {self._config.late.value}, and a schema without a time",
                where=f"settings of the stream, --by {self._config.by}",
                ways_out=("leave --late out", 'time = "COLUMN" under [roles] of the schema'),
            )

    def _dealt(self, openers: Sequence[_Opener]) -> _Dealt:
        """Number the rows of files that arrive at once: windows of N rows are full in order of time."""
        parts: list[np.ndarray] = []
        windows: list[np.ndarray] = []
        with BadRows(self._data.bad_rows, folder=self.folder / "deal") as bad_rows:  # the second look reports them
            for opener in openers:
                source = opener(bad_rows)
                # Without a time any column will do: only the number of rows is wanted.
                column = self._schema.time or self._schema.columns[0]
                times_of_file: list[np.ndarray] = []
                rows_of_file: list[np.ndarray] = []
                for chunk in self._frames(source, columns=[column]):
                    cut = self._cut_for(chunk)
                    has_time = bool(cut.clock.column)
                    times = (
                        cut.clock.times(chunk, bad_rows=bad_rows, latest_s=self._latest_s, by_row=self._is_by_row)
                        if has_time
                        else np.zeros(chunk.num_rows)
                    )
                    times_of_file.append(times)
                    rows_of_file.append(chunk.file_rows)
                # Rows that the reader left out stay NaN here, and so have no readable time.
                times = np.full(source.num_read, np.nan)
                if rows_of_file:
                    # By their number in the file, since chunks leave out bad rows.
                    times[np.concatenate(rows_of_file)] = np.concatenate(times_of_file)
                parts.append(times)
                is_timed = bool(self._schema.time)
                of_rows = np.where(np.isnan(times), UNREADABLE, 0)
                windows.append(self._cut.windows(times) if self._cut is not None and is_timed else of_rows)
        shutil.rmtree(self.folder / "deal", ignore_errors=True)
        every = np.concatenate([np.empty(0), *parts])
        found = np.concatenate([np.empty(0, np.int64), *windows])
        if self._cut is not None and not self._has_time and self._config.begin:
            # Without times, --from and --until are numbers of rows over all files.
            numbers = self.num_rows + np.arange(len(found))
            found[(numbers < self._cut.begin) & (found == 0)] = HISTORY
            found[(numbers >= self._cut.until) & (found == 0)] = LEFT_OUT
        is_streamed = (found == 0) & ~self._is_late(found, every)
        # Stable, so that rows of one moment stay in the order of the files.
        order = np.argsort(every[is_streamed], kind="stable")
        # The inverse of the order: the rank of each row in time.
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        # Windows are numbered from 1, because 0 is the mark of rows that are still to be dealt.
        found[is_streamed] = 1 + (self.journal.num_dealt + places) // self._config.rows
        self._num_dealt = self.journal.num_dealt + len(order)
        return _Dealt(windows=found)


_LATE = HISTORY - 1


class _Source(Protocol):
    """Rows that are read once more at each call of `frames`."""

    @property
    def num_read(self) -> int:
        """Rows that `frames` has been through, bad ones included."""
        ...

    def frames(self, *, columns: Sequence[str]) -> Iterator[RawChunk]:
        """Give the rows with these columns."""
        ...

    def num_rows_hint(self) -> int | None:
        """Return the number of rows, if it is known before they are read."""
        ...


_Opener = Callable[[BadRows], _Source]


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The rows of a file, or of messages, that were read and are in no journal yet."""

    num_read: int
    bad: int
    counts: _Counts
    pieces: list[tuple[int, Piece]]


@dataclass(kw_only=True)
class _Dealt:
    """Windows of the rows of several files, and the first row of the file that is read."""

    windows: Int64[np.ndarray, " N"]
    first_row: int = 0


@dataclass(kw_only=True)
class _Counts:
    """Counts of what one file held."""

    rows: int = 0
    late: int = 0
    left_out: int = 0
    newest: dict[int, float] = field(default_factory=dict)
    unlearned: int = 0
    arriving: Arriving = field(default_factory=Arriving)  # of rows that wait for records of their labels


def _columns(schema: Schema, config: StreamConfig) -> tuple[str, ...]:
    """Return the columns that are kept of the rows."""
    more = (config.delay.column,) if config.delay.is_on else ()
    return tuple(dict.fromkeys((*schema.columns, *more)))


def _reading(data: DataConfig, schema: Schema, *, also: Sequence[str]) -> str:
    """Digest what decides which cells are kept of the rows, and how their times are read."""
    settings = {
        "format": data.format.value,
        "text": repr(data.text),
        "date_order": data.split.date_order.value,
        "columns": [*schema.columns, *also],
        "time": schema.time,
    }
    return digest_of(settings)


def _refuse_other_settings(stored: StreamConfig, given: StreamConfig, *, where: str) -> None:
    """Refuse settings that would cut the rows that are still to come otherwise than those before."""
    flags = {
        "by": "--by",
        "begin": "--from",
        "until": "--until",
        "late": "--late",
        "growing": "--growing",
        "frozen": "--frozen",
    }
    flags |= {
        "policy": "--delay",
        "column": "--label-time",
        "observe_s": "--observe-s",
        "attribution_s": "--attribution-s",
        "label": "--delayed.label",
        "key": "--label-key",
        "confirms": "--delayed.loss, which needs confirmed negatives:",
    }
    before = asdict(stored) | asdict(stored.delay)
    now = asdict(given) | asdict(given.delay)
    others = [name for name in flags if before[name] != now[name]]
    if others:
        shown = ", ".join(f"{flags[name]} {before[name] or '(none)'}, given {now[name] or '(none)'}" for name in others)
        raise ConfigError(
            expected="the windows that the stream began with",
            found=shown,
            where=where,
            ways_out=("give the command that began it", "begin another stream: --out ANOTHER_FOLDER"),
        )
