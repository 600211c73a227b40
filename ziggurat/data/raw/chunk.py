"""RawChunk: some rows of a raw file as a frame, and where each of them stands in the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from ziggurat.data.raw.bad_rows import BadReason, BadRow, place
from ziggurat.data.raw.spans import TextSpans
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenColumns, WrittenNumbers
from ziggurat.features.number_marks import NumberColumn
from ziggurat.files.stores import DataPath


@dataclass(frozen=True, kw_only=True)
class RawChunk:
    """Consecutive rows of one raw file.

    Args:
        frame: the columns asked for.
        path: the file.
        first_row: 0-based data row in the file of the chunk's first row.
        start: global number of that row, over all files in order.
        rows: (N,) 0-based file row of each row where some were left out, or None when they are consecutive.
        lines: (N,) 1-based line of each row in a text file, or None.
        spans: columns of ids that were left as bytes of a text file (`ids` of `RawSource.frames`); not in `frame`.
        numbers: how numbers are written in columns of text.
        number_columns: columns of text in which they are written in another way, as the schema says.
        list_separator: what divides lists in columns of text, where the schema does not say it.
    """

    frame: pl.DataFrame
    path: DataPath
    first_row: int = 0
    start: int = 0
    rows: np.ndarray | None = field(default=None, repr=False)
    lines: np.ndarray | None = field(default=None, repr=False)
    spans: Mapping[str, TextSpans] = field(default_factory=dict, repr=False)
    numbers: WrittenNumbers = PLAIN_NUMBERS
    number_columns: tuple[NumberColumn, ...] = ()
    list_separator: str = ""

    @staticmethod
    def of(frame: pl.DataFrame, *, name: str = "frame", start: int = 0) -> RawChunk:
        """A chunk of a frame in memory; `name` stands for the file in errors."""
        return RawChunk(frame=frame, path=Path(name), start=start)

    def with_number_columns(self, columns: Iterable[NumberColumn]) -> RawChunk:
        """The same rows, read as a schema says of columns whose numbers are written in a way of their own."""
        columns = tuple(columns)
        return replace(self, number_columns=columns) if columns != self.number_columns else self

    @cached_property
    def written(self) -> WrittenColumns:
        """Return how numbers are written in each column of text."""
        return WrittenColumns(files=self.numbers).with_own(self.number_columns)

    @property
    def num_rows(self) -> int:
        """Rows of the chunk."""
        return next((len(column) for column in self.spans.values()), self.frame.height)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns."""
        return (*self.frame.columns, *self.spans)

    def has_column(self, name: str) -> bool:
        """True if there is a column of that name."""
        return name in self.spans or name in self._series

    def column(self, name: str) -> pl.Series:
        """One column; text is made of spans. KeyError if there is none."""
        if name in self.spans:
            return self.spans[name].series(name)
        return self._series[name]

    @cached_property
    def _series(self) -> dict[str, pl.Series]:
        """Columns of the frame by name: polars would look through all names for each."""
        return {series.name: series for series in self.frame.get_columns()}

    @property
    def file_rows(self) -> np.ndarray:
        """(N,) 0-based data row in the file of each row."""
        return np.arange(self.first_row, self.first_row + self.num_rows) if self.rows is None else self.rows

    @property
    def global_rows(self) -> np.ndarray:
        """(N,) global number of each row."""
        return self.file_rows + (self.start - self.first_row)

    def line(self, index: int) -> int | None:
        """1-based line of row `index` of the chunk, if the file is text."""
        return None if self.lines is None else int(self.lines[index])

    def where(self, index: int, *, column: str = "") -> str:
        """File, line, row and column of row `index` of the chunk, in words."""
        return place(self.path, row=int(self.file_rows[index]), line=self.line(index), column=column)

    def bad_row(
        self,
        index: int,
        *,
        column: str,
        reason: BadReason,
        expected: str,
        found: str = "",
        ways_out: tuple[str, ...] = (),
    ) -> BadRow:
        """Return row `index` of the chunk as one that cannot be used; see `BadRow`."""
        return BadRow(
            path=self.path,
            row=int(self.file_rows[index]),
            line=self.line(index),
            column=column,
            reason=reason,
            expected=expected,
            found=found,
            ways_out=ways_out,
        )

    def filter(self, keep: np.ndarray) -> RawChunk:
        """The rows where the (N,) mask `keep` is true; numbers and lines go with them."""
        rows = self.file_rows[keep]
        return replace(
            self,
            # Where all columns are spans, the frame has no rows that a mask would fit.
            frame=self.frame.filter(pl.Series(keep)) if self.frame.width else self.frame,
            spans={name: column.take(keep) for name, column in self.spans.items()},
            first_row=int(rows[0]) if len(rows) else self.first_row,
            start=int(rows[0]) + self.start - self.first_row if len(rows) else self.start,
            rows=rows,
            lines=None if self.lines is None else self.lines[keep],
        )
