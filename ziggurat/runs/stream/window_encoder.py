"""WindowEncoder: raw rows of a window of a stream to encoded rows on the disk, those that it is trained on beside.

    arrived rows ─► join with teachers ─► encode ─► windows/000007           scored, and trained where labels are known
    lessons      ─► join with teachers ─► encode ─► windows/000007-lessons   trained where labels come later than rows
                                             └► counts of values by bucket, bad rows put aside, watermark

What a window encodes to depends on its raw rows, on what was fitted to the history and on what its teachers said when
it was first opened; see `encode_ahead.py` for why a thread may do it beside training. The first rank has it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.dataset import EncodedWriter
from ziggurat.data.encoded.records import ROW_COLUMN
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.bad_rows import PUT_ASIDE, BadRow, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.journal import Window
from ziggurat.data.streams.label_delay import (
    DelayConfig,
    delayed_label,
    inputs_with_state,
    labels_ahead,
    with_state,
    without_label,
)
from ziggurat.data.streams.stability import BucketCounts
from ziggurat.errors import ZigguratError
from ziggurat.features.label_state import LabelState
from ziggurat.features.schema import Schema
from ziggurat.runs.stream.encode_ahead import EncodedWindow
from ziggurat.runs.stream.teachers import StreamTeachers, WindowJoin
from ziggurat.training.records.run_folder import RunFolder

A_DAY_S = 86_400.0  # a time that lies further in the future is one of a wrong clock
NO_ROWS = 0  # number of a window without rows, for a model that is built before its next window is known


def windows_folder(run: RunFolder) -> Path:
    """Return the folder of the encoded windows of a stream."""
    return run.stream / "windows"


def window_folder(run: RunFolder, number: int) -> Path:
    """Return where the encoded rows of a window lie."""
    return windows_folder(run) / f"{number:06}"


def lessons_folder(run: RunFolder, number: int) -> Path:
    """Return where the encoded rows lie that a window is trained on, where these are others than its own."""
    return windows_folder(run) / f"{number:06}-lessons"


@contextmanager
def _ways_out_of_taken_rows(*, is_begun: bool) -> Iterator[None]:
    """Say of a bad row what helps once a stream has begun: its file was taken as it is, and the schema stays.

    Args:
        is_begun: a window was trained. Before that, files and schema may still be corrected.
    """
    try:
        yield
    except ZigguratError as error:
        if is_begun and BadRow.of(error) is not None:
            others = [way for way in error.ways_out if way != PUT_ASIDE]
            error.ways_out = (
                "put such rows aside, and go on: the same command with --data.bad-rows quarantine",
                *(f"begin the stream anew: --out ANOTHER_FOLDER, and before that {way}" for way in others),
            )
        raise


class WindowEncoder:
    """Encodes the windows of a stream.

    Args:
        run: the folder of the stream.
        arrivals: the raw rows.
        data: how bad rows are treated, and how many rows a group has.
        schema: of the rows.
        delay: when labels are known.
        preprocessing: what was fitted to the history.
        teachers: that rows are joined with; None without.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        arrivals: Arrivals,
        data: DataConfig,
        schema: Schema,
        delay: DelayConfig,
        preprocessing: Preprocessing,
        teachers: StreamTeachers | None,
    ) -> None:
        self._run = run
        self._arrivals = arrivals
        self._data = data
        self._schema = schema
        self._delay = delay
        self._preprocessing = preprocessing
        self._teachers = teachers

    def encode(self, number: int, window: Window, *, shown: Callable[[int], None]) -> EncodedWindow:
        """Encode a window, in whatever thread: raw rows and preprocessing are read, and nothing else of the stream.

        Args:
            number: of the window.
            window: its rows.
            shown: called with the number of rows that were encoded, after each chunk.
        """
        begin = time.perf_counter()
        # What was encoded ahead for another window of this number, or before an error.
        shutil.rmtree(window_folder(self._run, number), ignore_errors=True)
        aside = self._run.stream / f"window-{number:06}"
        shutil.rmtree(aside, ignore_errors=True)
        done = 0
        newest = -math.inf
        num_ahead = 0
        num_labelled = 0
        latest_s = time.time() + A_DAY_S
        clock = self._arrivals.journal.clock
        inputs = self._preprocessing.inputs
        counts = BucketCounts(inputs)
        join = None
        if self._teachers is not None and number != NO_ROWS:
            join = self._teachers.open(window, arrivals=self._arrivals)
        with (
            BadRows(self._data.bad_rows, folder=aside, budget=self._data.bad_row_budget) as bad_rows,
            EncodedWriter(window_folder(self._run, number), inputs, rows_per_group=self._data.rows_per_group) as writer,
        ):
            for chunk in self._arrivals.chunks(window):
                taught = chunk if join is None else join.added_to(chunk)
                with _ways_out_of_taken_rows(is_begun=number > 1):
                    encoded = self._preprocessing.encode(taught, bad_rows=bad_rows)
                if window.awaits:
                    encoded = without_label(encoded, self._delayed)
                if join is not None:
                    join.count(taught, encoded)
                counts.add(encoded)
                writer.append(encoded)
                done += chunk.num_rows
                if self._delay.is_on and not window.awaits:
                    # Of the rows that are scored: those that were put aside here are in no share.
                    is_scored = np.isin(chunk.global_rows, encoded.column(ROW_COLUMN).to_numpy())
                    num_labelled += int((is_scored & self._arrivals.known_labels(chunk, window)).sum())
                if clock is not None and self._delay.is_on:
                    # Records of labels with a time of the future are bad rows, so a window that awaits them has none.
                    if not window.awaits:
                        num_ahead += labels_ahead(chunk, clock=clock, config=self._delay, latest_s=latest_s)
                elif clock is not None and clock.column:
                    newest = max(newest, clock.newest(_encoded_rows(chunk, encoded)))
                shown(done)
            bad = bad_rows.num_rows
        trained: dict[str, int] = {}
        if self._delay.is_on:
            trained, newest = self._encode_lessons(number, window, join=join, shown=lambda: shown(done))
        if join is not None and window.joined is None:
            self._arrivals.keep_joined(number, join.used)
        watermark = "" if clock is None or not math.isfinite(newest) else clock.shown(newest)
        return EncodedWindow(
            window=window,
            bad=bad,
            counts=counts.plain(),
            encode_s=time.perf_counter() - begin,
            watermark=watermark,
            trained=trained,
            teachers={} if join is None else join.taught(),
            histories={} if join is None else join.histories(),
            labels_ahead=num_ahead,
            labelled=num_labelled,
        )

    @property
    def _delayed(self) -> str:
        """The name of the label that comes later."""
        return delayed_label(self._schema, self._delay.label).name

    def _encode_lessons(
        self, number: int, window: Window, *, join: WindowJoin | None, shown: Callable[[], None]
    ) -> tuple[dict[str, int], float]:
        """Encode the rows that a window is trained on.

        Args:
            number: of the window.
            window: its rows.
            join: adds what teachers say; None without.
            shown: called after each chunk.

        Returns:
            Their numbers by what is known of their labels, and the latest of their times.
        """
        newest = -math.inf
        clock = self._arrivals.journal.clock
        counts = {state.value: 0 for state in LabelState}
        label = self._delayed
        inputs = inputs_with_state(self._preprocessing.inputs)
        folder = lessons_folder(self._run, number)
        shutil.rmtree(folder, ignore_errors=True)
        aside = self._run.stream / f"lessons-{number:06}"
        shutil.rmtree(aside, ignore_errors=True)
        with (
            # Each row was scored with its own window, whose record counts the bad ones and has them written aside.
            BadRows(self._data.bad_rows, folder=aside) as bad_rows,
            EncodedWriter(folder, inputs, rows_per_group=self._data.rows_per_group) as writer,
        ):
            for state, chunk in self._arrivals.lessons(window):
                taught = chunk if join is None else join.added_to(chunk)
                with _ways_out_of_taken_rows(is_begun=number > 1):
                    table = self._preprocessing.encode(taught, bad_rows=bad_rows)
                writer.append(with_state(table, state, label=label, inputs=inputs))
                counts[state.value] += table.num_rows
                if clock is not None:
                    newest = max(newest, clock.newest(_encoded_rows(chunk, table)))
                shown()
        shutil.rmtree(aside, ignore_errors=True)
        return counts, newest


def _encoded_rows(chunk: RawChunk, table: pa.Table) -> RawChunk:
    """Return the rows of a chunk that were encoded: those that were put aside are not trained."""
    if table.num_rows == chunk.num_rows:
        return chunk
    return chunk.filter(np.isin(chunk.global_rows, table.column(ROW_COLUMN).to_numpy()))
