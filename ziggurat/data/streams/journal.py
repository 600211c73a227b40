"""Journal: everything that is known of a stream, kept as a file of its state and a file of what has changed since.

    stream.json     the state, and how many changes it has in it
    stream.jsonl    a line for each change since: a file that was taken, a window that was done, …

    state ◄── apply(change) ◄── `commit`: one line              state + changes, when read again: the same state

A folder that is followed brings thousands of small files. If each of them wrote the whole state, whose size is that of
all files before it, n files would write O(n²) bytes. So a change is appended, and the state is written when the
lines since are as long as the state: all writes together are at most three times the changes. In memory and from the
file, a change goes through the same `apply`.

A line has a number and a check (`files/checked_lines.py`). It holds everything that belongs together, and is there as a
whole or not at all: a torn last line is cut off. Lines that the state has in it, because a process was killed between
writing the state and emptying the file of lines, are known by their numbers.

Cost: a line of about 500 bytes a file and 100 a window.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.data.streams.windows import Clock, StreamConfig
from ziggurat.data.teachers.growing import JoinedPart
from ziggurat.errors import CheckpointError
from ziggurat.features.label_state import LabelState
from ziggurat.files import Format, write_text
from ziggurat.files.checked_lines import append_line, checked_line, read_checked_lines
from ziggurat.plain import JSON, as_group, as_list

_WAYS_OUT = ("restore the folder from a copy", "begin the stream anew in another folder")
JOURNAL_FILE = "stream.json"
JOURNAL = Format(
    name="ziggurat.stream",
    what="the journal of a stream",
    # A Ziggurat that knows nothing of lines would take the state for all that was.
    version=2,
    # Paths of copies that were left out: a copy is known by its content now, which is digested once more.
    migrations={
        1: lambda content: {"applied": 0, "state": {name: each for name, each in content.items() if name != "again"}}
    },
    error=CheckpointError,
    ways_out=_WAYS_OUT,
    max_bytes=1 << 30,
)
_MIN_BYTES = 1 << 16  # of lines, before the state is written anew


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a window that arrived together.

    Args:
        file: number of the raw file that they are from.
        part: file below `arrived/`.
        group: row group of it.
        rows: how many.
        state: what is known of their labels, of rows that are to be trained; None of those that are to be scored, and
            trained with them where labels are known at once.
    """

    file: int
    part: str
    group: int
    rows: int
    state: LabelState | None = None


@dataclass(kw_only=True)
class Window:
    """A window whose rows arrive, or all of them have.

    Args:
        key: number that rises with time.
        name: for people.
        rows: in all.
        late: rows among them that belong to windows before it.
        pieces: where its rows lie; none once they are gone.
        dropped: rows that came too late for windows before it, and were dropped, since the last one was done.
        labelled: a count of journals from before, which nothing reads.
        lessons: where the rows lie that are trained with it, where these are others than its own.
        joined: parts of a side table that gave its rows the scores of a teacher; None before it was first joined.
        counted: digest of the counts of its values that later windows are compared with; "" before it was counted.
        awaits: whether its labels come in records of their own, behind its end; its pieces have none.
        answers: digest of the scores that it was given at its end, which wait for these labels; "" before that.
        truth: file below `arrived/` with its labels, once they are complete; "" before that.
    """

    key: int
    name: str
    rows: int = 0
    late: int = 0
    pieces: list[Piece] = field(default_factory=list)
    dropped: int = 0
    labelled: int = 0
    lessons: list[Piece] = field(default_factory=list)
    joined: list[JoinedPart] | None = None
    counted: str = ""
    awaits: bool = False
    answers: str = ""
    truth: str = ""

    def as_rows(self) -> Window:
        """Return a copy with what is known of its rows, and nothing of their scores and labels."""
        copied = dataclasses.replace(self, pieces=[*self.pieces], lessons=[*self.lessons])
        copied.answers = ""
        copied.truth = ""
        return copied

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add rows."""
        for piece in pieces:
            self.pieces.append(piece)
            self.rows += piece.rows


@dataclass(kw_only=True)
class HeldRows:
    """Rows of a window that wait for records of their labels; see `awaiting_labels.py`.

    Args:
        pieces: where they lie, in the order of their arrival.
        oldest: the first of their times, in the units of the time column.
        newest: the last of them.
        num_closed: pieces, from the first on, that belong to windows which are closed.
        last: key of the window in which the last of these are scored; None before one is.
    """

    pieces: list[Piece]
    oldest: float
    newest: float
    num_closed: int = 0
    last: int | None = None


@dataclass(frozen=True, kw_only=True)
class LabelLog:
    """A file below `arrived/` with the keys of rows, or with records of labels, from which memory is filled again.

    Args:
        part: its name.
        is_of_rows: whether it has keys of rows.
        newest: the last of its times.
    """

    part: str
    is_of_rows: bool
    newest: float


@dataclass(frozen=True, kw_only=True)
class ArrivedFile:
    """A raw file whose rows were taken.

    Args:
        path: of the file.
        place: where it lies, without links.
        num_bytes: its size.
        tag: what changes when it is written: its time, or its version in a store.
        sha256: of its content.
        first_row: number of its first row over all files, in order of their arrival.
        rows: of the file.
        late: rows that came too late.
        left_out: rows from --until on.
        bad: rows that were put aside.
        position: of a broker, behind these rows, which are none of a file; "" of a file.
        lost: messages before them that the broker no longer had.
        oldest: the first of the times of its rows, where these wait for records of their labels; else None.
        newest: the last of the times of its records of labels; None of rows.
    """

    path: str
    place: str
    num_bytes: int
    tag: str
    sha256: str
    first_row: int
    rows: int
    late: int = 0
    left_out: int = 0
    bad: int = 0
    position: str = ""
    lost: int = 0
    oldest: float | None = None
    newest: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a journal: those of its fields that are given.

    Args:
        clock: of the times of the stream.
        file: that was taken.
        arrived: rows of it, by window: key, name and pieces.
        late: rows of it that came too late.
        dropped: so many more rows came too late, and were dropped.
        newest: the latest time of its rows in each window of rows, by its key.
        num_dealt: rows that windows of N rows were dealt, by now.
        copies: files whose content had arrived before, under another name.
        is_done: the oldest open window, with the late rows, is done; where none is open, `last` is.
        last: key and name of a window of late rows alone.
        by_state: its lessons are in order of their states; False in journals from before they were.
        done_until: the latest time of windows of rows that are done, by now.
        forgotten: windows whose rows are gone, by now.
        lessons: rows of it that are to be trained, by the key of the window in which they may be.
        unlearned: so many more rows may be trained behind --until alone.
        joined_window: number of a window that was joined with what its teachers say.
        joined: the parts of their side table that gave it a score.
        counted_window: number of a window whose values were counted.
        counted: digest of the counts.
        held: rows that wait for records of their labels, by the key of their window.
        released: key of the window whose rows wait no longer; of journals from before windows were closed at their end.
        closed: key of the window that is closed: rows that wait in it, or in one before it, belong to windows now.
        closed_until: moment before which labels were complete then: its end, or an earlier one where no more came.
        reheld: pieces of rows that wait, by the key of their window, in the place of those of before.
        let_go: keys of windows whose rows wait for nothing any more.
        answered_window: number of a window that was scored, and whose labels come later.
        answers: digest of its scores.
        truth_window: number of a window whose labels are complete.
        truth: file with its labels.
        label_file: a file of labels that was taken.
        log: of keys of rows, or of records of labels.
        newest_row: time of the newest row that has come, by now.
        newest_record: time of the newest record of a label, by now.
        rows_before: keys of rows of before that moment are forgotten, by now.
        records_before: records of labels of before that moment are forgotten, by now.
        label_counts: so many more records of labels, by what became of them.
        digests: SHA-256 of files below `arrived/` that were written.
        undigested: files below `arrived/` that nothing needs any more.
    """

    clock: Clock | None = None
    file: ArrivedFile | None = None
    arrived: list[Window] = field(default_factory=list)
    late: list[Piece] = field(default_factory=list)
    dropped: int = 0
    newest: dict[str, float] = field(default_factory=dict)
    num_dealt: int | None = None
    copies: list[ArrivedFile] = field(default_factory=list)
    is_done: bool = False
    last: Window | None = None
    by_state: bool = False
    done_until: float | None = None
    forgotten: int | None = None
    lessons: dict[str, list[Piece]] = field(default_factory=dict)
    unlearned: int = 0
    joined_window: int | None = None
    joined: list[JoinedPart] = field(default_factory=list)
    counted_window: int | None = None
    counted: str = ""
    held: dict[str, HeldRows] = field(default_factory=dict)
    released: int | None = None
    closed: int | None = None
    closed_until: float | None = None
    reheld: dict[str, list[Piece]] = field(default_factory=dict)
    let_go: list[int] = field(default_factory=list)
    answered_window: int | None = None
    answers: str = ""
    truth_window: int | None = None
    truth: str = ""
    label_file: ArrivedFile | None = None
    log: LabelLog | None = None
    newest_row: float | None = None
    newest_record: float | None = None
    rows_before: float | None = None
    records_before: float | None = None
    label_counts: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    undigested: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Journal:
    """Everything that is known of a stream.

    Args:
        config: its settings.
        reading: digest of how files are read, and of the columns that are kept.
        clock: of its times; None before the first row.
        files: in order of their arrival.
        copies: files whose content had arrived before under another name, as they were then.
        done: windows that are done, in order; number 1 is the first, the history.
        open: windows whose rows still arrive, in order of time.
        late: rows that came too late, and wait for the next window.
        dropped: rows that came too late and were dropped, in all.
        num_counted: rows among these that windows which are done have counted.
        num_dealt: rows that windows of N rows were dealt.
        done_until: the latest time of windows of rows that are done.
        newest: the latest time of each window of rows that is open, by its key.
        forgotten: windows, from the first on, whose rows are gone, because no checkpoint needs them.
        num_folded: records of received rows that became one, because their rows are gone: it is the first of `files`.
        lessons: rows that windows to come are to be trained on, by the key of that window.
        unlearned: rows whose moment to be trained is behind --until.
        also: columns that are kept beside those of the schema.
        held: rows that wait for records of their labels, by the key of their window.
        released: key of the last window that is closed; None before the first.
        closed_until: moment before which labels were complete when it was closed; None where that is its end, as in
            journals from before.
        num_released: times that a window was closed.
        label_files: files of labels, in order of their arrival.
        num_labels_folded: records of received labels that became one, the first of `label_files`, as `num_folded`.
        logs: of keys of rows and records of labels that are needed, in order of their arrival.
        newest_row: time of the newest row, where labels have records of their own.
        newest_record: time of the newest record of a label.
        rows_before: keys of rows of before that moment are forgotten.
        records_before: records of labels of before that moment are forgotten.
        label_counts: records of labels, by what became of them.
        digests: SHA-256 of files below `arrived/`, by their names; of journals from before these were kept, of those
            files alone that came since.
    """

    config: StreamConfig
    reading: str = ""
    clock: Clock | None = None
    files: list[ArrivedFile] = field(default_factory=list)
    copies: list[ArrivedFile] = field(default_factory=list)
    done: list[Window] = field(default_factory=list)
    open: list[Window] = field(default_factory=list)
    late: list[Piece] = field(default_factory=list)
    dropped: int = 0
    num_counted: int = 0
    num_dealt: int = 0
    done_until: float | None = None
    newest: dict[str, float] = field(default_factory=dict)
    forgotten: int = 0
    num_folded: int = 0
    lessons: dict[str, list[Piece]] = field(default_factory=dict)
    unlearned: int = 0
    also: list[str] = field(default_factory=list)
    held: dict[str, HeldRows] = field(default_factory=dict)
    released: int | None = None
    closed_until: float | None = None
    num_released: int = 0
    label_files: list[ArrivedFile] = field(default_factory=list)
    num_labels_folded: int = 0
    logs: list[LabelLog] = field(default_factory=list)
    newest_row: float | None = None
    newest_record: float | None = None
    rows_before: float | None = None
    records_before: float | None = None
    label_counts: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def num_files(self) -> int:
        """Files that have arrived, and times that rows of a broker did."""
        return len(self.files) + max(self.num_folded - 1, 0)

    @property
    def num_label_files(self) -> int:
        """Files of labels that have arrived, and times that labels of a broker did."""
        return len(self.label_files) + max(self.num_labels_folded - 1, 0)

    def file(self, number: int) -> ArrivedFile:
        """Return the record of a number; of one that was folded the one that it became."""
        return self.files[max(number - max(self.num_folded - 1, 0), 0)]

    def apply(self, change: Change) -> None:
        """Make a change; its cost is that of the change, whatever is known already."""
        self.digests |= change.digests
        for part in change.undigested:
            self.digests.pop(part, None)
        if change.clock is not None:
            self.clock = change.clock
        if change.file is not None:
            self.files.append(change.file)
        for window in change.arrived:
            # Windows are finished from the front, and rows of an older one may arrive after those of a newer.
            place = bisect.bisect_left(self.open, window.key, key=lambda each: each.key)
            if place == len(self.open) or self.open[place].key != window.key:
                self.open.insert(place, Window(key=window.key, name=window.name, awaits=window.awaits))
            self.open[place].add(window.pieces)
        for key, pieces in change.lessons.items():
            self.lessons.setdefault(key, []).extend(pieces)
        self.unlearned += change.unlearned
        self.late += change.late
        self.dropped += change.dropped
        for key, time in change.newest.items():
            self.newest[key] = max(self.newest.get(key, time), time)
        if change.num_dealt is not None:
            self.num_dealt = change.num_dealt
        self.copies += change.copies
        if change.is_done:
            last = self.open.pop(0) if change.last is None else change.last
            window = self.with_late(last, by_state=change.by_state)
            self.newest.pop(str(window.key), None)
            self.late = []
            self.num_counted = self.dropped
            for key in self._keys_of_lessons(window):
                del self.lessons[key]
            self.done.append(window)
        if change.done_until is not None:
            self.done_until = change.done_until
        if change.forgotten is not None:
            # Windows before `forgotten` have given their rows away already.
            for window in self.done[self.forgotten : change.forgotten]:
                window.pieces = []
                window.lessons = []
                window.joined = None
                window.awaits = False
                window.truth = ""
            self.forgotten = change.forgotten
            if self.files and self.files[0].position:
                self._fold()
            self._fold_labels()
        if change.joined_window is not None:
            self.done[change.joined_window - 1].joined = change.joined
        if change.counted_window is not None:
            self.done[change.counted_window - 1].counted = change.counted
        self._apply_labels(change)

    def _apply_labels(self, change: Change) -> None:
        """Make what a change says of labels that have records of their own."""
        for key, more in change.held.items():
            held = self.held.get(key)
            if held is None:
                self.held[key] = dataclasses.replace(more, pieces=[*more.pieces])
                continue
            held.pieces += more.pieces
            held.oldest = min(held.oldest, more.oldest)
            held.newest = max(held.newest, more.newest)
        if change.released is not None:
            del self.held[str(change.released)]
            self.released = change.released if self.released is None else max(self.released, change.released)
            self.num_released += 1
        for key, pieces in change.reheld.items():
            self.held[key].pieces = [*pieces]
        if change.closed is not None:
            for key, held in self.held.items():
                if int(key) <= change.closed and held.num_closed < len(held.pieces):
                    held.num_closed = len(held.pieces)
                    held.last = change.closed
            self.released = change.closed
            self.closed_until = change.closed_until
            self.num_released += 1
        for key in change.let_go:
            del self.held[str(key)]
        if change.answered_window is not None:
            self.done[change.answered_window - 1].answers = change.answers
        if change.truth_window is not None:
            self.done[change.truth_window - 1].truth = change.truth
        if change.label_file is not None:
            self.label_files.append(change.label_file)
        if change.log is not None:
            self.logs.append(change.log)
        if change.newest_row is not None:
            self.newest_row = change.newest_row
        if change.newest_record is not None:
            self.newest_record = change.newest_record
        if change.rows_before is not None:
            self.rows_before = change.rows_before
            self.logs = [log for log in self.logs if not log.is_of_rows or log.newest >= change.rows_before]
        if change.records_before is not None:
            self.records_before = change.records_before
            self.logs = [log for log in self.logs if log.is_of_rows or log.newest >= change.records_before]
        for name, count in change.label_counts.items():
            self.label_counts[name] = self.label_counts.get(name, 0) + count

    def first_awaiting(self) -> int | None:
        """Return the number of the first window that is done and whose labels are not complete; None where none is."""
        for number, window in enumerate(self.done[self.forgotten :], start=self.forgotten + 1):
            if window.awaits and not window.truth:
                return number
        return None

    def first_needed(self, number: int) -> int:
        """Return the number of the first record of which a row is needed behind a window: late and waiting ones, too.

        Args:
            number: of a window.
        """
        windows = (*self.done[number:], *self.open)
        pieces = (piece for window in windows for piece in (*window.pieces, *window.lessons))
        waiting = [piece for lessons in self.lessons.values() for piece in lessons]
        waiting += [piece for held in self.held.values() for piece in held.pieces]
        return min((piece.file for piece in (*pieces, *waiting, *self.late)), default=self.num_files)

    def labels_covered(self, number: int) -> int:
        """Return how many records of `label_files`, from the first on, are of labels that no row needs behind a window.

        A label is needed while its row is: those of rows that are needed have no time before them. And it is needed
        while its row may still come.

        Args:
            number: of the window.
        """
        if self.records_before is None:
            return 0
        first = self.first_needed(number)
        shift = self.num_files - len(self.files)
        times = [file.oldest for file in self.files[max(first - shift, 0) :] if file.oldest is not None]
        before = min([self.records_before, *times])
        return next(
            (at for at, file in enumerate(self.label_files) if file.newest is not None and file.newest >= before),
            len(self.label_files),
        )

    def _fold_labels(self) -> None:
        """Make one record of those at the beginning that are of received labels, none of which is needed."""
        # The newest stays as it is: it has the position.
        gone = self.label_files[: min(self.labels_covered(self.forgotten), len(self.label_files) - 1)]
        if len(gone) < 2 or not all(file.position for file in gone):
            return
        self.num_labels_folded = self.num_label_files - len(self.label_files) + len(gone)
        self.label_files = [_folded(gone), *self.label_files[len(gone) :]]

    def _fold(self) -> None:
        """Make one record of those at the beginning that are of received rows, all of which are gone."""
        shift = self.num_files - len(self.files)
        # The newest stays as it is: it has the position.
        gone = self.files[: max(min(self.first_needed(self.forgotten), self.num_files - 1) - shift, 0)]
        if len(gone) < 2 or not all(file.position for file in gone):
            return
        self.num_folded = shift + len(gone)
        self.files = [_folded(gone), *self.files[len(gone) :]]

    def with_late(self, window: Window, *, by_state: bool = True) -> Window:
        """Return a copy of a window with what came too late for those before it, and with its lessons.

        Args:
            window: that is done, or would be.
            by_state: put its lessons in order of their states: in that of their arrival they depend on how rows were
                cut into files, or into the messages that were taken together, which for the same rows may be otherwise
                after a kill.
        """
        late = sum(piece.rows for piece in self.late)
        lessons: list[Piece] = []
        for key in self._keys_of_lessons(window):
            of_key = self.lessons[key]
            # Stable: those of one state stay in the order of their rows.
            lessons += sorted(of_key, key=_number_of_state) if by_state else of_key
        dropped = self.dropped - self.num_counted
        found = dataclasses.replace(window, pieces=[*window.pieces], late=late, dropped=dropped, lessons=lessons)
        found.awaits = found.awaits or (bool(late) and self.config.delay.has_records)
        found.add(self.late)
        return found

    def _keys_of_lessons(self, window: Window) -> list[str]:
        """Return the keys of lessons that a window has if it is done: its own, and those of before that are left.

        These are of rows that came late, and of labels of hours in which no row came.
        """
        return [key for key in sorted(self.lessons, key=int) if int(key) <= window.key]


def _number_of_state(piece: Piece) -> int:
    return -1 if piece.state is None else piece.state.number


def _folded(files: Sequence[ArrivedFile]) -> ArrivedFile:
    """Return one record of several, with the position of the last."""
    return dataclasses.replace(
        files[-1],
        first_row=files[0].first_row,
        rows=sum(file.rows for file in files),
        late=sum(file.late for file in files),
        left_out=sum(file.left_out for file in files),
        bad=sum(file.bad for file in files),
        lost=sum(file.lost for file in files),
    )


class JournalFile:
    """Reads and writes a journal; one process does.

    Args:
        folder: of its two files.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        self._lines = folder / "stream.jsonl"
        self._applied = 0  # changes that were written, in all
        self._num_bytes = 0  # of the lines since the state was written
        self._state_bytes = 0
        self._is_cut = False  # no torn line is at the end

    def read(self) -> Journal | None:
        """Return the journal that is there, if there is one.

        Raises:
            CheckpointError: it is damaged.
        """
        if not self.path.exists():
            return None
        content = as_group(JOURNAL.read(self.path))
        where = str(self.path)
        journal = from_json(Journal, content["state"], where=where, error=CheckpointError)
        self._applied = int(content["applied"])  # type: ignore[arg-type]
        self._state_bytes = self.path.stat().st_size
        for number, line in enumerate(
            read_checked_lines(self._lines, error=CheckpointError, ways_out=_WAYS_OUT), start=1
        ):
            found = line["number"]
            assert isinstance(found, int)
            if found <= self._applied:
                continue
            where = f"{self._lines}, line {number}"
            if found != self._applied + 1:
                raise CheckpointError(
                    expected=f"change {self._applied + 1:,} of the stream",
                    found=f"change {found:,}: lines are missing",
                    where=where,
                    ways_out=_WAYS_OUT,
                )
            for change in as_list(line["changes"]):
                journal.apply(from_json(Change, change, where=where, error=CheckpointError))
            self._applied = found
        return journal

    def write(self, journal: Journal, changes: Sequence[Change], *, durable: bool = True) -> None:
        """Write changes that were applied to a journal, all or none.

        Args:
            journal: with the changes.
            changes: since the last call.
            durable: they are on the disk when this returns; False: they outlive the process, and not a power cut.
        """
        is_new = not self._state_bytes
        self._applied += 1
        line = checked_line({"number": self._applied, "changes": [_brief(each) for each in changes]})
        self._num_bytes += len(line)
        if is_new or not self._is_cut or self._num_bytes > max(self._state_bytes, _MIN_BYTES):
            self._write_state(journal)
            return
        append_line(self._lines, line, durable=durable)

    def _write_state(self, journal: Journal) -> None:
        JOURNAL.write(self.path, {"applied": self._applied, "state": to_json(journal)})
        # A kill in between leaves lines that the state has in it; their numbers say so.
        write_text(self._lines, "")
        self._state_bytes = self.path.stat().st_size
        self._num_bytes = 0
        self._is_cut = True


def _brief(change: Change) -> JSON:
    """Return a change as plain data, without the fields that nothing was given for."""
    nothing = to_json(Change())
    return {name: value for name, value in to_json(change).items() if value != nothing[name]}
