"""The ranker of the chain: DCNv2 over users' histories, with rows of movies that were drawn (`data/drawn_items.py`).

Two labels: `seen` (rated at all, against a movie drawn for the same user and moment) and `like` (rated, and with 4 or
5). The rows are split by the same cuts in time as those of the run that retrieves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl

from benchmarks.quality import seeded
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.drawn_items import DrawnItemsConfig, with_drawn_items
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.features.schema import Label
from ziggurat.models import DCNv2Config, MLPConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.config import TrainingConfig

DATA = "movielens-1m-histories"
DRAWN = DrawnItemsConfig(item="movie_id", describes=("title", "year", "genres"), zeros=("rating",))


def ranker_run(seed: int, *, out: Path) -> RunConfig:
    """One pass over events and drawn movies.

    Args:
        seed: of weights and order.
        out: keeps the table.
    """
    path = out / "events_and_drawn.parquet"
    if not path.exists():
        with_drawn_items(pl.read_parquet(fetch(DATA)), DRAWN).write_parquet(path)
    schema = schema_for(DATA)
    labels = (Label(name="seen"), *schema.labels)
    config = RunConfig(
        data=DataConfig(train=(str(path),), split=SplitConfig(by=SplitBy.TIME)),
        table_schema=dataclasses.replace(schema, labels=labels),
        model=DCNv2Config(embedding_dim=32, deep=MLPConfig(hidden_dims=(256, 128))),
        training=TrainingConfig(
            epochs=1, learning_rate=1e-3, table_learning_rate=0.02, loader=LoaderConfig(batch_size=2048)
        ),
    )
    return seeded(config, seed)
