"""Events of a small shop: who saw which item, when, and whether they liked it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.features.items import Items
from ziggurat.models import MLPConfig
from ziggurat.models.retrieval.encoders import EncoderConfig
from ziggurat.models.retrieval.two_tower import TwoTowerConfig

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


@dataclass(frozen=True)
class Shop:
    """Folders of the shop."""

    place: Path
    two_tower: Path
    ranker: Path
    export: Path
    events: pl.DataFrame


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


def make_shop(place: Path) -> Shop:
    """Train both runs and export them, into one folder."""
    frame = events(2000)
    frame.write_parquet(place / "events.parquet")
    small, tables = MLPConfig(hidden_dims=(8,)), EmbeddingConfig(kernel=KernelChoice.TORCH)
    encoder = EncoderConfig(hidden=small)
    models = {
        "two_tower": TwoTowerConfig(
            embedding_dim=4, output_dim=8, negatives_block=64, user=encoder, item=encoder, embedding=tables
        ),
        "ranker": zg.DCNv2Config(embedding_dim=4, deep=small, embedding=tables),
    }
    for name, model in models.items():
        data = zg.DataConfig(train=(str(place / "events.parquet"),))
        config = zg.RunConfig(data=data, table_schema=SCHEMA, model=model, training=SETTINGS)
        zg.train_run(config, folder=place / name)
    zg.export_run(
        place / "two_tower",
        ranker=place / "ranker",
        out=place / "export",
        config=zg.ExportConfig(value="like", num_candidates=12, keep=("title",), golden=2, program=False),
    )
    return Shop(place, place / "two_tower", place / "ranker", place / "export", frame)
