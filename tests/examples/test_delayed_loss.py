"""A loss of delayed labels from outside the package: its equations, and a stream that is trained by it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.stream.test_delayed_streams import delayed_events
from tests.runs.stream.test_stream_runs import SCHEMA
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.training.delayed_losses import DelayedLoss, DelayedRows
from ziggurat.training.records.windows import read_windows

MODULE = "examples.extensions.late_share"


@pytest.fixture
def module() -> Iterator[Any]:
    """The example, its loss listed while a test runs."""
    found = importlib.import_module(MODULE)
    DelayedLoss.add(found.LATE_40)
    yield found
    DelayedLoss._members.pop("late_40", None)


def test_with_all_positives_late_it_is_the_weighted_loss_of_the_package(module: Any) -> None:
    logits = torch.linspace(-4, 4, 9, dtype=torch.float64)
    states = torch.zeros(9)
    for label in (0.0, 1.0):
        labels = torch.full((9,), label, dtype=torch.float64)
        rows = DelayedRows(logits=logits, labels=labels, states=states)
        torch.testing.assert_close(module.LateShare(percent=100).of_rows(rows), DelayedLoss.FNW.of_rows(rows))


def test_it_is_still_at_the_true_probability(module: Any) -> None:
    p = 0.2
    share = 0.4
    for shift, is_still in ((0.0, True), (0.5, False)):
        logit = torch.tensor([p], dtype=torch.float64).logit() + shift
        logit.requires_grad_()
        # Rows of a click: early positives once; late ones as negatives and again as positives; negatives.
        labels = (torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        positive, negative = (
            module.LATE_40.of_rows(DelayedRows(logits=logit, labels=label, states=torch.zeros(1))) for label in labels
        )
        (p * positive + (1 - p + share * p) * negative).sum().backward()
        assert logit.grad is not None
        assert (abs(float(logit.grad)) < 1e-12) is is_still


def test_a_stream_is_trained_by_it_and_goes_on(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    Path("days").mkdir()
    frame = delayed_events(240, days=4).sort("at")
    frame[:160].write_csv("days/first.csv")
    words = ["--extension", MODULE, "stream", "table_dlrm", "--schema", "my.toml", "--batch-size", "32"]
    words += ["--training.threads", "1", "--data.train", "days", "--out", "live", "--delay", "correct"]
    words += ["--label-time", "known", "--observe-s", "3600", "--delayed.loss", "late-40"]
    assert main(words) == 0
    before = len(read_windows(Path("live/windows.jsonl")))
    frame[160:].write_csv("days/second.csv")
    assert main(words) == 0
    assert len(read_windows(Path("live/windows.jsonl"))) > before
    assert '"late_40"' in json.dumps(json.loads(Path("live/config.json").read_text()))
    assert "late_40 of click" in Path("live/run.log").read_text()


def test_losses_that_break_their_promise_are_refused_where_they_are_added(module: Any) -> None:
    class Mean(module.LateShare):
        def of_rows(self, *arguments: Any) -> torch.Tensor:
            return super().of_rows(*arguments).mean()

    with pytest.raises(ConfigError, match="a finite loss for each of 3 rows"):
        DelayedLoss.add(Mean(percent=7))
    with pytest.raises(ConfigError, match="percent"):
        module.LateShare(percent=0)
    assert "late_7" not in DelayedLoss._members
