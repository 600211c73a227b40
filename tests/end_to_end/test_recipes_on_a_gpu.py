"""Every recipe on a GPU that is pretended: trained, evaluated, saved, and resumed between CPU and GPU.

The GPU's tensors are the CPU's in disguise (`ziggurat/testing/pretend_cuda.py`): whatever mixes devices raises, and the
numbers have to be those of the CPU. All of `ziggurat recipes` take part, on a few made rows (`recipe_rows.py`); a new
recipe is a new case, and an error where it has no rows. A few belong to the everyday suite, the others are slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.end_to_end.recipe_rows import with_rows
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.embeddings import KernelChoice
from ziggurat.parallel.device import Device
from ziggurat.recipes.catalogue import RECIPES
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.training.config import Precision, ScheduleConfig

NAMES = tuple(recipe.__name__ for recipe in RECIPES)
EVERYDAY = ("table_dlrm", "criteo_dcn_v2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        cache_with_kernels(folder / "cache", patch)
        yield folder


def small(name: str, *, data: Path) -> RunConfig:
    """A recipe on few rows, with what a few steps need and nothing that a machine or the number of steps decides."""
    config = with_rows(name, folder=data)
    loader = dataclasses.replace(config.training.loader, batch_size=40, prefetch=0)
    stop = dataclasses.replace(config.training.early_stop, patience=0)
    changes = {"threads": 1, "log_every": 1, "clip_norm": 5.0, "epochs": 9, "loader": loader, "early_stop": stop}
    changes |= {"schedule": ScheduleConfig(warmup_steps=min(config.training.schedule.warmup_steps, 2))}
    training = dataclasses.replace(config.training, precision=Precision.FP32, **changes)
    # Batch normalisation behind tables that start near zero makes their rounding as large as their numbers.
    start = max(config.model.embedding.init_std, 0.1)
    embedding = dataclasses.replace(config.model.embedding, kernel=KernelChoice.TORCH, init_std=start)
    model = without_dropout(dataclasses.replace(config.model, embedding=embedding))
    if hasattr(model, "negatives_block"):
        model = dataclasses.replace(model, negatives_block=40)
    return dataclasses.replace(config, training=training, model=model, device=Device.CPU)


def without_dropout(config: Any) -> Any:
    """The same settings, whose masks no generator draws: those of a GPU differ from a CPU's."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "dropout":
            changes[field.name] = 0.0
        elif dataclasses.is_dataclass(value):
            changes[field.name] = without_dropout(value)
    return dataclasses.replace(config, **changes)


def until(config: RunConfig, step: int, *, device: Device) -> RunConfig:
    training = dataclasses.replace(config.training, max_steps=step)
    return dataclasses.replace(config, training=training, device=device)


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_run_moves_between_cpu_and_gpu(name: str, data: Path, tmp_path: Path) -> None:
    config = small(name, data=data)
    on_cpu = train_run(until(config, 4, device=Device.CPU), folder=tmp_path / "cpu")
    moving = tmp_path / "moving"
    train_run(until(config, 1, device=Device.CPU), folder=moving)
    with pretend_cuda():
        result = train_run(until(config, 3, device=Device.CUDA), folder=moving, resume=True)
        assert result.fit.steps == 3
        loaded = load_run(moving).model  # to score and export it
        assert all(isinstance(value, PretendCuda) for value in loaded.state_dict().values())
    stored = json.loads((moving / "config.json").read_text())
    assert stored["device"] == "cuda"
    assert stored["model"]["embedding"]["kernel"] == "torch"  # what was asked for
    loaded = load_run(moving).model  # where there is no GPU
    assert not any(isinstance(value, PretendCuda) for value in loaded.state_dict().values())
    moved = train_run(until(config, 4, device=Device.CPU), folder=moving, resume=True)
    assert moved.fit.steps == on_cpu.fit.steps == 4
    losses, metrics, rate = [], [], config.training.learning_rate
    for run in (tmp_path / "cpu", moving):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
        metrics.append(next(line for line in lines if line["kind"] == "valid" and line["step"] == 4))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert metrics[1] == {
        name: value if isinstance(value, str) else pytest.approx(value, rel=1e-3) for name, value in metrics[0].items()
    }
    one, other = (load_run(run, step=4).model.state_dict() for run in (tmp_path / "cpu", moving))
    for tensor, value in one.items():
        # Where a gradient is 0 but for rounding (a bias of keys, or before batch normalisation), Adam moves by noise:
        # up to the learning rate a step, there and back.
        torch.testing.assert_close(
            other[tensor], value, rtol=1e-2, atol=2 * rate, msg=lambda text, at=tensor: f"{at}: {text}"
        )


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("table_din", "table_hstu")])
def test_scores_from_a_gpu(name: str, data: Path, tmp_path: Path) -> None:
    config = small(name, data=data)
    train_run(until(config, 2, device=Device.AUTO), folder=tmp_path / "run")
    expected = load_run(tmp_path / "run").evaluate_split("test").metrics
    with pretend_cuda():
        run = load_run(tmp_path / "run")
        assert all(isinstance(value, PretendCuda) for value in run.model.state_dict().values())
        assert run.evaluate_split("test").metrics == pytest.approx(expected, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("table_dlrm", "table_two_tower", "table_din")]
)
def test_files_are_scored_and_runs_exported_on_a_gpu(name: str, data: Path, tmp_path: Path) -> None:
    config, rows = small(name, data=data), str(data / "clicks.parquet")
    train_run(until(config, 2, device=Device.AUTO), folder=tmp_path / "run")
    scored = []
    for where in (contextlib.nullcontext(), pretend_cuda()):
        out = tmp_path / f"{len(scored)}.parquet"
        with where:
            assert main(["predict", str(tmp_path / "run"), rows, "--out", str(out)]) == 0
        scored.append(pl.read_parquet(out))
    assert scored[1].columns == scored[0].columns
    for column in scored[0].columns:
        assert scored[1][column].to_list() == pytest.approx(scored[0][column].to_list(), rel=1e-4)
    with pretend_cuda():
        zg.export_run(tmp_path / "run", out=tmp_path / "export")
    assert (tmp_path / "export").is_dir()  # it was compared with the run before it was published


def test_every_recipe_has_rows(data: Path) -> None:
    for name in NAMES:
        config = small(name, data=data)
        assert config.dataset.name == "synthetic" or Path(config.data.train[0]).stat().st_size, name
    assert len(set(NAMES)) == len(NAMES) >= 50
    assert set(EVERYDAY) <= set(NAMES)
