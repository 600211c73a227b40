"""The data sets of comparisons: what they fix, and MovieLens-1M without ratings of 3."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.synthetic.teacher import six_orders
from ziggurat.studies import compare_data
from ziggurat.studies.compare_data import ComparedData, data_run, ratings_without_three


def test_ratings_of_three_are_dropped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    raw = tmp_path / "ratings.parquet"
    pl.DataFrame({"user_id": range(10), "rating": [1, 2, 3, 4, 5, 3, 3, 1, 4, 5]}).write_parquet(raw)
    asked: list[str | None] = []

    def fetched(name: str, *, source: str | None = None) -> Path:
        asked.append(source)
        return raw

    monkeypatch.setattr(compare_data, "fetch", fetched)
    path = ratings_without_three("archive.zip")
    assert pl.read_parquet(path)["rating"].to_list() == [1, 2, 4, 5, 1, 4, 5]
    assert data_run(ComparedData.MOVIELENS_RANDOM, source="archive.zip").data.train == (str(path),)
    assert asked == ["archive.zip"]  # the second time it is there
    assert [each.name for each in path.parent.iterdir()] == ["ratings.parquet"]


def test_splits_are_what_the_names_say() -> None:
    assert data_run(ComparedData.FRAPPE).data.split.by is SplitBy.FILES
    assert data_run(ComparedData.MOVIELENS).data.split.by is SplitBy.TIME
    assert data_run(ComparedData.SYNTHETIC, rows=50).dataset.rows == 50
    assert data_run(ComparedData.SYNTHETIC_10M).dataset.rows == 10_000_000
    assert data_run(ComparedData.SYNTHETIC_300K).teacher == six_orders()
