"""Recall against time: it rises with the clusters, and ends at the exact answer."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import torch

from ziggurat.retrieval.item_index import ItemIndex, ItemIndexConfig
from ziggurat.retrieval.recall import measure_recall, plot_recall
from ziggurat.retrieval.vectors import VectorIndexConfig


def test_more_clusters_find_more_until_all_is_found(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, queries = (torch.randn(num, 8, generator=generator) for num in (3000, 20))
    config = ItemIndexConfig(vectors=VectorIndexConfig(num_clusters=50, kept="float32"))  # type: ignore[arg-type]
    index = ItemIndex.build(vectors, items=pl.DataFrame({"half": [i % 2 for i in range(3000)]}), config=config)
    index.delete([1])
    points = measure_recall(index, queries, k=10, filters=[None, "half:1"], vectors=vectors, probes=(1, 4, 50))
    for name in ("", "half:1"):
        recalls = [point.recall for point in points if point.filter == name]
        assert recalls == sorted(recalls)
        assert recalls[0] < 1.0 == recalls[-1]
    assert all(point.us_per_query > 0 for point in points)
    plot_recall(points, tmp_path / "recall.png", k=10)
    assert (tmp_path / "recall.png").stat().st_size > 1000
