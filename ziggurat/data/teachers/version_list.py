"""VersionList: which versions of which teachers a side table has, so that one that is gone as a whole is missed.

    FOLDER/versions.json     big/5f0c91ab22de, big/77e1…, small/09ab…
    FOLDER/big/5f0c91ab22de/version.json, part-00000.parquet, …

A version is listed by the process that begins to log it, once its folder describes itself. A listed version whose
folder has gone is refused by whoever opens the side table: without it rows would have scores and histories of older
versions, or none. One that is there and not listed counts, as a copy from elsewhere and what an older Ziggurat logged
do; the next process that logs lists it.

Whoever wants to do without a version takes it away together with the list, which then begins anew with what is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from ziggurat.commands import pasted
from ziggurat.errors import DataError, FileError
from ziggurat.files import Format, locked

LIST_FILE = "versions.json"
_LIST = Format(
    name="ziggurat.teacher_versions",
    what="the list of versions in a side table",
    ways_out=("restore the file from a copy", "delete it, if all versions are there: logging makes it anew"),
)
_PATIENCE_S = 30.0


class _Content(TypedDict):
    versions: list[str]


def list_versions(folder: Path, there: list[str]) -> None:
    """Add versions to the list of a side table.

    Args:
        folder: the side table.
        there: TEACHER/VERSION of all that describe themselves now.

    Raises:
        FileError: another process holds the list.
    """
    if set(there) <= set(_listed(folder)):
        return
    with held_list(folder):
        content: _Content = {"versions": sorted({*_listed(folder), *there})}
        _LIST.write(folder / LIST_FILE, content)


@contextlib.contextmanager
def held_list(folder: Path) -> Iterator[None]:
    """Hold the right to begin versions and to write the list, for as long as small files are read and written.

    Args:
        folder: the side table, which is there.

    Raises:
        FileError: another process holds it.
    """
    path = folder / "versions.lock"

    def busy(_: str) -> FileError:
        return FileError(
            expected="one process that writes the list of versions",
            found="another one, which has not ended",
            where=str(path),
            ways_out=("end that process", "log into another folder: --out ANOTHER_FOLDER"),
        )

    with locked(path, busy=busy, patience_s=_PATIENCE_S):
        yield


def found_versions(folder: Path, look: Callable[[], list[str]], *, about_to_log: str = "") -> list[str]:
    """Return the versions that describe themselves; refuse a side table of which a listed one is gone.

    Args:
        folder: the side table.
        look: TEACHER/VERSION of all that describe themselves at that moment.
        about_to_log: a version that may be gone, for it is logged again.

    Raises:
        DataError: one is gone, or the list is damaged.
    """
    # The list first: a version that another process lists between the two reads would count as gone else.
    listed = _listed(folder)
    there = look()
    gone = sorted(set(listed).difference(there, [about_to_log]))
    if gone:
        raise DataError(
            expected=f"the version {gone[0]} of a teacher, as {LIST_FILE} lists it",
            found="it is gone" + (f", and {len(gone) - 1} more" if len(gone) > 1 else ""),
            where=str(folder / gone[0]),
            ways_out=(
                "restore the folder from a copy",
                "log it again: ziggurat teacher log RUN FILES, by the same run into the same folder",
                f"do without it, if all others are there: rm {pasted(folder / LIST_FILE)}",
            ),
        )
    return there


def without_version(version: Path) -> str:
    """Return the way out to do without a version.

    Args:
        version: FOLDER/TEACHER/VERSION.
    """
    listed = version.parent.parent / LIST_FILE
    return f"do without this version: rm -f {pasted(listed)} && mv {pasted(version)} ELSEWHERE"


def _listed(folder: Path) -> list[str]:
    """Return the names in the list; none where there is no list yet."""
    path = folder / LIST_FILE
    if not path.exists():
        return []
    content: _Content = _LIST.read(path)
    return content["versions"]
