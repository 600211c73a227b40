"""The line of a window: counts where there are some, and no gap where there are none."""

from __future__ import annotations

from typing import Any

import pytest

from ziggurat.runs.stream.window_line import window_line
from ziggurat.training.records.windows import HistoryRows, WindowRecord


def record_of(**settings: Any) -> WindowRecord:
    whole: dict[str, Any] = {"window": 2, "name": "2026-01-02", "step": 3, "rows": 1200, "late": 0, "bad": 0}
    return WindowRecord(**whole | {"row_sum": "0", "is_trained": True, "watermark": "", "metrics": {}} | settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"trained": {"known": 0, "assumed": 0}}, []),  # all labels of the window are known in later ones
        ({"trained": {"known": 0, "assumed": 7, "corrected": 2}}, ["7 assumed, 2 corrected"]),
        ({"unknown": {"user": 0.004, "item": 0.1}}, ["unknown item 10.0%"]),
        ({"shift_before": {"user": 0.19, "item": 0.3, "age": 0.4}}, ["shifted age 0.40, item 0.30"]),
        (
            {"histories": {"big": HistoryRows(share=0.5, length=2.25, age=7200.0)}},
            ["history big 50.0% of 2.2 vectors, 2 hours old"],
        ),
        ({"histories": {"big": HistoryRows(share=0.0)}}, ["history big 0.0%"]),
        ({"late": 12, "bad": 3}, ["12 late", "3 put aside"]),
        ({"dropped": 4}, ["4 late, left out"]),
        ({"metrics": {"auc": 0.75, "mrr": 0.5}}, ["auc 0.75000"]),
    ],
)
def test_parts_of_the_line(settings: dict[str, Any], expected: list[str]) -> None:
    line = window_line(record_of(**settings), train_s=0.0, steps=0)
    assert line == "  ".join(["2026-01-02      1,200 rows", *expected])


def test_the_rate_is_that_of_trained_rows() -> None:
    assert window_line(record_of(), train_s=2.0, steps=4).endswith("  trained, 600/s")
    assert "trained" not in window_line(record_of(), train_s=0.0, steps=0)
