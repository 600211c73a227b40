"""Every test runs on one thread: sums are then the same whatever the machine, and ranks do not fight for cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
