"""Drawn items: rows of what nobody chose, so that a ranker learns what is chosen and not only what is liked of it.

    user  item  rating  price        user  item  rating  price  seen
    a     x     5       10       ──► a     x     5       10     1
    b     y     2       7            a     y     0       7      0      drawn: user and moment of the event, the columns
                                     b     y     2       7      1      of the item of the drawn one, and labels are 0
                                     b     x     0       10     0

A ranker that was trained on what people chose to rate orders the items that an index finds poorly: it never saw one
that nobody chose (selection bias; Ma et al., SIGIR 2018, train over all that was shown, for the same reason). With
drawn rows `like` means chosen and liked, and a label `seen` beside it what is chosen at all.

Items are drawn uniformly from those of the events, never the event's own. What the user takes later may be drawn, since
nothing of the future may choose training rows; columns of an item are those of its last event. Drawn rows follow their
event at its time, so that a split by time cuts at the same times as without them.

Cost: one gather of all columns; `per_event` more rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from ziggurat.data.event_frames import check_events
from ziggurat.errors import ConfigError, DataError
from ziggurat.typed import Count, checked


@dataclass(frozen=True, kw_only=True)
@checked
class DrawnItemsConfig:
    """Settings for what is drawn, and for what the drawn rows hold.

    Args:
        item: column with the item's id.
        describes: further columns that describe the item.
        zeros: columns of labels, numbers that are 0 for a drawn item: nobody chose it.
        name: of the new column, 1 for events and 0 for drawn items.
        per_event: drawn items of each event.
        seed: of the draws.
    """

    item: str
    describes: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    name: str = "seen"
    per_event: Count = 1
    seed: int = 0


def with_drawn_items(events: pl.DataFrame, config: DrawnItemsConfig) -> pl.DataFrame:
    """The events, each followed by rows of its user and moment with items that were drawn.

    Args:
        events: one row an event.
        config: which columns, and how many.

    Raises:
        ConfigError: a column is absent, or the new one is there already.
        DataError: fewer than two items, or an event without one.
    """
    of_item = (config.item, *config.describes)
    check_events(events, (*of_item, *config.zeros), complete=(config.item,), new=config.name, where="drawn items")
    if texts := [
        name for name in config.zeros if not events.schema[name].is_numeric() and events.schema[name] != pl.Boolean
    ]:
        raise ConfigError(
            expected="columns of labels that are numbers, or true and false",
            found=", ".join(f"{name} ({events.schema[name]})" for name in texts),
            where="drawn items, zeros",
            ways_out="make numbers of them before: 1 for what was liked, else 0",
        )
    catalogue = events.select(of_item).unique(config.item, keep="last", maintain_order=True)
    if catalogue.height < 2:
        raise DataError(
            expected="events of at least two items",
            found=f"{catalogue.height:,} items",
            where=f"drawn items, column {config.item!r}",
            ways_out="name more events: an item of an event is drawn from the others",
        )
    own = events.select(config.item).join(
        catalogue.select(config.item).with_row_index("number:"), on=config.item, how="left", maintain_order="left"
    )["number:"]
    drawn = np.random.default_rng(config.seed).integers(0, catalogue.height - 1, (events.height, config.per_event))
    drawn += drawn >= own.to_numpy()[:, None].astype(np.int64)  # the own item is none of the others
    copies = events[np.repeat(np.arange(events.height), config.per_event)].drop(config.describes)
    columns = [pl.lit(0).cast(events.schema[name]).alias(name) for name in config.zeros]
    made = copies.with_columns(
        *columns, *(catalogue[name].gather(drawn.ravel()) for name in of_item), pl.lit(0, pl.Int8).alias(config.name)
    )
    whole = pl.concat(
        [events.with_columns(pl.lit(1, pl.Int8).alias(config.name)), made.select(*events.columns, config.name)]
    )
    event = np.concatenate([np.arange(events.height), np.repeat(np.arange(events.height), config.per_event)])
    # Stable, so that each event stands before the rows that were drawn for it.
    return whole[np.argsort(event, kind="stable")]
