"""Keep what a run writes out of the files that it reads.

A folder or a glob is read again at each start, and at each look of a stream. Records of a run below it would be taken
for rows: the next look ends with an error, or worse, learns from them.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError

# One name of each kind of file that a run or a published version has.
_WRITTEN = ("metrics.jsonl", "config.json", "part-00000.parquet", "rank-00000.safetensors", "ledger.bin", "report.html")


def refuse_among_rows(
    folder: str | Path, rows: Sequence[str], *, flag: str, also: Sequence[Path] = (), instead: str
) -> None:
    """Refuse a folder whose files would be taken for rows, or for records of a run.

    Args:
        folder: that will be written.
        rows: files, folders and globs that are read; URLs count for nothing.
        flag: that names the folder.
        also: further folders that something else is read from.
        instead: a folder for the way out.

    Raises:
        ConfigError: the folder is one of those, or below it.
    """
    path = Path(os.path.realpath(folder))
    read = [*(each for each in rows if each and "://" not in each), *map(str, also)]
    for each in read:
        if _takes(each, path):
            raise ConfigError(
                expected="a folder apart from the rows, and from the records of the run",
                found=f"one in {each}, whose files are read",
                where=f"{flag} {folder}",
                ways_out=(f"{flag} {pasted(instead)}", f"{flag} FOLDER, of a folder that is not in {each}"),
            )


def _takes(read: str, path: Path) -> bool:
    """Return whether what is read takes files below a folder."""
    read = os.path.expanduser(read)
    if not glob.has_magic(read) or os.path.exists(read):
        within = Path(os.path.realpath(read))
        return path == within or within in path.parents
    parts = Path(read).parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    fixed = Path(os.path.realpath(Path(*parts[:first])))
    if fixed != path and fixed not in path.parents:
        return False
    # A file that is written straight into the folder stands for those that are deeper.
    below = path.relative_to(fixed).parts
    return any(_matches((*below, name), parts[first:]) for name in _WRITTEN) or (
        # Files deeper in it are found by more wildcards.
        len(parts) - first > len(below) + 1
        and _matches((*below, *["x"] * (len(parts) - first - len(below) - 1), "metrics.jsonl"), parts[first:])
    )


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether names of a path match a glob, part by part; ** stands for any number of folders."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])
