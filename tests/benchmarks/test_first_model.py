"""The benchmark of first models: its tables hold what they say, and its verdict knows both kinds of metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import first_model
from benchmarks.first_model import Found, Options, parse_options, run, table
from benchmarks.first_model_sets import MADE, SmallSet


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
    assert ("**no**" in table({"one": [each]})) is not is_above


@pytest.mark.parametrize(
    ("metric", "suggested", "tuned", "is_near"),
    [("auc", 0.76, 0.769, True), ("auc", 0.75, 0.77, False), ("rmse", 1.0, 1.0, True), ("rmse", 1.02, 1.0, False)],
)
def test_the_best_of_the_others_is_a_second_goal(metric: str, suggested: float, tuned: float, is_near: bool) -> None:
    each = found(metric, suggested=suggested, floor=suggested)
    assert each.is_near_best()
    assert replace(each, tuned=tuned).is_near_best() is is_near
    assert replace(each, trees=tuned).is_near_best() is is_near


def test_several_seeds_are_shown_as_mean_and_deviation() -> None:
    one = found("auc", suggested=0.70, floor=0.69)
    other = replace(one, suggested=0.72, best="dcn_v2")
    assert Found.mean_of([one, other]).suggested == pytest.approx(0.71)
    assert "| 0.7100 ± 0.0141 | dlrm, dcn_v2 | 0.6900 ± 0.0000 | – |" in table({"one": [one, other]})


def test_the_table_of_tastes_is_that_of_its_description() -> None:
    made = MADE["taste"]()
    assert made.frame.height == 40_000
    assert (made.frame["user"].n_unique(), made.frame["item"].n_unique()) == (300, 100)
    assert made.attainable == pytest.approx(0.822, abs=0.005)
    assert parse_options(["--sets", "taste,sums", "--seeds", "0,2"]) == Options(sets=("taste", "sums"), seeds=(0, 2))


def test_published_tables_that_are_not_there_are_said_before_the_first_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frappe").mkdir()
    said: list[str] = []
    said_before: list[str] = []

    def measured(name: str, subject: SmallSet, *, out: Path, seed: int) -> Found:
        said_before.extend(said)
        return found("auc", suggested=0.7, floor=0.7)

    monkeypatch.setattr(first_model, "_PUBLISHED_FILES", tmp_path)
    monkeypatch.setattr(first_model, "say", said.append)
    monkeypatch.setattr(first_model, "measure", measured)
    report = run(options=Options(sets=("tiny", "criteo_sample")))
    assert said_before == ["skipped: criteo_sample: its files are not at ../shared/data/criteo_sample"]
    assert report.skipped == ["criteo_sample: its files are not at ../shared/data/criteo_sample"]
    assert first_model.missing_tables(("frappe_sample", "tiny"), published=tmp_path) == {}
