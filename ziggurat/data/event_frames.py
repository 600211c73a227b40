"""Frames of events: what must be there before columns are made of them."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from ziggurat.errors import ConfigError, DataError


def check_events(
    events: pl.DataFrame, columns: Sequence[str], *, complete: Sequence[str], new: str, where: str
) -> None:
    """Refuse events that lack a column or a value, or that have the column that is to be made.

    Args:
        events: one row an event.
        columns: that are read.
        complete: those of them that every event has a value in.
        new: name of the column that is to be made.
        where: for errors.

    Raises:
        ConfigError: a column is absent, or the new one is there already.
        DataError: an event without one of the values.
    """
    if new in events.columns or not set(columns) <= set(events.columns):
        raise ConfigError(
            expected=f"columns {', '.join(columns)}, and none called {new}",
            found=", ".join(events.columns),
            where=where,
            ways_out=("name the columns as they are", "choose another name for the new column"),
        )
    for name in complete:
        if nulls := events[name].null_count():
            raise DataError(
                expected=f"{', '.join(complete)} of each event",
                found=f"{nulls:,} events without {name}",
                where=f"{where}, row {int(events[name].is_null().arg_true()[0])}, column {name!r}",
                ways_out="take such events out: events.drop_nulls()",
            )
