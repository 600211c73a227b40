"""Compile Triton's kernels for every kind of setting that their callers take; `every_kind.py` says which those are."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ops.triton_runs import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no package triton"),
]


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("part", ["tables", "messages", "networks"])
def test_every_kind_compiles(part: str, architecture: int) -> None:
    done = run_python("-m", "tests.ops.every_kind", part, str(architecture), interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr
