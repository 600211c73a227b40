"""Ids to numbers and back: what is kept for single requests says what the vocabulary says."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from ziggurat.errors import RequestError
from ziggurat.serving.answering import item_catalogue
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, ItemColumns, NumberOfId
from ziggurat.serving.request_rows import canonical_id

TEXTS = ["0", "1", "7", "007", "true", "7.5", "Amélie", "a b", "-3", "x" * 300]
ASKED: list[Any] = [*TEXTS, "7.0", "1.0", "", " 7", "-0.0", "8", None, 7, 7.0, True, 1, False, 7.5, float("nan"), "nan"]


def test_kept_ids_are_those_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_catalogue, "_MAX_KEPT", 6)  # so that it is emptied on the way
    found = NumberOfId(pl.Series(TEXTS))
    draw = np.random.default_rng(0)
    for _ in range(200):
        asked = [ASKED[each] for each in draw.integers(0, len(ASKED), draw.integers(0, 5))]
        assert found.numbers(asked).tolist() == found.looked_up([canonical_id(each) for each in asked]).tolist()
        assert len(found._kept) <= 6


def test_what_is_no_id_is_refused_also_beside_kept_ones() -> None:
    found = NumberOfId(pl.Series(TEXTS))
    found.numbers(["7"])
    with pytest.raises(RequestError, match="user_id"):
        found.numbers(["7", {"a": 1}], column="user_id")


def test_few_ids_and_many_are_the_same() -> None:
    catalogue = ItemCatalogue(pl.DataFrame({"item": TEXTS}), columns=ItemColumns(id="item", features=("item",)))
    numbers = torch.tensor([3, 0, 3, 9] * 100)
    assert catalogue.ids_at(numbers) == [each for _ in range(100) for each in catalogue.ids_at(numbers[:4])]
    assert catalogue.ids_at(numbers[:4]) == [TEXTS[each] for each in (3, 0, 3, 9)]
    assert catalogue.ids_at(torch.empty(0, dtype=torch.int64)) == []
