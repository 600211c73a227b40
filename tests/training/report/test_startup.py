"""The start-up report of a run says when no test ran with the installed torch."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny import tiny_inputs
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.ops.machine import tested_torch
from ziggurat.training.config import TrainingConfig
from ziggurat.training.report.startup import startup_report
from ziggurat.training.step.train_step import TrainStep

TITLE = "Versions that no test ran with"


def test_an_untested_torch_is_a_section_and_a_tested_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DLRMConfig(embedding_dim=4, bottom=MLPConfig(hidden_dims=(4,)), top=MLPConfig(hidden_dims=(4,)))
    step = TrainStep(build_model(config, tiny_inputs(), seed=0), TrainingConfig())
    assert TITLE not in startup_report(step, data={}).sections
    monkeypatch.setattr(tested_torch, "NEWEST_TESTED", (2, 10))
    report = startup_report(step, data={})
    assert report.sections[TITLE]["found"] == f"torch {torch.__version__}, newer than every tested one"
    assert "way out 1" in report.text()
