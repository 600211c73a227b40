"""Join the windows of a stream with what its teachers said of their rows, and count what that came to.

    window opened ─► side table as it is now ─► join ─► encode ─► journal: parts that gave a score ─► score, train
                                                  └► share of rows with a teacher, age of what it said

Nothing of it reaches a test: a window is scored by logits alone, and teachers enter by the loss of training. What a
window may be joined with when it is opened a second time stands at the top of `data/teachers/growing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.records import extra_column
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals, Window
from ziggurat.data.teachers.growing import GrowingSideTable, WindowScores
from ziggurat.data.teachers.join import AGE, TeacherJoin, joined_column, joined_columns, teachers_of
from ziggurat.data.teachers.side_table import unchecked_note
from ziggurat.errors import DataError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.schema import Schema, column_of
from ziggurat.training.records.windows import TaughtRows


class StreamTeachers:
    """Opens the side table for the windows of a stream; the first rank has it.

    Args:
        folder: the side table.
        schema: of the rows, with extras whose columns the join makes.
        say: tells people.

    Raises:
        MissingFileError: there is no side table.
    """

    def __init__(self, folder: str, *, schema: Schema, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._schema = schema
        self._say = say
        self._table = GrowingSideTable(folder, teachers=teachers_of(schema))
        self._said: list[str] = []
        self._noted = ""

    @staticmethod
    def columns_beside(schema: Schema, teachers: StreamTeachers | None) -> list[str]:
        """Return the raw columns that a stream keeps for its losses: extras, and by what teachers know examples."""
        raw = [column_of(extra) for extra in schema.extras if column_of(extra) not in joined_columns(schema)]
        return [*raw, *(teachers._table.columns() if teachers is not None else ())]

    def open(self, window: Window, *, arrivals: Arrivals) -> WindowJoin:
        """Return the join of a window.

        Raises:
            DataError: what it was joined with before is gone, or the columns are not kept that examples are known by.
        """
        others = self._table.others()
        if others and others != self._said:
            self._said = others
            self._say(f"not learned from, as the stream began without: {', '.join(others)} in {self._folder}")
        scores = self._table.open(window.joined, window=window.name)
        note = unchecked_note(scores.versions)
        if note and note != self._noted:
            self._noted = note
            self._say(f"warning: {note}")
        missing = {
            column: version
            for version in scores.versions
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
        clock = arrivals.journal.clock
        # Of few rows nobody could tell which number is the month.
        order = DateOrder.AUTO if clock is None else clock.date_order
        join = TeacherJoin(self._folder, schema=self._schema, date_order=order, scores=scores)
        return WindowJoin(join, scores=scores, schema=self._schema)


class WindowJoin:
    """Adds what teachers said to the rows of one window, and counts.

    Args:
        join: of raw rows.
        scores: that it finds.
        schema: of the rows.
    """

    def __init__(self, join: TeacherJoin, *, scores: WindowScores, schema: Schema) -> None:
        self._join = join
        self._ages: dict[str, list[np.ndarray]] = {name: [] for name in teachers_of(schema)}
        extras = {column_of(extra): extra.name for extra in schema.extras}
        self._columns = {name: extra_column(extras[joined_column(name, AGE)]) for name in self._ages}
        self.scores = scores

    def added_to(self, chunk: RawChunk) -> RawChunk:
        """Return rows with what teachers said of them."""
        return self._join.added_to(chunk)

    def count(self, encoded: pa.Table) -> None:
        """Take encoded rows into account."""
        for name, column in self._columns.items():
            self._ages[name].append(cast(np.ndarray, encoded.column(column).to_numpy()))

    def taught(self) -> dict[str, TaughtRows]:
        """Return what each teacher said of the window."""
        used = [part.version for part in self.scores.used]
        found: dict[str, TaughtRows] = {}
        for name, parts in self._ages.items():
            ages = np.concatenate([np.empty(0), *parts])
            known = ages[~np.isnan(ages)]
            versions = dict.fromkeys(each.partition("/")[2] for each in used if each.partition("/")[0] == name)
            found[name] = TaughtRows(
                share=len(known) / max(len(ages), 1),
                age=float(np.median(known)) if len(known) else None,
                oldest=float(known.max()) if len(known) else None,
                is_calendar=all(version.facts.is_calendar for version in self.scores.versions),
                versions=tuple(versions),
            )
        return found


def taught_text(name: str, taught: TaughtRows) -> str:
    """Return what a teacher said of a window, for its line."""
    age = taught.age_text()
    return f"teacher {name} {taught.share:.1%}" + (f", {age}" if age else "")
