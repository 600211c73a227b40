"""The Python of docs/guides/torchrec.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make test-bridges` runs these tests")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.bridges.torchrec_models import on_ranks

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "torchrec.md"
FEATURES = ["user", "age", "item", "genres"]


def _follow(rank: int) -> list[tuple[int, ...]]:
    tables = [
        EmbeddingBagConfig(name=f"of_{name}", embedding_dim=16, num_embeddings=10, feature_names=[name])
        for name in FEATURES
    ]
    names: dict[str, Any] = {"ebc": EmbeddingBagCollection(tables=tables, device=torch.device("meta"))}
    for content in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(content, "docs/guides/torchrec.md", "exec"), names)
    features = KeyedJaggedTensor(keys=FEATURES, values=torch.arange(8), lengths=torch.ones(8, dtype=torch.int32))
    before = [weight.detach().clone() for weight in names["dense"].values()]
    shape = None
    for _ in range(2):
        names["optimizer"].zero_grad()
        logits = names["model"](features)
        logits.sum().backward()
        names["optimizer"].step()
        shape = tuple(logits.shape)
    assert shape == (2, 1)
    changed = [not torch.equal(*pair) for pair in zip(before, names["dense"].values(), strict=True)]
    assert all(changed)
    assert any("tower_layer" in name for name in names["dense"])
    return [tuple(names["embeddings"].tower_layer.module(0).field_dims)]


def test_the_guide_runs() -> None:
    assert on_ranks(_follow, 4) == [[(16, 16)]] * 4
