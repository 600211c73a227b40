"""A verb and extensions from outside the package: listed, helped, run, and left out where they are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.extensions.curve_verb import line_of
from tests.training.test_late_steps import CPU, TABLES, trained
from ziggurat.cli.main import main

REPOSITORY = Path(__file__).parents[2]


def installed(folder: Path, points: str) -> None:
    """Write what pip leaves of a package: its name, and its entry points."""
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(REPOSITORY), str(REPOSITORY / "examples" / "extensions")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def ziggurat(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return started(folder, "-m", "ziggurat", *arguments)


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from ziggurat.cli.main import main

said = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(arguments)
        except SystemExit as end:  # of --help
            status = end.code or 0
    said.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


def one_process(folder: Path, *commands: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run command lines in one process of Python, which imports torch once."""
    done = started(folder, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return [
        subprocess.CompletedProcess(list(command), status, out, err)
        for command, (status, out, err) in zip(commands, said, strict=True)
    ]


def test_an_installed_verb_is_listed_teaches_and_runs(tmp_path: Path) -> None:
    installed(tmp_path, "[ziggurat.verbs]\ncurve = curve_verb:CURVE\n")
    trained(CPU, tmp_path / "run", tables=TABLES, nan_row=None, epochs=2)
    drawn = ziggurat(tmp_path, "curve", "run")
    listed, helped, refused, missing = one_process(
        tmp_path,
        ["--help"],
        ["curve", "--help"],
        ["curve", "run", "--training.epochs", "3"],
        ["curve", "nowhere"],
    )
    assert "draw the loss and a metric of a run in the terminal" in listed.stdout
    assert "ziggurat curve runs/first" in helped.stdout
    assert drawn.returncode == 0, drawn.stderr
    loss, auc = drawn.stdout.splitlines()
    assert loss.startswith("loss")
    assert auc.startswith("auc")
    assert "steps 1 to 8" in loss
    assert refused.returncode == 2
    assert "--training.epochs" in refused.stderr
    assert missing.returncode == 2
    assert "expected: the log of a run" in missing.stderr


def test_a_broken_package_is_named_and_takes_nothing_with_it(tmp_path: Path) -> None:
    installed(
        tmp_path,
        "[ziggurat.verbs]\nbroken = no_such_module:VERB\nnumber = math:pi\ntrain = taken:TRAIN\n"
        "raising_arguments = taken:RAISES\ntwo = taken:TWO_WORDS\n"
        "ends_arguments = taken:ENDS\n[ziggurat.extensions]\nends = ending\nraises = raising\n",
    )
    (tmp_path / "raising.py").write_text("raise RuntimeError('as on a bad day')\n")
    (tmp_path / "ending.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "taken.py").write_text(
        "import dataclasses\nfrom curve_verb import CURVE\nTRAIN = dataclasses.replace(CURVE, name='train')\n"
        "RAISES = dataclasses.replace(CURVE, name='raises', add_arguments=lambda parser: 1 / 0)\n"
        "ENDS = dataclasses.replace(CURVE, name='ends', add_arguments=lambda parser: parser.exit(0))\n"
        "TWO_WORDS = dataclasses.replace(CURVE, name='two words')\n"
    )
    done = ziggurat(tmp_path, "recipes")
    assert done.returncode == 0, done.stderr
    for line in (
        "no_such_module:VERB, of my_package, is left out: ModuleNotFoundError",
        "math:pi, of my_package, is left out: it is float, not a ziggurat.cli.verb.Verb",
        "taken:TRAIN, of my_package, is left out: there is a verb 'train' already",
        "raising, of my_package, is left out: RuntimeError: as on a bad day",
        "ending, of my_package, is left out: SystemExit: 0",
        "taken:ENDS, of my_package, is left out: declaring its arguments: SystemExit: 0",
        "taken:RAISES, of my_package, is left out: declaring its arguments: ZeroDivisionError: division by zero",
        "taken:TWO_WORDS, of my_package, is left out: its name 'two words' is no word of a command line",
    ):
        assert f"warning: {line}" in done.stderr


def test_an_extension_is_known_to_settings_once_it_is_imported(tmp_path: Path) -> None:
    wanted = ("train", "movielens_dlrm", "--training.precision", "tf32_anywhere", "--settings")
    listed, refused, named = one_process(
        tmp_path, ["train", "movielens_dlrm", "--settings"], wanted, ["--extension", "tf32_anywhere", *wanted]
    )
    assert listed.returncode == 0, listed.stderr
    assert "tf32_anywhere" not in listed.stdout
    assert refused.returncode == 2
    assert "ziggurat --extension MODULE" in refused.stderr
    assert named.returncode == 0, named.stderr
    assert "tf32_anywhere" in named.stdout
    installed(tmp_path, "[ziggurat.extensions]\nprecision = tf32_anywhere\n")
    by_package = ziggurat(tmp_path, *wanted)
    assert by_package.returncode == 0, by_package.stderr


def test_an_extension_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--extension", "no_such_module", "recipes"]) == 2
    assert "where:    command line, --extension no_such_module" in capsys.readouterr().err


def test_a_long_curve_is_drawn_by_means() -> None:
    line = line_of([(step, float(step)) for step in range(1, 481)])
    blocks = line.split()[1]
    assert len(blocks) == 48
    assert blocks[0] == "▁"
    assert blocks[-1] == "█"
    assert line.endswith("steps 1 to 480")
    assert line_of([(1, 2.0)]) == "2.0000 ▁ 2.0000    steps 1 to 1"
