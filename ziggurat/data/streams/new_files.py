"""Know raw files by their content: what a stream notes of a file before it takes its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ziggurat.data.streams.finished_files import ends_amid_line
from ziggurat.data.streams.journal import ArrivedFile
from ziggurat.errors import DataError
from ziggurat.files import sha256_of
from ziggurat.files.stores import DataPath, facts_of

_BLOCK_BYTES = 1 << 20  # of a file in a store that is digested


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A file whose rows are about to be taken, as it was when its digest was computed."""

    path: DataPath
    facts: tuple[str, int, int | str]
    sha256: str

    def refuse_changed(self) -> None:
        """Refuse a file that changed while it was read: rows that came meanwhile would belong to no digest."""
        if facts_of(self.path) != self.facts:
            raise DataError(
                expected="a file that nobody writes to while it is read",
                found="it changed meanwhile",
                where=str(self.path),
                ways_out=(
                    "give the same command again when it is whole: nothing of it was taken",
                    "write files elsewhere, and rename them into the folder when they are whole",
                ),
            )


def torn_names(files: Iterable[NewFile]) -> tuple[str, ...]:
    """Return the names of files whose last row may be the first half of one."""
    return tuple(str(file.path) for file in files if ends_amid_line(file.path))


def record_of_copy(path: DataPath, *, facts: tuple[str, int, int | str], sha256: str) -> ArrivedFile:
    """Return the record of a file whose rows had arrived before, under another name."""
    place, num_bytes, tag = facts
    return ArrivedFile(
        path=str(path), place=place, num_bytes=num_bytes, tag=str(tag), sha256=sha256, first_row=0, rows=0
    )


def content_digest(path: DataPath) -> str:
    """Return the SHA-256 of the content of a file."""
    if isinstance(path, Path):
        return sha256_of(path)
    # A store has no path to hash, so its bytes are read through it.
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
