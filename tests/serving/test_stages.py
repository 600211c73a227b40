"""Stages of answers: measured where somebody collects, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from ziggurat.serving.answering.stages import collected, stage


def test_the_stages_of_an_answer_are_collected_in_their_order(loaded: Any) -> None:
    with collected() as stages:
        loaded.recommend({"user_id": "3"})
    assert [each.name for each in stages] == ["user vectors", "search", "ranker"]
    assert all(each.begin_ns <= each.end_ns for each in stages)
    assert [each.begin_ns for each in stages] == sorted(each.begin_ns for each in stages)
    with collected(False) as none:
        loaded.recommend({"user_id": "3"})
    assert not none
    assert len(stages) == 3, "nothing is collected after the block"


def test_a_stage_that_fails_is_collected_too() -> None:
    @stage("one")
    def fail(number: int) -> None:
        raise ValueError(number)

    with collected() as stages, pytest.raises(ValueError, match="3"):
        fail(3)
    assert [each.name for each in stages] == ["one"]
