"""StreamWindows: the windows of a stream as encoded data, one at a time, on every rank.

    rank 0    look for files, or ask a broker ─► take rows ─► is the next window done? ─► encode it ─┐
    others    wait ─────────────────────────────────────────────────────────────────────────────────┴─► open it

The first window is the history. Vocabularies and statistics are fitted to it once and then kept: what a number or an id
means to the model does not change while it learns. Two encoded windows are on the disk at a time, the one that is open
and the next, which a thread encodes meanwhile (`encode_ahead.py`); a few of their chunks are in memory. With teachers a
window is encoded when it is opened: until then they may say more of it (`teachers.py`).
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.dataset import EncodedDataset, MemoryDataset
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.awaiting_labels import Truth
from ziggurat.data.streams.brokers import Broker, Reader, Waiting, broker_of, is_broker
from ziggurat.data.streams.finished_files import FinishedFiles
from ziggurat.data.streams.intake import Intake, Taken
from ziggurat.data.streams.journal import Window
from ziggurat.data.streams.label_intake import LabelIntake
from ziggurat.data.streams.late_labels import counts_in_words
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.stability import (
    COUNTS_FILE,
    HISTORY_NUMBER,
    Stability,
    WindowCounts,
    digest_of_counts,
)
from ziggurat.data.streams.windows import HISTORY, StreamConfig
from ziggurat.data.teachers.join import (
    TeacherJoin,
    with_empty_histories,
    with_teacher_columns,
    without_histories,
)
from ziggurat.errors import ConfigError, DataError, MissingFileError
from ziggurat.features.label_state import LabelState
from ziggurat.features.schema import Schema
from ziggurat.files.stores import DataPath
from ziggurat.runs.many_ranks import Ranks
from ziggurat.runs.quality.below_chance import some_rows
from ziggurat.runs.stream.encode_ahead import EncodeAhead, EncodedWindow
from ziggurat.runs.stream.gone import damaged, refuse_gone, refuse_shorter_journal
from ziggurat.runs.stream.history import batch_for_windows, doubts_about_history
from ziggurat.runs.stream.reader import LABELS_READER, KeptReader
from ziggurat.runs.stream.teachers import StreamTeachers
from ziggurat.runs.stream.window_encoder import (
    A_DAY_S,
    NO_ROWS,
    WindowEncoder,
    lessons_folder,
    window_folder,
    windows_folder,
)
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.windows import HistoryRows, TaughtRows
from ziggurat.training.report.progress import Progress

_NAP_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """Settings of how a stream waits for files.

    Args:
        poll_s: seconds between two looks.
        settle_s: seconds for which a file without an end of its own must stay as it is; see `finished_files.py`.
        idle_close_s: seconds without a row after which windows that are open are called done; 0: never.
    """

    poll_s: float = 1.0
    settle_s: float = 2.0
    idle_close_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StreamWindow:
    """A window of a stream that is ready to be scored and trained.

    Args:
        number: from 1 on; 1 is the history.
        name: for people.
        data: its encoded rows.
        late: rows of it that belong to windows before it.
        dropped: rows that belong to windows before it, and were dropped.
        bad: rows of it that were put aside.
        encode_s: seconds that encoding took, most of them while the window before was trained.
        stability: how far its features are from those of the history, and of the window before.
        wait_s: seconds for which the stream waited for it.
        watermark: time of the newest row that is trained with it; "" where none is, or the schema has no time.
        lessons: its encoded rows as they are trained, where labels are known later than rows; None: they are `data`.
        trained: rows of `lessons` by what is known of their labels.
        labelled: rows of `data` whose label is known at the end of the window; None: all are.
        is_settled: whether positives are trained no sooner than negatives of the same time.
        teachers: by name, what they said of its rows.
        histories: by teacher, what its rows read of the vectors.
        labels_ahead: rows of `data` whose label has a time of more than a day from now: they wait until then.
        awaits: whether labels of `data` come in records of their own; these are missing there.
        labels_until: the moment until which such labels may come; "" where none comes any more.
    """

    number: int
    name: str
    data: EncodedDataset
    late: int
    dropped: int
    bad: int
    stability: Stability
    encode_s: float
    wait_s: float
    watermark: str = ""
    lessons: EncodedDataset | None = None
    trained: Mapping[str, int] = field(default_factory=dict)
    labelled: int | None = None
    is_settled: bool = True
    teachers: dict[str, TaughtRows] = field(default_factory=dict)
    histories: dict[str, HistoryRows] = field(default_factory=dict)
    labels_ahead: int = 0
    awaits: bool = False
    labels_until: str = ""

    @property
    def training(self) -> EncodedDataset:
        """The rows that are trained with this window."""
        return self.data if self.lessons is None else self.lessons

    @property
    def has_fair_shares(self) -> bool:
        """False if too few labels are known to say how many rows are positives: positives alone, or none of them."""
        if self.lessons is None:
            return True
        if not self.lessons.num_rows:  # labels come later than the window ends
            return False
        known = self.trained[LabelState.KNOWN.value]
        corrected = self.trained[LabelState.CORRECTED.value]
        return corrected > 0 or (0 < known == sum(self.trained.values()) and self.is_settled)


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Facts that the first rank knows of an encoded window; see `StreamWindow`."""

    name: str
    late: int
    dropped: int
    bad: int
    stability: Stability
    encode_s: float
    watermark: str
    teachers: dict[str, TaughtRows]
    histories: dict[str, HistoryRows]
    labelled: int
    trained: dict[str, int]
    labels_ahead: int
    awaits: bool
    labels_until: str


class StreamWindows:
    """Gives the windows of a stream by their number; its methods are collective.

    Args:
        run: the folder of the stream.
        config: how rows are cut.
        data: files, and how they are read.
        schema: of the rows.
        ranks: all of them.
        progress: shows what is read and encoded.
        follow: how files are waited for; None: those that are there are all.
        takes_future: rows of more than a day from now are rows like others, and no bad ones.
        is_asked: whether somebody asks the first rank to end.
        labels: files, or a stream of a broker, with records of labels, where these have records of their own.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        config: StreamConfig,
        data: DataConfig,
        schema: Schema,
        ranks: Ranks,
        progress: Progress,
        follow: FollowConfig | None = None,
        takes_future: bool = False,
        is_asked: Callable[[], bool] = lambda: False,
        labels: Sequence[str] = (),
    ) -> None:
        self._follow = follow
        self._labels = tuple(labels)
        self._takes_future = takes_future
        self._last_came_s = time.monotonic()
        self._receiving: Receiving | None = None  # of rows
        self._label_intake: LabelIntake | None = None
        self._receiving_labels: Receiving | None = None
        broker = broker_of(data.train)
        label_broker = broker_of(self._labels, flag="--labels")
        self._finished = FinishedFiles(settle_s=0.0 if follow is None else follow.settle_s)
        self._said_waiting: tuple[str, ...] = ()
        self._run = run
        self._data = data
        self._delay = config.delay
        self._schema = schema
        self._ranks = ranks
        self._progress = progress
        self._encoder: WindowEncoder | None = None
        self._preprocessing: Preprocessing | None = None
        self._arrivals: Arrivals | None = None
        self._teachers: StreamTeachers | None = None
        self._ahead = EncodeAhead(self._encode_ahead)

        def begin() -> None:
            # What a killed process encoded is encoded again, to the same bits.
            shutil.rmtree(windows_folder(run), ignore_errors=True)
            has_begun = run.has_begun()
            if has_begun:
                refuse_gone(run)
            kept = None if broker is None else KeptReader(run.stream)
            kept_of_labels = None if label_broker is None else KeptReader(run.stream, file=LABELS_READER)
            if data.teacher and with_teacher_columns(schema):
                self._teachers = StreamTeachers(data.teacher, schema=schema, say=progress.say)
            self._arrivals = Arrivals(
                run.stream,
                config=config,
                data=data,
                schema=without_histories(schema),
                has_begun=has_begun,
                also=StreamTeachers.columns_beside(schema, self._teachers),
            )
            if has_begun:
                refuse_shorter_journal(run, self._arrivals)
            self._refuse_other_form_of_labels(label_broker)
            if broker is not None and kept is not None:
                kept.keep()  # where what arrived under other settings was removed
                self._receiving = self._received_from(
                    broker, data.train[0], kept, intake=self._arrivals, is_asked=is_asked
                )
            if label_broker is not None and kept_of_labels is not None:
                has_position = bool(self._arrivals.journal.label_files)
                kept_of_labels.read_from(self._labels[0], has_position=has_position)
                self._label_intake = LabelIntake(self._arrivals)
                self._receiving_labels = self._received_from(
                    label_broker, self._labels[0], kept_of_labels, intake=self._label_intake, is_asked=is_asked
                )
            if not has_begun:  # fitted by a start that died, perhaps to other rows
                shutil.rmtree(run.preprocessing, ignore_errors=True)

        ranks.on_first(begin)

    def _received_from(
        self, broker: Broker, url: str, kept: KeptReader, *, intake: Intake, is_asked: Callable[[], bool]
    ) -> Receiving:
        reader = Reader(
            name=kept.name,
            former=kept.former,
            covered=kept.acknowledged,
            say=self._progress.say,
            is_asked=is_asked,
        )
        return Receiving(
            broker,
            url,
            intake=intake,
            data=self._data,
            reader=reader,
            follows=self._follow is not None,
            note=kept.acknowledge,
            has_begun=bool(self._held.journal.files),
        )

    def _refuse_other_form_of_labels(self, broker: Broker | None) -> None:
        """Refuse files of labels in the place of messages, and the reverse: some would be missed between the two.

        Raises:
            ConfigError: the stream began with the other form.
        """
        before = self._held.journal.label_files
        if not before or bool(before[-1].position) == (broker is not None):
            return
        as_before = before[-1].path.rpartition("/")[0] or "."
        if before[-1].position:
            as_before = KeptReader(self._run.stream, file=LABELS_READER).url
        raise ConfigError(
            expected=f"labels from {'messages' if before[-1].position else 'files'}, as before",
            found=", ".join(self._labels),
            where=f"{self._run.stream}, --labels",
            ways_out=(f"--labels {as_before}", "begin another stream: --out ANOTHER_FOLDER"),
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """Vocabularies and statistics that were fitted to the history."""
        assert self._preprocessing is not None, "`fit` comes first"
        return self._preprocessing

    @property
    def reading(self) -> DataConfig:
        """Return the settings by which files are read."""
        return self._data

    def look(self) -> str:
        """Take the rows of new files; say what came."""
        return self._ranks.on_first(self._look)

    def _look(self) -> str:
        phase = ""

        def told(what: str, done: int, total: int | None) -> None:
            nonlocal phase
            if what != phase:
                self._progress.begin(what, total=total)
                phase = what
            self._progress.update(done, total=total)

        arrivals = self._held
        unlearned = arrivals.journal.unlearned
        taken = self._taken(told)
        if phase:
            self._progress.end()
        parts: list[str] = []
        if taken.files or taken.label_files:
            self._last_came_s = time.monotonic()
        if taken.files and self._receiving is not None:
            parts.append(f"{taken.rows:,} rows received{_behind(self._receiving.waiting())}")
        elif taken.files:
            parts.append(f"{taken.rows:,} rows of {taken.files:,} new file{'s' if taken.files > 1 else ''}")
        if taken.label_files and self._receiving_labels is not None:
            parts.append(f"{taken.labels:,} labels received{_behind(self._receiving_labels.waiting())}")
        elif taken.label_files:
            num_files = f"{taken.label_files:,} new file{'s' if taken.label_files > 1 else ''}"
            parts.append(f"{taken.labels:,} labels of {num_files}")
        if taken.label_counts:
            parts.append(f"labels {counts_in_words(taken.label_counts)}")
        if taken.lost:
            parts.append(f"warning: {taken.lost:,} messages before them were trimmed, and are lost")
        if taken.lost_labels:
            parts.append(f"warning: {taken.lost_labels:,} messages with labels were trimmed, and are lost")
        if taken.late:
            what = "trained in the window that they came in" if not arrivals.journal.dropped else "left out"
            parts.append(f"{taken.late:,} {'rows' if self._labels else 'of them'} late, {what}")
        if taken.left_out:
            parts.append(f"{taken.left_out:,} of them left out, from --until {arrivals.journal.config.until} on")
        if arrivals.journal.unlearned > unlearned:
            parts.append(self._shown_unlearned(arrivals.journal.unlearned - unlearned))
        if taken.bad:
            parts.append(f"{taken.bad:,} of them put aside below {self._run.stream}")
        if 2 * taken.bad_labels > taken.labels:
            # One bad record is an accident; of most of them the settings are wrong, and nothing else would say so.
            parts.append(
                f"warning: {taken.bad_labels:,} of {taken.labels:,} labels were put aside, so their rows count as "
                "negatives: are --label-key and --label-time the columns of labels, with times in the unit of the rows?"
            )
        if taken.newest_s > time.time() + A_DAY_S:
            # Taken because somebody said so: of made data.
            parts.append(
                f"warning: the newest is of {datetime.fromtimestamp(taken.newest_s, UTC):%Y-%m-%d %H:%M}, which is to "
                "come: windows before it are done, so rows that come for them later are late"
            )
        if taken.torn:
            names = ", ".join(taken.torn)
            parts.append(f"warning: without the end of a line at their end, as half a file is: {names}")
        if taken.again:
            parts.append(f"left out, as their content had come before: {', '.join(taken.again)}")
        return "; ".join(parts)

    def _taken(self, told: Callable[[str, int, int | None], None]) -> Taken:
        """Take what has come: rows first, then labels, of files or of a broker."""
        arrivals = self._held
        latest_s = self._latest_s
        counts = Counter(arrivals.journal.label_counts)
        found = Taken()
        if self._receiving_labels is not None:
            self._receiving_labels.connect()
        if self._receiving is not None:
            found += self._receiving.look(latest_s=latest_s, told=told)
        files, labels = self._files()
        if self._receiving is None or labels:
            found += arrivals.take(files, labels=labels, latest_s=latest_s, progress=told, closes=False)
        if self._receiving_labels is not None and self._label_intake is not None and self._label_intake.can_receive:
            found += self._receiving_labels.look(latest_s=latest_s, told=told)
        if self._delay.has_records:
            if found.files or found.label_files:
                # What waits in memory has come, too, and a window that is closed now may be its own.
                found += self._flushed()
            arrivals.close_windows()
        # Rows find labels that came before them, and a window that is closed those that no row is for.
        return replace(found, label_counts=dict(Counter(arrivals.journal.label_counts) - counts))

    def _flushed(self) -> Taken:
        """Take messages that wait in memory."""
        found = Taken()
        for receiving in (self._receiving, self._receiving_labels):
            if receiving is not None:
                found += receiving.flush(latest_s=self._latest_s)
        return found

    def _files(self) -> tuple[Sequence[DataPath], Sequence[DataPath]]:
        """All files of rows and all of labels that are there and whole."""
        rows = self._named_files(self._data.train if self._receiving is None else ())
        labels = self._named_files(self._labels if self._receiving_labels is None else ())
        if self._follow is None:
            return rows, labels
        # Once for both, for their names are shown together; a folder that is followed may have thousands of files.
        whole = set(self._whole_files([*rows, *labels]))
        return [path for path in rows if path in whole], [path for path in labels if path in whole]

    def _named_files(self, named: Sequence[str]) -> Sequence[DataPath]:
        """All files that are there."""
        try:
            return self._data.source(named).paths if named else ()
        except MissingFileError:
            # An empty folder of labels is one of which none has come; rows may come where they are waited for.
            may_be_empty = self._follow is not None or named is self._labels
            if not may_be_empty or not all(Path(folder).is_dir() for folder in named):
                raise
            return ()

    def _whole_files(self, paths: Sequence[DataPath]) -> Sequence[DataPath]:
        """Those of some files that nobody writes to any more."""
        found = self._finished.of(paths, known=self._held.knows)
        if self._finished.waiting and self._finished.waiting != self._said_waiting:
            self._progress.detail(f"not whole yet: {', '.join(self._finished.waiting)}")
        self._said_waiting = self._finished.waiting
        return found

    @property
    def _latest_s(self) -> float:
        """The latest time that a row may have: a later one would call all windows before it done."""
        return math.inf if self._takes_future else time.time() + A_DAY_S

    def fit(self) -> None:
        """Fit vocabularies and statistics to the history, or load what was fitted.

        Raises:
            DataError: there is no history.
        """
        if not self._ranks.on_first(self._run.preprocessing.exists):
            self._ranks.on_first(self._fit)
        self._preprocessing = load_preprocessing(self._run.preprocessing)
        if self._arrivals is not None:
            self._encoder = WindowEncoder(
                self._run,
                arrivals=self._arrivals,
                data=self._data,
                schema=self._schema,
                delay=self._delay,
                preprocessing=self._preprocessing,
                teachers=self._teachers,
            )

    def _fit(self) -> None:
        arrivals = self._held
        begin = arrivals.journal.config.begin
        if not arrivals.journal.done[:1] or (begin and not arrivals.journal.done[0].name.startswith("before")):
            first = arrivals.journal.done[0].name if arrivals.journal.done else "none"
            until = arrivals.journal.config.until
            left_out = sum(file.left_out for file in arrivals.journal.files)
            bad = sum(file.bad for file in arrivals.journal.files)
            parts = [f"{left_out:,} rows left out, from --until {until} on"] if left_out else []
            parts += [f"{bad:,} put aside below {self._run.stream}"] if bad else []
            parts += [f"{arrivals.num_held:,} rows wait for the end of their window"] if arrivals.num_held else []
            parts += [f"the first window with rows is {first}"]
            ways = ["a later moment: --until, or leave it out"] if left_out else []
            if arrivals.num_held:
                ways.append("give the same command again when rows and labels of a later window have come")
            ways += (
                ["a later moment: --from", "leave --from out: the first window is then the history"] if begin else []
            )
            more = ["name files with rows: --data.train"]
            if self._receiving is not None:
                more = ["give the same command again when rows were sent", "wait for the first ones: --follow"]
            raise DataError(
                expected=f"rows{f' before --from {begin}' if begin else ''}, to which vocabularies are fitted",
                found=f"none; {', '.join(parts)}",
                where=", ".join(self._data.train[:3]),
                ways_out=(*ways, *more),
            )
        if self._receiving is not None:
            self._receiving.refuse_unseen(arrivals.chunks(arrivals.journal.done[0]))
        self._progress.begin("fit", total=arrivals.journal.done[0].rows)
        with BadRows(self._data.bad_rows, folder=self._run.stream / "fit") as bad_rows:
            # Nothing is fitted to histories, which are joined when the window is opened.
            chunks = (with_empty_histories(each, self._schema) for each in arrivals.chunks(arrivals.journal.done[0]))
            fitted = Preprocessing.fit(self._schema, chunks, bad_rows=bad_rows)
        self._progress.end()
        shutil.rmtree(self._run.stream / "fit", ignore_errors=True)
        save_preprocessing(fitted, self._run.preprocessing)

    def is_done(self, number: int, *, is_over: bool) -> bool:
        """Return whether all rows of a window are there.

        Args:
            number: of the window.
            is_over: no more files come.
        """
        return self._ranks.on_first(lambda: self._is_done(number, is_over=is_over))

    def _is_done(self, number: int, *, is_over: bool) -> bool:
        arrivals = self._held
        if len(arrivals.journal.done) < number and self._is_quiet():
            is_over = True
        while len(arrivals.journal.done) < number:
            if not arrivals.finish_next(is_over=is_over):
                return False
        return True

    def _is_quiet(self) -> bool:
        """Return whether nothing has come for so long that open windows are called done."""
        if self._follow is None or not self._follow.idle_close_s:
            return False
        for_s = self._follow.idle_close_s
        receivings = [each for each in (self._receiving, self._receiving_labels) if each is not None]
        has_files = self._receiving is None or (self._labels and self._receiving_labels is None)
        if has_files and time.monotonic() - self._last_came_s < for_s:
            return False
        if not all(each.is_quiet(for_s) for each in receivings):
            return False
        self._flushed()
        return True

    def open(self, number: int) -> StreamWindow:
        """Open a window that is done on every rank, encoded before or now; all others but the next are gone then."""
        begin = time.perf_counter()
        told = self._ranks.on_first(lambda: to_json(self._ready(number)))
        facts = from_json(_Ready, told, where=f"window {number}", error=DataError)
        return StreamWindow(
            number=number,
            name=facts.name,
            data=EncodedDataset(window_folder(self._run, number)),
            late=facts.late,
            dropped=facts.dropped,
            bad=facts.bad,
            stability=facts.stability,
            encode_s=facts.encode_s,
            wait_s=time.perf_counter() - begin,
            watermark=facts.watermark,
            lessons=EncodedDataset(lessons_folder(self._run, number)) if self._delay.is_on else None,
            trained=facts.trained,
            labelled=facts.labelled if self._delay.is_on and not facts.awaits else None,
            is_settled=self._delay.attribution_s > 0.0,
            teachers=facts.teachers,
            histories=facts.histories,
            labels_ahead=facts.labels_ahead,
            awaits=facts.awaits,
            labels_until=facts.labels_until,
        )

    def open_ahead(self, number: int, *, is_over: bool) -> None:
        """Begin to encode a window in a thread, where all of its rows are there; not collective.

        Nothing is decided by it: which rows the window has is asked again when it is opened.

        Args:
            number: of the window after the one that was opened.
            is_over: no more files come.
        """
        # What a teacher says by the time at which a window is opened would be missed.
        if self._arrivals is None or self._teachers is not None:
            return
        window = self._arrivals.upcoming(number, is_over=is_over)
        if window is not None:
            self._ahead.begin(number, window)

    def close(self) -> None:
        """End the thread that encodes ahead, and the connection to a broker."""
        self._ahead.close()
        for receiving in (self._receiving, self._receiving_labels):
            if receiving is not None:
                receiving.close()

    def _ready(self, number: int) -> _Ready:
        window = Window(key=HISTORY, name="") if number == NO_ROWS else self._held.journal.done[number - 1]
        # What it was encoded from; labels may have become complete meanwhile.
        found = self._ahead.take(number, window.as_rows())
        if found is None:
            self._progress.begin(f"encode {window.name}", total=window.rows)
            found = self._encoding.encode(number, window, shown=self._progress.update)
            self._progress.end()
        for folder in windows_folder(self._run).iterdir():
            if folder not in (window_folder(self._run, number), lessons_folder(self._run, number)):
                shutil.rmtree(folder)
        stability = Stability()
        if number != NO_ROWS and window.rows:
            stability = self._compared(number, found.counts)
        return _Ready(
            name=window.name,
            late=window.late,
            dropped=window.dropped,
            bad=found.bad,
            stability=stability,
            encode_s=found.encode_s,
            watermark=found.watermark,
            teachers=found.teachers,
            histories=found.histories,
            labelled=found.labelled,
            trained=dict(found.trained),
            labels_ahead=found.labels_ahead,
            awaits=window.awaits,
            labels_until="" if number == NO_ROWS else self._held.labels_until(number),
        )

    def _compared(self, number: int, counts: dict[str, list[int]]) -> Stability:
        """Keep the counts of a window, and return how far they are from those of the history and the one before."""
        arrivals = self._held
        path = self._run.stream / COUNTS_FILE
        # Read at each window: the file is small, and of another process it says where that one stood.
        kept = WindowCounts.read(path)
        others = {HISTORY_NUMBER, number - 1} - {0, number}
        kept.check({other: arrivals.counted(other) for other in sorted(others)}, path=path)
        found = kept.add(number, counts, path=path, forgotten=arrivals.journal.forgotten)
        # Behind the file: the journal never asks for counts that a killed process did not come to keep.
        arrivals.keep_counted(number, digest_of_counts(counts))
        return found

    def _encode_ahead(self, number: int, window: Window, check: Callable[[], None]) -> EncodedWindow:
        # Nothing is shown: the display is that of the window which is scored and trained meanwhile.
        return self._encoding.encode(number, window, shown=lambda done: check())

    def waiting(self) -> str:
        """Say which rows of a stream that ends wait for the window in which they may be trained; "" where none do."""
        return self._ranks.on_first(self._waiting)

    def _waiting(self) -> str:
        held = self._held
        parts: list[str] = []
        if held.num_held:
            parts.append(f"labels of {held.num_held:,} rows may still come: their attribution window has not passed")
        if held.journal.label_counts:
            parts.append(f"labels {counts_in_words(held.journal.label_counts)} in all")
        if held.num_waiting:
            parts.append(
                f"{held.num_waiting:,} rows wait for windows in which their labels are known, "
                f"the last of them {held.last_waiting}"
            )
        if held.journal.unlearned:
            parts.append(f"{self._shown_unlearned(held.journal.unlearned)}, in all")
        return "; ".join(parts)

    def _shown_unlearned(self, count: int) -> str:
        """Say how many rows, or corrections of rows, are never trained; each counts once for each time."""
        until = self._held.journal.config.until
        return f"{count:,} rows are not trained, or not corrected: their labels are known from --until {until} on"

    # Of windows whose labels come in records of their own; the first rank has them, and none of these is collective.

    def truth(self, number: int) -> Truth | None:
        """Return the labels of a window; None where more of them may come."""
        return self._held.truth(number)

    def answered(self) -> dict[int, str]:
        """Return the digests of the scores of windows that wait for their labels, by number."""
        done = self._held.journal.done
        return {number: window.answers for number, window in enumerate(done, start=1) if window.answers}

    def keep_answers(self, number: int, digest: str) -> None:
        """Write down what the scores of a window are known by; "" once they wait no more."""
        self._held.keep_answers(number, digest)

    def sample(self, number: int) -> RawChunk | None:
        """Return the first raw rows of a window, on the first rank; None where they are gone."""
        window = self._held.journal.done[number - 1]
        return next(iter(self._held.chunks(window)), None)

    def histories_now(self) -> TeacherJoin | None:
        """Return what joins rows with the histories of now, on the first rank; None where the model reads none."""
        return None if self._teachers is None else self._teachers.histories_now(arrivals=self._held)

    def forget(self, number: int) -> None:
        """Remove the raw rows of all windows up to a number."""
        self._ranks.on_first(lambda: self._held.forget(number))

    def facts(self) -> dict[str, str]:
        """Say in lines what has arrived, for the start-up report."""
        return self._ranks.on_first(self._facts)

    def _facts(self) -> dict[str, str]:
        journal = self._held.journal
        num_files = journal.num_files
        bad = sum(file.bad for file in journal.files)
        left_out = sum(file.left_out for file in journal.files)
        waiting = [*journal.done, *journal.open]
        source = f"{num_files:,} raw file{'s' if num_files != 1 else ''}"
        lost = sum(file.lost for file in journal.files)
        lost_labels = sum(file.lost for file in journal.label_files)
        lines = {
            "rows": f"{self._held.num_rows:,} from {source if self._receiving is None else self._data.train[0]}",
            "split": f"windows by {journal.config.by}, {len(waiting):,} so far; vocabularies of {waiting[0].name}",
            "bad rows": f"{bad:,} without a time" if bad else "none",
        }
        if self._delay.is_on:
            lines["labels"] = f"{self._delay.policy.value}, known since {self._delay.column}"
            if self._delay.has_records:
                num_records = sum(file.rows for file in journal.label_files)
                lines["labels"] += f", {num_records:,} records of {', '.join(self._labels)} by {self._delay.key}"
        if left_out:
            lines["left out"] = f"{left_out:,} rows from {journal.config.until} on"
        if lost:
            lines["lost"] = f"{lost:,} messages that the broker had trimmed before they were read"
        if lost_labels:
            lines["lost labels"] = f"{lost_labels:,} messages that the broker had trimmed before they were read"
        return lines

    def refuse_no_rows(self, history: EncodedDataset | MemoryDataset) -> None:
        """Refuse a history without rows: a model that begins with it knows nothing.

        Raises:
            CheckpointError: its rows are gone, and so are all checkpoints.
            DataError: all of its rows were put aside.
        """
        if not history.num_rows:
            self._ranks.on_first(self._refuse_no_rows)

    def _refuse_no_rows(self) -> None:
        if self._held.journal.forgotten:
            raise damaged("a checkpoint of a stream that has begun", "none", where=self._run.checkpoints)
        window = self._held.journal.done[0]
        raise DataError(
            expected=f"rows of the history, {window.name}",
            found=f"none of {window.rows:,} that can be read",
            where=str(self._run.stream / "window-000001"),
            ways_out=(
                "look there at what was put aside, correct the rows or the schema, and give the same command again",
                "a longer history: --from MOMENT",
            ),
        )

    def doubts(self, history: EncodedDataset | MemoryDataset, *, batch_size: int) -> list[str]:
        """Return lines with reasons to begin with another history.

        Args:
            history: its encoded rows.
            batch_size: of all ranks together.
        """
        return self._ranks.on_first(lambda: self._doubts(history, batch_size=batch_size))

    def _doubts(self, history: EncodedDataset | MemoryDataset, *, batch_size: int) -> list[str]:
        journal = self._held.journal
        return doubts_about_history(
            some_rows(history),
            # Where labels are known later, one class alone is no surprise, and scores do not begin there.
            labels=() if self._delay.is_on else self.preprocessing.inputs.labels,
            delay=self._delay,
            windows=[*journal.done, *journal.open],
            folder=self._run.path,
            batch_size=batch_size,
        )

    def batch_size(self, given: int) -> int:
        """Return a batch size that fits the rows of the windows that are there.

        Args:
            given: of all ranks together, for windows of many rows.
        """

        def fitting() -> int:
            journal = self._held.journal
            return batch_for_windows([*journal.done, *journal.open], batch_size=given)

        return self._ranks.on_first(fitting)

    def acknowledge(self, number: int) -> None:
        """Tell the broker that a checkpoint contains the rows of all windows up to a number; on the first rank."""
        # Labels behind their rows: whoever takes over a row that was not acknowledged needs its label.
        is_known = self._receiving is None or self._receiving.acknowledge(number)
        if is_known and self._receiving_labels is not None:
            self._receiving_labels.acknowledge(number)

    @property
    def waits_for(self) -> str:
        """Return what a stream that is followed waits for."""
        sources = (*self._data.train, *self._labels)
        has_files = any(not is_broker(source) for source in sources)
        return f"{'files' if has_files else 'messages'}: {', '.join(sources)}"

    @property
    def _held(self) -> Arrivals:
        assert self._arrivals is not None, "the first rank alone has them"
        return self._arrivals

    @property
    def _encoding(self) -> WindowEncoder:
        assert self._encoder is not None, "the first rank alone has it, behind `fit`"
        return self._encoder

    def wait(self, *, is_asked: Callable[[], bool]) -> bool:
        """Wait a moment for files; return False if somebody asks the first rank to end."""
        return self._ranks.on_first(lambda: self._wait(is_asked))

    def _wait(self, is_asked: Callable[[], bool]) -> bool:
        assert self._follow is not None, "there is nothing to wait for"
        deadline = time.monotonic() + self._follow.poll_s
        while not is_asked() and time.monotonic() < deadline:
            time.sleep(min(_NAP_S, self._follow.poll_s))
        return not is_asked()


def _behind(waiting: Waiting) -> str:
    """Say how far a stream is behind, if it is."""
    parts: list[str] = []
    if waiting.messages:
        parts.append(f"{waiting.messages:,} messages wait")
    if waiting.behind_s and waiting.behind_s >= 1.0:
        parts.append(f"{waiting.behind_s:,.0f} s behind the newest one")
    return f" ({', '.join(parts)})" if parts else ""
