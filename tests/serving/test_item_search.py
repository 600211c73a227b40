"""The index of an export: numbers are rows of the catalogue, filters and exclusions hold, and files come back."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.test_aligned_tensors import mapped_from
from ziggurat.errors import ExportError, ZigguratError
from ziggurat.serving.answering.item_search import ItemSearch

ITEMS = pl.DataFrame(
    {
        "item": [f"i{n}" for n in range(300)],
        "year": [1990 + n % 20 for n in range(300)],
        "genre": ["Drama", "War"] * 150,
    }
)


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(300, 8, generator=torch.Generator().manual_seed(0)))


def test_searches_are_exact_in_a_small_catalogue(vectors: torch.Tensor, tmp_path: Path) -> None:
    built = ItemSearch.build(vectors, items=ITEMS)
    queries = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    built.tune(queries, k=20, recall=0.9)
    built.save(tmp_path / "index.safetensors")
    search = ItemSearch.load(tmp_path / "index.safetensors", num_items=300)
    wanted = [None, search.parse("genre:Drama"), search.parse("NOT genre:Drama AND year:>=2000"), None]
    seen = [None, torch.arange(0, 300, 3), None, torch.tensor([7, 9])]
    found = search.search(queries[:4], k=20, filters=wanted, exclude=seen)
    passing = search.passing(filters=wanted, exclude=seen)
    frame = ITEMS.with_row_index()
    for query in range(4):
        allowed = torch.ones(300, dtype=torch.bool)
        if query in (1, 2):
            rule = pl.col("genre") == "Drama" if query == 1 else (pl.col("genre") != "Drama") & (pl.col("year") >= 2000)
            allowed = torch.tensor(frame.select(rule).to_series().to_list())
        items = seen[query]
        if items is not None:
            allowed[items] = False
        assert torch.equal(passing[query], allowed)
        products = torch.where(allowed, vectors @ queries[query], -torch.inf)
        best = products.sort(descending=True).indices[:20]
        assert set(found.items[query].tolist()) == set(best.tolist())
    assert search.attributes["genre"] == "text"
    assert "Drama" in search.explain(search.parse("genre:Drama"), 1)
    assert search.example()
    assert len(found.plans) == 4
    with pytest.raises(ZigguratError, match="year"):
        search.parse("yaer:1990")


def test_a_loaded_index_is_the_file(vectors: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    ItemSearch.build(vectors, items=ITEMS).save(path)
    search = ItemSearch.load(path, num_items=300)
    mapped = mapped_from(path)
    copied = [
        name
        for name, each in search.index.state_dict().items()
        if each.numel() and not any(each.data_ptr() in place for place in mapped)
    ]
    assert copied == ["filters.about"], "its description is read, not searched"


def test_another_index_is_refused(vectors: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    ItemSearch.build(vectors, items=ITEMS).save(path)
    with pytest.raises(ExportError, match="301 items"):
        ItemSearch.load(path, num_items=301)
    state = load_file(str(path))
    save_file({name: tensor for name, tensor in state.items() if not name.startswith("vectors.")}, str(path))
    with pytest.raises(ExportError, match="index"):
        ItemSearch.load(path, num_items=300)
    path.write_bytes(b"nothing")
    with pytest.raises(ExportError, match="safetensors"):
        ItemSearch.load(path, num_items=300)
