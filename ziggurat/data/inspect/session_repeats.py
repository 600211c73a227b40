"""How often each column repeats within a session, and what deduplication would make of it.

    S        mean rows of a session                       d   share of rows that keep the value of the row before
    factor   rows / distinct values one after the other   =   1 / (1 − d·(S − 1)/S)

(Zhao et al., RecD, MLSys 2023, arXiv 2211.05239, section 4.2.) The factor bounds what is gained where a column is all
the work; for a column of single values there is hardly any work to save, on one device.

Rows of a session are compared in the order of the file, wherever they lie in it: the factor is that of data which
`ziggurat data cluster-by-session` has put together. How far the file itself is from that, `adjacent` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import polars as pl

from ziggurat.data.clustering import without_session
from ziggurat.data.raw.names import missing_column
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.features.batches.repeats import MIN_FACTOR


@dataclass(frozen=True, kw_only=True)
class ColumnRepeats:
    """Measures of how often the values of one column repeat.

    Args:
        column: its name.
        unchanged: d.
        factor: rows for each distinct value.
        is_list: whether it holds lists.
    """

    column: str
    unchanged: float
    factor: float
    is_list: bool

    @property
    def advice(self) -> str:
        """Advice on what to do about the repeats."""
        if self.factor < MIN_FACTOR:
            return f"leave as it is: it pays from a factor of {MIN_FACTOR} on"
        if self.is_list:
            return "deduplicate: shuffle = session_lanes does it"
        return "compresses, clustered by session; single values save hardly any work"


@dataclass(frozen=True, kw_only=True)
class SessionRepeats:
    """The sessions of some rows, and what repeats in them.

    Args:
        num_rows: rows looked at.
        num_sessions: sessions in them; rows without one count each.
        adjacent: rows of the same session as the row before, as a share of those that could be.
        columns: the other columns, those that repeat most first.
    """

    num_rows: int
    num_sessions: int
    adjacent: float
    columns: tuple[ColumnRepeats, ...]

    @property
    def rows_per_session(self) -> float:
        """S."""
        return self.num_rows / max(self.num_sessions, 1)


def measure_sessions(
    path: str | os.PathLike[str], *, session: str, separator: str = "", sample_rows: int = 200_000
) -> SessionRepeats:
    """Measure the first rows of a file.

    Args:
        path: Parquet, Arrow, JSON Lines, CSV or TSV.
        session: column of the session.
        separator: of a text file; "" guesses it.
        sample_rows: most rows to look at.

    Raises:
        SchemaError: there is no such column.
    """
    file = os.fspath(path)
    source = RawSource(file, text=TextOptions(delimiter=separator or RawSource(file).better_separator()))
    if session not in source.columns():
        raise missing_column(source.paths[0], session, tuple(source.columns()), asked="--session")
    parts: list[pl.DataFrame] = []
    for chunk in source.frames(chunk_rows=sample_rows):
        parts.append(chunk.frame)
        if sum(part.height for part in parts) >= sample_rows:
            break
    frame = pl.concat(parts).head(sample_rows) if parts else pl.DataFrame({session: []})
    return repeats_of(frame, session=session)


def repeats_of(frame: pl.DataFrame, *, session: str) -> SessionRepeats:
    """The same of rows in memory."""
    absent = without_session(frame[session])
    frame = frame.with_columns(pl.when(~absent).then(frame[session]).alias(session))
    same = pl.col(session).is_not_null() & pl.col(session).eq_missing(pl.col(session).shift(1))
    size = max(frame.height, 1)
    lie_together = int(frame.select(same.sum()).item())
    frame = frame.sort(session, maintain_order=True)
    follows = frame.select(same.fill_null(False).alias("same"))["same"]
    num_following = int(follows.sum())
    columns = []
    for name in frame.columns:
        if name == session:
            continue
        kept = frame.select(pl.col(name).eq_missing(pl.col(name).shift(1)).alias("kept"))["kept"]
        unchanged = int((kept & follows).sum())
        columns.append(
            ColumnRepeats(
                column=name,
                unchanged=unchanged / max(num_following, 1),
                factor=size / max(size - unchanged, 1),
                is_list=isinstance(frame.schema[name], pl.List | pl.Array),
            )
        )
    return SessionRepeats(
        num_rows=frame.height,
        num_sessions=frame.height - num_following,
        adjacent=lie_together / max(num_following, 1),
        columns=tuple(sorted(columns, key=lambda each: -each.factor)),
    )
