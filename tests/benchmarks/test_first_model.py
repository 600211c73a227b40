"""The benchmark of first models: its tables hold what they say, and its verdict knows both kinds of metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.first_model import Found, parse_options, table
from benchmarks.first_model_sets import MADE


def found(metric: str, *, suggested: float, floor: float) -> Found:
    return Found(
        metric=metric,
        suggested=suggested,
        best="dlrm",
        floor=floor,
        trees=math.nan,
        attainable=math.nan,
        seconds=3.0,
    )


@pytest.mark.parametrize(
    ("metric", "suggested", "floor", "is_above"),
    [("auc", 0.70, 0.69, True), ("auc", 0.69, 0.70, False), ("rmse", 1.0, 1.1, True), ("rmse", 1.1, 1.0, False)],
)
def test_the_verdict_follows_the_metric(metric: str, suggested: float, floor: float, is_above: bool) -> None:
    each = found(metric, suggested=suggested, floor=floor)
    assert each.is_above_floor() is is_above
    assert ("**no**" in table({"one": each})) is not is_above


@pytest.mark.parametrize(
    ("metric", "suggested", "tuned", "is_near"),
    [("auc", 0.76, 0.769, True), ("auc", 0.75, 0.77, False), ("rmse", 1.0, 1.0, True), ("rmse", 1.02, 1.0, False)],
)
def test_the_best_of_the_others_is_a_second_goal(metric: str, suggested: float, tuned: float, is_near: bool) -> None:
    each = found(metric, suggested=suggested, floor=suggested)
    assert each.is_near_best()
    assert replace(each, tuned=tuned).is_near_best() is is_near
    assert replace(each, trees=tuned).is_near_best() is is_near


def test_the_table_of_tastes_is_that_of_its_description() -> None:
    made = MADE["taste"]()
    assert made.frame.height == 40_000
    assert (made.frame["user"].n_unique(), made.frame["item"].n_unique()) == (300, 100)
    assert made.attainable == pytest.approx(0.822, abs=0.005)
    assert parse_options(["--sets", "taste,sums", "--seed", "2"]).sets == ("taste", "sums")
