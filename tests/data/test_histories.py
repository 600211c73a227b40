"""Histories hold what was strictly before, and nothing of the event's own moment or future."""

import numpy as np
import polars as pl
import pytest

from ziggurat.data.histories import HistoryConfig, with_histories
from ziggurat.errors import ConfigError, DataError

CONFIG = HistoryConfig(user="user", item="item", time="t", max_length=3)


def naive(events: pl.DataFrame, *, max_length: int) -> list[list[str]]:
    rows = events.to_dicts()
    found = []
    for row in rows:
        before = [
            (other["t"], number)
            for number, other in enumerate(rows)
            if other["user"] == row["user"] and other["t"] < row["t"] and (other["rating"] or 0) >= 4
        ]
        found.append([rows[number]["item"] for _, number in sorted(before)[-max_length:]])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_histories_are_those_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 60))
    events = pl.DataFrame(
        {
            "user": rng.integers(0, 5, size),
            "item": [f"i{n}" for n in rng.integers(0, 9, size)],
            "t": rng.choice([-1.5, 0.0, 2.0, 7.0, 8.0], size),
            "rating": [None if n == 0 else int(n) for n in rng.integers(0, 6, size)],
        },
        schema_overrides={"rating": pl.Int64, "item": pl.String},
    )
    made = with_histories(events, CONFIG, liked=pl.col("rating") >= 4)
    assert made.drop("history").equals(events)
    assert made["history"].cast(pl.List(pl.String)).to_list() == naive(events, max_length=3)


def test_what_comes_later_changes_nothing():
    """The leak test: cut the data at any moment, change all after it, and no earlier history moves."""
    rng = np.random.default_rng(7)
    times = rng.integers(0, 40, 300)
    events = pl.DataFrame({"user": rng.integers(0, 6, 300), "item": rng.integers(0, 30, 300), "t": times})
    whole = with_histories(events, CONFIG)
    for cut in (0, 5, 20, 39):
        late = pl.col("t") >= cut
        other = events.with_columns(
            item=pl.when(late).then(30 + pl.col("item")).otherwise("item"),
            user=pl.when(late).then((pl.col("user") + 1) % 6).otherwise("user"),
        )
        changed = with_histories(other, CONFIG)
        until = (pl.col("t") < cut) if cut else pl.lit(False)
        assert whole.filter(until).equals(changed.filter(until))
        alone = with_histories(events.filter(~late), CONFIG)
        assert alone.equals(whole.filter(~late))


def test_what_does_not_fit_is_named():
    events = pl.DataFrame({"user": [1, None], "item": ["a", "b"], "t": [1, 2]})
    with pytest.raises(DataError, match="row 1, column 'user'"):
        with_histories(events, CONFIG)
    with pytest.raises(ConfigError, match="columns user, item, t"):
        with_histories(events.drop("t"), CONFIG)
    with pytest.raises(ConfigError, match="none called history"):
        with_histories(events.with_columns(history=pl.lit(1)), CONFIG)


def test_times_in_text_are_refused_until_they_are_dates():
    texts = pl.Series("t", ["02.01.2023 10:00", "01.12.2022 10:00"])
    events = pl.DataFrame({"user": ["a", "a"], "item": ["late", "early"], "t": texts})
    for times in (texts, texts.cast(pl.Categorical())):
        with pytest.raises(DataError, match="times that have an order") as refused:
            with_histories(events.with_columns(times), CONFIG)
    code = refused.value.ways_out[0].removeprefix("dates: ")
    assert code == 'events.with_columns(pl.col("t").cast(pl.String).str.to_datetime("%d.%m.%Y %H:%M"))'
    dated = events.with_columns(pl.col("t").cast(pl.String).str.to_datetime("%d.%m.%Y %H:%M"))
    assert with_histories(dated, CONFIG)["history"].to_list() == [["early"], []]
    counted = events.with_columns(t=pl.Series(["9", "10"])).with_columns(pl.col("t").cast(pl.String).cast(pl.Int64))
    assert with_histories(counted, CONFIG)["history"].to_list() == [[], ["late"]]
