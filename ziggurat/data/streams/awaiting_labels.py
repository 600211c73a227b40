"""AwaitingLabels: rows whose labels have records of their own, from their arrival until the last label is known.

    rows of window n arrive ─► held                                              disk, by window of their time
    both logs are beyond n  ─► close n: its rows are scored; lessons whose moment is in n are dealt, from n and from all
                               windows before whose rows are held, by the labels that are known at the end of n
    labels are beyond the attribution window of n ─► truth n: the labels of its rows, by which its scores are judged
    lessons of n are all dealt, and its truth is there ─► let go

A window is closed at its end, as it is where rows have their labels beside them (`label_delay.py`): when the log of
rows has gone on to a later window and that of labels is beyond the end of this one. So the model is as old as that of
one file with both columns, and the same rows are trained in the same windows by the same labels, however the two logs
are interleaved, as long as each is in order of time. Only what a window's scores were worth is known later, by the
attribution window.

What is dealt follows from the time t of a row, from the time u at which its label is known, and from the window that is
closed: a label of a later window is not looked at. A record that comes behind the end of its window (out of order) is
taken as one that is known at the begin of the next: what was trained stays so, and a positive is corrected there. One
that comes when the attribution window of its row is closed is not used.

Cost: a row is written when it arrives and for each of its lessons, a label twice. For each window that is closed, keys
and times are read once more of those held windows that have a moment in it: of a few where lessons come by the time of
the row, and with corrections of all that have a record in it. Whole rows are read of pieces that have a lesson.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Bool, Float64, Int64

from ziggurat.data.preprocess.build import ProgressCallback
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.values.cells import Faults
from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.raw.bad_rows import BadReason, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import in_terms_of_roles
from ziggurat.data.streams.intake import ReceivedRows
from ziggurat.data.streams.journal import ArrivedFile, Change, HeldRows, LabelLog, Piece, Window
from ziggurat.data.streams.kept_rows import KeptRows
from ziggurat.data.streams.label_delay import LabelDelay, delayed_label, known_from, lessons
from ziggurat.data.streams.late_labels import (
    EARLY,
    LATE,
    NO_ROW,
    Keyed,
    KeyedRuns,
    LateLabels,
    keys_of,
    label_cells,
    records_of,
    report_keyless,
    report_second_rows,
    report_unreadable,
)
from ziggurat.data.streams.new_files import NewFile
from ziggurat.data.streams.row_spool import RowSpool
from ziggurat.data.streams.windows import HISTORY, LEFT_OUT, Cut, StreamConfig
from ziggurat.errors import FileError, SchemaError
from ziggurat.features.label_state import LabelState
from ziggurat.features.schema import Schema, column_of
from ziggurat.files import writing_to
from ziggurat.files.parquet import ParquetFile

_NONE = HISTORY - 1  # before every window
_LATER_STATES = (LabelState.CORRECTED, LabelState.CONFIRMED)
_TRUTH = pa.schema({"row": pa.int64(), "is_positive": pa.bool_(), "is_labelled": pa.bool_()})


@dataclass(kw_only=True)
class Arriving:
    """Facts about rows of one file that are being held; they count once the file is in the journal.

    Args:
        newest: the latest of their times.
        spans: the first and the last of their times, by window.
        keyed: their keys, in their order.
        keys: the same, to be looked up.
        late: keys of those whose window is closed.
    """

    newest: float = -np.inf
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    keyed: list[Keyed] = field(default_factory=list)
    keys: KeyedRuns = field(default_factory=KeyedRuns)
    late: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The labels of the rows of a window.

    Args:
        rows: (N,) positions over all files of the stream.
        is_positive: (N,) whether the label is a positive in the end.
        is_labelled: (N,) whether it was known at the end of the window.
    """

    rows: Int64[np.ndarray, " N"]
    is_positive: Bool[np.ndarray, " N"]
    is_labelled: Bool[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Facts that records give of the rows of a piece by the end of a window.

    Args:
        chunk: the rows, of which keys and times alone were read.
        chosen: (M,) which rows of the piece these N are; None: all of them.
        times: of the rows.
        found: when their labels are known; NaN where no record says it yet.
        known: the same, with the end of the attribution window for those without a record.
        is_positive: whether they are positives, as far as is known.
    """

    chunk: RawChunk
    chosen: Bool[np.ndarray, " M"] | None = None
    times: Float64[np.ndarray, " N"]
    found: Float64[np.ndarray, " N"]
    known: Float64[np.ndarray, " N"]
    is_positive: Bool[np.ndarray, " N"]


class AwaitingLabels:
    """The rows of a stream whose labels have records of their own.

    Args:
        kept: the journal and the rows on the disk.
        config: how rows are cut, and when labels are known.
        schema: of the rows.
        data: how files are read.
        columns: raw columns that are kept.
    """

    def __init__(
        self, kept: KeptRows, *, config: StreamConfig, schema: Schema, data: DataConfig, columns: Sequence[str]
    ) -> None:
        self._kept = kept
        self._config = config
        self._delay = config.delay
        self._schema = schema
        self._data = data
        self._columns = tuple(columns)
        self._label = delayed_label(schema, config.delay.label)
        self._labels = LateLabels()
        self._late_keys: list[np.ndarray] = []  # of rows that came behind the end of their window, and wait for a next
        self._until = -np.inf  # the time up to which labels have come

    def begin(self, cut: Cut | None) -> None:
        """Fill memory with what the logs say.

        Args:
            cut: of the stream; None before its first row.
        """
        journal = self._kept.journal
        self._labels = LateLabels()
        self._late_keys = []
        self._until = -np.inf
        if cut is None:
            return
        for log in journal.logs:
            keyed = Keyed.from_table(self._kept.table(log.part, 0))
            if log.is_of_rows:
                self._labels.add_rows(keyed, reach=self._reach(cut))
            else:
                self._labels.add_records(keyed)
        self._labels.cut(
            rows_before=-np.inf if journal.rows_before is None else journal.rows_before,
            records_before=-np.inf if journal.records_before is None else journal.records_before,
        )
        for key, held in journal.held.items():
            for piece in held.pieces[held.num_closed :] if int(key) <= self._closed else ():
                chunk = self._kept.chunk_of(piece, self._kept.frame(piece, columns=[self._delay.key]))
                self._late_keys.append(keys_of(chunk, self._delay.key)[0])

    @property
    def labels(self) -> LateLabels:
        """Return what is known of keys of rows, and of records."""
        return self._labels

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The columns that are read of rows: with the key by which their labels find them, and without these."""
        later = (column_of(self._label), self._delay.column)
        return tuple(dict.fromkeys((*(name for name in self._columns if name not in later), self._delay.key)))

    @property
    def num_rows(self) -> int:
        """Rows whose label may still come."""
        journal = self._kept.journal
        windows = (*journal.done[journal.forgotten :], *journal.open)
        closed = sum(window.rows for window in windows if window.awaits and not window.truth)
        closed += sum(piece.rows for piece in journal.late)
        return closed + sum(piece.rows for held in journal.held.values() for piece in held.pieces[held.num_closed :])

    @property
    def _closed(self) -> int:
        """The key of the last window that is closed."""
        released = self._kept.journal.released
        return _NONE if released is None else released

    def _closed_until(self, cut: Cut) -> float:
        """Return the moment before which labels were complete when the last window was closed.

        That is its end, or an earlier one: the newest window of a stream that ends is closed by its newest row, and of
        rows whose attribution window ends behind that labels may still come when the stream goes on.
        """
        if self._closed == _NONE:
            return -np.inf
        until = self._kept.journal.closed_until
        return cut.end(self._closed) if until is None else until

    def _reach(self, cut: Cut) -> float:
        """Return the attribution window in the units of times."""
        return self._delay.attribution_s * cut.clock.per_second

    # ------------------------------------------------------------------------------------------------------- rows

    def are_late(self, windows: Int64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        """Return which windows are closed."""
        return windows <= self._closed

    def hold(
        self,
        rows: RawChunk,
        times: Float64[np.ndarray, " N"],
        windows: Int64[np.ndarray, " N"],
        *,
        spool: RowSpool,
        bad_rows: BadRows,
        arriving: Arriving,
    ) -> None:
        """Write the rows of a chunk by their windows, in which they wait for their labels.

        Args:
            rows: each with a time, and of a window that is wanted.
            times: of them.
            windows: of them.
            spool: of their file.
            bad_rows: where rows without a key go, and those of a key that another row has.
            arriving: of their file.
        """
        keys, has_key = keys_of(rows, self._delay.key)
        faults = Faults(chunk=rows)
        report_keyless(faults, has_key, column=self._delay.key)
        _, firsts = np.unique(keys, return_index=True)
        is_second = np.ones(len(keys), dtype=np.bool_)
        is_second[firsts] = False
        is_second |= self._labels.are_known(keys) | ~np.isnan(arriving.keys.find(keys).times)
        report_second_rows(faults, is_second & has_key, column=self._delay.key)
        is_good = faults.report(bad_rows)
        if not is_good.any():
            return
        of_rows = Keyed.of(keys, times).where(is_good)
        windows = windows[is_good]
        spool.write(rows.filter(is_good), windows)
        arriving.keyed.append(of_rows)
        arriving.keys.add(of_rows)
        arriving.late.append(of_rows.keys[self.are_late(windows)])
        for window in np.unique(windows).tolist():
            of_window = of_rows.times[windows == window]
            oldest, newest = arriving.spans.get(window, (np.inf, -np.inf))
            arriving.spans[window] = (min(oldest, float(of_window.min())), max(newest, float(of_window.max())))

    def place(
        self,
        file: ArrivedFile,
        pieces: Iterable[tuple[int, Piece]],
        arriving: Arriving,
        *,
        dropped: int,
        cut: Cut | None,
    ) -> None:
        """Enter a file and its rows into the journal together.

        Args:
            file: whose rows they are.
            pieces: by the key of their window.
            arriving: of the file.
            dropped: rows of it that came too late, and were left out.
            cut: of the stream; None where no row of it has come.
        """
        journal = self._kept.journal
        held: dict[str, HeldRows] = {}
        for key, piece in pieces:
            self._kept.need([piece.part])
            if str(key) not in held:
                oldest, newest = arriving.spans[key]
                held[str(key)] = HeldRows(pieces=[], oldest=oldest, newest=newest)
            held[str(key)].pieces.append(piece)
        keyed = Keyed.joined(arriving.keyed)
        log = self._write_log(keyed, stem=f"{journal.num_files:05}-keys", is_of_rows=True)
        counts = {} if cut is None else self._labels.add_rows(keyed, reach=self._reach(cut))
        if len(keyed):
            file = replace(file, oldest=float(keyed.times.min()))
        self._late_keys += arriving.late
        change = Change(
            clock=cut.clock if cut is not None and journal.clock is None else None,
            file=file,
            held=held,
            dropped=dropped,
            log=log,
            newest_row=_later(journal.newest_row, arriving.newest),
            label_counts={name: count for name, count in counts.items() if count},
        )
        self._kept.apply(change)

    def _write_log(self, keyed: Keyed, *, stem: str, is_of_rows: bool) -> LabelLog | None:
        """Write the log of a file; it counts once it is in the journal."""
        if not len(keyed):
            return None
        part = f"{stem}.parquet"
        self._write(part, keyed.table())
        return LabelLog(part=part, is_of_rows=is_of_rows, newest=keyed.newest())

    def _write(self, part: str, table: pa.Table) -> None:
        """Write a small file below `arrived/`, and keep it."""
        path = self._kept.rows / part
        with writing_to(path, FileError):
            writer = ParquetFile(path, table.schema, compression="lz4", write_page_checksum=True)
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            writer.close()
        self._kept.need([part])

    # ----------------------------------------------------------------------------------------------------- labels

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns of a record: its key, its time, and the label, which may be absent."""
        return (self._delay.key, self._delay.column, column_of(self._label))

    @property
    def positive_cell(self) -> str:
        """The label of a record that has none: a positive."""
        return str(label_cells(self._label, np.ones(1, dtype=np.bool_))[0])

    def take(self, file: NewFile, *, cut: Cut, latest_s: float, told: ProgressCallback) -> ArrivedFile:
        """Read a file of labels, and keep those of its records that may be used.

        Args:
            file: of records.
            cut: of the stream.
            latest_s: seconds since 1970; later records have a wrong clock.
            told: see `Arrivals.take`.
        """
        with self._bad_records() as bad_rows:
            source = self._data.source([file.path], bad_rows=bad_rows)
            there = source.columns()
            columns = [name for name in self.record_columns if name != column_of(self._label) or name in there]
            done = 0
            parts: list[Keyed] = []
            with naming_roles(self._schema, self._config):
                for chunk in source.frames(columns=columns):
                    parts.append(self._records(chunk, cut=cut, bad_rows=bad_rows, latest_s=latest_s))
                    done += chunk.num_rows
                    told(f"read {file.path.name}", done, source.num_rows_hint())
            bad = bad_rows.num_rows
        file.refuse_changed()
        place, num_bytes, tag = file.facts
        arrived = ArrivedFile(
            path=str(file.path),
            place=place,
            num_bytes=num_bytes,
            tag=str(tag),
            sha256=file.sha256,
            first_row=0,
            rows=source.num_read,
            bad=bad,
        )
        return self._enter(arrived, Keyed.joined(parts), cut=cut)

    def receive(self, received: ReceivedRows, *, cut: Cut, latest_s: float) -> ArrivedFile:
        """Keep those records of a broker that may be used, and the position behind them with them.

        Args:
            received: records right behind the position of the journal.
            cut: of the stream.
            latest_s: seconds since 1970; later records have a wrong clock.
        """
        self._kept.rows.mkdir(parents=True, exist_ok=True)
        parts: list[Keyed] = []
        with self._bad_records(message_of=received.message_of) as bad_rows:
            for bad in received.bad:
                bad_rows.report(bad)
            for chunk in received.frames(columns=self.record_columns):
                # Each record has a writer of its own: one that writes times otherwise is bad, and not all are.
                parts.append(self._records(chunk, cut=cut, bad_rows=bad_rows, latest_s=latest_s, by_row=True))
            num_bad = bad_rows.num_rows
        return self._enter(received.arrived(bad=num_bad), Keyed.joined(parts), cut=cut)

    def _bad_records(self, *, message_of: Callable[[int], str] | None = None) -> BadRows:
        """Return where bad records of the next file go; what a killed process left there is removed."""
        folder = self._kept.folder / f"labels-{self._kept.journal.num_label_files:05}"
        shutil.rmtree(folder, ignore_errors=True)
        budget = self._data.bad_row_budget
        return BadRows(self._data.bad_rows, folder=folder, budget=budget, message_of=message_of)

    def _records(self, chunk: RawChunk, *, cut: Cut, bad_rows: BadRows, latest_s: float, by_row: bool = False) -> Keyed:
        try:
            return records_of(
                chunk,
                key=self._delay.key,
                label=self._label,
                schema=self._schema,
                clock=replace(cut.clock, column=self._delay.column),
                bad_rows=bad_rows,
                latest_s=latest_s,
                by_row=by_row,
            )
        except SchemaError as error:
            if not by_row:
                raise
            report_unreadable(chunk, error, bad_rows=bad_rows)
            return Keyed.joined([])

    def _enter(self, arrived: ArrivedFile, records: Keyed, *, cut: Cut) -> ArrivedFile:
        """Enter records and what they came in into the journal together."""
        journal = self._kept.journal
        kept, counts = self._judged(records, cut=cut)
        newest = records.newest()
        arrived = replace(arrived, newest=newest if np.isfinite(newest) else None)
        log = self._write_log(kept, stem=f"labels-{journal.num_label_files:05}", is_of_rows=False)
        self._labels.add_records(kept)
        change = Change(
            label_file=arrived,
            log=log,
            newest_record=_later(journal.newest_record, newest),
            label_counts={name: count for name, count in counts.items() if count},
        )
        self._kept.apply(change)
        self._kept.save(durable=bool(arrived.position))
        return arrived

    def _judged(self, records: Keyed, *, cut: Cut) -> tuple[Keyed, Counter[str]]:
        """Return the records that may be used, with the time from which each counts; and counts of the others."""
        counts = Counter[str]()
        times = self._labels.row_times(records.keys)
        is_closed = self._are_closed(records.keys, times, cut=cut)
        # The row was scored, and perhaps trained, so it cannot be put aside any more: its record is.
        is_early = is_closed & (records.times < times)
        counts[EARLY] = int(is_early.sum())
        records = records.where(~is_early)
        times = times[~is_early]
        # What a score was worth and what is trained follow from the same labels.
        closed_until = self._closed_until(cut)
        is_over = cut.windows(times) <= self._settled()
        is_over = is_closed[~is_early] & (is_over | (times + self._reach(cut) < closed_until))
        kept, others = self._labels.judged(records, reach=self._reach(cut), over=is_over)
        counts += others
        is_closed = self._are_closed(kept.keys, self._labels.row_times(kept.keys), cut=cut)
        is_late = is_closed & (kept.times < closed_until)
        if is_late.any():
            counts[LATE] = int(is_late.sum())
            kept = Keyed.of(kept.keys, np.where(is_late, closed_until, kept.times), kept.is_positive)
        return kept, counts

    def _are_closed(self, keys: np.ndarray, times: Float64[np.ndarray, " N"], *, cut: Cut) -> Bool[np.ndarray, " N"]:
        """Return which rows belong to a window that is closed; False where no row is there: its time is NaN."""
        found = cut.windows(times) <= self._closed
        return found & ~np.isin(keys, np.concatenate([keys[:0], *self._late_keys]))

    # ---------------------------------------------------------------------------------------------------- windows

    def would_pass(self, times: Float64[np.ndarray, " N"], *, cut: Cut) -> bool:
        """Return whether rows that are not taken yet are the first behind the oldest window that is not closed.

        Args:
            times: of the rows; NaN where one cannot be read.
            cut: of the stream.
        """
        oldest = self._oldest_open
        if oldest is None:
            return True
        windows = cut.windows(times)
        return not self.have_rows_passed(cut=cut) and bool((windows[windows < LEFT_OUT] > oldest).any())

    def have_rows_passed(self, *, cut: Cut | None) -> bool:
        """Return whether the log of rows has gone on behind the oldest window that is not closed."""
        return self._has_passed(self._kept.journal.newest_row, cut=cut)

    def have_labels_passed(self, *, cut: Cut | None) -> bool:
        """Return whether the log of labels has gone on behind the oldest window that is not closed."""
        return self._has_passed(self._kept.journal.newest_record, cut=cut)

    def would_settle(self, times: Float64[np.ndarray, " N"], *, cut: Cut) -> bool:
        """Return whether records that are not taken yet are the first behind an open window, or complete another one.

        Args:
            times: of the records; NaN where one cannot be read.
            cut: of the stream.
        """
        journal = self._kept.journal
        newest = float(np.fmax.reduce(times, initial=-np.inf))
        if self._has_passed(newest, cut=cut) and not self.have_labels_passed(cut=cut):
            return True
        number = journal.first_awaiting()
        if number is None:
            return False
        until = self.labels_until(journal.done[number - 1])
        return newest > until >= (-np.inf if journal.newest_record is None else journal.newest_record)

    @property
    def _oldest_open(self) -> int | None:
        """The key of the oldest window that is not closed; None where none is."""
        held = self._kept.journal.held
        keys = [int(key) for key, each in held.items() if each.num_closed < len(each.pieces)]
        return min((key for key in keys if key > self._closed), default=None)

    def _has_passed(self, newest: float | None, *, cut: Cut | None) -> bool:
        oldest = self._oldest_open
        if newest is None or oldest is None or cut is None:
            return False
        return int(cut.windows(np.array([newest]))[0]) > oldest

    def close(self, *, cut: Cut | None, is_over: bool) -> None:
        """Close all windows whose rows are there and whose end the labels have passed; settle those before.

        Args:
            cut: of the stream; None before its first row.
            is_over: no more files come: rows of all windows are there, and labels have come up to the newest row.
        """
        journal = self._kept.journal
        if cut is None or journal.newest_row is None:
            return
        newest_record = -np.inf if journal.newest_record is None else journal.newest_record
        rows_at, labels_at = (
            int(cut.windows(np.array([each]))[0]) if np.isfinite(each) else _NONE
            for each in (journal.newest_row, newest_record)
        )
        before = journal.num_released
        newest = max(newest_record, journal.newest_row)
        behind = float(np.nextafter(newest, np.inf))  # the first moment that is behind it
        for key in sorted(int(key) for key, held in journal.held.items() if held.num_closed < len(held.pieces)):
            if key <= self._closed:
                continue  # late rows go along with the next window
            # Windows go in the order of time; of the newest one more rows may come.
            if not is_over and (key >= rows_at or key >= labels_at):
                break
            self._close(key, until=min(cut.end(key), behind), cut=cut)
        if is_over and any(held.num_closed < len(held.pieces) for held in journal.held.values()):
            # Late rows for which no window comes any more.
            until = max(self._closed_until(cut), min(cut.end(self._closed), behind))
            self._close(self._closed, until=until, cut=cut)
        self._until = newest if is_over else newest_record
        if journal.num_released > before:
            self._let_go(cut=cut)
        self.settle(cut=cut)

    def _close(self, key: int, *, until: float, cut: Cut) -> None:
        """Close a window: its rows are scored in it, and what may be trained by its end is dealt.

        Args:
            key: of the window.
            until: moment before which labels are complete: its end, or an earlier one where no more come.
            cut: of the stream.
        """
        kept = self._kept
        journal = kept.journal
        closed = self._closed
        before = self._closed_until(cut)
        number = journal.num_released
        folder = kept.folder / f"labelled-{number:05}"
        shutil.rmtree(folder, ignore_errors=True)
        own: list[Piece] = []
        late: list[Piece] = []
        reheld: dict[str, list[Piece]] = {}
        num_unlearned = 0
        touched = self._touched(before, until, cut=cut)
        nothing = np.empty(0)
        with (
            BadRows(self._data.bad_rows, folder=folder, budget=self._data.bad_row_budget) as bad_rows,
            RowSpool(kept.rows, number=0, stem=f"lessons-{number:05}") as spool,
            RowSpool(kept.rows, number=0, stem=f"good-{number:05}") as good,
        ):
            for window in sorted(map(int, journal.held)):
                held = journal.held[str(window)]
                is_new = held.num_closed < len(held.pieces)
                if window > key:
                    break
                # Of a record in between its row alone has a lesson; when an observation ends, all rows of that time.
                is_whole = is_new or self._has_ends(held, before, until, cut=cut)
                wanted = None if is_whole else touched.get(window, nothing)
                if wanted is nothing:
                    continue
                for index, piece in enumerate(held.pieces):
                    known = self._known(piece, until=until, cut=cut, wanted=wanted)
                    if index < held.num_closed:
                        self._deal(piece, known, spool, before=before, until=until, cut=cut)
                        continue
                    num_unlearned += self._deal(piece, known, spool, before=-np.inf, until=until, cut=cut)
                    found = self._without_early(piece, known, good, cut=cut, bad_rows=bad_rows)
                    (own if window == key > closed else late).extend(found)
                    if found != [piece]:
                        # In the place of the piece: later lessons of its rows are in the order of all.
                        rest = reheld.setdefault(str(window), [*held.pieces])
                        at = rest.index(piece)
                        rest[at : at + 1] = found
            num_bad = bad_rows.num_rows
        taught: dict[str, list[Piece]] = {}
        for moment, piece in spool.pieces:
            taught.setdefault(str(moment), []).append(piece)
        kept.need(piece.part for piece in (*own, *late, *(piece for _, piece in spool.pieces)))
        gone = Counter[str]()
        for window, pieces in reheld.items():
            kept.need(piece.part for piece in pieces)
            gone.update(piece.part for piece in journal.held[window].pieces)
        arrived = Window(key=key, name=cut.name(key), awaits=True)
        arrived.add(own)
        change = Change(
            arrived=[arrived] if own else [],
            late=late,
            lessons=taught,
            unlearned=num_unlearned,
            reheld=reheld,
            closed=key,
            closed_until=until,
            label_counts={EARLY: num_bad} if num_bad else {},
        )
        kept.apply(change)
        kept.save_without(gone)
        self._late_keys = []

    def _touched(self, before: float, until: float, *, cut: Cut) -> dict[int, Float64[np.ndarray, " K"]]:
        """Return the times of the rows whose label is known between two moments, by their window."""
        if self._delay.policy is not LabelDelay.CORRECT:
            return {}
        records = self._labels.records_between(before, until)
        times = self._labels.row_times(records.keys)
        times = np.unique(times[~np.isnan(times)])
        windows, firsts = np.unique(cut.windows(times), return_index=True)
        return dict(zip(windows.tolist(), np.split(times, firsts[1:]), strict=True)) if len(times) else {}

    def _has_ends(self, held: HeldRows, before: float, until: float, *, cut: Cut) -> bool:
        """Return whether observations or attribution windows of rows may end between two moments."""
        spans: list[float] = []
        if self._delay.policy is not LabelDelay.WAIT:
            spans.append(self._delay.observe_s * cut.clock.per_second)
        if self._delay.policy is LabelDelay.WAIT or self._delay.confirms:
            spans.append(self._reach(cut))
        return any(held.oldest + span < until and held.newest + span >= before for span in spans)

    def _known(
        self, piece: Piece, *, until: float, cut: Cut, wanted: Float64[np.ndarray, " K"] | None = None
    ) -> _Known:
        """Return what is known of the labels of a piece before a moment.

        Args:
            piece: of rows that wait.
            until: the moment.
            cut: of the stream.
            wanted: times, in order, of the rows that are wanted, and others of these times; None: all rows.
        """
        clock = cut.clock
        columns = list(dict.fromkeys((self._delay.key, clock.column)))
        chunk = self._kept.chunk_of(piece, self._kept.frame(piece, columns=columns))
        times = readable_times(chunk.frame[clock.column], order=clock.date_order, is_date=clock.is_date)
        chosen = None
        if wanted is not None:
            # By time first: a digest of each key, and a look-up, cost a hundred times as much.
            chosen = wanted[np.searchsorted(wanted, times).clip(max=len(wanted) - 1)] == times
            chunk = chunk.filter(chosen)
            times = times[chosen]
        keys, _ = keys_of(chunk, self._delay.key)
        found, is_positive = self._labels.of_rows(keys, times, reach=self._reach(cut))
        is_known = found < until
        found = np.where(is_known, found, np.nan)
        known = known_from(found, times, reach=self._reach(cut), policy=self._delay.policy)
        return _Known(
            chunk=chunk, chosen=chosen, times=times, found=found, known=known, is_positive=is_positive & is_known
        )

    def _deal(self, piece: Piece, known: _Known, spool: RowSpool, *, before: float, until: float, cut: Cut) -> int:
        """Write the rows of a piece that may be trained from one moment on, and before another.

        Returns:
            How many of them are never trained, as their moment is behind --until.
        """
        per_second = cut.clock.per_second
        times = np.where(known.found < known.times, np.nan, known.times)  # of early ones: they are bad rows
        whole: RawChunk | None = None
        num_unlearned = 0
        for lesson in lessons(times / per_second, known.known / per_second, known.is_positive, config=self._delay):
            moments = lesson.at_s * per_second
            windows = cut.windows(moments)
            if lesson.state not in _LATER_STATES:  # whether a row has these is known with its label: see `_truth_table`
                num_unlearned += int((lesson.mask & (windows == LEFT_OUT)).sum())
            is_due = lesson.mask & (moments < until) & (moments >= before) & (windows < LEFT_OUT)
            if is_due.any():
                whole = whole or self._labelled(piece, known, cut=cut)
                spool.turn_to(piece.file)
                spool.write(whole.filter(is_due), windows[is_due], state=lesson.state)
        return num_unlearned

    def _labelled(self, piece: Piece, known: _Known, *, cut: Cut) -> RawChunk:
        """Return the rows of a piece with the columns that records of labels bring, as far as they are known."""
        chunk = self._kept.chunk_of(piece, self._kept.frame(piece))
        chunk = chunk if known.chosen is None else chunk.filter(known.chosen)
        known_at = pl.Series(self._delay.column, known.found, nan_to_null=True)
        if cut.clock.is_date:
            known_at = known_at.cast(pl.Int64).cast(pl.Datetime("us"))
        frame = chunk.frame.with_columns(label_cells(self._label, known.is_positive), known_at)
        return replace(chunk, frame=frame.select(self._columns))

    def _without_early(
        self, piece: Piece, known: _Known, good: RowSpool, *, cut: Cut, bad_rows: BadRows
    ) -> list[Piece]:
        """Return a piece without the rows whose label was known before them, which are bad rows."""
        is_early = known.found < known.times
        if not is_early.any():
            return [piece]
        keys = known.chunk.frame[self._delay.key]
        for index in np.flatnonzero(is_early).tolist():
            since = cut.clock.shown(known.times[index])
            bad_rows.report(
                known.chunk.bad_row(
                    index,
                    column=self._delay.column,
                    reason=BadReason.EARLY_LABEL,
                    expected=f"a label that is known at the time of its row, {since}, or later",
                    found=f"{cut.clock.shown(known.found[index])}, of {self._delay.key} {keys[index]!r}",
                    ways_out=("write the time of the row where the label is known at once", "set the two clocks alike"),
                )
            )
        rows = self._kept.chunk_of(piece, self._kept.frame(piece)).filter(~is_early)
        if not rows.num_rows:
            return []
        before = len(good.pieces)
        good.turn_to(piece.file)
        good.write(rows, np.zeros(rows.num_rows, dtype=np.int64))
        return [each for _, each in good.pieces[before:]]

    def unlabelled(self, chunk: RawChunk) -> RawChunk:
        """Return rows of a window as files with both columns have them, with cells of labels that say nothing."""
        if chunk.has_column(column_of(self._label)):
            return chunk
        nothing = np.zeros(chunk.num_rows, dtype=np.bool_)
        known_at = pl.Series(self._delay.column, [None] * chunk.num_rows, dtype=pl.Float64)
        frame = chunk.frame.with_columns(label_cells(self._label, nothing), known_at)
        return replace(chunk, frame=frame.select(self._columns))

    # ------------------------------------------------------------------------------------------------------ truth

    def labels_until(self, window: Window) -> float:
        """Return the time, in the units of the time column, until which labels of the rows of a window may come.

        Args:
            window: that is done, and whose labels are not complete.
        """
        clock = self._kept.journal.clock
        assert clock is not None, "rows have shown it"
        pieces = {(piece.part, piece.group) for piece in window.pieces}
        spans = [
            held.newest
            for held in self._kept.journal.held.values()
            if any((piece.part, piece.group) in pieces for piece in held.pieces)
        ]
        return max(spans, default=-np.inf) + self._delay.attribution_s * clock.per_second

    def settle(self, *, cut: Cut | None) -> None:
        """Write down the labels of windows that are done, and of which no label can come any more.

        Args:
            cut: of the stream; None before its first row.
        """
        if cut is None:
            return
        kept = self._kept
        count = 0
        # In their order, so that lines of windows are.
        while (number := kept.journal.first_awaiting()) is not None:
            window = kept.journal.done[number - 1]
            if self.labels_until(window) >= self._until:
                break
            part = f"truth-{number:06}.parquet"
            table, num_unlearned = self._truth_table(window, cut=cut)
            self._write(part, table)
            kept.apply(Change(truth_window=number, truth=part, unlearned=num_unlearned))
            kept.save()
            count += 1
        if count:
            self._let_go(cut=cut)

    def _truth_table(self, window: Window, *, cut: Cut) -> tuple[pa.Table, int]:
        """Return the labels of a window, and how many of its rows are not trained once more, as --until is before that.

        Args:
            window: whose labels are complete.
            cut: of the stream.
        """
        per_second = cut.clock.per_second
        num_unlearned = 0
        rows: list[np.ndarray] = []
        positives: list[np.ndarray] = []
        labelled: list[np.ndarray] = []
        for piece in window.pieces:
            known = self._known(piece, until=np.inf, cut=cut)
            rows.append(known.chunk.global_rows)
            positives.append(known.is_positive)
            labelled.append(cut.windows(known.known) <= window.key)
            for lesson in lessons(
                known.times / per_second, known.known / per_second, known.is_positive, config=self._delay
            ):
                if lesson.state in _LATER_STATES:
                    num_unlearned += int((lesson.mask & (cut.windows(lesson.at_s * per_second) == LEFT_OUT)).sum())
        columns = [np.concatenate([np.empty(0, np.int64), *rows])]
        columns += [np.concatenate([np.empty(0, np.bool_), *each]) for each in (positives, labelled)]
        return pa.Table.from_arrays([pa.array(each) for each in columns], schema=_TRUTH), num_unlearned

    def truth(self, number: int) -> Truth | None:
        """Return the labels of the rows of a window; None where more of them may come.

        Args:
            number: of a window that is done.

        Raises:
            CheckpointError: they are damaged or gone.
        """
        window = self._kept.journal.done[number - 1]
        if not window.truth:
            return None
        table = self._kept.table(window.truth, 0)
        return Truth(
            rows=table.column("row").to_numpy(),
            is_positive=table.column("is_positive").to_numpy(),
            is_labelled=table.column("is_labelled").to_numpy(),
        )

    # ----------------------------------------------------------------------------------------------------- forget

    def _let_go(self, *, cut: Cut) -> None:
        """Forget rows that wait for nothing any more, and keys and records that no row has use for."""
        kept = self._kept
        journal = kept.journal
        assert journal.newest_row is not None, "rows were closed"
        until = min(self._until, journal.newest_row)
        reach = self._reach(cut)
        settled = self._settled()
        ended = [
            key
            for key, held in journal.held.items()
            if held.num_closed == len(held.pieces)
            and (held.last is None or held.last <= settled)
            and held.newest + reach < self._closed_until(cut)
        ]
        gone = Counter(piece.part for key in ended for piece in journal.held[key].pieces)
        oldest = min((held.oldest for key, held in journal.held.items() if key not in ended), default=np.inf)
        records_before = _later(journal.records_before, min(until - reach, oldest))
        # Of each record that is kept the row is, or it would count as one of no row.
        rows_before = _later(journal.rows_before, min(until - reach, oldest) - reach)
        assert records_before is not None, "a moment is given"
        assert rows_before is not None, "a moment is given"
        num_of_no_row = self._labels.cut(rows_before=rows_before, records_before=records_before)
        logs = Counter(log.part for log in journal.logs)
        change = Change(
            let_go=[int(key) for key in ended],
            rows_before=rows_before,
            records_before=records_before,
            label_counts={NO_ROW: num_of_no_row} if num_of_no_row else {},
        )
        kept.apply(change)
        kept.save_without(gone + (logs - Counter(log.part for log in journal.logs)))

    def _settled(self) -> int:
        """Return a key: labels of all windows up to it are complete."""
        journal = self._kept.journal
        number = journal.first_awaiting()
        waiting = [] if number is None else [journal.done[number - 1].key]
        waiting += [window.key for window in journal.open if window.awaits]
        waiting += [self._closed] if journal.late else []
        return min(waiting, default=self._closed + 1) - 1


@contextmanager
def naming_roles(schema: Schema, config: StreamConfig) -> Iterator[None]:
    """Say in the error of a column that is no feature what names it."""
    delay = config.delay
    roles = {schema.time: "time", delay.column: "--label-time", delay.key: "--label-key"}
    try:
        yield
    except SchemaError as error:
        raise in_terms_of_roles(error, roles) from error


def _later(first: float | None, second: float) -> float | None:
    """Return the later of two moments, of which the first may not be known; None where neither is."""
    latest = second if first is None else max(first, second)
    return latest if np.isfinite(latest) else None
