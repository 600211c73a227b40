"""Events of a small shop: who saw which item, when, and whether they liked it."""

from __future__ import annotations

import numpy as np
import polars as pl

import ziggurat as zg
from ziggurat.features.items import Items

NUM_USERS, NUM_ITEMS = 60, 40
SCHEMA = zg.Schema(
    features=(
        zg.Categorical(name="user_id"),
        zg.Dense(name="age"),
        zg.Categorical(name="item"),
        zg.MultiHot(name="tags"),
        zg.Dense(name="price"),
        zg.Sequence(name="history", table="item"),
    ),
    labels=(zg.Label(name="like"),),
    group="user_id",
    time="timestamp",
    items=Items(id="item", features=("item", "tags", "price")),
)
SETTINGS = zg.TrainingConfig(
    epochs=1, threads=1, loader=zg.LoaderConfig(batch_size=256), learning_rate=0.01, table_learning_rate=0.1
)


def events(num_rows: int, *, seed: int = 0) -> pl.DataFrame:
    """Random events; items and users have columns of their own that stay as they are."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, NUM_USERS, num_rows), draw.integers(0, NUM_ITEMS, num_rows)
    price = np.round(np.random.default_rng(1).lognormal(2, 1, NUM_ITEMS), 2)
    logit = 2.0 * ((user + item) % 3 == 0) - 1.0
    return pl.DataFrame(
        {
            "user_id": user,
            "age": 18 + user % 50,
            "item": [f"i{value}" for value in item],
            "title": [f"Item number {value}" for value in item],
            "tags": [[f"t{value % 5}", f"t{value % 7}"][: value % 3] for value in item],
            "price": price[item],
            "history": [[f"i{value}" for value in draw.integers(0, NUM_ITEMS, draw.integers(0, 4))] for _ in user],
            "timestamp": 1_700_000_000 + np.arange(num_rows) * 60,
            "like": (draw.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
        }
    )
