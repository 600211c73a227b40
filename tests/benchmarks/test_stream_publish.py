"""The benchmark of publishing runs to its end, and says how many times fewer bytes a delta of few rows has."""

from __future__ import annotations

import pytest

from benchmarks import stream_publish
from benchmarks.report import Report


@pytest.mark.slow
def test_a_delta_of_few_rows_has_fewer_bytes_than_a_whole_version() -> None:
    report = Report(benchmark="stream_publish", claim="", command="")
    stream_publish.add_cases(report, quick=True)
    by_name = {case.name: case for case in report.cases}
    assert set(by_name) == {
        f"publish_{number}_rows_{what}" for number in stream_publish.TOUCHED for what in ("s", "cpu_s", "bytes")
    }
    few = by_name["publish_100_rows_bytes"]
    assert few.ours < few.peer
    assert few.ratio == pytest.approx(few.peer / few.ours)
    rows = [figure["rows"] for figure in report.figures]
    assert rows == sorted(rows, reverse=True)
