"""Join rows that a run scores with the teacher's vectors of earlier examples, as its training rows were joined."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.data.preprocess.order_of_dates import order_of_dates, shown_order
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.source import RawSource
from ziggurat.data.teachers.join import TeacherJoin, is_joined, joined_histories
from ziggurat.errors import ConfigError, MissingFileError, ZigguratError
from ziggurat.features.date_order import DateOrder
from ziggurat.runs.data_paths import located
from ziggurat.runs.scores.given_data import files_in
from ziggurat.training.report.progress import NoProgress

if TYPE_CHECKING:
    from ziggurat.runs.load import Run


def history_join_of(run: Run, data: object = None) -> TeacherJoin | None:
    """Return what joins rows to score with histories of vectors; None for a run that reads none.

    Args:
        run: that scores them.
        data: files or a frame with the rows; None: they are the run's own.

    Raises:
        MissingFileError: the side table is not where it was.
        ConfigError: nothing shows what stands first in dates like 01/03/2024.
    """
    schema = run.preprocessing.schema
    if not joined_histories(schema):
        return None
    folder = run.config.data.teacher  # an absolute path
    order = order_of_given_dates(run, data)
    try:
        return TeacherJoin(folder, schema=schema, date_order=order, with_scores=False)
    except MissingFileError as error:
        raise MissingFileError(
            expected="the side table whose vectors the run reads as histories of users",
            found=error.found,
            where=folder,
            ways_out=(
                "put the folder back",
                f"log the teacher again: ziggurat teacher log RUN FILES --out {folder}",
            ),
        ) from error


def order_of_given_dates(run: Run, data: object = None) -> DateOrder:
    """Return what stands first in the dates of rows to score: as they show, or else as the run's own files show.

    A file of one day, such as 05/06/2026, shows nothing by itself: it is written as the files that the run has seen.

    Args:
        run: that scores them.
        data: files or a frame with the rows; None: they are the run's own.

    Raises:
        ConfigError: there are dates like 01/03/2024, and none shows what stands first.
    """
    column = run.preprocessing.schema.time
    order = run.config.data.split.date_order
    if order is not DateOrder.AUTO or not column:
        return order
    if data is None:
        return _order_of_own_dates(run, column)
    try:
        if is_frame(data):
            return shown_order([RawChunk.of(as_polars(data, written=run.written))], column)
        # Rows with faults are reported by whoever reads the rest of them.
        with tempfile.TemporaryDirectory() as aside, BadRows(BadRowPolicy.QUARANTINE, folder=Path(aside)) as bad_rows:
            reading = run.reading
            source = RawSource(files_in(data), format=reading.format, bad_rows=bad_rows, text=reading.text)
            return shown_order(source.frames(columns=[column]), column)
    except ConfigError as unclear:
        try:
            return _order_of_own_dates(run, column)
        except ZigguratError:  # they are gone, or show nothing either
            raise unclear from None


def _order_of_own_dates(run: Run, column: str) -> DateOrder:
    from ziggurat.runs.execute import raw_files  # which reads runs to go on from, and these score rows

    own = raw_files(located(run.config, folder=run.folder), progress=NoProgress())
    return order_of_dates(own, own.train, column=column)


def raw_columns(columns: Iterable[str], *, join: TeacherJoin | None) -> Sequence[str]:
    """Return the columns to read of files: those that are wanted and no join makes, and those that it needs."""
    needed = () if join is None else join.columns
    return tuple(dict.fromkeys([name for name in (*columns, *needed) if not is_joined(name)]))


def with_histories(chunks: Iterable[RawChunk], join: TeacherJoin | None) -> Iterator[RawChunk]:
    """Yield raw rows with the histories of their users."""
    for chunk in chunks:
        yield chunk if join is None else join.added_to(chunk)
