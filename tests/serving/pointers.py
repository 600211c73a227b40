"""Versions in a published folder, as a publisher enters them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ziggurat.serving.export.published_folder import Pointer, Publication, change_pointer


def enter(folder: Path, number: int) -> None:
    """Enter a version, whose folder is there, into the pointer; lead to it unless the pointer is held."""
    added = Publication(number=number, version=f"v{number}", run="r", window=number, name=str(number), step=number)

    def change(pointer: Pointer | None) -> Pointer:
        if pointer is None:
            return Pointer(current=number, last=number, versions=(added,))
        current = pointer.current if pointer.held else number
        return dataclasses.replace(pointer, current=current, last=number, versions=(*pointer.versions, added))

    change_pointer(folder, change)
