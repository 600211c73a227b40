"""Samples a second, without the first step."""

from __future__ import annotations

from ziggurat.training.report.pace import Pace


def test_rates_leave_out_the_first_step() -> None:
    pace = Pace()
    assert pace.samples_per_s == 0.0
    assert pace.since_last() == {"samples_per_s": 0.0}
    pace.count(30.0, rows=10)
    assert pace.samples_per_s == 0.0
    assert pace.first_step_s == 30.0
    pace.count(2.0, rows=10)
    assert pace.since_last() == {"samples_per_s": 5.0}
    pace.count(2.0, rows=30)
    assert pace.since_last() == {"samples_per_s": 15.0}
    assert pace.since_last() == {"samples_per_s": 0.0}
    assert pace.samples_per_s == 10.0
