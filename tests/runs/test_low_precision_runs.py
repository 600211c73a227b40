"""A run with tables in few bits trains, goes on bit for bit, is loaded in its format, and says what it keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runs.test_initial_tables import TEACHER
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.embeddings.storage import LowPrecisionStorage
from ziggurat.errors import ConfigError
from ziggurat.models import Model
from ziggurat.precision import DenseProducts
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.many_ranks import Ranks
from ziggurat.training.records.run_folder import STARTUP, RunFolder


def config_of(row_format: str, *, epochs: int = 2, optimizer: str = "rowwise_adagrad") -> RunConfig:
    config = dataclasses.replace(
        recipe_named("synthetic_dlrm"),
        teacher=TEACHER,
        table_schema=SyntheticTeacher(TEACHER).schema(),
        dataset=DatasetConfig(name="synthetic", rows=400),
    )
    settings = {"model.embedding.kernel": "torch", "training.precision": "fp32", "training.epochs": str(epochs)}
    settings |= {"model.bottom.hidden-dims": "8", "model.top.hidden-dims": "8", "tables.weights": row_format}
    return override(config, settings | {"model.embedding.optimizer": optimizer})


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    row_format = "int4"
    train_run(config_of(row_format), folder=tmp_path / "whole")
    train_run(config_of(row_format, epochs=1), folder=tmp_path / "resumed")
    train_run(config_of(row_format), folder=tmp_path / "resumed", resume=True)
    whole, resumed = (load_run(tmp_path / name) for name in ("whole", "resumed"))
    for name in whole.model.embeddings.tables.places:
        assert torch.equal(whole.model.embeddings.table(name), resumed.model.embeddings.table(name)), name
    storage = whole.model.embeddings.tables.storage(0)
    assert isinstance(storage, LowPrecisionStorage)
    assert storage.num_bytes == storage.num_rows * storage.row_format.row_bytes(storage.dim)
    report = STARTUP.read(RunFolder(tmp_path / "whole").startup)
    assert report["Training"]["tables"].endswith(f"in {row_format}")
    assert main(["export", str(tmp_path / "whole"), "--out", str(tmp_path / "export")]) == 0
    exported = load_file(tmp_path / "export" / "ranker" / "weights.safetensors")
    for name in whole.model.embeddings.tables.places:
        assert torch.equal(exported[f"embeddings.tables.{name}.weight"], whole.model.embeddings.table(name)), name
    with pytest.raises(ConfigError, match=r"tables\.weights"):
        train_run(config_of("int8", epochs=3), folder=tmp_path / "resumed", resume=True)
    named = override(config_of(row_format, epochs=3), {"tables.by-table": "C1=fp32"})
    with pytest.raises(ConfigError, match=r"tables\.by-table"):
        train_run(named, folder=tmp_path / "resumed", resume=True)


def test_a_run_converts_its_model_before_it_is_made_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    found = set[str]()
    parallelize = Ranks.parallelize

    def seen(self: Ranks, model: Model, **arguments: Any) -> Any:
        found.update(module.arithmetic.name for module in model.modules() if isinstance(module, DenseProducts))
        return parallelize(self, model, **arguments)

    monkeypatch.setattr(Ranks, "parallelize", seen)
    train_run(override(config_of("fp32", epochs=1), {"training.precision": "mx9"}), folder=tmp_path / "run")
    assert found == {"mx9"}


def test_dense_gradients_are_refused_before_data_is_read(tmp_path: Path) -> None:
    wrong = config_of("int8", optimizer="adam_dense")
    with pytest.raises(ConfigError, match="a gradient for every row"):
        train_run(wrong, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
