"""Runs with tables on the host: started, resumed with another place for them, and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.test_low_precision_runs import config_of
from ziggurat.config import override
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.errors import ConfigError
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.tables.memory_limit import with_rungs
from ziggurat.training.records.run_folder import STARTUP, RunFolder


def test_a_run_goes_on_wherever_its_tables_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    on_host = {"tables.device-memory": "20%"}
    train_run(config_of("fp32"), folder=tmp_path / "device")
    train_run(override(config_of("fp32", epochs=1), on_host), folder=tmp_path / "host")
    train_run(override(config_of("fp32"), {"tables.device-memory": "1MiB"}), folder=tmp_path / "host", resume=True)
    device, host = (load_run(tmp_path / name).model.embeddings for name in ("device", "host"))
    assert isinstance(host.tables.storage(0), HostStorage)
    for name in device.tables.places:
        assert torch.equal(device.table(name), host.table(name)), name
    report = STARTUP.read(RunFolder(tmp_path / "host").startup)
    assert "held_on" in str(report)


def test_ranks_refuse_tables_on_the_host() -> None:
    config = override(config_of("fp32"), {"tables.device-memory": "20%"})
    with pytest.raises(ConfigError, match="2 ranks"):
        with_rungs(config, None, list_lengths={}, num_ranks=2)  # type: ignore[arg-type]
