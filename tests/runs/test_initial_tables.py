"""A run draws its tables once, and nothing that a checkpoint overwrites: resumed and loaded runs draw none."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from ziggurat.config import override
from ziggurat.data.synthetic.teacher import SyntheticConfig, SyntheticTeacher
from ziggurat.embeddings import weights
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import DatasetConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run

TEACHER = SyntheticConfig(num_dense=1, cardinalities=(20, 30), num_groups=1, seed=3)


def test_tables_are_drawn_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    drawn: list[str] = []
    rows = weights.InitialRows

    def counted(*, table: str, **settings: Any) -> Any:
        drawn.append(table)
        return rows(table=table, **settings)

    monkeypatch.setattr(weights, "InitialRows", counted)
    config = dataclasses.replace(
        recipe_named("synthetic_dlrm"),
        teacher=TEACHER,
        table_schema=SyntheticTeacher(TEACHER).schema(),
        dataset=DatasetConfig(name="synthetic", rows=400),
    )
    settings = {"model.embedding.kernel": "torch", "training.precision": "fp32", "training.epochs": "1"}
    config = override(config, {**settings, "model.bottom.hidden-dims": "8", "model.top.hidden-dims": "8"})
    longer = override(config, {"training.epochs": "2"})
    run = tmp_path / "run"
    train_run(config, folder=run)
    assert sorted(drawn) == sorted(table.name for table in load_run(run).model.inputs.tables)
    train_run(longer, folder=run, resume=True)
    assert load_run(run).config.training.epochs == 2
    assert len(drawn) == 2, "neither a resumed run nor a loaded one draws"
    shutil.rmtree(run / "checkpoints")
    train_run(longer, folder=run, resume=True)
    assert len(drawn) == 4, "a run that was killed before its first checkpoint starts from drawn tables"
