"""Where tests find real data: a folder beside the checkout, or the cache that `ziggurat data fetch` fills."""

from __future__ import annotations

from pathlib import Path

import pytest


def shared_data(name: str) -> Path:
    """The folder of real data called `name`; skips the calling test, with the reason, where it is absent."""
    here = Path(__file__).resolve()
    for parent in here.parents:
        candidate = parent.parent / "shared" / "data" / name
        if candidate.is_dir():
            return candidate
    pytest.skip(f"real data {name!r} is not beside this checkout (../shared/data/{name}); it may not be redistributed")
