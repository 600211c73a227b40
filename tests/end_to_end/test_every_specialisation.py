"""Compile every kernel of Triton's that a recipe asks for; `specialisations.py` says how without a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ops.triton_runs import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no package triton"),
    pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="no polars, which writes the recipes' rows"),
]


@pytest.mark.parametrize("architecture", [90, 100])
def test_what_recipes_ask_for_compiles(architecture: int) -> None:
    done = run_python("-m", "tests.end_to_end.specialisations", str(architecture), interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr
