"""The benchmark of formats: errors are judged against a table, and a part that is none is refused."""

from __future__ import annotations

import pytest

from benchmarks import numerics
from benchmarks.report import Report
from ziggurat.errors import ConfigError


def test_errors_of_formats_agree_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(benchmark="numerics", claim="", command="")
    monkeypatch.setattr(numerics, "PUBLISHED_QSNR", {"mx9": 46.6, "mx6": 30.0})
    numerics.measure_formats(report, 1, True)
    verdicts = {case["name"]: case["verdict"] for case in report.figures}
    assert verdicts == {"qsnr_mx9_normal": "met", "qsnr_mx6_normal": "missed"}


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="qsnr"):
        numerics.run(options=numerics.parse_options(["--parts", "gears"]))
