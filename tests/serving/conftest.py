"""A small shop: runs of a two_tower and of a ranker on the same events, and an export of both, made once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import SCHEMA, SETTINGS, events
from ziggurat.models import MLPConfig
from ziggurat.models.retrieval.encoders import EncoderConfig
from ziggurat.models.retrieval.two_tower import TwoTowerConfig


@dataclass(frozen=True)
class Shop:
    """Folders of the shop."""

    place: Path
    two_tower: Path
    ranker: Path
    export: Path
    events: pl.DataFrame


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    place = tmp_path_factory.mktemp("shop")
    torch.set_num_threads(1)
    frame = events(2000)
    frame.write_parquet(place / "events.parquet")
    small = MLPConfig(hidden_dims=(8,))
    models = {
        "two_tower": TwoTowerConfig(
            embedding_dim=4,
            output_dim=8,
            negatives_block=64,
            user=EncoderConfig(hidden=small),
            item=EncoderConfig(hidden=small),
        ),
        "ranker": zg.DCNv2Config(embedding_dim=4, deep=small),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
        for name, model in models.items():
            data = zg.DataConfig(train=(str(place / "events.parquet"),))
            config = zg.RunConfig(data=data, table_schema=SCHEMA, model=model, training=SETTINGS)
            zg.train_run(config, folder=place / name)
        zg.export_run(
            place / "two_tower",
            ranker=place / "ranker",
            out=place / "export",
            config=zg.ExportConfig(num_candidates=12, keep=("title",), golden=2, program=False),
        )
        yield Shop(place, place / "two_tower", place / "ranker", place / "export", frame)


@pytest.fixture(scope="session")
def loaded(shop: Shop) -> zg.Recommender:
    return zg.Recommender.load(shop.export)
