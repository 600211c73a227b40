"""Watermark of a run: the time of the newest row that its weights have seen, by training or by choosing among them.

    rows of the run itself     training and validation rows of its raw files; of a stream its trained windows
    rows of its ancestors      warm_start.json keeps the watermark of each, read when the run began from its parent
    ────────────────────────── the latest of all

A run that begins from the weights of another one knows what that one has learned, and so on. The watermark of each
ancestor is written down when the run begins, so it stays known when the parent or its data is gone. Where one is not
known, none is guessed: whoever asks is told to name the moment. A moment that is named and is before one of those that
are known is refused.

A student of a teacher needs nothing more. A row is joined with versions whose watermark is before the row's time alone,
so whatever the teacher has learned is older than a row that the student was trained on.

Cost: the time column of the raw files is read once more, and the row numbers of the encoded rows.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ziggurat.config import from_json
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.order_of_dates import order_of_dates
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.windows import Clock
from ziggurat.data.teachers.side_table import times_of
from ziggurat.errors import ConfigError, DataError, MissingFileError, ZigguratError
from ziggurat.features.schema import Schema
from ziggurat.runs.data_record import DataRecord, files_with_roles, raw_file, refuse_other_data
from ziggurat.training.records.answers import read_scored_windows
from ziggurat.training.records.run_folder import PRODUCTS, WARM_START, Ancestor, RunFolder
from ziggurat.training.records.windows import WindowRecord
from ziggurat.training.report.progress import Progress

WATERMARK_KEY = "watermark"
"""Name in products.json of what a packed run keeps of a stream."""
_WANTED = "the time of the newest row that the run has learned from: nothing of later may teach"
_WAYS_OUT = (
    "name it: --watermark 2026-01-31T18:00",
    "where times count from a moment of their own: --watermark 1000",
)


@dataclass(frozen=True, kw_only=True)
class Watermark:
    """The time of a newest row.

    Args:
        time: seconds since 1970, or what the time column counts.
        is_calendar: whether it is in seconds since 1970.
    """

    time: float
    is_calendar: bool

    @staticmethod
    def of_text(text: str, *, flag: str) -> Watermark:
        """Return the moment of a text: a number, or a date.

        Raises:
            ConfigError: it is neither.
        """
        try:
            return Watermark(time=float(text), is_calendar=False)
        except ValueError:
            return Watermark(time=Clock(per_second=1).moment(text, flag=flag), is_calendar=True)

    def text(self) -> str:
        """Return the time for a person."""
        return Clock(per_second=1 if self.is_calendar else 0).shown(self.time)

    def flag(self) -> str:
        """Return the time as the flag --watermark takes it."""
        return f"--watermark {self.text().replace(' ', 'T')}"


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run whose newest row is looked for.

    Args:
        folder: of the run.
        step: of its weights.
        schema: of its rows.
        began_from: the run that its settings name as its parent; "" for none.
        files: returns its data settings with real paths.
        prepared: returns its encoded rows, which are made again if they are not there.
    """

    folder: RunFolder
    step: int
    schema: Schema
    began_from: str
    files: Callable[[], DataConfig]
    prepared: Callable[[], PreparedData]


def watermark_of(run: TrainedRun, *, progress: Progress) -> Watermark:
    """Return the watermark of a run, that of all of its ancestors included.

    Raises:
        ConfigError, DataError: that of the run or of an ancestor is not known, or two count from other moments.
    """
    return _latest([find() for find in _found_by(run, progress=progress)], folder=run.folder)


def given_watermark(text: str, run: TrainedRun, *, progress: Progress) -> Watermark:
    """Return the watermark that somebody names for a run.

    Args:
        text: the moment.
        run: of which it is said.
        progress: says what the moment could not be compared with.

    Raises:
        ConfigError: it is no moment, or is before a row that the run is known to have learned from: what the run says
            of the rows between would know their answers.
    """
    given = Watermark.of_text(text, flag="--watermark")
    known: list[Watermark] = []
    for find in _found_by(run, progress=progress):
        try:
            known.append(find())
        except (ZigguratError, OSError) as error:
            # Whoever names a moment does so because one is not known.
            progress.end()
            reason = error.found if isinstance(error, ZigguratError) else str(error)
            progress.say(f"--watermark {text} is taken as it is given: {reason}")
    alike = [each for each in known if each.is_calendar == given.is_calendar]
    latest = max(alike or known, key=lambda each: each.time, default=given)
    if latest.is_calendar != given.is_calendar:
        raise ConfigError(
            expected=f"a watermark that counts as the times of the rows do: the newest one is {latest.text()}",
            found=f"--watermark {text}",
            where=str(run.folder.path),
            ways_out=(latest.flag(), "leave --watermark out"),
        )
    if given.time < latest.time:
        raise ConfigError(
            expected=f"a watermark that is not before the newest row that the run has learned from, {latest.text()}",
            found=f"--watermark {text}: what the run says of the rows between knows their answers",
            where=str(run.folder.path),
            ways_out=(
                "leave --watermark out",
                f"name that moment, or a later one: {latest.flag()}",
                "where the clock of that row was wrong, train the teacher again without it",
            ),
        )
    return given


def own_watermark(run: TrainedRun, *, progress: Progress) -> Watermark:
    """Return the watermark of a run by the rows that it was trained on itself.

    Raises:
        ConfigError, DataError: it is not known.
    """
    if run.folder.is_stream():
        return stream_watermark(run.folder, step=run.step)
    if run.folder.products.exists():
        kept = PRODUCTS.read(run.folder.products).get(WATERMARK_KEY)
        if kept is not None:
            return from_json(Watermark, kept, where=str(run.folder.products))
        if not run.folder.data.exists():
            raise _unknown("a packed run without a record of the rows that it was made from", folder=run.folder)
    if not run.schema.time:
        raise _unknown("a schema without a time", folder=run.folder)
    if run.schema.events is not None:
        raise _unknown("a schema with [events], whose samples are made of many rows each", folder=run.folder)
    progress.begin("read the watermark", total=None)
    try:
        found = _of_rows(run)
    except MissingFileError as error:
        raise DataError(
            expected=_WANTED,
            found=f"{error.found}, where raw files of the run were: {error.where}",
            where=str(run.folder.path),
            ways_out=("restore the raw files", *_WAYS_OUT),
        ) from error
    progress.end()
    if not found:
        raise DataError(
            expected=_WANTED,
            found=f"no row whose {run.schema.time!r} can be read",
            where=str(run.folder.path),
            ways_out=_WAYS_OUT,
        )
    return _latest(found, folder=run.folder)


def _of_rows(run: TrainedRun) -> list[Watermark]:
    """Return the watermark of each chunk of the raw rows that a run has seen.

    Raises:
        MissingFileError: a raw file is gone.
    """
    data = run.files()
    order = order_of_dates(data, data.train, column=run.schema.time)
    found: list[Watermark] = []
    # Rows that were put aside when the run was trained are put aside again, into a folder that nobody reads.
    with tempfile.TemporaryDirectory() as aside, BadRows(data.bad_rows, folder=Path(aside)) as bad_rows:
        for chunk, is_seen_N in _seen_rows(run, data, bad_rows):
            times_N, is_calendar = times_of(chunk, run.schema.time, date_order=order)
            times_N = times_N[is_seen_N & ~np.isnan(times_N)]
            if len(times_N):
                found.append(Watermark(time=float(times_N.max()), is_calendar=is_calendar))
    return found


def stream_watermark(run: RunFolder, *, step: int) -> Watermark:
    """Return the watermark of a stream: of the windows that weights of a step were trained on.

    Raises:
        ConfigError: a window has none.
        CheckpointError: the record of the windows is damaged.
    """
    # The step of a record is that of the weights that scored its window, before a row of it was trained.
    trained = [each for each in read_scored_windows(run) if each.step < step and each.trained_rows]
    if not trained:
        raise _unknown(f"no record of a window that was trained by step {step:,}", folder=run)
    timeless = [each.name for each in trained if not each.watermark]
    if timeless:
        raise _unknown(f"a stream without the time of its rows in window {timeless[0]}", folder=run)
    return _latest([_of_window(each) for each in trained], folder=run)


def _of_window(record: WindowRecord) -> Watermark:
    found = Watermark.of_text(record.watermark, flag="watermark of a window")
    if record.has_fractions or not found.is_calendar:
        return found
    # An older Ziggurat left fractions out: the newest row may be as late as the end of this second.
    return Watermark(time=math.nextafter(found.time + 1.0, -math.inf), is_calendar=True)


def _found_by(run: TrainedRun, *, progress: Progress) -> Iterator[Callable[[], Watermark]]:
    """Yield what finds the watermark of each run that this one began from in turn, and that of its own rows.

    Each raises ConfigError or DataError where it is not known. The rows come last, as they are read.
    """
    path = run.folder.warm_start
    if path.exists():
        for ancestor in WARM_START.read(path)["ancestors"]:
            yield partial(_of_ancestor, ancestor, folder=run.folder)
    elif run.began_from:
        yield partial(_of_no_ancestor, run, name=path.name)
    yield partial(own_watermark, run, progress=progress)


def _of_no_ancestor(run: TrainedRun, *, name: str) -> Watermark:
    raise _unknown(f"a run that began from the weights of {run.began_from}, without {name}", folder=run.folder)


def _of_ancestor(ancestor: Ancestor, *, folder: RunFolder) -> Watermark:
    time = ancestor.get("watermark")
    if time is None:
        raise _unknown(
            f"a run that began from the weights of {ancestor['run']}, step {ancestor['step']:,}, whose newest row was "
            "not known then",
            folder=folder,
        )
    return Watermark(time=float(time), is_calendar=bool(ancestor.get("is_calendar", True)))


def _latest(found: list[Watermark], *, folder: RunFolder) -> Watermark:
    """Return the latest of some watermarks.

    Raises:
        ConfigError: some are in a calendar, and others are not.
    """
    if len({each.is_calendar for each in found}) > 1:
        raise _unknown("rows with times in a calendar, and others that count from a moment of their own", folder=folder)
    return max(found, key=lambda each: each.time)


def _unknown(found: str, *, folder: RunFolder) -> ConfigError:
    return ConfigError(expected=_WANTED, found=found, where=str(folder.path), ways_out=_WAYS_OUT)


def _seen_rows(run: TrainedRun, data: DataConfig, bad_rows: BadRows) -> Iterator[tuple[RawChunk, np.ndarray]]:
    """Yield the times of a run's raw rows, and which of them training or the choice of its weights has seen."""
    time = [run.schema.time]
    if data.split.by is SplitBy.FILES:
        _refuse_other_files(run.folder, data)
        for paths in filter(None, (data.train, data.valid)):
            for chunk in data.source(paths, bad_rows=bad_rows).frames(columns=time):
                yield chunk, np.ones(chunk.num_rows, dtype=np.bool_)
        return
    prepared = run.prepared()
    refuse_other_data(run.folder, prepared, data=data, asked="the time of its newest row", ways_out=_WAYS_OUT)
    seen: list[np.ndarray] = []
    for dataset in (prepared.train, prepared.valid):
        if dataset is not None and dataset.num_rows:
            groups = range(len(dataset.group_sizes))
            seen += [dataset.read_group(index).column("row:").to_numpy() for index in groups]
    rows = np.concatenate(seen)
    is_seen = np.zeros(int(rows.max()) + 1, dtype=np.bool_)
    is_seen[rows] = True
    for chunk in data.source(data.train, bad_rows=bad_rows).frames(columns=time):
        at = chunk.global_rows
        yield chunk, np.where(at < len(is_seen), is_seen[np.minimum(at, len(is_seen) - 1)], False)


def _refuse_other_files(run: RunFolder, data: DataConfig) -> None:
    """Refuse files among which one is gone that the run was trained on: the newest row may be in it.

    Raises:
        DataError: one is.
    """
    record = DataRecord.load(run.data)
    if record is None:
        return
    there = {raw_file(path).digest for path, role in files_with_roles(data) if role != "test"}
    gone = [each.path for each in record.raw_files if each.role != "test" and each.digest not in there]
    if gone:
        raise DataError(
            expected="the raw files that the run was trained on, of which one has its newest row",
            found=f"{', '.join(gone[:3])}: gone, or another file by now",
            where=str(run.path),
            ways_out=("restore the raw files", *_WAYS_OUT),
        )
