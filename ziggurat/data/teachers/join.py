"""Join raw rows with logged scores: of each example what the newest teacher said that cannot know its answer.

    row of example e at time t  ◄─  the newest version of the teacher with watermark < t that has scored e

Nothing leaks from the future: a version that was trained on a row as late as the example, or later, is passed over,
whatever it says. A row without such a score has an empty cell, and so has one without a time. What is joined are
numbers in columns of our own: `teacher:NAME:LABEL`, a probability, and `teacher:NAME:age`, the seconds between
watermark and example. Histories of vectors (`history.py`) are `teacher:NAME:vectors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
from jaxtyping import Bool, Float32, UInt64

from ziggurat.config import JSON
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.growing import WindowTable
from ziggurat.data.teachers.history import HistoryJoin, check_versions, index_of
from ziggurat.data.teachers.side_table import (
    ExampleIndex,
    TeacherVersion,
    VersionFolder,
    example_ids,
    times_of,
    unchecked_note,
    versions_in,
)
from ziggurat.errors import DataError, SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.kinds import TeacherHistory
from ziggurat.features.schema import Schema, column_of

AGE = "age"
VECTORS = "vectors"
_PREFIX = "teacher:"


def joined_column(teacher: str, what: str) -> str:
    """Return the name of a joined column: of a label, or of the age."""
    return f"{_PREFIX}{teacher}:{what}"


def is_joined(column: str) -> bool:
    """Return whether a column is one that the join makes."""
    return column.startswith(_PREFIX)


def joined_columns(schema: Schema) -> list[str]:
    """Return the columns of a schema that no raw file has, as the join makes them."""
    return [column for column in map(column_of, schema.extras) if is_joined(column)]


def joined_histories(schema: Schema) -> list[TeacherHistory]:
    """Return the features of a schema whose columns the join makes of logged vectors."""
    return [each for each in schema.features if isinstance(each, TeacherHistory) and is_joined(column_of(each))]


def teacher_of(feature: TeacherHistory) -> str:
    """Return the name of the teacher whose vectors a feature holds."""
    return column_of(feature).removeprefix(_PREFIX).rpartition(":")[0]


def age_column(feature: TeacherHistory) -> str:
    """Return the raw column of seconds from the latest example of a history to its row, of windows of streams."""
    return f"{column_of(feature)}:{AGE}"


def without_histories(schema: Schema) -> Schema:
    """Return a schema without the features whose columns the join makes: that of the raw files."""
    joined = joined_histories(schema)
    return replace(schema, features=tuple(each for each in schema.features if each not in joined))


def with_empty_histories(chunk: RawChunk, schema: Schema) -> RawChunk:
    """Return raw rows without the joined histories that a schema wants, as those of no vector."""
    empty = [
        pl.Series(column_of(each), np.zeros((chunk.num_rows, each.history.words), dtype=np.int32))
        for each in joined_histories(schema)
    ]
    return replace(chunk, frame=chunk.frame.with_columns(empty)) if empty else chunk


def with_teacher_columns(schema: Schema) -> bool:
    """Return whether a schema wants anything of a side table."""
    return bool(joined_columns(schema) or joined_histories(schema))


def teachers_of(schema: Schema) -> list[str]:
    """Return the names of the teachers whose scores the join adds to rows of a schema."""
    names = [column.removeprefix(_PREFIX).rpartition(":")[0] for column in joined_columns(schema)]
    return list(dict.fromkeys(names))


def facts_of_teacher(folder: str) -> list[JSON]:
    """Return what changes when a side table does, for fingerprints of data that was made with it.

    Raises:
        DataError: a part is gone, or was added.
    """
    return [
        [str(each.path.relative_to(folder)), [list(part) for part in each.identities()]] for each in versions_in(folder)
    ]


def require_time(schema: Schema) -> None:
    """Refuse a schema by which nobody can tell whether a teacher knows an answer.

    Raises:
        SchemaError: it has no time.
    """
    if not schema.time:
        raise SchemaError(
            expected="a schema that says which column is the time: only teachers of before an example may teach it",
            found="none",
            where="schema, [roles], time",
            ways_out=('time = "COLUMN" under [roles] of the schema', "leave --teacher out"),
        )


class TeacherJoin:
    """Adds logged scores to raw rows.

    Args:
        folder: the side table.
        schema: of the rows, with extras whose columns the join makes.
        date_order: of dates in its time column.
        with_scores: False for rows that are scored, which need histories of vectors alone.
        window: of a side table that grows, as a window of a stream finds it; None: all that is there.

    Raises:
        SchemaError: the schema has no time.
        DataError: the side table is damaged.
    """

    def __init__(
        self,
        folder: str,
        *,
        schema: Schema,
        date_order: DateOrder,
        with_scores: bool = True,
        window: WindowTable | None = None,
    ) -> None:
        require_time(schema)
        self._time = schema.time
        self._date_order = date_order
        self._wanted = [column.removeprefix(_PREFIX) for column in joined_columns(schema)] if with_scores else []
        self._find = _found if window is None else window.find
        self._is_window = window is not None
        teachers = {name.rpartition(":")[0] for name in self._wanted}
        there = versions_in(folder) if window is None else window.versions
        versions = sorted(there, key=lambda each: each.facts.watermark, reverse=True)
        self._versions = [each for each in versions if each.facts.teacher in teachers]
        columns = [column for each in self._versions for column in each.facts.example_columns]
        self._histories: list[HistoryJoin] = []
        for feature in joined_histories(schema):
            own = [each for each in versions if each.facts.teacher == teacher_of(feature)]
            check_versions(feature, own)
            indices = [
                index for each in own for index in ([index_of(each)] if window is None else window.indices_of(each))
            ]
            self._histories.append(HistoryJoin(feature, indices=indices))
        columns += [each.feature.key for each in self._histories]
        self.columns = tuple(dict.fromkeys([self._time, *columns]))

    @property
    def histories(self) -> Sequence[HistoryJoin]:
        """Return the joins that give rows the packed vectors of each feature."""
        return self._histories

    @property
    def unchecked_note(self) -> str:
        """Return a sentence that names versions whose parts are taken as they are found; "" where there are none."""
        versions = [*self._versions, *(index.version for each in self._histories for index in each.indices)]
        return unchecked_note(versions)

    def check(self, known: Sequence[str], *, where: str) -> None:
        """Refuse files without the columns that examples are known by.

        Raises:
            SchemaError: one is not there.
        """
        missing = [name for name in self.columns if name not in known and name != self._time]
        if missing:
            raise SchemaError(
                expected=f"the columns that the teacher's examples are known by: {', '.join(self.columns[1:])}",
                found=f"no column {', '.join(missing)}",
                where=where,
                ways_out=(
                    "log the teacher with columns that both data sets have: ziggurat teacher log … --example COLUMN",
                    "leave --teacher out",
                ),
            )

    def added_to(self, chunk: RawChunk) -> RawChunk:
        """Return rows with the joined columns.

        Raises:
            DataError: a teacher's watermark is a date, and the times of the rows count from a moment of their own, or
                the other way round.
        """
        times_N, is_calendar = times_of(chunk, self._time, date_order=self._date_order)
        num_rows = len(times_N)
        ids_by_columns: dict[tuple[str, ...], np.ndarray] = {}
        found = {name: np.full(num_rows, np.nan) for name in self._wanted}
        is_open_by_teacher: dict[str, np.ndarray] = {}
        for version in self._versions:
            facts = version.facts
            self._refuse_other_times(chunk, times_N, is_calendar=is_calendar, facts=facts)
            is_open_N = is_open_by_teacher.setdefault(facts.teacher, np.ones(num_rows, dtype=np.bool_))
            rows_K = np.flatnonzero(is_open_N & (times_N > facts.watermark))
            if not len(rows_K):
                continue
            if facts.example_columns not in ids_by_columns:
                ids_by_columns[facts.example_columns] = example_ids(chunk, facts.example_columns)
            is_known_K, logits_KL = self._find(version, ids_by_columns[facts.example_columns][rows_K])
            rows_T = rows_K[is_known_K]
            is_open_N[rows_T] = False
            for column, label in enumerate(facts.labels):
                name = f"{facts.teacher}:{label}"
                if name in found:
                    logits_T = logits_KL[is_known_K, column].astype(np.float64)
                    found[name][rows_T] = 1.0 / (1.0 + np.exp(-logits_T))
            age = f"{facts.teacher}:{AGE}"
            if age in found:
                found[age][rows_T] = times_N[rows_T] - facts.watermark
        series = [pl.Series(_PREFIX + name, values).fill_nan(None) for name, values in found.items()]
        for history in self._histories:
            for facts in history.facts:
                self._refuse_other_times(chunk, times_N, is_calendar=is_calendar, facts=facts)
            histories = history.found(chunk, times_N, is_calendar=is_calendar)
            words_NW = histories.words
            series.append(pl.Series(column_of(history.feature), words_NW, dtype=pl.Array(pl.Int32, words_NW.shape[1])))
            if self._is_window:
                series.append(pl.Series(age_column(history.feature), times_N - histories.latest))
        frame = chunk.frame.with_columns(series) if chunk.frame.width else pl.DataFrame(series)
        return replace(chunk, frame=frame)

    def _refuse_other_times(
        self, chunk: RawChunk, times_N: np.ndarray, *, is_calendar: bool, facts: TeacherVersion
    ) -> None:
        """Refuse rows whose times cannot be compared with the watermark of a version."""
        if facts.is_calendar == is_calendar or np.isnan(times_N).all():
            return
        kind = "dates, or units since 1970" if facts.is_calendar else "counts"
        raise DataError(
            expected=f"times as the teacher's: {kind}",
            found="times that count from a moment of their own" if facts.is_calendar else "dates",
            where=chunk.where(0, column=self._time),
            ways_out=("write the times as the teacher's data has them", "leave --teacher out"),
        )


def _found(
    version: VersionFolder, ids: UInt64[np.ndarray, "N 2"]
) -> tuple[Bool[np.ndarray, "N"], Float32[np.ndarray, "N L"]]:
    """Return which examples a version has scored, and its logits; those of the others mean nothing."""
    index, logits = _logits(str(version.path), version.identities())
    is_known_N, at_N = index.find(ids)
    return is_known_N, logits[at_N] if len(logits) else np.empty((len(ids), logits.shape[1]), dtype=np.float32)


@lru_cache(maxsize=64)  # shards are read by several threads, and share what was logged
def _logits(path: str, parts: tuple[tuple[str, str | int], ...]) -> tuple[ExampleIndex, Float32[np.ndarray, "N L"]]:
    del parts  # other parts are another entry
    return VersionFolder.open(Path(path)).logits()
