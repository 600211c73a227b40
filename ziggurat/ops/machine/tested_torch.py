"""The versions of torch that the tests ran with, and what to say where another one is installed.

pip holds an installation to the bound of `pyproject.toml`, but not where torch was there first: `--no-deps`, a checkout
on the path, a machine's own image. Another torch mostly works, and may fail where it differs; so nothing is refused,
and `ziggurat doctor` and the start-up report of a run say it in the four parts of an error. How the bound is moved:
docs/decisions/0009-which-versions-of-torch.md.
"""

from __future__ import annotations

import re

import torch

from ziggurat.errors import MissingDependencyError

# Releases (major, minor), both included; the same as in pyproject.toml, which a test compares.
OLDEST_TESTED = (2, 11)
NEWEST_TESTED = (2, 14)


def torch_release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version of torch; of a preview (`2.16.0a0+git1234`) those of its release."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def untested_torch(version: str = torch.__version__) -> MissingDependencyError | None:
    """Say that no test ran with a version of torch, or return None where some did.

    Args:
        version: as `torch.__version__` has it.
    """
    release = torch_release(version)
    if OLDEST_TESTED <= release <= NEWEST_TESTED:
        return None
    side = "newer" if release > NEWEST_TESTED else "older"
    above = f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}"
    return MissingDependencyError(
        expected=f"torch {_text(OLDEST_TESTED)} to {_text(NEWEST_TESTED)}, with which the tests ran",
        found=f"torch {version}, {side} than every tested one",
        where="the installed packages",
        ways_out=(
            f"pip install 'torch>={_text(OLDEST_TESTED)},<{above}'",
            "go on: nothing is switched off; in a checkout python -m pytest tests/ops says what differs",
        ),
    )


def untested_torch_section() -> dict[str, dict[str, str]]:
    """Return a section of the start-up report about an untested torch, by its title; nothing where torch was tested."""
    error = untested_torch()
    if error is None:
        return {}
    lines = {"expected": error.expected, "found": error.found, "where": error.where}
    for number, way in enumerate(error.ways_out, start=1):
        lines[f"way out {number}"] = way
    return {"Versions that no test ran with": lines}


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
