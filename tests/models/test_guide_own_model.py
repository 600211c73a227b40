"""The guide "A model of your own" does what it says: its code runs on one device, and on four ranks with towers."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.own_model import OwnConfig, OwnModel
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.models.build import check_config_class
from ziggurat.testing.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.S | re.M)


def scripts() -> tuple[str, str]:
    """The module of the model, and the script that uses it: every block that is not indented code of a class."""
    module, *rest = (block for block in blocks("python") if not block.startswith("    "))
    return module, "\n".join(rest)


def run_script(folder: Path, code: str) -> list[str]:
    environment = os.environ | {"ZIGGURAT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def command(rank: int, folder: str, arguments: list[str]) -> int:
    """Runs on every rank."""
    del rank
    os.chdir(folder)
    os.environ["ZIGGURAT_CACHE"] = f"{folder}/cache"
    return main(arguments)


@pytest.mark.slow
def test_the_guide_runs_on_one_device_and_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, script = scripts()
    (tmp_path / "own_model.py").write_text(module)
    assert len([line for line in module.splitlines() if line.strip()]) <= 30
    auc, *scores, precision, steps, plain_steps, plain_auc = run_script(tmp_path, script)
    assert 0.5 < float(auc) <= 1.0
    assert 0.5 < float(plain_auc) <= 1.0
    assert plain_steps == steps
    assert len(scores) == 3
    assert 0.0 <= float(precision) <= 1.0
    assert int(steps) == 20
    towers, train, evaluate = (line[2:] for line in blocks("console")[0].splitlines())
    monkeypatch.chdir(tmp_path)
    Path("towers.json").write_text(shlex.split(towers)[-1])
    words = shlex.split(train)
    ranks, arguments = int(words[words.index("--nproc-per-node") + 1]), words[words.index("ziggurat") + 1 :]
    assert run_ranks(command, ranks, str(tmp_path), arguments, timeout_s=240.0) == [0] * 4
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    evaluate_words = shlex.split(evaluate)
    assert main([*evaluate_words[evaluate_words.index("ziggurat") + 1 :], "--json", "four.json"]) == 0
    assert math.isfinite((tmp_path / "four.json").stat().st_size)


def test_a_model_in_place_of_its_config_leads_to_the_config():
    with pytest.raises(ConfigError, match="no frozen dataclass") as refused:
        check_config_class(OwnModel)
    assert refused.value.ways_out[0] == "name the config: tests.models.own_model:OwnConfig"
    check_config_class(OwnConfig)
