"""Intake: what messages of a broker are taken into: the rows of a stream, or the records of its labels.

    broker ─► Receiving ─► Intake ─┬─ Arrivals            rows, dealt to their windows (`arrivals.py`)
                                   └─ LabelIntake         records of labels, which find their rows by a key

An intake keeps what it is given in the journal of the stream, together with the broker's position behind it, whole or
not at all. It says when messages that wait in memory are to be taken at once, since a window may be finished by them,
and up to which position a checkpoint contains all that they can still be about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ziggurat.data.raw.bad_rows import BadRow
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.journal import ArrivedFile


@dataclass(frozen=True, kw_only=True)
class ReceivedRows:
    """Rows, or records of labels, that came from a broker and are taken together.

    Args:
        name: stands for a file in errors.
        chunks: the rows, numbered from 0 on, without those that are none.
        num_read: rows, with those that are none.
        bad: those that are none.
        position: behind the last one.
        lost: messages before them that the broker no longer has.
        message_of: gives the id of the message of a row, for rows that are put aside.
    """

    name: str
    chunks: tuple[RawChunk, ...]
    num_read: int
    bad: tuple[BadRow, ...] = ()
    position: str
    lost: int = 0
    message_of: Callable[[int], str] | None = None

    def frames(self, *, columns: Sequence[str]) -> Iterator[RawChunk]:
        """Give the rows with these columns."""
        for chunk in self.chunks:
            yield replace(chunk, frame=chunk.frame.select(columns))

    def num_rows_hint(self) -> int:
        """Return the number of rows."""
        return self.num_read

    def arrived(self, *, bad: int, first_row: int = 0, late: int = 0, left_out: int = 0) -> ArrivedFile:
        """Return the record of them in the journal: the position behind them stands where a file has its facts.

        Args:
            bad: rows that were put aside.
            first_row: number of the first row in all that arrived.
            late: rows that came too late.
            left_out: rows from the end of the stream on.
        """
        return ArrivedFile(
            path=self.name,
            place=self.name,
            num_bytes=0,
            tag="",
            sha256="",
            first_row=first_row,
            rows=self.num_read,
            late=late,
            left_out=left_out,
            bad=bad,
            position=self.position,
            lost=self.lost,
        )


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The result of looking for new files, or messages.

    Args:
        files: that were taken.
        rows: of them.
        late: rows of them that came too late.
        left_out: rows of them from `until` on.
        bad: rows of them that were put aside.
        again: files that were left out, as their content had arrived before.
        newest_s: the latest time of these rows in seconds since 1970; minus infinity where there is none.
        lost: messages with rows that the broker no longer had.
        lost_labels: messages with labels that it no longer had.
        label_files: files of labels that were taken.
        labels: records of them.
        bad_labels: records of them that were put aside, which `bad` has among its own.
        label_counts: records of labels by what became of them, of those that are named.
        torn: text files that end amid a line, whose last row or record may be the first half of one.
    """

    files: int = 0
    rows: int = 0
    late: int = 0
    left_out: int = 0
    bad: int = 0
    again: tuple[str, ...] = ()
    newest_s: float = field(default=-np.inf, compare=False)
    lost: int = 0
    lost_labels: int = 0
    label_files: int = 0
    labels: int = 0
    bad_labels: int = 0
    label_counts: dict[str, int] = field(default_factory=dict)
    torn: tuple[str, ...] = ()

    def __add__(self, other: Taken) -> Taken:
        """Return both together."""
        label_counts = Counter(self.label_counts)
        label_counts.update(other.label_counts)
        return Taken(
            files=self.files + other.files,
            rows=self.rows + other.rows,
            late=self.late + other.late,
            left_out=self.left_out + other.left_out,
            bad=self.bad + other.bad,
            again=self.again + other.again,
            newest_s=max(self.newest_s, other.newest_s),
            lost=self.lost + other.lost,
            lost_labels=self.lost_labels + other.lost_labels,
            label_files=self.label_files + other.label_files,
            labels=self.labels + other.labels,
            bad_labels=self.bad_labels + other.bad_labels,
            label_counts=dict(label_counts),
            torn=self.torn + other.torn,
        )


class Intake(Protocol):
    """Takes messages of a broker into the journal of a stream."""

    @property
    def received_columns(self) -> tuple[str, ...]:
        """Fields that a message may have, by the name of their column."""
        ...

    @property
    def default_cells(self) -> Mapping[str, str]:
        """Cells of messages that lack a field, by column; a missing value where none is given."""
        ...

    @property
    def position(self) -> str:
        """The position of the broker behind what was taken; "" before the first message."""
        ...

    def would_finish(self, chunk: RawChunk) -> bool:
        """Return whether what was received, and not taken, may finish a window that is open, or begin the first."""
        ...

    def has_enough(self) -> bool:
        """Return whether a window may be done by now, so that no more need be read before it is."""
        ...

    def receive(self, rows: ReceivedRows, *, latest_s: float = np.inf) -> Taken:
        """Take what is right behind `position`, and the position behind it with it."""
        ...

    def covered(self, number: int) -> str:
        """Return the position up to which nothing is needed by any window behind one of a number."""
        ...
