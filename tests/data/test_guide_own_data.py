"""The guide "Bring your own data" does what it says: its commands run, and print what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "bring-your-own-data.md"

_GAP = re.compile(r" {2,}")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.S | re.M)


def _commands() -> list[tuple[str, list[str]]]:
    """Each `$ command` of the console blocks with the lines shown below it."""
    commands: list[tuple[str, list[str]]] = []
    for block in _blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
    return commands


def _agrees(shown: list[str], printed: str) -> bool:
    """`…` alone on a line stands for any lines, inside one for any text; widths of gaps do not count."""
    shown, printed = [_GAP.sub("  ", line) for line in shown], _GAP.sub("  ", printed)
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n"
        for line in shown
    )
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.slow
def test_every_command_prints_what_the_guide_shows(tmp_path: Path):
    (tmp_path / "make_shop.py").write_text(next(block for block in _blocks("python") if "make_shop.py" in block))
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        "COLUMNS": "100",
        "ZIGGURAT_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # so that both streams come in their order
    }
    for command, shown in _commands():
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        fails = any(line.endswith("Error") for line in shown)
        assert done.returncode == (2 if fails else 0), f"$ {command}\n{done.stdout}"
        # A busy machine takes long to compile, and says so.
        printed = "".join(each for each in done.stdout.splitlines(keepends=True) if "is being compiled" not in each)
        assert _agrees(shown, printed), f"$ {command}\n{done.stdout}"
    scoring = _blocks("python")[2]  # of the run that the commands have made
    done = subprocess.run([sys.executable, "-c", scoring], cwd=tmp_path, env=environment, text=True, timeout=300)
    assert done.returncode == 0


@pytest.mark.slow
def test_the_python_of_the_guide_runs(tmp_path: Path):
    shop, training, _ = _blocks("python")
    code = shop.replace("n = 100_000", "n = 20_000") + training
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "price → dense: numbers with fractions" in done.stdout
    assert "'auc'" in done.stdout


def test_every_schema_key_the_guide_names_exists():
    from ziggurat.features.schema_io import schema_from_toml

    block = _blocks("toml")[0]
    others = (
        '[[feature]]\nname = "user_id"\nkind = "categorical"\n[[feature]]\nname = "item_id"\nkind = "categorical"\n'
    )
    schema = schema_from_toml(others + block, "guide")
    assert schema.table("user_id").num_rows == 1_000_000
    assert schema.table("item_id").min_count == 5
