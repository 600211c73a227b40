"""A whole run with a row format and a table optimizer from outside: trained, gone on with, read by every verb."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runs.test_low_precision_runs import config_of
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.errors import ConfigError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.table_optimizers import TableOptimizerKind
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.training.records.run_folder import STARTUP, RunFolder


@pytest.fixture
def extensions() -> Iterator[None]:
    """Both, listed while the test runs: others of this process ask for all that are listed."""
    RowFormat.add(importlib.import_module("examples.extensions.log8").LOG8)
    TableOptimizerKind.add(importlib.import_module("examples.extensions.lion").LION)
    yield
    del RowFormat._members["log8"]
    del TableOptimizerKind._members["lion"]


@pytest.mark.slow
@pytest.mark.usefixtures("extensions")
def test_a_run_goes_on_bit_for_bit_and_verbs_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    config = override(config_of("log8", optimizer="lion"), {"model.embedding.kernel": "auto"})
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    train_run(config, folder=whole)
    train_run(override(config, {"training.epochs": "1"}), folder=resumed)
    train_run(config, folder=resumed, resume=True)
    first = load_run(whole)
    again = load_run(resumed)
    for name in first.model.embeddings.tables.places:
        assert torch.equal(first.model.embeddings.table(name), again.model.embeddings.table(name)), name
    report = STARTUP.read(RunFolder(whole).startup)
    assert report["Training"]["tables"].endswith("in log8")
    for words in (
        ["tables", str(whole)],
        ["quantise", str(whole), "--formats", "log8,int8"],
        ["export", str(whole), "--out", str(tmp_path / "export"), "--tables", "log8", "--allow"],
        ["verify", str(whole)],
    ):
        assert main(words) == 0, words
    assert "log8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"tables\.weights"):
        train_run(override(config, {"tables.weights": "int8", "training.epochs": "3"}), folder=resumed, resume=True)
