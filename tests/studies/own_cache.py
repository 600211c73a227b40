"""A cache of a test's own for data, with the machine's built kernels: compiling them again takes half a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.cache import cache_folder


def cache_with_kernels(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `folder` the cache; built kernels are those of the usual cache."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    patch.setenv("ZIGGURAT_CACHE", str(folder))
