"""Damage a file as disks, kills and copies do: a bit flips, its end is lost, its bytes become zeros, it is gone."""

from __future__ import annotations

import random
from pathlib import Path


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file in a way that `draw` chooses; returns what was done. The file must hold a byte."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "flip", "flip", "cut", "empty", "zeros", "gone"])
    if kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[draw.randrange(len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        begin = draw.randrange(len(content))
        content[begin : begin + 512] = bytes(len(content[begin : begin + 512]))
        content[begin] = 0 if path.read_bytes()[begin] else 255
    path.unlink()  # what is mapped elsewhere stays as it was
    if kind != "gone":
        path.write_bytes(content)
    return f"{kind} {path}"
