"""Loads TorchRec once, in the fork server, instead of once a rank."""

from __future__ import annotations

import importlib.util
from multiprocessing import forkserver

import pytest


@pytest.fixture(autouse=True, scope="session")
def _torchrec_in_the_fork_server() -> None:
    if importlib.util.find_spec("torchrec") is not None:
        from ziggurat.testing.ranks import preload

        preload("tests.bridges.torchrec_models")
        forkserver.ensure_running()
