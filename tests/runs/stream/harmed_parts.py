"""Harms to a part of a teacher's side table, for tests of streams that were joined with it."""

from __future__ import annotations

import shutil
from pathlib import Path


def remove(part: Path) -> None:
    """Remove the part."""
    part.unlink()


def remove_version(part: Path) -> None:
    """Remove the version that the part is of."""
    shutil.rmtree(part.parent)


def flip(part: Path) -> None:
    """Flip a bit in the middle of the part."""
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
