"""Join rows that a run scores with the teacher's vectors of earlier examples, as its training rows were joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.join import TeacherJoin, is_joined, joined_histories
from ziggurat.errors import MissingFileError

if TYPE_CHECKING:
    from ziggurat.runs.load import Run


def history_join_of(run: Run) -> TeacherJoin | None:
    """Return what joins rows to score with histories of vectors; None for a run that reads none.

    Raises:
        MissingFileError: the side table is not where it was.
    """
    schema = run.preprocessing.schema
    if not joined_histories(schema):
        return None
    data = run.config.data  # whose side table is named by an absolute path
    try:
        return TeacherJoin(data.teacher, schema=schema, date_order=data.split.date_order, with_scores=False)
    except MissingFileError as error:
        raise MissingFileError(
            expected="the side table whose vectors the run reads as histories of users",
            found=error.found,
            where=data.teacher,
            ways_out=(
                "put the folder back",
                f"log the teacher again: ziggurat teacher log RUN FILES --out {data.teacher}",
            ),
        ) from error


def raw_columns(columns: Iterable[str], *, join: TeacherJoin | None) -> Sequence[str]:
    """Return the columns to read of files: those that are wanted and no join makes, and those that it needs."""
    needed = () if join is None else join.columns
    return tuple(dict.fromkeys([name for name in (*columns, *needed) if not is_joined(name)]))


def with_histories(chunks: Iterable[RawChunk], join: TeacherJoin | None) -> Iterator[RawChunk]:
    """Yield raw rows with the histories of their users."""
    for chunk in chunks:
        yield chunk if join is None else join.added_to(chunk)
