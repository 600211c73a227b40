"""A training hook from outside the package: by `zg.fit`, by the command line, and on four ranks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import ziggurat
from tests.training.rank_runs import Case, trainer_of
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.report.progress import NoProgress

MODULE = "examples.extensions.profiler_hook"
FRAME = {"user": ["ann", "bob", "cid"] * 400, "price": list(range(1200)), "bought": [1, 0, 0, 1] * 300}


@pytest.fixture
def profiler() -> Iterator[Any]:
    """The module, its hook listed while the test runs."""
    module = importlib.import_module(MODULE)
    Hook.add(module.PROFILE_STEPS)
    yield module
    Hook._members.pop("profile_steps", None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def operations(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event}


def test_fit_takes_it_and_the_run_is_the_same(place: Path, profiler: Any) -> None:
    model = ziggurat.DLRMConfig(embedding_dim=4)
    hook = profiler.ProfileSteps(first=2, last=3)
    few = {"training.epochs": 3}
    run = ziggurat.fit(FRAME, "bought", out="profiled", model=model, settings=few, progress=NoProgress(), hooks=[hook])
    plain = ziggurat.fit(FRAME, "bought", out="plain", model=model, settings=few, progress=NoProgress())
    assert "aten::addmm" in operations(place / "profiled/profile/rank0.json")
    assert "Self CPU" in (place / "profiled/profile/rank0.txt").read_text()
    state = plain.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())


def test_the_command_line_takes_it_by_name(place: Path, profiler: Any, capsys: pytest.CaptureFixture[str]) -> None:
    del profiler
    pl.DataFrame(FRAME).write_parquet("shop.parquet")
    assert main(["data", "inspect", "shop.parquet", "--label", "bought", "--write-schema", "shop.toml"]) == 0
    train = ["--extension", MODULE, "train", "table_dlrm", "--data.train", "shop.parquet", "--schema", "shop.toml"]
    train += ["--training.loader.batch-size", "64", "--training.epochs", "1", "--out", "run"]
    assert main([*train, "--hook", "profile_step"]) == 2
    assert "--hook profile_steps" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main([*train, "--hook", "profile_steps"]) == 0, capsys.readouterr().err
    assert operations(place / "run/profile/rank0.json")
    hook = "class Broken(Hook):\n    name = 'broken'\n\n    def on_step(self, trainer, made):\n        helped(made)\n"
    more = "def helped(made):\n    {}['loss']\n\n\nHook.add(Broken())\n"
    Path("breaks.py").write_text(f"from ziggurat.training.hooks.hook import Hook\n\n\n{hook}\n\n{more}")
    train[1] = "breaks"
    try:
        assert main([*train[:-1], "broken", "--hook", "broken"]) == 2
    finally:
        Hook._members.pop("broken", None)
    said = capsys.readouterr().err
    assert "KeyError: 'loss'" in said
    assert "the hook breaks.Broken, on_step, at step 1" in said
    assert "breaks.py:8 in on_step" in said
    assert "breaks.py:12 in helped" in said
    assert "Traceback" not in said
    assert f"{Path(ziggurat.__file__).parent}/" not in said


def test_steps_that_are_none_are_refused(profiler: Any) -> None:
    with pytest.raises(ConfigError, match="first <= last"):
        profiler.ProfileSteps(first=5, last=4)


def profile_ranks(rank: int, world_size: int, folder: str) -> float:
    module = importlib.import_module(MODULE)
    trainer = trainer_of(Case(), folder, world_size=world_size)
    trainer.fit(hooks=[module.ProfileSteps(first=2, last=3)])
    path = Path(folder) / "profile" / f"rank{rank}.json"
    assert "gloo:all_to_all" in operations(path) or world_size == 1, sorted(operations(path))
    return trainer.evaluate(trainer.valid).metrics["auc"]


def test_every_rank_of_four_profiles_itself(tmp_path: Path) -> None:
    found = run_ranks(profile_ranks, 4, 4, str(tmp_path / "four"))
    alone = profile_ranks(0, 1, str(tmp_path / "one"))
    assert sorted(path.name for path in (tmp_path / "four/profile").glob("*.json")) == [
        f"rank{rank}.json" for rank in range(4)
    ]
    assert found == pytest.approx([alone] * 4, abs=1e-6)
