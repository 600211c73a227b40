"""Gowalla in LightGCN's files: what is read, what is refused, and the published files where they are there."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cache import cache_folder
from ziggurat.data.datasets import fetch, gowalla, schema_for
from ziggurat.data.datasets.fetch import is_complete
from ziggurat.errors import DataError, MissingFileError
from ziggurat.files import sha256_of

MADE = {"train": b"0 0 1 2\n1 2\n", "test": b"0 3\n1 0 1\n"}


def test_a_source_is_checked_converted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(MissingFileError, match="no default download"):
        fetch("gowalla", cache=cache)
    with pytest.raises(MissingFileError, match="no such file or folder"):
        fetch("gowalla", source=tmp_path / "none", cache=cache)
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(MADE["train"]))
    (tmp_path / "test.txt").write_bytes(MADE["test"])
    with pytest.raises(DataError, match="sha256"):
        fetch("gowalla", source=tmp_path, cache=cache)
    monkeypatch.setattr(gowalla, "_SHA256", {name: sha256_of(data) for name, data in MADE.items()})
    for source in (tmp_path, None):
        folder = fetch("gowalla", source=source, cache=cache)
        train, test = (pl.read_parquet(folder / f"{split}.parquet") for split in gowalla.SPLITS)
        assert train.rows() == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 2, 1)]
        assert test.rows() == [(0, 3, 1), (1, 0, 1), (1, 1, 1)]
        assert not (folder / "valid.parquet").exists()


def test_its_recipe_reads_what_is_kept() -> None:
    config = zg.recipe_named("gowalla_lightgcn")
    assert config.table_schema == schema_for("gowalla")
    assert {each.name for each in config.table_schema.features} == {"user_id", "item_id"}


def test_the_published_files() -> None:
    if not is_complete(cache_folder() / gowalla.NAME):  # another test of this process may have moved the cache
        pytest.skip("Gowalla was not fetched into this cache")
    folder = fetch("gowalla")
    train, test = (pl.read_parquet(folder / f"{split}.parquet") for split in gowalla.SPLITS)
    assert (train.height, test.height) == (810_128, 217_242)
    assert train["user_id"].n_unique() == test["user_id"].n_unique() == 29_858
    assert train.join(test, on=["user_id", "item_id"], how="semi").is_empty()
