"""The report of studies, on tries made by hand: compute is counted in order, and a study that is not over says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.tune import Search, best_at, report_of_study
from ziggurat.studies.tune_report import TUNING
from ziggurat.studies.tune_study import Ended, Spent, Try


def made(number: int, value: float | None, *, flops: float, cpu_s: float = 10.0) -> Try:
    return Try(
        number=number,
        values={"training.learning_rate": 0.001 * (number + 1)},
        value=value,
        reached={1: 0.5},
        ended=Ended.PRUNED if value is None else Ended.COMPLETE,
        spent=Spent(cpu_s=cpu_s, wall_s=cpu_s, rows=100, flops=flops, evaluations=1),
    )


TRIES = (made(0, 0.7, flops=10.0), made(1, None, flops=2.0), made(2, 0.8, flops=10.0), made(3, None, flops=2.0))


def test_the_best_so_far_counts_what_pruned_tries_have_spent() -> None:
    assert best_at(TRIES, flops=9.0, higher=True) is None
    assert best_at(TRIES, flops=10.0, higher=True) == 0.7
    assert best_at(TRIES, flops=21.0, higher=True) == 0.7
    assert best_at(TRIES, flops=22.0, higher=True) == 0.8
    assert best_at(TRIES, flops=22.0, higher=False) == 0.7


def test_pruning_saves_what_tries_did_not_spend() -> None:
    search = Search(arm="tuned", tries=TRIES, outside_s=20.0, inside_s=40.0)
    assert search.saved == pytest.approx(1.0 - 24.0 / 40.0)
    assert search.count(Ended.PRUNED) == 2
    assert search.per_minute == pytest.approx(60.0 * 4 / 60.0)
    assert Search(arm="tuned", tries=TRIES[1:2]).saved == 0.0


@pytest.mark.parametrize(("budget", "verdict"), [(4, "met"), (5, None)])
def test_a_study_is_held_to_its_minutes_once_all_tries_are_made(
    tmp_path: Path, budget: int, verdict: str | None
) -> None:
    tries = [{**dataclasses.asdict(each), "ended": each.ended.value} for each in TRIES]
    study = {
        "data": "movielens-random",
        "metric": "auc",
        "protocol": "bars",
        "budget": {"tries": budget, "flops": 0.0, "hours": 0.0},
        "sampler": "tpe",
        "pruner": "hyperband",
        "inside_s": 40.0,
        "outside_s": 10.0,
        "calls": 2,
        "notes": ["dnn: a note"],
        "models": [{"name": "dnn", "tries": tries, "importances": {"training.learning_rate": 0.75}}],
    }
    TUNING.write(tmp_path / "tuning.json", study)
    report = report_of_study(tmp_path)
    assert report.benchmark == "tune_movielens_random"
    by_name = {each["name"]: each for each in report.figures}
    assert by_name["tune_movielens_random_beside_share"]["verdict"] == "missed"
    assert by_name["tune_movielens_random_minutes_on_two_cores"].get("verdict") == verdict
    assert ("is not over: dnn 4" in report.notes[0]) == (verdict is None)
    assert len(report.extra["study"]["models"][0]["tries"]) == 4  # pyright: ignore[reportIndexIssue]
    text = "\n".join(report.tables)
    assert "| dnn | 0.80000 | 0.70000 | 2 | 4 | 2 | 2 | 0 |" in text
    assert "training.learning_rate 75%" in text
    for name, draw in report.plots:
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
