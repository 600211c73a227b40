"""Join the windows of a stream with what its teachers said, of their rows and of earlier ones, and count what came.

    window opened ─► side table as it is now ─► join ─► encode ─► journal: parts that gave something ─► score, train
                                                  └► share of rows with a teacher or a history, age of what it said

Scores reach no test: a window is scored by logits alone, and scores enter by the loss of training. Vectors are a
feature, and a test reads them as training does: those of examples before each row, by versions of before it. What a
window may be joined with when it is opened a second time stands at the top of `data/teachers/growing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.records import extra_column, numbers_of
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.journal import Window
from ziggurat.data.teachers.growing import GrowingSideTable, JoinedPart, WindowTable
from ziggurat.data.teachers.join import (
    AGE,
    TeacherJoin,
    age_column,
    joined_column,
    joined_columns,
    joined_histories,
    teacher_of,
    teachers_of,
)
from ziggurat.data.teachers.side_table import unchecked_note
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Schema, column_of
from ziggurat.training.records.windows import HistoryRows, TaughtRows

if TYPE_CHECKING:
    from ziggurat.features.kinds import TeacherHistory


class StreamTeachers:
    """Opens the side table for the windows of a stream; the first rank has it.

    Args:
        folder: the side table.
        schema: of the rows, with extras and histories whose columns the join makes.
        say: tells people.

    Raises:
        MissingFileError: there is no side table.
    """

    def __init__(self, folder: str, *, schema: Schema, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._schema = schema
        self._say = say
        histories = [teacher_of(feature) for feature in joined_histories(schema)]
        self._table = GrowingSideTable(folder, teachers=teachers_of(schema), histories=histories)
        self._said: list[str] = []
        self._noted = ""

    @staticmethod
    def columns_beside(schema: Schema, teachers: StreamTeachers | None) -> list[str]:
        """Return the raw columns that a stream keeps beside its features: extras, and what teachers know rows by."""
        raw = [column_of(extra) for extra in schema.extras if column_of(extra) not in joined_columns(schema)]
        users = [feature.key for feature in joined_histories(schema)]
        return [*raw, *users, *(teachers._table.columns() if teachers is not None else ())]

    def open(self, window: Window, *, arrivals: Arrivals) -> WindowJoin:
        """Return the join of a window.

        Raises:
            DataError: what it was joined with before is gone, or the columns are not kept that examples are known by.
        """
        others = self._table.others()
        if others and others != self._said:
            self._said = others
            self._say(f"not learned from, as the stream began without: {', '.join(others)} in {self._folder}")
        table = self._table.open(window.joined, window=window.name)
        note = unchecked_note(table.versions)
        if note and note != self._noted:
            self._noted = note
            self._say(f"warning: {note}")
        missing = {
            column: version
            for version in table.versions
            if version.facts.teacher in teachers_of(self._schema)
            for column in version.facts.example_columns
            if column not in arrivals.columns
        }
        if missing:
            raise DataError(
                expected=f"examples that are known by columns which the stream keeps: {', '.join(arrivals.columns)}",
                found=", ".join(missing),
                where=str(next(iter(missing.values())).path),
                ways_out=(
                    "log the version again, into another folder, with the columns of the versions before: --example",
                    "begin the stream anew: --out ANOTHER_FOLDER",
                ),
            )
        join = TeacherJoin(self._folder, schema=self._schema, date_order=_order_of_dates(arrivals), window=table)
        return WindowJoin(join, table=table, schema=self._schema)

    def histories_now(self, *, arrivals: Arrivals) -> TeacherJoin | None:
        """Return the join of rows with the histories of now, as requests have them; None where none is wanted.

        Raises:
            DataError: a version does not fit, or is damaged.
        """
        if not joined_histories(self._schema):
            return None
        table = self._table.now()
        order = _order_of_dates(arrivals)
        return TeacherJoin(self._folder, schema=self._schema, date_order=order, with_scores=False, window=table)


def _order_of_dates(arrivals: Arrivals) -> DateOrder:
    """Return what stands first in dates, as the first files of the stream showed: a few rows would not."""
    clock = arrivals.journal.clock
    return DateOrder.AUTO if clock is None else clock.date_order


class WindowJoin:
    """Adds what teachers said to the rows of one window, and counts.

    Args:
        join: of raw rows.
        table: in which it finds scores and vectors.
        schema: of the rows.
    """

    def __init__(self, join: TeacherJoin, *, table: WindowTable, schema: Schema) -> None:
        self._join = join
        self._ages: dict[str, list[np.ndarray]] = {name: [] for name in teachers_of(schema)}
        extras = {column_of(extra): extra.name for extra in schema.extras}
        self._columns = {name: extra_column(extras[joined_column(name, AGE)]) for name in self._ages}
        self._histories = [_HistoryCounts(feature) for feature in joined_histories(schema)]
        self._table = table

    @property
    def used(self) -> list[JoinedPart]:
        """The parts that gave a score, or a vector of a history."""
        return self._table.used(self._join.histories)

    def added_to(self, chunk: RawChunk) -> RawChunk:
        """Return rows with what teachers said of them."""
        return self._join.added_to(chunk)

    def count(self, taught: RawChunk, encoded: pa.Table) -> None:
        """Take rows into account.

        Args:
            taught: as they were joined.
            encoded: the same, without bad rows.
        """
        for name, column in self._columns.items():
            self._ages[name].append(cast(np.ndarray, encoded.column(column).to_numpy()))
        for each in self._histories:
            each.add(taught, encoded)

    def taught(self) -> dict[str, TaughtRows]:
        """Return what each teacher said of the window."""
        used = [part.version for part in self._table.used()]
        found: dict[str, TaughtRows] = {}
        for name, parts in self._ages.items():
            ages = np.concatenate([np.empty(0), *parts])
            known = ages[~np.isnan(ages)]
            versions = dict.fromkeys(each.partition("/")[2] for each in used if each.partition("/")[0] == name)
            found[name] = TaughtRows(
                share=len(known) / max(len(ages), 1),
                age=float(np.median(known)) if len(known) else None,
                oldest=float(known.max()) if len(known) else None,
                is_calendar=self._is_calendar,
                versions=tuple(versions),
            )
        return found

    def histories(self) -> dict[str, HistoryRows]:
        """Return what the rows of the window read of each teacher's vectors."""
        found: dict[str, HistoryRows] = {}
        for counts, join in zip(self._histories, self._join.histories, strict=True):
            versions = dict.fromkeys(index.version.path.name for index in join.used)
            found[teacher_of(counts.feature)] = counts.rows(is_calendar=self._is_calendar, versions=sorted(versions))
        return found

    @property
    def _is_calendar(self) -> bool:
        return all(version.facts.is_calendar for version in self._table.versions)


class _HistoryCounts:
    """Counts what rows of a window read of one feature.

    Args:
        feature: which.
    """

    def __init__(self, feature: TeacherHistory) -> None:
        self.feature = feature
        self._lengths: list[np.ndarray] = []
        self._ages: list[np.ndarray] = []

    def add(self, taught: RawChunk, encoded: pa.Table) -> None:
        """Take rows into account."""
        words = numbers_of(encoded.column(self.feature.name).combine_chunks())
        self._lengths.append(words[:: self.feature.history.words].copy())
        self._ages.append(taught.column(age_column(self.feature)).to_numpy())

    def rows(self, *, is_calendar: bool, versions: list[str]) -> HistoryRows:
        """Return what all of them read."""
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        ages = np.concatenate([np.empty(0), *self._ages])
        ages = ages[~np.isnan(ages)]
        known = lengths[lengths > 0]
        return HistoryRows(
            share=len(known) / max(len(lengths), 1),
            length=float(known.mean()) if len(known) else 0.0,
            age=float(np.median(ages)) if len(ages) else None,
            is_calendar=is_calendar,
            versions=tuple(versions),
        )


def taught_text(name: str, taught: TaughtRows) -> str:
    """Return what a teacher said of a window, for its line."""
    age = taught.age_text()
    return f"teacher {name} {taught.share:.1%}" + (f", {age}" if age else "")


def history_text(name: str, read: HistoryRows) -> str:
    """Return what rows of a window read of a teacher's vectors, for its line."""
    age = read.age_text()
    return f"history {name} {read.share:.1%}" + (f" of {read.length:.1f} vectors, {age}" if age else "")
