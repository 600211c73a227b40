"""Rows of drawn items: the user's columns of their event, the item's of the draw, and labels of 0."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest

from ziggurat.data.drawn_items import DrawnItemsConfig, with_drawn_items
from ziggurat.errors import ConfigError, DataError

CONFIG = DrawnItemsConfig(item="item", describes=("price", "tags"), zeros=("rating",), per_event=3, seed=1)


def events(num: int = 200) -> pl.DataFrame:
    draw = np.random.default_rng(0)
    item = draw.integers(0, 9, num)
    return pl.DataFrame(
        {
            "user": draw.integers(0, 20, num),
            "item": [f"i{each}" for each in item],
            "rating": draw.integers(1, 6, num),
            "price": item * 1.5,
            "time": np.arange(num),
            "tags": [[f"t{each % 3}"] for each in item],
        }
    )


def test_rows_are_those_of_their_event_with_another_item() -> None:
    frame = events()
    made = with_drawn_items(frame, CONFIG)
    assert made.columns == [*frame.columns, "seen"]
    assert made.filter(seen=1).drop("seen").equals(frame)
    assert made["time"].to_list() == [each for time in range(200) for each in [time] * 4]
    assert made["seen"].to_list() == [1, 0, 0, 0] * 200
    assert made.filter(seen=0)["rating"].to_list() == [0] * 600
    for row in made.iter_rows(named=True):
        event = frame.row(row["time"], named=True)
        number = int(row["item"][1:])
        assert (row["user"], row["price"], row["tags"]) == (event["user"], number * 1.5, [f"t{number % 3}"])
        assert (row["item"] == event["item"]) == bool(row["seen"])
    counts = made.filter(seen=0)["item"].value_counts()["count"]
    assert counts.len() == 9
    assert counts.min() > 35  # 66.7 expected
    assert made.equals(with_drawn_items(frame, CONFIG))
    assert not made.equals(with_drawn_items(frame, dataclasses.replace(CONFIG, seed=2)))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="seen"):
        with_drawn_items(events().with_columns(seen=1), CONFIG)
    with pytest.raises(ConfigError, match="genre"):
        with_drawn_items(events(), dataclasses.replace(CONFIG, describes=("genre",)))
    with pytest.raises(ConfigError, match="numbers"):
        with_drawn_items(events(), dataclasses.replace(CONFIG, zeros=("item",)))
    with pytest.raises(DataError, match="1 items"):
        with_drawn_items(events(1), CONFIG)
