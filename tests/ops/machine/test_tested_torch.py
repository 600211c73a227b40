"""An installed torch that no test ran with is named, with ways out; the tested ones are those of the bound."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ziggurat.ops.machine import tested_torch
from ziggurat.ops.machine.tested_torch import NEWEST_TESTED, OLDEST_TESTED, untested_torch, untested_torch_section

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}.1+cu132"])
def test_tested_versions_need_no_word(version: str) -> None:
    assert untested_torch(version) is None


@pytest.mark.parametrize(
    ("version", "meaning"),
    [
        ("2.10.0", "older"),
        ("2.9.1+cu128", "older"),  # as text "2.9" comes after "2.11"
        (f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}.0a0+git1234", "newer"),
        ("3.0.0", "newer"),
    ],
)
def test_others_are_named_with_what_was_tested(version: str, meaning: str) -> None:
    error = untested_torch(version)
    assert error is not None
    assert error.expected.startswith("torch 2.11 to 2.")
    assert error.found == f"torch {version}, {meaning} than every tested one"
    assert error.ways_out[0].startswith("pip install 'torch>=2.11,<2.")


def test_the_section_says_the_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untested_torch_section() == {} or untested_torch() is not None
    monkeypatch.setattr(tested_torch, "untested_torch", lambda: untested_torch("2.10.0"))
    lines = untested_torch_section()["Versions that no test ran with"]
    assert list(lines) == ["expected", "found", "where", "way out 1", "way out 2"]
    assert all(lines.values())


def test_the_bound_of_the_package_is_what_was_tested() -> None:
    """pip and the start-up report must say the same."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = f"{OLDEST_TESTED[0]}.{OLDEST_TESTED[1]}"
    first_untested = f"{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}"
    assert f"torch>={oldest},<{first_untested}" in wanted
