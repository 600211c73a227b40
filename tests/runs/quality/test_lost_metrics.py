"""An evaluation names the metrics of a run that no loaded module computes any more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.runs.quality.test_trained_rows import shop, trained
from tests.studies.own_cache import cache_with_kernels
from ziggurat.training.records.run_folder import EVALUATION


def test_a_metric_of_an_extension_that_is_not_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    rows = shop(has_prices=True)
    run = trained(rows, folder=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        run.evaluate(rows.tail(100))
    assert not any("left out" in message for message in caplog.messages)
    path = tmp_path / "run" / "evaluations" / "test.json"
    kept = EVALUATION.read(path)
    kept["metrics"]["profit"] = 0.5
    EVALUATION.write(path, kept)
    with caplog.at_level(logging.WARNING):
        run.evaluate(rows.tail(100))
        run.evaluate(rows.tail(100), metrics={"profit": lambda scores, labels, weights: 1.0})
    said = [message for message in caplog.messages if "left out: profit" in message]
    assert len(said) == 1
    assert "--extension MODULE" in said[0]
