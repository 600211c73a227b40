"""Notes on drift in a stream's report: features that shifted, and windows in which NE rose for good."""

from __future__ import annotations

import sys

import pytest

from ziggurat.training.records.windows import WindowRecord
from ziggurat.training.report.drift_notes import alarm_notes, shift_notes


def record(number: int, *, ne: float | None = 0.9, item: float = 0.01) -> WindowRecord:
    return WindowRecord(
        window=number,
        name=f"w{number}",
        step=number,
        rows=100,
        metrics={} if number == 1 else {"ne": ne},
        shift_before={"item": item, "user": 0.05},
    )


def test_features_above_the_alarm_are_named_with_their_windows() -> None:
    records = [record(number, item=0.3 if number in (3, 5) else 0.1) for number in range(1, 6)]
    (note,) = shift_notes(records)
    assert note.startswith("item: ")
    assert "in 2 of 5 windows: w3, w5" in note


def test_a_loss_that_rises_for_good_is_an_alarm_and_one_that_wobbles_is_none() -> None:
    pytest.importorskip("river")
    steady = [record(number, ne=0.9 + 0.01 * (-1) ** number) for number in range(1, 20)]
    (note,) = alarm_notes(steady)
    assert "never rose for good" in note
    risen = [record(number, ne=0.9 if number < 12 else 0.98) for number in range(1, 20)]
    risen[4] = record(5, ne=None)  # a window of one class has no NE
    (note,) = alarm_notes(risen)
    assert "rose for good in w12" in note
    assert alarm_notes([record(1)]) == []


def test_without_river_the_report_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river.drift", None)
    monkeypatch.setitem(sys.modules, "river", None)
    (note,) = alarm_notes([record(1), record(2)])
    assert "ziggurat-rec[drift]" in note
