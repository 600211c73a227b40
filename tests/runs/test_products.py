"""Errors of formats in the products of a run, from what it kept and from its own rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.numerics.probe import Direction
from ziggurat.precision import DenseProducts
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import DISPATCH, Choice, DispatchPlan
from ziggurat.precision.precision import Precision
from ziggurat.runs.load import load_run
from ziggurat.runs.products import PRODUCT_ERRORS
from ziggurat.training.config import TrainingConfig
from ziggurat.training.hooks.probe_products import ProbeProducts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 400 rows that kept a probe."""
    path = tmp_path_factory.mktemp("probed") / "run"
    frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
    config = zg.table_run(
        zg.DNNConfig(embedding_dim=4, deep=zg.MLPConfig(hidden_dims=(16,))), zg.inspect_file(frame).schema
    )
    zg.train_run(config, folder=path, data=frame, hooks=[ProbeProducts(every=1)])
    return path


@pytest.mark.parametrize("words", [[], ["--measure"]])
def test_probe_prints_errors_and_writes_them(
    folder: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "errors.json"
    assert main(["numerics", "probe", str(folder), *words, "--kernels", "fp32,bf16,mx9,mx4", "--json", str(file)]) == 0
    assert "mx9" in capsys.readouterr().out
    found = PRODUCT_ERRORS.read(file)
    assert found["products"]
    for directions in found["products"].values():
        assert list(directions) == ["forward", "input_gradient", "weight_gradient"]
        for errors in directions.values():
            error = {name: float(each["error"]) for name, each in errors.items()}
            assert error["fp32"] <= error["mx9"] <= error["mx4"]


def test_dispatch_writes_choices_with_reasons(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "dispatch.json"
    assert main(["numerics", "dispatch", str(folder), "--out", str(file)]) == 0
    found = DISPATCH.read(file)
    assert found["model"] == "DNN"
    for directions in found["choices"].values():
        assert list(directions) == ["forward", "input_gradient", "weight_gradient"]
        assert all(choice["reason"] for choice in directions.values())


def test_run_without_a_probe_names_the_ways_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics", "probe", str(folder / "none")]) != 0
    assert "--measure" in capsys.readouterr().err


def test_run_trains_by_the_kernels_of_a_file(folder: Path, tmp_path: Path) -> None:
    kernels = {"forward": "mx9", "input_gradient": "mx9", "weight_gradient": "mx9"}
    of_run = load_run(folder)
    choices = {
        name: {Direction(each): Choice(kernel=kernel, reason="") for each, kernel in kernels.items()}
        for name, module in of_run.model.named_modules()
        if isinstance(module, DenseProducts)
    }
    plan = DispatchPlan(model="DNN", machine=machine_facts(torch.device("cpu")), choices=choices, missing={})
    file = plan.write(tmp_path / "dispatch.json")

    def losses(name: str, **changes: Any) -> dict[str, float]:
        training = dataclasses.replace(of_run.config.training, **changes)
        config = dataclasses.replace(of_run.config, training=training)
        return zg.train_run(config, folder=tmp_path / name).evaluations["valid"].metrics

    fp32 = losses("fp32", precision=Precision.FP32, dispatch="")
    mx9 = losses("mx9", precision=Precision("mx9"), dispatch="")
    dispatched = losses("dispatched", precision=Precision.DISPATCH, dispatch=str(file))
    assert dispatched == mx9
    assert dispatched != fp32


def test_precision_dispatch_and_its_file_go_together() -> None:
    with pytest.raises(ConfigError, match="together with the file"):
        TrainingConfig(precision=Precision.DISPATCH)
    with pytest.raises(ConfigError, match="together with the file"):
        TrainingConfig(precision=Precision.FP32, dispatch="dispatch.json")
