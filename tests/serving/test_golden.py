"""Golden requests: an export without any finite value is not made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ziggurat.errors import ConfigError
from ziggurat.serving.answers import Ranked, RankRequest, Recommendations, RecommendRequest, ScoredItem
from ziggurat.serving.golden import write_golden
from ziggurat.serving.value_model.formula import LOWEST


class Constant:
    """Answers every request with one item of this score."""

    def __init__(self, score: float) -> None:
        self.items = (ScoredItem(id="a", score=score),)

    def recommend_many(self, requests: Sequence[RecommendRequest]) -> list[Recommendations]:
        return [Recommendations(items=self.items, version="v") for _ in requests]

    def rank_many(self, requests: Sequence[RankRequest]) -> list[Ranked]:
        return [Ranked(items=self.items, version="v") for _ in requests]


def test_a_formula_that_is_never_finite_is_refused(tmp_path: Path) -> None:
    requests = [{"rank": {"user": {}, "items": ["a"]}}]
    write_golden(Constant(0.5), requests, tmp_path / "good.json")
    with pytest.raises(ConfigError, match="finite"):
        write_golden(Constant(LOWEST), requests, tmp_path / "bad.json")
    assert not (tmp_path / "bad.json").exists()
