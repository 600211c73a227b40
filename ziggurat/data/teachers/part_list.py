"""PartList: which parts a version of a teacher has, how many examples each holds, and the digest of its file.

    write temporary file ─► version.json: it is *next* ─► rename to part-00007.parquet ─► version.json: it is a *part*

The list stands in `version.json`, beside the facts of the version and under the same checksum. A part that is gone or
in no list, a file with another digest or another number of examples is refused by whoever reads. So a reader never sees
fewer scores than were logged, or scores of somebody else, without a word.

A part is *next* before it has its name. Whoever is killed in between leaves a next part that is there, which counts, or
one that is not, which nobody has seen; a reader that looks at the wrong moment sees the same. Names are listed before
`version.json` is read: what has its name by then is in the list.

A version of before there were lists has none (`parts` is null), and its parts are taken as they are found until
somebody logs into it again.

Cost: SHA-256 of a part once per process, before it is read; the list is written twice a part, with about 150 bytes for
each part before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.data.teachers.version_list import without_version
from ziggurat.errors import DataError
from ziggurat.files import sha256_of

PART = re.compile(r"part-\d{5,}\.parquet")
_RESTORE = "restore the file from a copy"
_ANEW = "log the teacher again into another folder: ziggurat teacher log RUN FILES --out ANOTHER_FOLDER"
_MAX_KNOWN = 1 << 16  # digests of files that a process remembers


@dataclass(frozen=True, kw_only=True)
class LoggedPart:
    """A part of a version as it was written.

    Args:
        name: of its file.
        rows: examples in it.
        sha256: of its file.
    """

    name: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PartList:
    """The parts of a version.

    Args:
        parts: in the order in which they were written; None: an older Ziggurat wrote them, and listed none.
        next: that gets its name now, or whose writer was killed; None: there is none.
    """

    parts: tuple[LoggedPart, ...] | None = ()
    next: LoggedPart | None = None

    @property
    def is_checked(self) -> bool:
        """False if parts are taken as they are found."""
        return self.parts is not None

    @cached_property
    def _by_name(self) -> dict[str, LoggedPart]:
        own = (*(self.parts or ()), *((self.next,) if self.next is not None else ()))
        return {part.name: part for part in own}

    def named(self, name: str) -> LoggedPart | None:
        """Return the record of a part; None where the list does not have it."""
        return self._by_name.get(name)

    def found(self, names: Sequence[str], *, folder: Path) -> list[str]:
        """Return the names of the parts that are there, in order.

        Args:
            names: of parts in the folder, listed before this list was read.
            folder: of the version.

        Raises:
            DataError: one is gone, or is in no list.
        """
        if self.parts is None:
            return sorted(names)
        for name in sorted(names):
            self._refuse_unlisted(folder / name)
        there = set(names)
        for part in self.parts:
            # A part that got its name behind the listing is there by now.
            if part.name not in there and not (folder / part.name).is_file():
                raise DataError(
                    expected=f"a part of {part.rows:,} examples, as version.json lists it",
                    found="it is gone",
                    where=str(folder / part.name),
                    ways_out=(_RESTORE, _ANEW, without_version(folder)),
                )
        found = [part.name for part in self.parts]
        if self.next is not None and (folder / self.next.name).is_file():
            found.append(self.next.name)
        return found

    def check(self, path: Path) -> LoggedPart | None:
        """Compare a part with its digest; return its record, None where parts are taken as they are found.

        Raises:
            DataError: it has another content, is in no list, or is gone.
        """
        if self.parts is None:
            return None
        part = self._refuse_unlisted(path)
        found = digest_of_file(path)
        if found != part.sha256:
            raise another_content(path, expected=f"{part.rows:,} examples with SHA-256 {part.sha256}", found=found)
        return part

    def _refuse_unlisted(self, path: Path) -> LoggedPart:
        """Return the record of a part.

        Raises:
            DataError: it is in no list.
        """
        part = self.named(path.name)
        if part is not None:
            return part
        raise DataError(
            expected=f"the {len(self.parts or ()):,} parts that this version was logged in",
            found="a part that its version.json does not list",
            where=str(path),
            ways_out=(
                f"take the file out of the folder: mv {pasted(path)} ELSEWHERE",
                "restore version.json from a copy that lists it",
            ),
        )


def another_content(path: Path, *, expected: str, found: str) -> DataError:
    """Return the error for a part that is not as it was written."""
    return DataError(
        expected=f"a part as it was written: {expected}",
        found=f"another content: {found}",
        where=str(path),
        ways_out=(_RESTORE, _ANEW),
    )


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is read once per process as long as it stays as it is; "no file" of none."""
    try:
        stat = os.stat(path)
        return _digest(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    except FileNotFoundError:
        return "no file"


@lru_cache(maxsize=_MAX_KNOWN)
def _digest(path: str, inode: int, num_bytes: int, modified_ns: int, changed_ns: int) -> str:
    del inode, num_bytes, modified_ns, changed_ns  # a file that was touched is another entry
    return sha256_of(Path(path))
