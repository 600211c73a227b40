"""The study of students: teachers that are as old as they are said to be, settings that validation alone chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from benchmarks.distil import (
    AUX,
    LABEL,
    NONE,
    SINGLE,
    Condition,
    Outcome,
    Size,
    best_of,
    of_another_domain,
    ratio_figure,
    student,
    teacher_scores,
    world_of,
)

SMALL = Size(seeds=1, windows=6, first=2, warm=1, valid=1, traffic=600, own=100)


def test_a_teacher_scores_a_window_by_weights_of_before_it() -> None:
    """With the labels of window 3 turned round, what was said of it stays, and what is said of later ones does not."""
    world = world_of(0, SMALL)
    turned = list(world.frames)
    turned[3] = turned[3].with_columns((1 - pl.col(LABEL)).cast(pl.Int8).alias(LABEL))
    plain = teacher_scores(world, SMALL, is_biased=False, staleness=(0, 1))
    other = teacher_scores(replace(world, frames=turned), SMALL, is_biased=False, staleness=(0, 1))
    for stale, first_that_differs in ((0, 4), (1, 5)):
        for window in range(SMALL.first, SMALL.windows):
            is_same = np.array_equal(plain[stale][window], other[stale][window])
            assert is_same is (window < first_that_differs)


def test_another_domain_has_all_positives_and_other_meanings() -> None:
    frame = world_of(0, SMALL).frames[0]
    other = of_another_domain(frame, seed=0, window=0)
    assert other[LABEL].sum() == frame[LABEL].sum()
    negatives, kept_negatives = (each.filter(pl.col(LABEL) == 0).height for each in (frame, other))
    assert 0.1 < kept_negatives / negatives < 0.4
    kept = frame.filter(pl.col(LABEL) == 1)
    moved = other.filter(pl.col(LABEL) == 1)
    assert moved["C1"].equals(kept["C1"])
    assert not moved["C4"].equals(kept["C4"])
    assert moved.group_by("C4").len()["len"].sort().equals(kept.group_by("C4").len()["len"].sort())


def test_settings_are_chosen_by_validation_alone() -> None:
    good = {"auc": 0.7, "ne": 0.9, "calibration": 1.0}
    bad = good | {"ne": 1.2}
    tried = {SINGLE: [Outcome(valid=bad, test=good)], AUX: [Outcome(valid=good, test=bad)]}
    assert best_of(tried) is AUX


def test_no_multiple_of_a_loss_is_told() -> None:
    def arm(*gains: float) -> list[dict[str, float]]:
        return [{"auc": 0.7 + gain, "ne": 0.9, "calibration": 1.0} for gain in gains]

    arms = {"labels": arm(0, 0, 0), "ours": arm(0.02, 0.03, 0.04), "peer": arm(0.01, 0.01, 0.02)}
    arms["worse"] = arm(-0.01, 0, -0.02)
    condition = Condition(name="drift_0", teacher=arm(0.1, 0.1, 0.1), arms=arms, settings={})
    met = ratio_figure("one", condition, ours="ours", peer="peer", goal=2.0)
    assert (round(float(str(met["ratio"])), 6), met["verdict"]) == (2.25, "met")
    against_loss = ratio_figure("two", condition, ours="ours", peer="worse", goal=2.0)
    assert (against_loss["ratio"], against_loss["verdict"]) == (None, "met")
    assert ratio_figure("three", condition, ours="worse", peer="peer", goal=2.0)["verdict"] == "missed"


def test_a_student_is_scored_before_it_is_trained() -> None:
    """What its teacher says of the last window changes nothing that is measured."""
    world = world_of(0, SMALL)
    told = teacher_scores(world, SMALL, is_biased=False, staleness=(0,))[0]
    last = [*told[:-1], 1.0 - told[-1]]
    assert student(world, SMALL, SINGLE, told) == student(world, SMALL, SINGLE, last)
    assert student(world, SMALL, SINGLE, told) != student(world, SMALL, NONE, None)
