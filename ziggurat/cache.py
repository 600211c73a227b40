"""The one folder that Ziggurat keeps outside of a run: fetched data, prepared data, built kernels, compiled graphs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """`folder` if given, else $ZIGGURAT_CACHE, else ~/.cache/ziggurat."""
    return Path(folder or os.environ.get("ZIGGURAT_CACHE") or Path.home() / ".cache" / "ziggurat").expanduser()


def keep_compiled_code() -> None:
    """Let torch's compiler and Triton keep what they compile in the cache folder, where it can be written.

    Otherwise they keep it in the temporary folder and in the home folder, which a container or the next start of a
    machine may not have. A folder that is named by a variable of theirs stays, unless it is the temporary one that
    torch itself writes there when its compiler is imported, as optimizers do.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache_folder() / "inductor", "TRITON_CACHE_DIR": cache_folder() / "triton"}
    for variable, folder in folders.items():
        if _is_named_by_the_user(os.environ.get(variable, "")):
            continue
        # It is made by whoever compiles first: a process that compiles nothing leaves no trace.
        nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
        if nearest.is_dir() and os.access(nearest, os.W_OK):
            os.environ[variable] = str(folder)


def _is_named_by_the_user(folder: str) -> bool:
    path = Path(folder)
    is_torchs = path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_")
    return bool(folder) and not is_torchs


def compiled_code_line() -> str:
    """Say where compiled code is kept for the next process."""
    keep_compiled_code()
    kept = {"torch.compile": "TORCHINDUCTOR_CACHE_DIR", "Triton": "TRITON_CACHE_DIR"}
    places = {name: os.environ.get(variable, "its own folder") for name, variable in kept.items()}
    return ", ".join(f"{name}: {place}" for name, place in places.items())
