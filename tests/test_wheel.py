"""The wheel: it holds what the package needs, runs away from the checkout, and asks for versions that were tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ziggurat
from tests.end_to_end.test_main_job import events

ROOT = Path(__file__).parents[1]

_WORK = """
import ziggurat
from ziggurat.cli.main import main
print(ziggurat.__file__)
assert main(["doctor"]) == 0
train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "run"]
small = ["--model.embedding.kernel", "cpp", "--model.embedding-dim", "4", "--training.epochs", "1"]
assert main([*train, *small, "--training.loader.batch-size", "256"]) == 0
assert main(["predict", "run", "events.parquet", "--out", "scores.csv"]) == 0
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, built from a copy, so that nothing left from older builds gets in."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT / "ziggurat", source / "ziggurat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "-w", place, source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("ziggurat_rec-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place / "site")
    return place / "site"


def test_the_wheel_holds_every_file_of_the_package(site: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for path in (root / "ziggurat").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(root)) for path in found}

    assert files(site) == files(ROOT)
    assert {"ziggurat/py.typed", "ziggurat/runs/load.py", "ziggurat/ops/csrc/lookup.cpp"} <= files(site)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the C++ that the wheel brings")
@pytest.mark.slow
def test_the_wheel_runs_outside_of_the_checkout(site: Path, tmp_path: Path) -> None:
    events(600).drop("tags").write_parquet(tmp_path / "events.parquet")
    features = (ziggurat.Categorical(name="user_id"), ziggurat.Dense(name="price"))
    ziggurat.write_schema(
        ziggurat.Schema(features=features, labels=(ziggurat.Label(name="click"),)), tmp_path / "my.toml"
    )
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = given | {"PYTHONPATH": str(site), "ZIGGURAT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "ziggurat train" in run("-m", "ziggurat", "--help")
    shown = run("-c", _WORK)
    assert shown.startswith(str(site))
    assert (tmp_path / "scores.csv").read_text().count("\n") == 601


def test_versions_are_bounded_and_the_locked_ones_are_inside() -> None:
    """Without an upper bound pip takes whatever is newest, which nobody has tried."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (line.split("==") for line in (ROOT / "requirements/cpu.txt").read_text().splitlines() if "==" in line)
    locked = {name: version.strip() for name, version in lines}
    asked = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    for name, specifier in asked.items():
        assert any(each.operator == "<" for each in specifier), name
        assert specifier.contains(locked[name].partition("+")[0]), name
    assert all(asked["torch"].contains(version) for version in ("2.11.0", "2.13.0", "2.14.1"))
    assert not asked["torch"].contains("2.15.0")


def test_the_extras_with_fbgemm_ask_for_the_torch_that_it_loads_with() -> None:
    """FBGEMM's metadata names no torch: without this, pip takes the newest of the bound, and FBGEMM does not load."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file, name in (("cpu", "fbgemm-cpu"), ("cuda", "fbgemm-cuda")):
        lines = (ROOT / f"requirements/{file}.txt").read_text().splitlines()
        locked = dict(line.split("==") for line in lines if "==" in line)
        asked = {each.name: each.specifier for each in map(Requirement, extras[name])}
        fbgemm = next(each for each in asked if each.startswith("fbgemm"))
        assert asked[fbgemm].contains(locked[fbgemm])
        assert asked["torch"].contains(locked["torch"].partition("+")[0])
        assert not any(asked["torch"].contains(version) for version in ("2.11.0", "2.12.1", "2.14.1", "2.15.0"))
