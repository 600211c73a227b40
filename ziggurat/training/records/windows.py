"""windows.jsonl of a stream: one line a window, written when it was scored and before it is trained.

    {"window": 3, "name": "2000-06", "step": 812, "rows": 61, "late": 0, "metrics": {"auc": 0.71, …}, …, "check": "…"}

`step` is that of the weights that scored the window. So a resumed stream cuts the file back as it cuts its log: lines
behind its checkpoint's step go, since those windows will be scored again, by the same weights; a line at or before it
stays, and its window is not scored a second time. `rows` and `row_sum` say what the ledger must hold of the window.
Where labels come behind the end of a window, its scores wait for them (`answers.py`), and the line is written then.

Each line has a check of its own, and is on the disk before a row of its window is trained. A line that a kill has torn
is the last one, and goes; a bad line before it is damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.errors import CheckpointError
from ziggurat.files import write_text
from ziggurat.files.checked_lines import append_line, checked_line, read_checked_lines
from ziggurat.plain import as_group

_SHOWN = 6
_A_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class TaughtRows:
    """Facts about what a teacher said of the rows of a window.

    Args:
        share: of the rows that it has scored.
        age: from the watermark of what it said to the row, the median of these rows: seconds, or what times count.
        oldest: the largest age.
        is_calendar: whether ages are in seconds.
        versions: of the teacher, that said it.
    """

    share: float
    age: float | None = None
    oldest: float | None = None
    is_calendar: bool = True
    versions: tuple[str, ...] = ()

    def age_text(self) -> str:
        """Return the median age for people; "" where it said nothing."""
        return _age_text(self.age, is_calendar=self.is_calendar)


@dataclass(frozen=True, kw_only=True)
class HistoryRows:
    """Facts about what the rows of a window read of a teacher's vectors of earlier rows.

    Args:
        share: of the rows that have a history.
        length: mean number of its vectors, of these rows.
        age: from its latest example to the row, the median of these rows: seconds, or what times count.
        is_calendar: whether the age is in seconds.
        versions: of the teacher, that wrote vectors of them.
    """

    share: float
    length: float = 0.0
    age: float | None = None
    is_calendar: bool = True
    versions: tuple[str, ...] = ()

    def age_text(self) -> str:
        """Return the median age for people; "" where no row has a history."""
        return _age_text(self.age, is_calendar=self.is_calendar)


def _age_text(age: float | None, *, is_calendar: bool) -> str:
    if age is None:
        return ""
    if not is_calendar:
        return f"{age:.4g} old"
    return f"{age / _A_DAY_S:.3g} days old" if age >= _A_DAY_S else f"{age / 3600:.3g} hours old"


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """A window of a stream.

    Args:
        window: its number, from 1 on; 1 is the history, which nothing scores.
        name: for people, such as 2000-05.
        step: of the weights that scored it.
        rows: of the window.
        late: rows of it that belong to windows before it.
        dropped: rows that came too late for windows before it and were left out, since the last one was done; they are
            none of its rows.
        bad: rows of it that were put aside.
        row_sum: sum of the mixed row ids that are trained with it, in hex; see `ledger.py`.
        is_trained: whether the window is trained after it was scored.
        watermark: time of the newest row that is trained with it; "" where none is, or the schema has no time.
        has_fractions: whether `watermark` has its fraction of a second, which older versions left out.
        metrics: by name; null where one is undefined.
        averaged: the same of the average of weights, where there is one.
        unknown: by feature, the share of samples whose id had no row.
        shift: by feature, the population stability index against the history; see `data/streams/stability.py`.
        shift_before: against the window before.
        trained: rows that are trained with it, by what is known of their labels (`label_delay.py`); empty where they
            are its own rows, whose labels are known.
        labelled: share of its rows whose label is known at its end; its metrics are of all of them, in hindsight. None
            where labels are known with their rows.
        labels_ahead: rows of it whose label has a time of more than a day from when it was read: they wait until then.
        labels_until: the moment until which its labels may come, of a window that is scored and has no metrics yet.
        teachers: by name, what they said of its rows, from which training learns and no metric.
        histories: by teacher, what its rows read of the vectors, in the test as in training.
        timing: what depends on the clock, in seconds.
    """

    window: int
    name: str
    step: int
    rows: int
    late: int = 0
    dropped: int = 0
    bad: int = 0
    row_sum: str = "0"
    is_trained: bool = True
    watermark: str = ""
    has_fractions: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)
    averaged: dict[str, float | None] = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)
    shift: dict[str, float] = field(default_factory=dict)
    shift_before: dict[str, float] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)
    labelled: float | None = None
    labels_ahead: int = 0
    labels_until: str = ""
    teachers: dict[str, TaughtRows] = field(default_factory=dict)
    histories: dict[str, HistoryRows] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def trained_rows(self) -> int:
        """Rows that are trained with it, those that are trained once more included."""
        if not self.is_trained:
            return 0
        return sum(self.trained.values()) if self.trained else self.rows


def read_windows(path: Path) -> list[WindowRecord]:
    """All windows of a file, in order; without a last line that is torn.

    Raises:
        CheckpointError: a line before the last one is damaged.
    """
    ways_out = ("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER")
    lines = read_checked_lines(path, error=CheckpointError, ways_out=ways_out)
    return [
        from_json(WindowRecord, line, where=f"{path}, line {number}", error=CheckpointError)
        for number, line in enumerate(lines, start=1)
    ]


class WindowsFile:
    """Appends windows, after cutting the file back to the step where a stream goes on.

    Args:
        path: the file.
        last_step: keep windows that were scored at this step or before.
        last_window: of which a row was trained at this step; each up to it was scored before, and must have a line.
        waiting: numbers of windows that were scored, and whose line waits for their labels.

    Raises:
        CheckpointError: a line is damaged, gone, or there twice.
    """

    def __init__(self, path: Path, *, last_step: int, last_window: int = 0, waiting: Collection[int] = ()) -> None:
        self._path = path
        before = read_windows(path)
        self.windows = [record for record in before if record.step <= last_step]
        doubled = sorted(
            number for number, count in Counter(record.window for record in self.windows).items() if count > 1
        )
        if doubled:
            raise CheckpointError(
                expected="one line for each window: it is scored once",
                found=f"several of window {', '.join(map(str, doubled[:_SHOWN]))}"
                f"{', …' if len(doubled) > _SHOWN else ''}",
                where=str(path),
                ways_out=("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
            )
        gone = sorted(set(range(1, last_window + 1)) - {record.window for record in self.windows} - {*waiting})
        if gone:
            raise CheckpointError(
                expected=f"a line for each window up to {last_window}: they were scored before they were trained",
                found=f"none of window {', '.join(map(str, gone[:_SHOWN]))}{', …' if len(gone) > _SHOWN else ''}",
                where=str(path),
                ways_out=("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
            )
        if path.exists():
            write_text(path, "".join(_line(record) for record in self.windows))

    def append(self, record: WindowRecord) -> None:
        """Add a window; it is on the disk when this returns."""
        self.windows.append(record)
        append_line(self._path, _line(record))


def _line(record: WindowRecord) -> str:
    return checked_line(as_group(to_json(record)))
