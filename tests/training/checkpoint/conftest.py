"""Start the fork server with what these tests import, before a test starts it with less."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Importing torch's checkpoint and tensor parts takes seconds; once in the server, not once in every rank."""
    here = Path(__file__).parent
    if session.config.option.collectonly or not any(item.path.parent == here for item in getattr(session, "items", ())):
        return
    modules = ["torch", "torch._dynamo", "torch.distributed.tensor", "pytest", "ziggurat.testing.ranks"]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*modules, "ziggurat.training.checkpoint"])
    forkserver.ensure_running()
