"""A model from outside the package: its equation, what it learns, the command line, and ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat
from tests.parallel.in_turn import in_turn
from tests.parallel.test_parity import inputs, placed
from ziggurat.cli.main import main
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import ConfigError
from ziggurat.models import build_model
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

extension: Any = importlib.import_module("examples.extensions.matrix_factorisation")
MODEL = "examples.extensions.matrix_factorisation:MatrixFactorisationConfig"


def config(**changes: Any) -> Any:
    embedding = EmbeddingConfig(kernel=KernelChoice.TORCH)
    return extension.MatrixFactorisationConfig(embedding_dim=8, embedding=embedding, **changes)


def test_it_is_the_equation() -> None:
    model = build_model(config(), inputs(), seed=3)
    with torch.no_grad():
        model.bias.fill_(0.25)
    batch = random_batch(inputs(), 13, seed=1)
    names = [spec.name for spec in inputs().single]
    vectors = {}
    for name in ("user", "item"):
        rows = batch.single[names.index(name)]
        vectors[name] = torch.where(rows.unsqueeze(1) < 0, 0.0, model.embeddings.table(name)[rows.clamp(min=0).long()])
    user = vectors["user"]
    item = vectors["item"]
    wanted = 0.25 + user[:, 8] + item[:, 8] + (user[:, :8] * item[:, :8]).sum(1)
    assert torch.allclose(model(batch).squeeze(1), wanted, atol=1e-6)


def test_features_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="no client") as refused:
        build_model(config(user="client"), inputs(), seed=3)
    assert "user, item, shop" in refused.value.expected


def check_ranks(rank: int, plan_json: str, dense: str) -> None:
    """Runs on every rank."""
    assert_same_as_single_device(
        lambda: build_model(config(), inputs(), seed=3),
        from_json(Plan, plan_json, where="test"),
        batch=random_batch(inputs(), 13, seed=1),
        config=ParallelConfig(dense=DenseParallelism(dense)),
        tolerance=Tolerance(fields=1e-6, others=3e-6),
    )


def test_four_ranks_equal_one_device() -> None:
    ways = (("table_wise", "ddp"), ("row_wise", "fsdp"), ("data_parallel", "ddp"))
    cases = [(to_json(placed(4, Placement(placement))), dense) for placement, dense in ways]
    run_ranks(in_turn, 4, check_ranks, cases)


def test_the_command_line_trains_it_on_a_taste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who likes what is a product of two hidden numbers: a sum of weights cannot say it, a product can."""
    draw = np.random.default_rng(0)
    user = draw.integers(0, 60, 6_000)
    item = draw.integers(0, 40, 6_000)
    likes = draw.choice([-1.0, 1.0], 60)[user] * draw.choice([-1.0, 1.0], 40)[item]
    click = (draw.random(6_000) < 1 / (1 + np.exp(-2 * likes))).astype(np.int8)
    pl.DataFrame({"who": user, "what": item, "click": click}).write_parquet(tmp_path / "likes.parquet")
    schema = ziggurat.Schema(
        features=(ziggurat.Categorical(name="who"), ziggurat.Categorical(name="what")),
        labels=(ziggurat.Label(name="click"),),
    )
    ziggurat.write_schema(schema, tmp_path / "my.toml")
    root = Path.cwd()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(tmp_path)
    given = ["--model", MODEL, "--data.train", "likes.parquet", "--schema", "my.toml", "--out", "runs/a"]
    settings = ["--model.user", "who", "--model.item", "what", "--epochs", "20", "--threads", "1"]
    learning = ["--model.embedding.optimizer", "sparse_adam", "--training.table-learning-rate", "0.01"]
    assert main(["train", "table_dlrm", *given, *settings, *learning, "--training.loader.batch-size", "64"]) == 0
    assert read_evaluation(RunFolder(Path("runs/a")).evaluation("test"))["metrics"]["auc"] > 0.8
    assert main(["evaluate", "runs/a", "likes.parquet", "--model", MODEL]) == 0
