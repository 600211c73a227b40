"""Callbacks hear what is logged and change nothing; adapters speak to their packages, or say that one is missing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ConfigError
from ziggurat.models import DNNConfig, MLPConfig, build_model
from ziggurat.training.callbacks import MlflowCallback, WandbCallback
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.trainer import Trainer


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, int, dict[str, float]]] = []

    def on_log(self, step: int, values: dict[str, float]) -> None:
        self.said.append(("log", step, values))

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self.said.append(("evaluate", step, metrics))

    def on_end(self, step: int, summary: dict[str, float]) -> None:
        self.said.append(("end", step, summary))


def trained(folder: Path, *callbacks: Any) -> dict[str, torch.Tensor]:
    model = build_model(DNNConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,))), tiny_inputs(), seed=0)
    config = TrainingConfig(
        epochs=2, log_every=2, threads=1, precision=Precision.FP32, loader=LoaderConfig(batch_size=64)
    )
    trainer = Trainer(model, config=config, train=tiny_dataset(256), valid=tiny_dataset(128, seed=1), folder=folder)
    trainer.fit(callbacks=callbacks)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_callbacks_hear_what_is_logged_and_change_nothing(tmp_path: Path) -> None:
    heard = Heard()
    with_callback, without = trained(tmp_path / "a", heard), trained(tmp_path / "b")
    assert all(torch.equal(with_callback[name], value) for name, value in without.items())
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert [(step, values["loss"]) for kind, step, values in heard.said if kind == "log"] == logged
    evaluated = [(line["step"], line["auc"]) for line in lines if line["kind"] == "valid"]
    assert [(step, values["auc"]) for kind, step, values in heard.said if kind == "evaluate"] == evaluated
    assert all("samples_per_s" in values for kind, _, values in heard.said if kind == "log")
    best = max(evaluated, key=lambda each: each[1])
    kind, step, summary = heard.said[-1]
    assert (kind, step) == ("end", 8)
    assert (summary["best_step"], summary["best_value"]) == best


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: sent.append((step, values)),
        summary=types.SimpleNamespace(update=lambda values: sent.append(values)),
        finish=lambda: sent.append("finish"),
    )
    fake = types.SimpleNamespace(init=lambda **settings: sent.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # pyright: ignore[reportArgumentType]
    trained(tmp_path, WandbCallback(project="shop"))
    assert sent[0] == {"project": "shop"}
    assert {"train/loss", "train/lr", "train/samples_per_s"} <= sent[1][1].keys()
    assert any("valid/auc" in each[1] for each in sent if isinstance(each, tuple))
    assert sent[-1] == "finish"
    assert sent[-2]["steps"] == 8


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    fake = types.SimpleNamespace(
        start_run=lambda **settings: sent.append(settings),
        log_metrics=lambda values, step: sent.append((step, values)),
        end_run=lambda: sent.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # pyright: ignore[reportArgumentType]
    trained(tmp_path, MlflowCallback(run_name="first"))
    assert sent[0] == {"run_name": "first"}
    assert any("valid.auc" in each[1] for each in sent if isinstance(each, tuple))
    assert sent[-1] == "end"


@pytest.mark.parametrize(("package", "adapter"), [("wandb", WandbCallback), ("mlflow", MlflowCallback)])
def test_a_missing_package_is_said(package: str, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        adapter()
