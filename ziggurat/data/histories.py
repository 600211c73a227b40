"""Histories: for each event, what its user did before it, as a list that a model may read.

    user  item  time  rating        history (rating >= 4, strictly before)
    a     x      1     5            []
    a     y      2     3            [x]
    b     x      2     4            []
    a     z      3     4            [x]                   y was not liked
    a     w      3     5            [x]                   z is of the same moment: not before

Strictly before: an event at the same time does not count, whatever the order of the rows, since it may have been part
of the same act (a page of ratings, a basket). Nothing of an event's own moment or future can then reach its features,
so a model that is trained with histories may be tested with them.

Cost: one sort of the events, and one gather of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from jaxtyping import Bool, Int64

from ziggurat.data.event_frames import check_events
from ziggurat.errors import DataError
from ziggurat.typed import Length, checked


@dataclass(frozen=True, kw_only=True)
@checked
class HistoryConfig:
    """Settings of what a history is made of.

    Args:
        user: column of the user.
        item: column of the item.
        time: column with the order of events: numbers or dates, and no text.
        name: of the new column.
        max_length: the latest so many items of a user.
    """

    user: str
    item: str
    time: str
    name: str = "history"
    max_length: Length = 50


def with_histories(events: pl.DataFrame, config: HistoryConfig, *, liked: pl.Expr | None = None) -> pl.DataFrame:
    """The events, in their order, with a list column: items of earlier events of the same user, the latest last.

    Args:
        events: one row an event.
        config: which columns, and how long a list.
        liked: which events enter a history (`pl.col("rating") >= 4`); None: all.

    Raises:
        ConfigError: a column is absent, or the new one is there already.
        DataError: an event without user, item or time, or times in text.
    """
    needed = (config.user, config.item, config.time)
    check_events(events, needed, complete=needed, new=config.name, where="histories")
    _refuse_texts(events[config.time])
    is_liked = events.select(pl.lit(True) if liked is None else liked).to_series()
    is_liked = is_liked if len(is_liked) == len(events) else is_liked.new_from_index(0, len(events))
    moments = events.select(
        user=pl.col(config.user).rank("dense").cast(pl.Int64), time=pl.col(config.time).rank("dense").cast(pl.Int64)
    )
    starts, before = history_indices(
        moments["user"].to_numpy(),
        moments["time"].to_numpy(),
        liked=is_liked.fill_null(False).to_numpy(),
        max_length=config.max_length,
    )
    codes = events[config.item].rank("dense").cast(pl.Int32).to_numpy() - 1
    ids = events[config.item].unique().sort().to_arrow()
    values = pa.DictionaryArray.from_arrays(pa.array(codes[before]), ids)
    lists = pa.LargeListArray.from_arrays(pa.array(starts), values)
    return events.with_columns(pl.Series(config.name, pl.from_arrow(lists)))


def _refuse_texts(times: pl.Series) -> None:
    """Refuse times in text, whose order is that of letters: 01.12.2023 would come before 02.01.2023."""
    if not isinstance(times.dtype, pl.String | pl.Categorical | pl.Enum):
        return
    column = times.name
    raise DataError(
        expected="times that have an order: numbers or dates",
        found=f"type {times.dtype}, for example {times[0]!r}" if len(times) else f"type {times.dtype}",
        where=f"histories, column {column!r}",
        ways_out=(
            f'dates: events.with_columns(pl.col("{column}").cast(pl.String).str.to_datetime("%d.%m.%Y %H:%M"))',
            f'numbers: events.with_columns(pl.col("{column}").cast(pl.String).cast(pl.Int64))',
        ),
    )


def history_indices(
    users: Int64[np.ndarray, " N"], times: Int64[np.ndarray, " N"], *, liked: Bool[np.ndarray, " N"], max_length: int
) -> tuple[Int64[np.ndarray, " N+1"], Int64[np.ndarray, " M"]]:
    """List for each event the numbers of the liked events of its user that were strictly before it, the latest last.

    Args:
        users: of the events.
        times: of the events.
        liked: events that enter a history.
        max_length: at most so many, the latest ones.

    Returns:
        (N + 1,) where the list of each event begins, and (M,) the numbers of events, one list after the other.
    """
    order = np.lexsort((times, users))
    sorted_users = users[order]
    sorted_times = times[order]
    is_new_user = np.r_[True, sorted_users[1:] != sorted_users[:-1]][: len(order)]
    is_new_moment = is_new_user | np.r_[True, sorted_times[1:] != sorted_times[:-1]][: len(order)]
    # Liked events stand one after the other, by user and time; a history is a run of them that ends before its event.
    is_liked = liked[order]
    num_before = np.cumsum(is_liked) - is_liked
    first_of_moment = np.maximum.accumulate(np.where(is_new_moment, np.arange(len(order)), 0))
    first_of_user = np.maximum.accumulate(np.where(is_new_user, np.arange(len(order)), 0))
    ends = num_before[first_of_moment]
    begins = np.maximum(num_before[first_of_user], ends - max_length)
    lengths = np.empty(len(order), dtype=np.int64)
    first = np.empty(len(order), dtype=np.int64)
    lengths[order], first[order] = ends - begins, begins
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    places = np.arange(starts[-1]) + np.repeat(first - starts[:-1], lengths)
    return starts, order[is_liked][places]
