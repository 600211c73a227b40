"""The one folder that Ziggurat keeps outside of a run: fetched data, prepared data, built kernels, compiled graphs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """`folder` if given, else $ZIGGURAT_CACHE, else ~/.cache/ziggurat."""
    return Path(folder or os.environ.get("ZIGGURAT_CACHE") or Path.home() / ".cache" / "ziggurat").expanduser()
